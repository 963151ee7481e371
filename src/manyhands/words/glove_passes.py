"""The passes of one GloVe training as its parent sees them: costs, progress, and what the last whole one gave."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from manyhands.draw.bars import Bars, Phase
from manyhands.errors import NonFinite
from manyhands.words.glove_model import GloveOptions, Snapshot

__all__ = ["AfterPass", "Passes", "Work"]

AfterPass = Callable[[int, float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What there is to train on; plain values, so that it can be sent to other processes."""

    path: Path
    num_records: int
    vocabulary_size: int
    options: GloveOptions
    workers: int


class Passes:
    """Takes the sum of costs of each pass; a context manager around the training, which shows a bar.

    `kept` are the parameters after the last finished pass, so that an interruption loses one pass at most.
    """

    def __init__(self, work: Work, bars: Bars | None = None, after_pass: AfterPass | None = None) -> None:
        self.costs: list[float] = []
        self.kept: Snapshot | None = None
        self._work = work
        self._bars = bars
        self._after_pass = after_pass
        self._phase: Phase | None = None
        self._stack = ExitStack()

    def finish(self, cost: float, snapshot: Callable[[], Snapshot]) -> None:
        """A pass is over, with this sum of costs; NonFinite where it is no number."""
        mean = cost / self._work.num_records
        if not math.isfinite(mean):
            raise NonFinite(
                f"the cost of pass {len(self.costs) + 1} is {mean}; lower the rate ({self._work.options.rate:g}) or "
                f"the batch ({self._work.options.batch})"
            )
        self.costs.append(mean)
        self.kept = snapshot()
        if self._after_pass is not None:
            self._after_pass(len(self.costs), mean)

    def advance(self, records: float) -> None:
        """So many more records were visited."""
        if self._phase is not None and records:
            self._phase.advance(records)

    def __enter__(self) -> Self:
        if self._bars is not None:
            total = self._work.num_records * self._work.options.passes
            self._phase = self._stack.enter_context(self._bars.phase("training", total, "records"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phase = None
        self._stack.close()
