"""Tasks whose step is compiled: a block of memory, a step that moves it, a reader of records.

A `KernelTask` is for workloads that go through millions of records a second, where a step in Python would cost more
than the work. It says what it keeps in memory and how a portion of its records moves that; the strategy says who takes
which portion, on which memory. Where a strategy moves gradients, as `ps` does, it gives itself as a `Task`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from torch import Tensor, nn

from manyhands.errors import UserError, check_count
from manyhands.facts import Split, Truth
from manyhands.native.group.gate import CompiledGate
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.segment import Segment
from manyhands.strategy import Strategy
from manyhands.task import Metric, Passes, RowsOf, Task

CHECKPOINT_SHARE = 50
"""Checkpoints write at most one byte for so many bytes of records that are read, so that they cost little time."""
_CHECKPOINT_BYTES = 12 << 20  # what can be written while the disk makes sure of a small one


@dataclass(frozen=True, slots=True)
class Portion:
    """The records of one step: `begin` to `end` of a pass, which is number `passed` from 0."""

    begin: int
    end: int
    passed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What one worker did with a portion."""

    loss: float  # the sum of the losses that count here, each before its own update
    weight: float  # what they are divided by for their mean
    samples: int  # how many records are this worker's, so that those of all workers are all of them
    input_ns: int = 0  # what reading took
    bytes_sent: int = 0  # what others read of this worker
    messages_sent: int = 0
    # What the step measured on data held out, the same on every worker: a row of evaluation in the history
    metrics: Mapping[str, float] = field(default_factory=dict)
    ends: str = ""  # why the run is to end with this step, the same on every worker; empty: it continues


class KernelStep(ABC):
    """One worker's compiled step; after `gather`, `model`'s `state_dict()` is all that a run needs to continue."""

    shares_memory: ClassVar[bool] = True  # whether all workers train on one memory; else each has its own
    # Memory that all workers share, where the step has it: its first bytes are the trainer's
    segment: Segment | None = None

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def is_done(self) -> bool:
        """Whether training has converged, the same on all workers; asked at the synchronization after a pass."""
        return False

    @abstractmethod
    def take(self, portion: Portion) -> Taken:
        """Update the memory by the records of `portion`."""

    @abstractmethod
    def fill(self) -> None:
        """Initialize the memory for a new run; worker 0 does so where all share it."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(state)

    def gather(self) -> None:  # noqa: B027 - where one memory is all there is
        """Collective: complete `model` on worker 0, where workers hold parts of it."""

    def close(self) -> None:
        if self.segment is not None:
            self.segment.close()


class KernelTask(ABC):
    """One training problem with a compiled step. Plain values, which are sent to worker processes."""

    compiled: ClassVar[bool] = True
    sparse: ClassVar[Mapping[str, RowsOf]] = {}
    evaluation: ClassVar[None] = None
    metrics: ClassVar[Mapping[str, Metric]] = {}
    files: ClassVar[Mapping[str, str]] = {}
    records_each: ClassVar[float] = 1.0
    text_work: ClassVar[None] = None
    name: ClassVar[str]

    @property
    @abstractmethod
    def samples(self) -> int:
        """The number of records in one pass."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """The number of records in one step; the last step of a pass may have fewer."""

    @property
    @abstractmethod
    def epochs(self) -> int:
        """The number of passes that `fit` makes by default."""

    @property
    @abstractmethod
    def options(self) -> Mapping[str, Any]:
        """The options it was made from, as JSON; a run is resumed with the same."""

    @property
    @abstractmethod
    def record_bytes(self) -> float:
        """About how many bytes reading one record reads."""

    @property
    @abstractmethod
    def advice(self) -> str:
        """Advice for a loss that is not finite."""

    @abstractmethod
    def model(self) -> nn.Module:
        """New memory as an `nn.Module` whose parameters are the whole state; not filled yet."""

    @abstractmethod
    def shared_model(self, segment: Segment, offset: int) -> nn.Module:
        """The same module on shared memory, with the contents that are there."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """The bytes that `shared_model` takes."""

    @abstractmethod
    def step(self, model: nn.Module, gate: CompiledGate) -> KernelStep:
        """The step on this memory, which others may be changing; `gate` describes the gate that orders steps."""

    @abstractmethod
    def warm(self) -> None:
        """Compile what workers will call, so that they find it compiled."""

    def numbering(self, step: int) -> int:
        """The number that the first of a step's small steps has at the gate."""
        return step

    def step_on_copies(self, group: SharedGroup, control_bytes: int) -> KernelStep:
        """The step where every worker has a copy and a part of each batch; `for_strategy` says whether it exists."""
        raise NotImplementedError(f"{self.name} has no step on copies")

    def step_on_slices(self, group: SharedGroup, control_bytes: int) -> KernelStep:
        """The step where every worker has some dimensions; `for_strategy` says whether it exists."""
        raise NotImplementedError(f"{self.name} has no step on slices")

    @abstractmethod
    def for_strategy(self, strategy: Strategy, workers: int) -> AnyTask:
        """Itself, or a `Task` where the strategy exchanges gradients; UserError where they do not go together."""

    @property
    def passes(self) -> Passes:
        return Passes(steps=-(-self.samples // self.batch_size))

    def portion(self, step: int) -> Portion:
        passed, number = divmod(step, self.passes.steps)
        begin = number * self.batch_size
        return Portion(begin, min(begin + self.batch_size, self.samples), passed)

    def checkpoint_every(self, steps: int) -> int:
        """The checkpoint interval: ten per run, or fewer where the memory is large or the run is very short."""
        written = self.num_bytes + _CHECKPOINT_BYTES
        seldom = CHECKPOINT_SHARE * written / (self.record_bytes * self.batch_size)
        return max(1, math.ceil(max(steps / 10, seldom)))


def check_shared_rows(strategy: Strategy, workers: int, task: str, no_settings: str) -> None:
    """UserError unless one process or plain copies share the rows; `no_settings` says why copies have no settings."""
    check_count("workers", workers)
    if strategy.most_workers is not None and workers > strategy.most_workers:
        raise UserError(f"workers={workers}: {strategy.word} is one process; use strategy=allreduce for more")
    copies = strategy.truth is Truth.EVERYONE and strategy.split is Split.DATA and strategy.trains_compiled
    if not copies and strategy.most_workers != 1:
        raise UserError(f"strategy {strategy} does not train {task}; allowed: single, allreduce, mirrored")
    if copies and strategy != type(strategy)():
        raise UserError(f"strategy {strategy}: {task} {no_settings}")


AnyTask: TypeAlias = Task | KernelTask
"""What `fit` trains."""
