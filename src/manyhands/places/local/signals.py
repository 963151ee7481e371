"""Ctrl-C, SIGTERM and SIGHUP as something to look at instead of an exception out of nowhere.

An exception between starting a process and noting it down would lose the process. So while a cluster runs in
the main thread, these signals are only counted; the launcher looks every tick, takes everyone down, and
raises then. Around that, `ending` makes an exception of all three, so that a command can say what it leaves.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any] | signal.Handlers
_IMPATIENT = 3  # the press that raises at once, in case a callback of the application hangs
_DEFAULTS: dict[signal.Signals, _Handler] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


class SignalEnding:
    """A handler that raises what comes, and remembers the first of it for the exit status."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.note(number)
        raise as_exception(number)

    def note(self, number: int) -> None:
        self.signal = self.signal or signal.Signals(number)

    @property
    def status(self) -> int:
        return 128 + (self.signal or signal.SIGINT)

    @property
    def name(self) -> str:
        return (self.signal or signal.SIGINT).name


@contextmanager
def ending() -> Iterator[SignalEnding]:
    """While this lasts, SIGTERM and SIGHUP raise SystemExit in the main thread, unless someone handles them."""
    handler = SignalEnding()
    with _replaced(lambda _number, _before: handler):
        yield handler


@contextmanager
def counted_signals() -> Iterator[list[int]]:
    """The signals that came; handlers of the user's own stay in charge; all are restored after."""
    received: list[int] = []

    def counting(_number: int, before: _Handler) -> _Handler:
        def count(number: int, _frame: FrameType | None) -> None:
            received.append(number)
            if isinstance(before, SignalEnding):
                before.note(number)
            if len(received) == _IMPATIENT:
                raise as_exception(number)

        return count

    with _replaced(counting):
        yield received


@contextmanager
def _replaced(made: Callable[[int, _Handler], _Handler]) -> Iterator[None]:
    """Put handlers in the place of Python's own and of `Ending`s, in the main thread; restored after."""
    before: dict[signal.Signals, _Handler] = {}
    for number, usual in _DEFAULTS.items():
        handler = signal.getsignal(number)
        if threading.current_thread() is threading.main_thread():
            if handler == usual:
                before[number] = usual
            elif isinstance(handler, SignalEnding):
                before[number] = handler
    for number, handler in before.items():
        signal.signal(number, made(number, handler))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def as_exception(number: int) -> BaseException:
    """What Python raises at Ctrl-C, and what a shell shows after SIGTERM or SIGHUP."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def signal_of(error: BaseException) -> signal.Signals | None:
    """The signal that `as_exception` made this of; None for any other exception, and for a program's own exit."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    ends = {128 + number: number for number in (signal.SIGTERM, signal.SIGHUP)}
    return ends.get(error.code) if isinstance(error, SystemExit) and isinstance(error.code, int) else None
