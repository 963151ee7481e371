"""Python processes for tests that start warm: forks of one process that has imported what takes seconds to import.

    warm.Popen([sys.executable, "-m", "manyhands", "train", ...], stdout=PIPE, ...)
    warm.run([sys.executable, "script.py"], capture_output=True, ...)

What comes of it is a process like any other: a child of the test with its own number, arguments, environment, folder,
streams, signals and exit status. Only importing is not done again, neither in the process itself nor in the template
that it forks its workers from, and at the end, when all that was to be called then has been called, the modules are not
taken apart. So what is about importing, or about the first and last moments of an interpreter, is not for here: use
`subprocess` there.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

from manyhands.places.local import entry
from manyhands.places.local.template import Template, inherited_environment

MODULES = ("torch", "warm_modules")
"""What the process that others are forked from imports."""

COMPILER = ("torch._dynamo", "torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes")
"""What torch imports, for as long as all of itself, when a script steps an optimizer or shards a model."""

_FIRST_FILE = str(Path(__file__).with_name("warm_process.py"))
_NOTHING_MORE: Mapping[str, Any] = {"spares": (0, 0), "imports": ()}
_ROOM = "WARM_ROOM"
"""A variable whose letters are there to be overwritten: a fork shows its own environment in their place."""

_OF_POPEN = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_READ_EARLY = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NUMBA_", "TORCH", "PYTHON", "LD_", "MALLOC_")
_SET_LATER = (
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "PYTHONWARNINGS",
    "PYTHONUNBUFFERED",
    "TORCHINDUCTOR_CACHE_DIR",
)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` for this interpreter, or a program of Python beside it, forked instead of started.

    `trains`: whether it calls `fit`, or how many templates it starts for that; a process for each is then kept at hand.
    The command line does. `compiler`: whether it will import torch's compiler anyhow, and may find it imported.
    `starts`: how many processes of Python it starts itself, as torchrun does: the first ones are warm, too, and have
    what it `imports` before it does anything.
    """

    def __init__(
        self,
        args: Sequence[str | Path],
        *,
        trains: bool | int = False,
        compiler: bool = False,
        starts: int = 0,
        imports: Sequence[str] = (),
        **options: Any,
    ) -> None:
        words = [str(word) for word in args]
        if words[0] != sys.executable and Path(words[0]).parent == Path(sys.executable).parent:
            words.insert(0, sys.executable)
        if words[0] != sys.executable:
            raise ValueError(f"{words[0]} is not this interpreter: start it with subprocess")
        self._spares = [int(trains) or int(_is_ours(words)), starts]
        self._imports, self._compiler = list(imports), compiler
        super().__init__(words, **options)

    def _execute_child(self, *arguments: Any) -> None:
        order = {"spares": self._spares, "imports": self._imports}
        _fork(self, _asked(self, arguments), order, compiler=self._compiler)


class Spared:
    """For a warm process: those that it will start, forked from it before it had done anything, and waiting."""

    def __init__(self, templates: list[Any], others: list[Any]) -> None:
        """Of each: the function that asks it, and its number."""
        self._templates, self._others = templates, others

    def stand_in(self) -> None:
        """From now on, the first templates that `subprocess` starts here, and other processes, are those that wait."""
        start = subprocess.Popen._execute_child  # type: ignore[attr-defined]

        @wraps(start)
        def start_or_ask(process: Any, *arguments: Any) -> None:
            words = list(_OF_POPEN.bind(process, *arguments).arguments["args"])
            waiting = self._waiting(words)
            if not waiting:
                start(process, *arguments)
                return
            asked = _asked(process, arguments)
            ask, process.pid = waiting.pop(0)
            order = {"words": words, "spares": [int(_is_ours(words)), 0], **_numbers(asked)}
            surroundings = {
                "environment": dict(os.environ if asked["env"] is None else asked["env"]),
                "folder": os.path.abspath(asked["cwd"] or "."),
                "leads_session": bool(asked["start_new_session"]),
            }
            ask(json.dumps({"order": order, **surroundings}), _descriptors(asked))
            _begun(process, asked)

        subprocess.Popen._execute_child = start_or_ask  # type: ignore[attr-defined]

    def _waiting(self, words: Sequence[Any]) -> list[Any]:
        if words[-2:] == [entry.__file__, "template"]:
            return self._templates
        return self._others if words[0] == sys.executable else []


