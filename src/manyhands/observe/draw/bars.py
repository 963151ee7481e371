"""One line per long phase in a terminal: how much is done, how fast, and how long it will still take.

```
counting  ━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━  5,742,100 tokens  2.31 M tokens/s  0:00:01 left
```

Where stderr is no terminal nothing is printed, so logs and pipes stay clean and callers need not ask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

if TYPE_CHECKING:
    from manyhands.observe.analyse.totals import TotalsSnapshot

__all__ = ["BarPhase", "Bars", "bar_view", "following", "show_rate"]

_LOOK_EVERY_S = 0.25


class BarPhase:
    """One phase of the work, as a context manager; `advance` may be called from any thread."""

    def __init__(self, progress: Progress | None, name: str, total: float | None, unit: str) -> None:
        self._progress = progress
        self._name, self._total, self._unit = name, total, unit
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._task = self._progress.add_task(self._name, total=self._total, unit=self._unit)
        return self

    def advance(self, amount: float, total: float | None = None) -> None:
        """Advance by `amount`; `total` updates the estimated total, where it is not known beforehand."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=amount, total=total)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._progress is None or self._task is None:
            return
        if kind is None:  # an estimated total becomes the actual one
            done = self._progress.tasks[self._progress.task_ids.index(self._task)].completed
            self._progress.update(self._task, total=done)
        self._progress.stop_task(self._task)


class Bars:
    """The phases of one piece of work, one bar each; a context manager.

    Draws on stderr, or on `console`; prints nothing where that is not a terminal, and outside its `with` statement.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        console = self._console if self._console is not None else Console(stderr=True)
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), _Words())
            self._progress = Progress(*columns, console=console)
            self._progress.start()
        return self

    def phase(self, name: str, total: float | None, unit: str) -> BarPhase:
        return BarPhase(self._progress, name, total, unit)

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


@contextmanager
def following(done: Callable[[], float], advance: Callable[[float], None]) -> Iterator[None]:
    """Poll `done` while the body runs, and once after it, and pass the increments to `advance`.

    A thread does the polling.
    """
    over = threading.Event()
    shown = 0.0

    def look() -> None:
        nonlocal shown
        now = max(done(), shown)
        advance(now - shown)
        shown = now

    def look_again() -> None:
        while not over.wait(_LOOK_EVERY_S):
            look()

    thread = threading.Thread(target=look_again, name="bar", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    look()


@contextmanager
def bar_view(
    phase: BarPhase, samples: Callable[[int], float], steps: int, snapshot: Callable[[], TotalsSnapshot]
) -> Iterator[None]:
    """Advance a bar with a run, as a view for `fit`; `samples` converts steps to samples."""
    with phase, following(lambda: samples(min(snapshot().step, steps)), phase.advance):
        yield


class _Words(ProgressColumn):
    """The text beside the bar: done, rate, time left."""

    def render(self, task: Task) -> Text:
        unit = task.fields["unit"]
        words = [f"{task.completed:,.0f} {unit}"]
        # A finished phase shows its mean rate, a running one the current rate.
        speed = task.completed / task.elapsed if task.finished and task.elapsed else task.speed
        if speed:
            words.append(f"{show_rate(speed)} {unit}/s")
        if not task.finished and task.time_remaining is not None:
            minutes, seconds = divmod(int(task.time_remaining), 60)
            words.append(f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left")
        return Text("  ".join(words), no_wrap=True)


def show_rate(per_second: float) -> str:
    """Format a rate: `2310000` as `2.31 M`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if per_second >= size:
            return f"{per_second / size:.3g} {unit}"
    return f"{per_second:.3g}"
