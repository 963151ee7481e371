"""A pipeline's schedule as data: which worker does what with which micro-batch, in which order.

A chain of layers is cut into `stages` × `chunks` parts. Worker s of the pipeline, its *stage*, has the parts s,
stages + s, 2·stages + s and so on: one for each of its chunks. A micro-batch goes forward through all parts in order,
and backward through them in reverse order; the table says when. It is executed, checked, costed and drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, unique
from typing import TypeAlias

__all__ = ["Maker", "Pass", "Schedule", "StageWork"]


@unique
class Pass(Enum):
    """What a stage does with a micro-batch in one work item."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """The gradient of the part's input; that of its parameters as well, unless the schedule splits it off."""

    WEIGHTS = "weight gradient"
    """The gradient of the part's parameters, in schedules that split it off: no other stage waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """One work item of one stage."""

    tick: int
    """When it starts if every work item takes one tick and messages take none; from 0."""

    stage: int
    microbatch: int
    work: Pass
    chunk: int = 0
    """Which of the stage's parts it is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The whole table; every stage executes its work items in order, and waits for what they need."""

    name: str
    stages: int
    microbatches: int
    turns: tuple[StageWork, ...]
    """All work items, by tick, then by stage."""

    chunks: int = 1
    splits_backward: bool = False
    """Whether backward is two work items: the input's gradient, and the weight gradient, which can be delayed."""

    over_time: bool = False
    """Whether micro-batches are slices of a sequence in time: a part needs its own state after the slice before, and in
    backward the gradient of its state from the slice after."""

    def of_stage(self, stage: int) -> tuple[StageWork, ...]:
        """The work items of one stage, in order."""
        return tuple(turn for turn in self.turns if turn.stage == stage)

    def part(self, turn: StageWork) -> int:
        """Which part of the chain a work item is about, from 0 at the input."""
        return turn.chunk * self.stages + turn.stage

    @property
    def parts(self) -> int:
        """How many parts the chain is cut into."""
        return self.stages * self.chunks


Maker: TypeAlias = Callable[[int, int], Schedule]
"""(stages, microbatches) -> the table; a UserError for numbers that do not fit names the nearest that do."""
