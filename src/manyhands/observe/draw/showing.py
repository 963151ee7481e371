"""Where a run shows how far it is, and how often: a bar in a terminal or notebook, lines elsewhere, or nothing.

    asked   notebook   terminal   redirected   under pytest, or not in the main thread
    auto    bar        bar        lines        nothing
    bar     bar        bar        lines        as elsewhere
    lines   lines      lines      lines        lines
    none    nothing

A bar comes after a second and lines after five: short runs say nothing. A thread draws from the run's totals.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from html import escape
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from manyhands.observe.analyse.remarks import about_workers, headline, in_order
from manyhands.observe.analyse.totals import TotalsSnapshot

_BAR_AFTER_S, _BAR_EVERY_S = 1.0, 0.25
_NOTEBOOK_EVERY_S = 0.5
_LINES_EVERY_S = 5.0


class Here(NamedTuple):
    """The environment of a run's output."""

    notebook: bool  # A kernel of IPython, which shows HTML
    terminal: bool  # whether stderr is one that can move its cursor
    unwatched: bool  # nobody watches: a test, or a run in a background thread


def look_around() -> Here:
    stream = sys.stderr
    is_gone = stream is None or getattr(stream, "closed", False)
    is_terminal = not is_gone and stream.isatty() and os.environ.get("TERM") != "dumb"
    in_main = threading.current_thread() is threading.main_thread()
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return Here(
        notebook=getattr(shell, "kernel", None) is not None,
        terminal=is_terminal,
        unwatched="PYTEST_CURRENT_TEST" in os.environ or not in_main or is_gone,
    )


def chosen(asked: str, here: Here) -> str:
    if asked in ("lines", "none"):
        return asked
    if asked == "auto" and here.unwatched:
        return "none"
    return "notebook" if here.notebook else "bar" if here.terminal else "lines"


def showing(
    asked: str, steps: int, snapshot: Callable[[], TotalsSnapshot], strategy: str = ""
) -> AbstractContextManager[object]:
    """Return a context that shows a run of `steps` steps; `asked` is one of `PROGRESS`."""
    match chosen(asked, look_around()):
        case "none":
            return nullcontext()
        case "notebook":
            return Showing(snapshot, Notebook(steps, strategy), _BAR_AFTER_S, _NOTEBOOK_EVERY_S)
        case "lines":
            return Showing(snapshot, Lines(steps), _LINES_EVERY_S, _LINES_EVERY_S)
        case _:
            return Showing(snapshot, _Terminal(steps, strategy), _BAR_AFTER_S, _BAR_EVERY_S)


class Screen(Protocol):
    """A display of a run's progress; `close` comes last, and only after a `show`."""

    def show(self, snapshot: TotalsSnapshot) -> None: ...

    def close(self) -> None:
        return  # what was shown last stays


class Showing:
    """Shows a run after `after_s`, every `every_s` and at its end, in a thread; a display that fails ends alone."""

    def __init__(
        self, snapshot: Callable[[], TotalsSnapshot], screen: Screen, after_s: float, every_s: float
    ) -> None:
        self._snapshot, self._screen = snapshot, screen
        self._after_s, self._every_s = after_s, every_s
        self._over = threading.Event()
        self._shown = False
        self._gone = False
        self._thread = threading.Thread(target=self._work, name="manyhands-progress", daemon=True)

    def __enter__(self) -> Showing:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        if self._shown:
            self._do(lambda: self._screen.show(self._snapshot()))
            self._do(self._screen.close)

    def _work(self) -> None:
        while not self._over.wait(self._every_s if self._shown else self._after_s) and not self._gone:
            self._shown = True
            self._do(lambda: self._screen.show(self._snapshot()))

    def _do(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except (OSError, ValueError):  # the terminal or the pipe was closed
            self._gone = True


class Lines(Screen):
    """One line on stderr per update."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._last = ""

    def show(self, snapshot: TotalsSnapshot) -> None:
        line = f"manyhands: {in_order(headline(snapshot, self._steps))}"
        if line != self._last:
            print(line, file=sys.stderr, flush=True)
            self._last = line


class Notebook(Screen):
    """A bar in the output of the cell, updated in place."""

    def __init__(self, steps: int, strategy: str = "") -> None:
        self._steps, self._strategy = steps, strategy
        self._handle: Any = None

    def show(self, snapshot: TotalsSnapshot) -> None:
        panel = Panel(snapshot, self._steps, self._strategy)
        if self._handle is None:
            self._handle = import_module("IPython.display").display(panel, display_id=True)
        else:
            self._handle.update(panel)


class Panel:
    """One moment of a run as a notebook shows it."""

    def __init__(self, snapshot: TotalsSnapshot, steps: int, strategy: str) -> None:
        self._words = in_order(headline(snapshot, steps))
        self._done, self._steps = min(snapshot.step, steps), steps
        notices = about_workers(snapshot.slow, snapshot.late, strategy)
        self._notice = notices[0] if notices else ""

    def __repr__(self) -> str:
        return f"manyhands: {self._words}"

    def _repr_html_(self) -> str:
        notice = f"<br/><small>{escape(self._notice)}</small>" if self._notice else ""
        return (
            f'<div><progress max="{max(1, self._steps)}" value="{self._done}"></progress> '
            f"<code>{escape(self._words)}</code>{notice}</div>"
        )


class _Terminal(Screen):
    """The picture of `bars`, whose libraries are loaded at the first `show`."""

    def __init__(self, steps: int, strategy: str) -> None:
        self._asked = (steps, strategy)
        self._screen: Screen | None = None

    def show(self, snapshot: TotalsSnapshot) -> None:
        if self._screen is None:
            from manyhands.observe.draw.bars import LivePicture

            self._screen = LivePicture(*self._asked)
        self._screen.show(snapshot)

    def close(self) -> None:
        if self._screen is not None:
            self._screen.close()
