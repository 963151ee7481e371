"""Ctrl-C and SIGTERM as something to look at instead of an exception out of nowhere.

An exception between starting a process and noting it down would lose the process. So while a cluster runs in
the main thread, these signals are only counted; the launcher looks every tick, takes everyone down, and
raises then.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["as_exception", "counted_signals"]

_Handler = Callable[[int, FrameType | None], Any] | signal.Handlers
_IMPATIENT = 3  # the press that raises at once, in case a callback of the application hangs
_DEFAULTS: dict[signal.Signals, _Handler] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}


@contextmanager
def counted_signals() -> Iterator[list[int]]:
    """The signals that came; handlers of the user's own stay in charge; all are restored after."""
    received: list[int] = []

    def count(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        if len(received) == _IMPATIENT:
            raise as_exception(number)

    replaced: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        replaced += [number for number, usual in _DEFAULTS.items() if signal.getsignal(number) == usual]
    for number in replaced:
        signal.signal(number, count)
    try:
        yield received
    finally:
        for number in replaced:
            signal.signal(number, _DEFAULTS[number])


def as_exception(number: int) -> BaseException:
    """What Python raises at Ctrl-C, and what a shell shows after SIGTERM."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
