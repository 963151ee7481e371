"""How a worker gets its batches: it reads them between the steps, or loader processes read them meanwhile."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TypeAlias

from manyhands.errors import UserError

__all__ = ["Key", "Loading", "Upcoming"]

Key: TypeAlias = tuple[int, int, int]
"""A step, a part and the number of parts: one worker's share of one global batch."""

_REMEMBERED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """Loader processes of each worker, which read and collate its next batches while it computes.

    The batches are the same, in the same order, with and without them. Data that are arrays in memory need none: there
    a batch is gathered at once, and this setting changes nothing.
    """

    workers: int = 0
    """Loader processes for each worker of the run, as `num_workers` of torch's DataLoader; 0: the worker loads each
    batch itself, when it needs it. A stream of samples is read by one process, however many are given."""
    ahead: int = 2
    """Batches that each loader process has ready or in work beyond the one that is computed, as `prefetch_factor`."""
    pinned: bool = False
    """Copy batches to page-locked memory, from which a GPU fetches them while it computes; without a GPU, no effect."""
    timeout_s: float = 300.0
    """How long a worker waits for a batch before the run fails; the error names the loader process and where it is."""

    def __post_init__(self) -> None:
        for name, value, least in (("workers", self.workers, 0), ("ahead", self.ahead, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(f"loading: {name} is {value!r}; it must be an integer of at least {least}")
        if not isinstance(self.pinned, bool):
            raise UserError(f"loading: pinned is {self.pinned!r}; it must be True or False")
        if not (isinstance(self.timeout_s, int | float) and self.timeout_s > 0):
            raise UserError(f"loading: timeout_s is {self.timeout_s!r}; it must be a number above 0")


class Upcoming:
    """Predicts the shares that a worker will request next from those it requested; none beyond `steps`.

    Steps come as far apart as they mostly came lately: 1 where all workers share each batch, n where n workers take
    batches in turn. Where batches are given out in the order of asking nobody can know, and a guess may be wrong: then
    the right batch is loaded, and the time of the wrong one was wasted.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._last: int | None = None
        self._distances: deque[int] = deque(maxlen=_REMEMBERED)

    def after(self, key: Key, count: int) -> list[Key]:
        """The next `count` after `key`, which is asked for now."""
        step, part, parts = key
        if self._last is not None and step > self._last:
            self._distances.append(step - self._last)
        self._last = step
        seen = Counter(reversed(self._distances))  # of several that came as often, the latest
        distance = seen.most_common(1)[0][0] if seen else 1
        following = range(step + distance, self._steps, distance)
        return [(later, part, parts) for later in following[:count]]
