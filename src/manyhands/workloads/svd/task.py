"""A truncated SVD as a task whose step is compiled: a Krylov space that grows with every pass over the rows.

* `single`: one thread goes through all rows.
* `allreduce`, `mirrored`: every worker goes through its part of each portion. After a pass their products, a thin
  matrix, are added up in worker order; worker 0 extends the space, which all share.

A step is a portion of a pass, so that a large file shows how far it is; what follows a pass follows its last step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final

import numpy as np
from torch import nn

from manyhands.engine.kernel_task import AnyTask, KernelStep, KernelTask, check_shared_rows
from manyhands.native.group.gate import Turn
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.segment import Segment
from manyhands.strategy import Strategy
from manyhands.workloads.svd.pass_steps import AllRowsStep, SharedRowsStep
from manyhands.workloads.svd.pass_sums import SvdMemory, SvdWork
from manyhands.workloads.svd.product_kernels import warm

__all__ = ["SvdTask", "check_strategy"]

_STEP_BYTES: Final = 1 << 26  # a fraction of a second


@dataclass(frozen=True, kw_only=True)
class SvdTask(SvdWork, KernelTask):
    """Decomposing a stored matrix; `workers` decides how large everything may be."""

    name: ClassVar[str] = "svd"

    step_bytes: int = _STEP_BYTES
    """Of the matrix, that a worker goes through in a step."""

    @property
    def samples(self) -> int:
        return self.matrix.rows

    @property
    def batch_size(self) -> int:
        row_bytes = max(1.0, self.matrix.num_bytes / self.matrix.rows)
        return max(1, min(self.matrix.rows, int(self.workers * self.step_bytes / row_bytes)))

    @property
    def epochs(self) -> int:
        """Passes at most; it ends as soon as all is known."""
        return self.svd.passes

    @property
    def options(self) -> Mapping[str, Any]:
        """All that changes what comes out, but how long it may go on."""
        kept = asdict(self.svd)
        without = ("passes", "allow_overload", "memory_bytes")
        return {
            **{name: value for name, value in kept.items() if name not in without},
            "rows": self.matrix.rows,
            "columns": self.matrix.columns,
            "entries": self.matrix.entries,
            "most": self.sizes.most,
            "width": self.sizes.width,
        }

    @property
    def record_bytes(self) -> float:
        return max(1.0, self.matrix.num_bytes / self.matrix.rows)

    @property
    def advice(self) -> str:
        return "scale the matrix down"

    def model(self) -> SvdMemory:
        return SvdMemory(np.zeros(SvdMemory.count(self.sizes)), self.sizes)

    def shared_model(self, segment: Segment, offset: int) -> SvdMemory:
        return SvdMemory(segment.array(offset, SvdMemory.count(self.sizes), np.float64), self.sizes)

    @property
    def num_bytes(self) -> int:
        return 8 * SvdMemory.count(self.sizes)

    def step(self, model: nn.Module, turn: Turn) -> KernelStep:
        del turn
        assert isinstance(model, SvdMemory), "a model of this task"
        return AllRowsStep(self, model)

    def step_on_copies(self, group: SharedGroup, control_bytes: int) -> KernelStep:
        return SharedRowsStep(self, group, control_bytes)

    def warm(self) -> None:
        if self.matrix.is_sparse:
            warm()

    def for_strategy(self, strategy: Strategy, workers: int) -> AnyTask:
        check_strategy(strategy, workers)
        return self


def check_strategy(strategy: Strategy, workers: int) -> None:
    """UserError where a strategy does not decompose with so many workers."""
    why = "adds products up in shared memory once a pass, so it has no other algorithm and no buckets"
    check_shared_rows(strategy, workers, "svd", f"{why}; use {strategy.word}")
