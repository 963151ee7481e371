"""Logistic regression as a task whose step is compiled: a table of weights, parsed examples, one after the other.

* `single`: one thread, in the order of the file.
* `hogwild`: threads or processes that do the same on one table.
* The others move gradients, and get the same problem as a `Task` of batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from manyhands.engine.kernel_task import AnyTask, KernelStep, KernelTask, Portion, Taken
from manyhands.errors import UserError
from manyhands.facts import Split
from manyhands.native.group.gate import Turn, require_turn
from manyhands.native.segment import Segment
from manyhands.strategy import Strategy
from manyhands.workloads.logreg.batch_task import logreg_task
from manyhands.workloads.logreg.examples import Parsed
from manyhands.workloads.logreg.logreg_kernels import BETA, LOSS, RULES, WEIGHT, WIDTHS, train, warm
from manyhands.workloads.logreg.options import LogregOptions

__all__ = ["LogregMemory", "LogregTask", "check_strategy"]

_MOST, _LEAST = 1 << 14, 1 << 13  # examples of a step: a millisecond or more
_LEAST_ENTRIES = 1 << 17  # features that take a millisecond: examples with many of them need not be as many
_PER_PASS = 16  # steps that a short file has, so that all workers have some


class LogregMemory(nn.Module):
    """The bias and then every feature: a row each of the weight and what the learner keeps of it, all 0 at first."""

    def __init__(self, rows: int, width: int, table: NDArray[Any]) -> None:
        super().__init__()
        self.table = table
        self.rows = nn.Parameter(torch.from_numpy(table.reshape(rows, width)), requires_grad=False)


@dataclass(frozen=True, kw_only=True)
class LogregTask(KernelTask):
    """Learning from `parsed` examples; `logreg` has a rate."""

    name: ClassVar[str] = "logreg"

    parsed: Parsed
    logreg: LogregOptions
    dtype: str = "float32"

    @classmethod
    def of(cls, parsed: Parsed, options: LogregOptions, dtype: str = "float32") -> LogregTask:
        """With a rate that fits the examples, where none was given."""
        return cls(parsed=parsed, logreg=options.settled(parsed.scale), dtype=dtype)

    @property
    def samples(self) -> int:
        """Examples."""
        return self.parsed.examples

    @property
    def batch_size(self) -> int:
        """Enough for all workers, and for what Python does around a step to cost nothing."""
        least = min(_LEAST, -(-_LEAST_ENTRIES * self.samples // max(1, self.parsed.entries)))
        return min(_MOST, max(least, -(-self.samples // _PER_PASS)))

    @property
    def epochs(self) -> int:
        """Passes."""
        return self.logreg.passes

    @property
    def options(self) -> Mapping[str, Any]:
        """All but how long it goes on."""
        kept = asdict(self.logreg)
        return {name: value for name, value in kept.items() if name not in ("passes", "allow_overload")}

    @property
    def record_bytes(self) -> float:
        """Index and value of each feature."""
        return 8.0 * max(1.0, self.parsed.entries / self.samples)

    @property
    def advice(self) -> str:
        """The steps are too long."""
        return "use a smaller rate, or scale the features down"

    @property
    def _width(self) -> int:
        return WIDTHS[self.logreg.learner]

    def model(self) -> LogregMemory:
        """A row for the bias and each feature."""
        rows = self.parsed.size + 1
        return LogregMemory(rows, self._width, np.zeros(rows * self._width, self.dtype))

    def shared_model(self, segment: Segment, offset: int) -> LogregMemory:
        """The same in a segment."""
        rows = self.parsed.size + 1
        table = segment.array(offset, rows * self._width, np.dtype(self.dtype))
        return LogregMemory(rows, self._width, table)

    @property
    def num_bytes(self) -> int:
        """Of the table."""
        return (self.parsed.size + 1) * self._width * np.dtype(self.dtype).itemsize

    def step(self, model: nn.Module, turn: Turn) -> KernelStep:
        """One example after the other."""
        assert isinstance(model, LogregMemory), "a model of this task"
        return _ExampleStep(self, model, turn)

    def warm(self) -> None:
        """Compile for this table."""
        warm(self.dtype)

    def numbering(self, step: int) -> int:
        """Every example goes through the gate."""
        portion = self.portion(step)
        return portion.passed * self.samples + portion.begin

    def for_strategy(self, strategy: Strategy, workers: int) -> AnyTask:
        """Compiled where workers share one memory, and batches elsewhere."""
        check_strategy(strategy, workers)
        return self if strategy.facts.record_order is not None else logreg_task(self.parsed, self.logreg)


class _ExampleStep(KernelStep):
    def __init__(self, task: LogregTask, model: LogregMemory, turn: Turn) -> None:
        super().__init__(model)
        self._table, self._turn = model.table, turn
        self._parsed = task.parsed.opened()
        self._samples = task.samples
        self._rule = RULES[task.logreg.learner]
        settings = [task.logreg.rate, task.logreg.l1, task.logreg.l2, BETA, float(task.logreg.bias)]
        self._settings = np.array(settings, task.dtype)

    def fill(self) -> None:
        """It begins with 0, which it is."""

    def take(self, portion: Portion) -> Taken:
        """Learn from these examples."""
        sums = np.zeros(2)
        for rows, targets, span, before in self._parsed.pieces(portion.begin, portion.end):
            seen = portion.passed * self._samples + before
            status = train(
                self._table,
                rows,
                targets,
                span,
                self._rule,
                self._settings,
                tuple(self._turn),
                seen,
                sums,
            )
            require_turn(status, self._turn)
        count = portion.end - portion.begin
        return Taken(loss=float(sums[LOSS]), weight=float(sums[WEIGHT]), samples=count)


def check_strategy(strategy: Strategy, workers: int) -> None:
    """UserError where a strategy does not train it with so many workers."""
    if not isinstance(workers, int) or workers < 1:
        raise UserError(f"workers={workers!r} must be a whole number of at least 1")
    if strategy.most_workers is not None and workers > strategy.most_workers:
        raise UserError(f"workers={workers}: {strategy.word} is one process; use strategy=hogwild for more")
    if strategy.split is Split.DIMENSIONS:
        raise UserError(
            f"strategy {strategy} splits vectors, and a feature has one weight here; use hogwild or ps"
        )
