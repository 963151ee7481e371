"""The stacks of a process, from outside: even one that is stuck in compiled code can be asked where it is.

The child lets Python's `faulthandler` answer one signal by writing all its stacks into a memory file that the launcher
holds, too. That needs neither the interpreter's lock nor a healthy thread; only a stopped process does not answer.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import NamedTuple

from manyhands.strategies.registry import STRATEGIES

STACK_SIGNAL = signal.SIGRTMIN + 13  # among the signals that nobody uses by habit

_ANSWER_S = 0.3

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_OURS = str(Path(__file__).resolve().parents[2])
_STDLIB = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_SITE_FOLDERS = {"site-packages", "dist-packages"}  # wherever they are: an environment may use another's
_BEGINNING = str(Path(_OURS, "places", "local", "entry.py"))
"""The file that begins a role: whatever called it has started the process, and is nobody's training."""
_LOADER = (str(Path(_OURS, "places", "local", "loaders.py")), "run_loader")
"""The file and function from which a loader process calls the user's data."""
LOADER_CALL = "waiting for its loader process, which is "
"""How `call_of` begins where the stack is that of a loader process."""
_STRATEGIES = frozenset(strategy.package for strategy in STRATEGIES.values())
_EVERY_ROLE = frozenset({"places", "engine"})  # packages of ours that run a role, whatever it does


class Frame(NamedTuple):
    """One call on a stack."""

    file: str
    line: int
    function: str
    text: str = ""  # the line's source, where it can be read

    @property
    def package(self) -> str:
        path = PurePath(self.file)
        parts = path.relative_to(_OURS).parts if path.is_relative_to(_OURS) else ("",)
        return "/".join(parts[:2]) if parts[0] == "strategies" else parts[0]

    @property
    def is_installed(self) -> bool:
        """Whether it is of an installed package other than ours."""
        if self.package:
            return False
        return self.file.startswith(_INSTALLED) or not _SITE_FOLDERS.isdisjoint(PurePath(self.file).parts)

    @property
    def is_users(self) -> bool:
        """Whether it is neither ours nor the standard library's nor that of an installed package."""
        return not (self.package or self.is_installed or self.file.startswith(("<frozen", *_STDLIB)))

    @property
    def place(self) -> str:
        return f"{PurePath(self.file).name}:{self.line}"


def answer_with_stacks(descriptor: int) -> None:
    """From now on `STACK_SIGNAL` has this process write its stacks to `descriptor`; called in the main thread."""
    global _descriptor
    _descriptor = descriptor
    signal.signal(STACK_SIGNAL, _pass_on)  # after the stacks are written, when the interpreter runs again
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True, chain=True)


def answers_to() -> int | None:
    """Where this process writes its stacks when it is asked to; None where nobody asks it."""
    return _descriptor


@contextmanager
def answered_by(pid: int) -> Iterator[None]:
    """While open, this process waits for its child `pid`, whose stacks, in the same file, follow its own and count."""
    global _waited_for
    _waited_for = pid
    try:
        yield
    finally:
        _waited_for = None


def _pass_on(*_: object) -> None:
    if _waited_for is not None:
        os.kill(_waited_for, STACK_SIGNAL)


_descriptor: int | None = None
_waited_for: int | None = None


def ask_for_stack(pid: int, descriptor: int) -> tuple[Frame, ...]:
    """The calls of the main thread of `pid`, which answers by writing to `descriptor`; empty if it does not."""
    before = os.fstat(descriptor).st_size
    os.kill(pid, STACK_SIGNAL)
    time.sleep(_ANSWER_S)
    written = os.pread(descriptor, os.fstat(descriptor).st_size - before, before)
    return main_stack(written.decode(errors="replace"))


def split_threads(dump: str) -> list[str]:
    """What faulthandler wrote, one text per thread; the main thread, the oldest, is the last."""
    return [
        part.strip("\n")
        for part in re.split(r"^(?:Current thread|Thread) .*\n", dump, flags=re.M)
        if part.strip()
    ]


def main_stack(dump: str) -> tuple[Frame, ...]:
    """The calls of the main thread, the innermost first; the sources are read from their files."""
    threads = split_threads(dump)
    frames = []
    for match in map(_FRAME.match, threads[-1].splitlines() if threads else ()):
        if match is not None:
            file, line = match["file"], int(match["line"]) if match["line"].isdigit() else 0
            try:
                source = Path(file).read_text(errors="replace").splitlines()
            except OSError:
                source = []
            text = source[line - 1].strip() if 0 < line <= len(source) else ""
            frames.append(Frame(file=file, line=line, function=match["function"], text=text))
    return tuple(frames)


def call_of(stack: Sequence[Frame]) -> str:
    """Where a role is, for one line: the user's own line where there is one, else the strategy's call.

    That is the outermost one of the strategy's package since the loop of every role, or torch in a model's forward, has
    called it. A role without a strategy is in the outermost call that not every role has.
    """
    begun = next((at for at, frame in enumerate(stack) if frame.file == _BEGINNING), len(stack))
    in_loader = LOADER_CALL if any((frame.file, frame.function) == _LOADER for frame in stack) else ""
    for frame in stack[:begun]:
        if frame.is_users:
            return f"{in_loader}in {frame.text or frame.function} ({frame.place})"
    callers = (at for at, frame in enumerate(stack) if frame.is_installed or frame.package in _EVERY_ROLE)
    called = stack[: next(callers, len(stack))]
    calls = [frame for part in (called, stack) for frame in reversed(part) if frame.package in _STRATEGIES]
    calls += [frame for frame in reversed(stack) if frame.package and frame.package not in _EVERY_ROLE]
    if calls:
        first = calls[0]
        return f"in {first.function}() ({PurePath(first.file).relative_to(_OURS)}:{first.line})"
    return f"in {stack[0].function}() ({stack[0].place})" if stack else "at an unknown place"
