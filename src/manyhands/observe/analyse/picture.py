"""The data model of a timeline: rows, slices, steps, marks and arrows, all in nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.observe.record.events import NOBODY, EventKind

__all__ = ["Arrow", "Gap", "Mark", "PictureStep", "Row", "Slice", "Timeline", "Window"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """An interval of one role's time; times are nanoseconds since the run's first event."""

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
    """Omitted steps of one role and their totals; for a server, an omitted time range."""

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
    """A moment: a role joined, left, or met a fault that `peer` caused."""

    kind: EventKind
    at_ns: int
    step: int
    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One role; its slices and gaps do not overlap and are in time order."""

    role: int
    name: str
    slices: tuple[Slice, ...]
    steps: tuple[PictureStep, ...]
    gaps: tuple[Gap, ...]
    marks: tuple[Mark, ...]
    holds: tuple[Slice, ...] = ()  # what a server kept back, for whom; these overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """An arrow between slices of two roles: the end of a wait, or a message."""

    source: int
    source_ns: int
    target: int
    target_ns: int
    step: int
    is_message: bool = False
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A range of steps that is kept, both ends included; `label` says why: all, first, slowest or last."""

    label: str
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All rows in role order; `left_out` has sentences on what they omit."""

    rows: tuple[Row, ...]
    arrows: tuple[Arrow, ...]
    windows: tuple[Window, ...]
    left_out: tuple[str, ...] = ()
