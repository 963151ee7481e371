"""What an all-reduce algorithm is: a pure function from (rank, world) to a table of steps.

The vector is cut into chunks. A step says which chunks leave for whom, which arrive from whom, and what
becomes of them: added, copied, or kept in the slot of their source until a fold sums the slots in rank
order. From this one table the executor runs the algorithm over any link, `symbolic` proves it, `cost`
counts and times it, and `draw` shows it.

The meaning of one step, the same in all four:

1. Every send leaves with what the rank held when the step began; one message per `Send`.
2. The receives take effect in the order in which they are listed. ADD puts the value from the lower rank on
   the left, so that two ranks that swap partial sums compute the same expression, down to the sign of a
   zero.
3. The folds: each chunk becomes the sum of the rank's own value and the kept ones, left to right in rank
   order. A helper has no own value.

Tables are aligned: all ranks of one algorithm have the same number of steps, some of them empty, and a
message sent in a step is received in the step of the same number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from manyhands.errors import ManyhandsError, UserError

__all__ = [
    "Algorithm",
    "How",
    "Receive",
    "Schedule",
    "ScheduleError",
    "Send",
    "Step",
    "Table",
    "chunk_bounds",
    "span_bounds",
]


class ScheduleError(ManyhandsError):
    """A schedule is wrong; the message names the algorithm, the world, the round and the rank."""


class How(Enum):
    """What becomes of a chunk that arrives."""

    ADD = "add"
    COPY = "copy"
    KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """One message: the `chunks` (a run of neighbours) as this rank holds them, to rank `to`."""

    to: int
    chunks: range

    def __post_init__(self) -> None:
        _check_run(self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """One message: the `chunks` from rank `source`, and what becomes of them."""

    source: int
    chunks: range
    how: How

    def __post_init__(self) -> None:
        _check_run(self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one rank does in one round; by default nothing.

    `folds` come after the receives; each names a run of chunks just as the messages it sums were kept.
    """

    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()
    folds: tuple[range, ...] = ()


Table = tuple[Step, ...]
Schedule = Callable[[int, int], Table]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One all-reduce algorithm: its schedule, how many chunks it cuts a vector into, and where it is from."""

    name: str
    schedule: Schedule
    chunks: Callable[[int], int]
    description: str
    source: str
    helpers: int = 0
    """The last ranks, so many of them, that have no vector of their own: they only sum, and want no result."""

    def gives(self, rank: int, world: int) -> bool:
        """Whether a rank has a vector of its own."""
        return rank < world - self.helpers

    def table(self, rank: int, world: int) -> Table:
        """The steps of one rank of `world`; computed once."""
        if world < 1 or not 0 <= rank < world:
            raise UserError(f"rank={rank}, world={world}: world is at least 1 and rank one of 0 to world - 1")
        return _cached_table(self.schedule, rank, world)

    def tables(self, world: int) -> tuple[Table, ...]:
        """The steps of every rank."""
        return tuple(self.table(rank, world) for rank in range(world))


def chunk_bounds(count: int, chunks: int, index: int) -> tuple[int, int]:
    """Where chunk `index` of `chunks` begins and ends in `count` items; the first ones are longer by one.

    Any count will do: with fewer items than chunks the last chunks are empty.
    """
    length, longer = divmod(count, chunks)
    begin = index * length + min(index, longer)
    return begin, begin + length + (index < longer)


def span_bounds(count: int, chunks: int, span: range) -> tuple[int, int]:
    """Where a run of neighbouring chunks begins and ends."""
    return chunk_bounds(count, chunks, span[0])[0], chunk_bounds(count, chunks, span[-1])[1]


@lru_cache(maxsize=256)
def _cached_table(schedule: Schedule, rank: int, world: int) -> Table:
    return schedule(rank, world)


def _check_run(chunks: range) -> None:
    if not chunks or chunks.step != 1 or chunks.start < 0:
        raise ScheduleError(f"a message carries a run of neighbouring chunks, not {chunks}")
