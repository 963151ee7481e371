"""Bars in a terminal: of long phases, how much is done, how fast, and how long it will still take;
and the live view of a run: how far, how well, and what each worker spends its time on.

    counting  ━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━  5,742,100 tokens  2.31 M tokens/s  0:00:01 left

    ━━━━━━━━━━━━━━━━━━━━━━━━  step 120/500  loss 0.2134  12,345 samples/s  0:32 left
    worker 0  ███████▓░░░░░░░░  compute  41 %  exchange   9 %  waiting  50 % for 1
    worker 1  ███████████████▓  compute  91 %  exchange   9 %  waiting   0 %
    worker 1 is 2.2 times slower than the median of the others since step 40: the
    others wait 50 % of their time

The width, the height and the encoding of the terminal decide how much is shown.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from manyhands.observe.analyse.remarks import about_workers, headline, in_order
from manyhands.observe.analyse.totals import TimeSplit, TotalsSnapshot, WorkerTotals

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
    """The phases of one piece of work, one bar each; prints nothing where the console is not a terminal."""

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
    """Poll `done` in a thread while the body runs, and once after it; pass the increments to `advance`."""
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


_STYLES = ("green", "blue", "yellow")
_BLOCKS, _ASCII_BLOCKS = "█▓░", "#=."
_WORKER_BAR = 16
_MIN_BAR = 8
_MIN_SENTENCE = 40


class LivePicture:
    """The run in its place of a terminal: a `Screen` of `showing`, on stderr or on `console`."""

    def __init__(self, steps: int, strategy: str = "", console: Console | None = None) -> None:
        self._steps = steps
        self._strategy = strategy
        self._console = console if console is not None else Console(stderr=True)
        self._live: Live | None = None

    def show(self, snapshot: TotalsSnapshot) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(RunPicture(snapshot, self._steps, self._strategy), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class RunPicture:
    """A snapshot of a run of `steps` steps, drawn to fit its console."""

    def __init__(self, snapshot: TotalsSnapshot, steps: int, strategy: str = "") -> None:
        self._snapshot = snapshot
        self._steps = steps
        self._strategy = strategy

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._headline(options.max_width)
        workers = self._snapshot.workers
        # One line too many would scroll the bar away: reserve lines for it, for the sentence and the prompt.
        room = max(1, console.size.height - 5)
        shown = workers if len(workers) <= room else workers[: room - 1]
        for worker in shown:
            yield _worker_line(worker, options.max_width, options.ascii_only)
        if len(shown) < len(workers):
            yield _fitted(f"and {len(workers) - len(shown)} more workers", options.max_width)
        notices = about_workers(self._snapshot.slow, self._snapshot.late, self._strategy)
        if notices and options.max_width >= _MIN_SENTENCE:
            yield Text(notices[0])

    def _headline(self, width: int) -> Table | Text:
        words = headline(self._snapshot, self._steps)
        while len(words) > 1 and _MIN_BAR + sum(2 + len(word) for word in words) > width:
            words.pop()
        # A narrow terminal keeps the first words, which matter most.
        label = in_order(words)
        bar_width = width - len(label) - 2
        if bar_width < _MIN_BAR:
            return _fitted(label, width)
        line = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        done = min(self._snapshot.step, self._steps)
        line.add_row(ProgressBar(total=max(1, self._steps), completed=done, width=bar_width), Text(label))
        return line


def split_bar(split: TimeSplit, width: int, ascii_only: bool = False) -> Text:
    """Return a bar of exactly `width` cells, divided by the shares; blank before the first event."""
    if not any(split):
        return Text(" " * width)
    bar, filled, share = Text(), 0, 0.0
    for part, block, style in zip(split, _ASCII_BLOCKS if ascii_only else _BLOCKS, _STYLES, strict=True):
        share += part
        boundary = min(width, math.floor(share * width + 0.5))
        bar.append(block * (boundary - filled), style)
        filled = boundary
    return bar


def _worker_line(worker: WorkerTotals, width: int, ascii_only: bool) -> Text:
    split = worker.split()
    label = f"worker {worker.worker:<2} "
    words = "".join(
        f"  {name} {100 * share:3.0f} %"
        for name, share in zip(("compute", "exchange", "waiting"), split, strict=True)
    )
    peer = worker.waits_mostly_for()
    if peer is not None:
        words += f" for {peer}"
    bar_width = _WORKER_BAR
    if len(label) + bar_width + len(words) > width:  # narrow: the bar alone
        words, bar_width = "", max(1, min(bar_width, width - len(label)))
    line = Text(label, no_wrap=True).append_text(split_bar(split, bar_width, ascii_only)).append(words)
    line.truncate(width)
    return line


def _fitted(text: str, width: int) -> Text:
    line = Text(text, no_wrap=True)
    line.truncate(width, overflow="crop")
    return line
