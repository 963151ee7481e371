"""A pipeline's schedule as data: which worker does what with which micro-batch, in which order.

A chain of layers is cut into `stages` × `chunks` parts. Worker s of the pipeline, its *stage*, has the parts s,
stages + s, 2·stages + s and so on: one for each of its chunks. A micro-batch goes forward through all parts in their
order, and backward through them in the other; a table says when. It is executed, checked, costed and drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, unique
from typing import TypeAlias

__all__ = ["Maker", "Pass", "Schedule", "StageWork"]


@unique
class Pass(Enum):
    """What a stage does with a micro-batch in one turn."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """The gradient of the part's input; that of its parameters as well, unless the schedule splits them."""

    WEIGHTS = "weight gradient"
    """The gradient of the part's parameters, in schedules that split it off: nobody else waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """One piece of work of one stage."""

    tick: int
    """When, if every piece of work took one tick and messages none; from 0."""

    stage: int
    microbatch: int
    work: Pass
    chunk: int = 0
    """Which of the stage's parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The whole table; every stage takes its own turns in their order, and waits for what they need."""

    name: str
    stages: int
    microbatches: int
    turns: tuple[StageWork, ...]
    """By tick, then by stage."""

    chunks: int = 1
    splits_backward: bool = False
    """Whether backward is two pieces of work: what the stage before waits for, and what can wait."""

    over_time: bool = False
    """Whether micro-batches are slices of a sequence in time: a part needs its own state after the slice before, and in
    backward the gradient of its state from the slice after."""

    def of_stage(self, stage: int) -> tuple[StageWork, ...]:
        """What one worker does, in order."""
        return tuple(turn for turn in self.turns if turn.stage == stage)

    def part(self, turn: StageWork) -> int:
        """Which part of the chain a turn is about, from 0 at the input."""
        return turn.chunk * self.stages + turn.stage

    @property
    def parts(self) -> int:
        """How many parts the chain is cut into."""
        return self.stages * self.chunks


Maker: TypeAlias = Callable[[int, int], Schedule]
"""(stages, microbatches) -> the table; UserError where the numbers do not fit, which says the nearest that do."""
