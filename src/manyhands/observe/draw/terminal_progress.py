"""The live view of a run in a terminal: how far, how well, how fast, and what each worker spends its time on.

```
━━━━━━━━━━━━━━━━━━━━━━━━  step 120/500  loss 0.2134  12,345 samples/s  0:32 left
worker 0  ███████▓░░░░░░░░  compute  41 %  exchange   9 %  waiting  50 % for 1
worker 1  ███████████████▓  compute  91 %  exchange   9 %  waiting   0 %
worker 1 is 2.2 times slower than the median of the others since step 40: the
others wait 50 % of their time
```

Drawing is a pure function of a `Snapshot`; the width, the height and the encoding of the terminal decide how
much is shown.
"""

from __future__ import annotations

import math

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from manyhands.observe.analyse.remarks import about_workers, headline, in_order
from manyhands.observe.analyse.totals import TimeSplit, TotalsSnapshot, WorkerTotals

__all__ = ["LivePicture", "RunPicture", "split_bar"]

_STYLES = ("green", "blue", "yellow")
_BLOCKS, _ASCII_BLOCKS = "█▓░", "#=."
_WORKER_BAR = 16
_MIN_BAR = 8
_MIN_SENTENCE = 40


class LivePicture:
    """The run in its place of a terminal: a `Screen` of `showing`, on stderr or on `console`.

    `strategy` (as text) lets an advice fit. What is printed meanwhile appears above it.
    """

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
    """Return a bar of exactly `width` cells, divided by the shares; blank before the first event.

    Shares are rounded to cells at their boundaries, so that the parts always fill the bar.
    """
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
