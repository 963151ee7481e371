"""Which checkpoints to delete after a new one: a pure decision over their steps and scores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["SavedStep", "best", "rotated_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """One checkpoint as rotation sees it; the lower the score the better."""

    step: int
    score: float | None = None
    intact: bool = True


def best(entries: Iterable[SavedStep]) -> int | None:
    """The step of the intact checkpoint with the lowest score, the newest of equals; None if none has one."""
    scored = [(entry.score, -entry.step) for entry in entries if entry.intact and entry.score is not None]
    return -min(scored)[1] if scored else None


def rotated_out(
    entries: Iterable[SavedStep], saved_step: int, keep: int, spare_from: int | None = None
) -> tuple[int, ...]:
    """The steps to remove after `saved_step` was saved: all before the last `keep`, but never the best.

    Those from `spare_from` on stay as well: others still need them.

    A damaged checkpoint does not count as one of those kept. One newer than the step just saved (the run
    went back to an earlier checkpoint) is neither counted nor removed: it goes once the run has passed it.
    """
    known = list(entries)
    reached = sorted(entry.step for entry in known if entry.intact and entry.step <= saved_step)
    if len(reached) < keep:
        return ()
    oldest_kept = reached[-keep] if spare_from is None else min(reached[-keep], spare_from)
    return tuple(sorted({entry.step for entry in known if entry.step < oldest_kept} - {best(known)}))
