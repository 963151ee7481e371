"""GloVe as a task whose step is compiled: the rows of all words and contexts, records from a file, and who does what.

* `single`: one thread, the published rule record by record; with `batch` above 1 the reference of the three below.
* `hogwild`: threads or processes that all do the same on one memory, without locks.
* `allreduce`, `mirrored`: every worker holds the model and takes its part of each batch; rows touched travel.
* `tensor`: every worker holds some dimensions of every vector and takes all records; scalars travel.
* `ps`: parameter servers hold the rows; workers pull those of their part of a batch, and push what moves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from manyhands.engine.kernel_task import AnyTask, KernelStep, KernelTask
from manyhands.errors import DataError, UserError
from manyhands.facts import Split, Truth
from manyhands.native.group.gate import Turn
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.segment import Segment
from manyhands.strategy import Strategy
from manyhands.workloads.glove.cooccurrence_files import RECORD, record_count
from manyhands.workloads.glove.glove_kernels import warm, warm_in_order
from manyhands.workloads.glove.glove_model import GloveModel
from manyhands.workloads.glove.glove_steps import (
    AllReduceStep,
    BatchStep,
    GloveWork,
    RecordStep,
    TensorStep,
    turn_number,
    warm_batches,
)
from manyhands.workloads.glove.options import GloveOptions, usual_batch

__all__ = ["GloveTask", "check_together"]


@dataclass(frozen=True, kw_only=True)
class GloveTask(GloveWork, KernelTask):
    """Training on a file of shuffled records, in its order in every pass."""

    name: ClassVar[str] = "glove"

    any_batch: bool = False
    """Whether the batch is what a strategy usually has, instead of the one in `glove`."""
    in_order: bool = True
    """Whether workers may take turns, which is compiled apart."""

    @classmethod
    def of(
        cls, path: Path, vocabulary_size: int, glove: GloveOptions, *, any_batch: bool = False
    ) -> GloveTask:
        if not isinstance(vocabulary_size, int) or vocabulary_size < 1:
            raise UserError(f"vocabulary_size={vocabulary_size!r} must be an integer of at least 1")
        if not record_count(path):
            raise DataError(f"{path} holds no records; count the words of a corpus first")
        return cls(
            path=Path(path).absolute(),
            num_records=record_count(path),
            vocabulary_size=vocabulary_size,
            glove=glove,
            any_batch=any_batch,
        )

    @property
    def samples(self) -> int:
        return self.num_records

    @property
    def batch_size(self) -> int:
        return self.step_records

    @property
    def epochs(self) -> int:
        return self.glove.passes

    @property
    def options(self) -> Mapping[str, Any]:
        kept = asdict(self.glove) | {"vocabulary_size": self.vocabulary_size}
        return {name: value for name, value in kept.items() if name not in ("passes", "allow_overload")}

    @property
    def record_bytes(self) -> float:
        return RECORD.itemsize

    @property
    def advice(self) -> str:
        return f"lower the rate ({self.glove.rate:g}) or the batch ({self.glove.batch})"

    def model(self) -> GloveModel:
        return GloveModel(self.vocabulary_size, self.glove)

    def shared_model(self, segment: Segment, offset: int) -> GloveModel:
        return GloveModel(self.vocabulary_size, self.glove, segment=segment, offset=offset)

    @property
    def num_bytes(self) -> int:
        return GloveModel.num_bytes(self.vocabulary_size, self.glove)

    def step(self, model: nn.Module, turn: Turn) -> KernelStep:
        assert isinstance(model, GloveModel), "a model of this task"
        batch = self.glove.batch
        return RecordStep(self, model, turn) if batch == 1 else BatchStep(self, model, model, batch)

    def step_on_copies(self, group: SharedGroup, control_bytes: int) -> KernelStep:
        return AllReduceStep(self, group, control_bytes)

    def step_on_slices(self, group: SharedGroup, control_bytes: int) -> KernelStep:
        return TensorStep(self, group, control_bytes)

    def warm(self) -> None:
        if self.glove.batch > 1:
            warm_batches(self.glove)
            return
        warm(self.glove.numpy_dtype)
        if self.in_order:
            warm_in_order(self.glove.numpy_dtype)

    def numbering(self, step: int) -> int:
        """STEP records go through the gate at once."""
        return turn_number(self.num_records, self.portion(step))

    def for_strategy(self, strategy: Strategy, workers: int) -> AnyTask:
        """Compiled but under `ps`, whose servers step by themselves."""
        batch = usual_batch(strategy) if self.any_batch else self.glove.batch
        task = replace(self, glove=replace(self.glove, batch=batch))
        check_together(strategy, task.glove, workers)
        if strategy.truth is not Truth.SERVERS:
            return replace(task, in_order=strategy.facts.record_order not in (None, "free"))
        from manyhands.workloads.glove.glove_server import glove_tables  # what the others never need

        return glove_tables(task, workers)


def check_together(strategy: Strategy, options: GloveOptions, workers: int) -> None:
    if not isinstance(workers, int) or workers < 1:
        raise UserError(f"workers={workers!r} must be an integer of at least 1")
    alone = strategy.most_workers == 1
    if alone and workers > 1:
        raise UserError(f"workers={workers}: {strategy.word} is one thread; use strategy=hogwild for more")
    if strategy.facts.record_order is not None:
        if options.batch > 1 and not alone:
            raise UserError(
                f"batch={options.batch}: {strategy.word} takes record after record; leave batch at 1"
            )
        return
    if strategy.split is Split.DIMENSIONS and workers > options.dim:
        raise UserError(
            f"workers={workers}: tensor gives each some of dim={options.dim} dimensions; use fewer workers"
        )
    if not strategy.trains_compiled and strategy.truth is not Truth.SERVERS:
        raise UserError(
            f"strategy {strategy} does not train glove; allowed: hogwild, single, mirrored, allreduce, tensor, ps"
        )
    if options.batch == 1:
        raise UserError(
            f"batch=1: {strategy} works on batches of records, whose duplicate rows are summed; use a batch of 2 or "
            "more, such as 1024"
        )
    by_rows = strategy.truth is Truth.EVERYONE and strategy.split is Split.DATA
    if by_rows and strategy != type(strategy)():
        raise UserError(
            f"strategy {strategy}: glove sends the rows touched, each worker's whole to all, so it has no other "
            f"algorithm and no buckets; use {strategy.word}"
        )
