"""One worker's share of a global batch, in the pieces that it is computed in.

What the shares of a batch weigh adds up to 1, and so does what the pieces of a share weigh in it: whoever adds up the
gradients of their mean losses, with these weights, has the gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from manyhands.data.batches import BatchSource
from manyhands.data.plan import BatchPlan, split

__all__ = ["IndexedShares", "Microbatch", "Share"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """Samples that are computed at once."""

    samples: int
    weight: float
    """In the share."""

    fetch: Callable[[], Any]
    """Gives them collated."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """What one worker computes of one global batch."""

    samples: int
    weight: float
    """In the batch."""

    pieces: tuple[Microbatch, ...]
    """None where there is nothing to compute."""


class IndexedShares:
    """Shares of batches whose samples are looked up by number, each in at most `microbatches` pieces."""

    def __init__(self, source: BatchSource, plan: BatchPlan, microbatches: int = 1) -> None:
        self._source = source
        self._plan = plan
        self._microbatches = microbatches

    def batch_samples(self, step: int) -> int:
        """The number of samples in global batch `step`."""
        return self._plan.size(step)

    def share(self, step: int, part: int, parts: int) -> Share:
        """Part `part` of `parts` of global batch `step`."""
        indices = self._plan.share(step, part, parts)
        pieces = [
            Microbatch(
                samples=len(piece),
                weight=len(piece) / len(indices),
                fetch=partial(self._source.fetch, indices[piece.start : piece.stop]),
            )
            for piece in cut(len(indices), self._microbatches)
        ]
        weight = len(indices) / self._plan.size(step)
        return Share(samples=len(indices), weight=weight, pieces=tuple(pieces))


def cut(count: int, most: int) -> list[range]:
    """`range(count)` in at most `most` pieces, none of them empty, whose sizes differ by at most one."""
    pieces = min(count, most)
    return [split(count, number, pieces) for number in range(pieces)]
