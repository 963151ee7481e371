"""How a signal ends a command: with a sentence that says what is kept, and the status that a shell shows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from manyhands.places.local.signals import SignalEnding

__all__ = ["ended_by_signal"]


@contextmanager
def ended_by_signal(kept: Callable[[], str] | None = None) -> Iterator[SignalEnding]:
    """While this lasts, Ctrl-C, SIGTERM and SIGHUP end the command.

    `kept` is called then and says what is left and how to go on; None: somebody has said so already.
    """
    from manyhands.places.local.signals import ending, signal_of

    try:
        with ending() as end:
            yield end
    except (KeyboardInterrupt, SystemExit) as stop:
        number = signal_of(stop)
        if number is None:
            raise
        number = end.signal or number  # the first that came
        if kept is not None:
            print(f"manyhands: ended by {number.name}; {kept()}", file=sys.stderr)
        raise typer.Exit(128 + number) from None
