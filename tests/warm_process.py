"""The first file of the process that warm processes are forked from, and the beginning of each of those; see `warm`."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from manyhands.places.local import entry
from manyhands.places.local.forking import MOST_PASSED, await_birth, die_with_parent, take_environment

_FRAME_BYTES = 1 << 18
_PR_SET_NAME = 15
_PR_SET_PDEATHSIG = 1
_before: Any = sys.modules.get(
    "warm_process"
)  # of the process that this one, from which others come, is a fork of
_first_filters = list(warnings.filters) if _before is None else _before._first_filters
_at_exit: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    *getattr(_before, "_at_exit", ())
]


def main() -> None:
    """Import, fork, and in a fork be what was asked for; this returns, raises and exits as that does."""
    text = os.environ.pop(entry.TEMPLATE_VARIABLE)
    die_with_parent(json.loads(text)["launcher_pid"], signal.SIGKILL)
    register, atexit.register = atexit.register, _note  # type: ignore[assignment]
    born = await_birth(text)
    atexit.register = register
    if born is None:
        return
    request, passed = born
    order = json.loads(request.role)
    _place(passed, order["numbers"])
    take_environment(request)
    for name in order["imports"]:
        import_module(name)
    while any(order["spares"]):  # one that was waiting may start others, too
        order = _spare_all(order)
    status: list[int] = []
    atexit.register(_leave, status)
    try:
        _be(order["words"], order["base"])
    except SystemExit as end:
        status.append(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    except Exception:  # told of before anything is called that is to be called at the end
        status.append(1)
        raise
    status.append(0)


def _leave(status: list[int]) -> None:
    """After all others, end here: to take the modules apart would copy what all forks share."""
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status[0] & 0xFF)


def _note(function: Callable[..., Any], *arguments: Any, **named: Any) -> Callable[..., Any]:
    """What modules want to be called at the end of every fork."""
    _at_exit.append((function, arguments, named))
    return function


def _spare_all(order: dict[str, Any]) -> dict[str, Any]:
    """In this process, its own orders, with those that it will start waiting; in one of those, when wanted, its own."""
    from warm import Spared

    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("what was imported has started threads, which a fork would not have")
    spares: list[list[Any]] = []
    for count in order["spares"]:
        spares.append([])
        for _ in range(count):
            spared = _spare(order["base"])
            if isinstance(spared, dict):
                return spared
            spares[-1].append(spared)
    Spared(*spares).stand_in()
    return {**order, "spares": (0, 0)}


def _spare(base: Sequence[str]) -> Any:
    """In this process, how to ask one that it will start, and its number; in that one, when wanted, its orders."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher_pid = os.getpid()
    child = os.fork()
    if child:
        theirs.close()
        return (lambda text, passed: socket.send_fds(mine, [text.encode()], passed)), child
    kept = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 1000)
    os.closerange(3, 1000)
    die_with_parent(launcher_pid, signal.SIGKILL)
    select.select([kept], [], [])
    with socket.socket(fileno=kept) as control:
        data, passed, _, _ = socket.recv_fds(control, _FRAME_BYTES, MOST_PASSED)
    if not data:
        os._exit(0)
    asked = json.loads(data)
    order: dict[str, Any] = {**asked["order"], "base": base}
    if asked["leads_session"]:
        os.setsid()
    if order["words"][-2:] != [entry.__file__, "template"]:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    _place(passed, order["numbers"])
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    random.seed()
    sys.modules["numpy"].random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal():
        sys.modules["torch"].set_num_threads(int(threads))
    return order


def _place(passed: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the descriptors that came the numbers that they have in the test."""
    remote = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 1000) for descriptor in passed]
    for descriptor in passed:
        os.close(descriptor)
    for descriptor, number in zip(remote, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _be(words: Sequence[str], base: Sequence[str]) -> None:
    """Run `python WORDS`, with what an interpreter sets up before it does."""
    if words[-1] != "template":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(Path(words[0]).name.encode()), 0, 0, 0)
    _show(words, os.environ)
    _take_warnings(os.environ.get("PYTHONWARNINGS", ""))
    sys.orig_argv[:] = words
    words = list(words[1:])
    safe, unbuffered = False, bool(os.environ.get("PYTHONUNBUFFERED"))
    while words[0] in ("-P", "-X", "-u"):
        option = words.pop(0)
        safe, unbuffered = safe or option == "-P", unbuffered or option == "-u"
        if option == "-X" and words.pop(0) == "faulthandler":
            faulthandler.enable()
    _open_streams(unbuffered=unbuffered)
    module = types.ModuleType("__main__")
    vars(module)["__builtins__"] = __builtins__
    sys.modules["warm_process"], sys.modules["__main__"] = sys.modules["__main__"], module
    path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    programs = (["-m", "manyhands"], ["-m", "manyhands.cli.command_process"])
    ours = words[:2] in programs or words[0].endswith(("/manyhands", entry.__file__))
    if words != [__file__, "template"]:  # it passes them on to its forks
        _register_at_exit(after_first=ours)
    if words[0] == "-m":
        sys.path[:] = [os.getcwd(), *path, *base]
        sys.argv[:] = words[1:]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    if words[0] == "-c":
        sys.path[:] = ["", *path, *base]
        sys.argv[:] = ["-c", *words[2:]]
        code = compile(words[1], "<string>", "exec")
    else:
        sys.path[:] = [*([] if safe else [str(Path(words[0]).resolve().parent)]), *path, *base]
        sys.argv[:] = words
        vars(module)["__file__"] = words[0]
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
    exec(code, vars(module))


def _register_at_exit(*, after_first: bool) -> None:
    """What modules have asked for; programs that register before they import anything get their turn first."""
    register = atexit.register

    def first(function: Callable[..., Any], *arguments: Any, **named: Any) -> Callable[..., Any]:
        atexit.register = register
        register(function, *arguments, **named)
        _register_at_exit(after_first=False)
        return function

    if after_first:
        atexit.register = first  # type: ignore[assignment]
        return
    for function, arguments, named in _at_exit:
        register(function, *arguments, **named)


def _open_streams(*, unbuffered: bool) -> None:
    """Those of the new descriptors, buffered as Python does."""
    errors = sys.stdout.errors
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors=errors, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.FileIO(number, "wb", closefd=False)
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type, type-var]
            encoding="utf-8",
            errors=errors if number == 1 else "backslashreplace",
            line_buffering=not unbuffered and (number == 2 or os.isatty(number)),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _take_warnings(text: str) -> None:
    """PYTHONWARNINGS, behind the filters of the modules that are imported, where an interpreter has it."""
    sys.warnoptions[:] = [option for option in text.split(",") if option]
    of_modules = warnings.filters[: -len(_first_filters)]
    warnings.filters[:] = _first_filters  # type: ignore[index]
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    warnings.filters[:0] = of_modules  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _show(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Let those who look into /proc see these arguments and variables: they replace the ones it was started with."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, arguments_end, variables, variables_end = map(int, fields[45:49])
    given = "\0".join(words).encode()[: arguments_end - arguments - 1]
    ctypes.memset(arguments, 0, arguments_end - arguments)
    ctypes.memmove(arguments, given, len(given))
    given = "\0".join(f"{name}={value}" for name, value in environment.items()).encode()
    if len(given) < variables_end - variables:
        ctypes.memset(variables, 0, variables_end - variables)
        ctypes.memmove(variables, given, len(given))


if __name__ == "__main__":
    main()