def fork_templates() -> None:
    """From now on, templates that this process starts for `fit` are warm, too, if they read the same variables."""
    start = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    @wraps(start)
    def start_or_fork(process: Any, *arguments: Any) -> None:
        given = _OF_POPEN.bind(process, *arguments).arguments
        first_file, *role = list(given["args"])[-2:]
        ours = first_file == entry.__file__ or (first_file == _FIRST_FILE and _kept)
        if role == ["template"] and ours and _reads_the_same(given["env"]):
            _fork(process, _asked(process, arguments))
        else:
            start(process, *arguments)

    subprocess.Popen._execute_child = start_or_fork  # type: ignore[attr-defined]


def import_compiler() -> None:
    """Keep a fork at hand that imports torch's compiler, for those that ask for it; returns at once."""
    if _reads_the_same(os.environ) and not _compiling:
        _compiling.append(Template(_own_environment(), (*MODULES, *COMPILER), _FIRST_FILE))


def run(
    args: Sequence[str | Path],
    *,
    timeout: float,
    check: bool = False,
    capture_output: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`."""
    if capture_output:
        options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with Popen(args, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def pid() -> int | None:
    """The process that others are forked from, if there is one."""
    return _kept[0].pid if _kept else None


def descriptor() -> int | None:
    """The descriptor that is kept for it."""
    return _kept[0]._control.fileno() if _kept else None


def _fork(
    process: Any, asked: Mapping[str, Any], more: Mapping[str, Any] = _NOTHING_MORE, *, compiler: bool = False
) -> None:
    """What `_execute_child` does of `process`."""
    environment = os.environ if asked["env"] is None else asked["env"]
    order = {
        "words": list(asked["args"]),
        **more,
        "base": _base_path(),
        **_numbers(asked),
    }
    template = _warm_template(environment, compiler=compiler)
    folder = os.path.abspath(asked["cwd"] or ".")
    adopted = template.ask("a process", json.dumps(order), _descriptors(asked), dict(environment), folder)
    process.pid = adopted.pid
    adopted.close()
    _begun(process, asked)


def _warm_template(environment: Mapping[str, str], *, compiler: bool) -> Template:
    if not _reads_the_same(environment):
        differ = sorted(set(_early(environment).items()) ^ set(_read_early.items()))
        raise ValueError(f"{differ} are read while importing: start it with subprocess")
    if not compiler:
        return _kept[0]
    if not _compiling:
        raise ValueError("a process with the compiler: the test needs the fixture `compiler_imported`")
    return _compiling[0]


def _reads_the_same(environment: Mapping[str, str]) -> bool:
    """Whether a process with these variables imports as the warm one did, which is started if there is none."""
    with _keeping:
        if _kept and not _kept[0].is_alive():  # the kernel ended it with the thread that started it
            _kept.pop().close()
        if not _kept:
            _kept.append(Template(_own_environment(), MODULES, _FIRST_FILE))
            _read_early.update(_early(os.environ))
    return _early(environment) == _read_early


def _own_environment() -> dict[str, str]:
    return {**inherited_environment(), _ROOM: "-" * 65536}


def _is_ours(words: Sequence[str]) -> bool:
    """Whether it is the command line, which trains."""
    commands = (["-m", "manyhands"], ["-m", "manyhands.cli.command_process"])
    return words[1:3] in commands or Path(words[1]).name == "manyhands"


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_EARLY) and name not in _SET_LATER
    }


def _asked(process: subprocess.Popen[Any], arguments: Sequence[Any]) -> dict[str, Any]:
    """The arguments of `Popen` by name, of which the uncommon ones are refused."""
    asked = _OF_POPEN.bind(process, *arguments).arguments
    if asked["preexec_fn"] is not None or asked["shell"] or asked["uid"] is not None:
        raise ValueError("a warm process takes no preexec_fn, shell or uid: start it with subprocess")
    return asked


def _numbers(asked: Mapping[str, Any]) -> dict[str, list[int]]:
    return {"numbers": [0, 1, 2, *asked["pass_fds"]]}


def _descriptors(asked: Mapping[str, Any]) -> list[int]:
    streams = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
    return [
        *(number if given == -1 else given for number, given in enumerate(streams)),
        *asked["pass_fds"],
    ]


def _begun(process: Any, asked: Mapping[str, Any]) -> None:
    """As the method that this stands for ends: the child's ends of the pipes are the child's."""
    process._child_created = True
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(asked[end] for end in ends))


@cache
def _base_path() -> list[str]:
    """What a plain interpreter searches."""
    code = "import json, sys; print(json.dumps(sys.path))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    printed = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, check=True, timeout=60
    ).stdout
    found: list[str] = json.loads(printed)
    return found


_keeping = threading.Lock()
_kept: list[Template] = []
_compiling: list[Template] = []
"""A fork of it that has the compiler, too."""

_read_early: dict[str, str] = {}


@atexit.register
def _end() -> None:
    for templates in (_compiling, _kept):
        while templates:
            templates.pop().close()
