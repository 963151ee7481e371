"""What a picture of a run is made of: rows, slices, steps, marks and arrows, all in nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.observe.record.events import NOBODY, EventKind

__all__ = ["Arrow", "Gap", "Mark", "PictureStep", "Row", "Slice", "Timeline", "Window"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A stretch of one role's time; times are nanoseconds since the run's first event."""

    kind: EventKind
    start_ns: int
    end_ns: int
    step: int
    peer: int = NOBODY
    num_bytes: int = 0
    count: int = 0
    value: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureStep:
    """One whole step of one role."""

    step: int
    start_ns: int
    end_ns: int
    samples: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Steps of one role that were left out, and what they add up to; a server's by time."""

    first_step: int
    last_step: int
    start_ns: int
    end_ns: int
    compute_ns: int
    exchange_ns: int
    wait_ns: int
    apply_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment: a role joined, left, or met a fault for which `peer` is to blame."""

    kind: EventKind
    at_ns: int
    step: int
    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One role; its slices and gaps do not overlap and are in the order of time."""

    role: int
    name: str
    slices: tuple[Slice, ...]
    steps: tuple[PictureStep, ...]
    gaps: tuple[Gap, ...]
    marks: tuple[Mark, ...]
    holds: tuple[Slice, ...] = ()
    """What a server kept back, for whom; these overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """From a moment inside a slice of one role into a slice of another: the end of a wait, or a message."""

    source: int
    source_ns: int
    target: int
    target_ns: int
    step: int
    is_message: bool = False
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Steps that are kept, both ends included; `label` says why: all, first, slowest or last."""

    label: str
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All rows in the order of their roles; `left_out` are sentences on what is not in them."""

    rows: tuple[Row, ...]
    arrows: tuple[Arrow, ...]
    windows: tuple[Window, ...]
    left_out: tuple[str, ...] = ()
