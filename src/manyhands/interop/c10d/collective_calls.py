"""Collective calls as records that all ranks compare, and as sentences that name the ranks that differ.

Before any data is read, every rank writes a record of its call into shared memory. All ranks compare all records, so
a mismatched call is rejected by all of them with the same sentence and nothing is summed. A wait that times out can
say which call each rank is in. This module is pure: records in, sentences out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import torch

from manyhands.errors import UserError
from manyhands.native.dtypes import BY_CODE, CODES
from manyhands.native.segment import CACHE_LINE, PAGE, round_up

Label = Callable[[int], str]  # how a rank is called in a sentence


class CallKind(IntEnum):
    """What is called; the names are those of torch.distributed."""

    BARRIER = 1
    ALL_REDUCE = 2
    REDUCE = 3
    BROADCAST = 4
    ALL_GATHER = 5
    GATHER = 6
    SCATTER = 7
    REDUCE_SCATTER = 8
    ALL_TO_ALL = 9
    SEND = 10
    RECV = 11


class Reduction(IntEnum):
    """How values of several ranks become one; the numbers are those of torch's ReduceOp plus one, 0 is none."""

    NONE = 0
    SUM = 1
    AVG = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5
    BAND = 6
    BOR = 7
    BXOR = 8


_NO_ROOT: Final = -1
_SHOWN_DIMS: Final = 6

RECORD_WORDS: Final = 16
COMPARED_WORDS: Final = 7  # the first words of a record must be the same on all ranks
# the most bytes this rank lays out for any other: the longest decides the number of rounds
EXTENT_WORD: Final = 7


class CollectiveCall(NamedTuple):
    """One rank's call, as laid into its record; `shape` is that of the first tensor, for sentences."""

    number: int
    kind: int
    dtype: int = 0
    reduction: int = 0
    root: int = _NO_ROOT
    items: int = 0
    digest: int = 0
    extent_bytes: int = 0
    tensors: int = 0
    dims: int = 0
    shape: tuple[int, ...] = ()

    def words(self) -> tuple[int, ...]:
        return (*self[:-1], *self.shape, *(0,) * (_SHOWN_DIMS - len(self.shape)))

    @classmethod
    def from_words(cls, words: Sequence[int]) -> CollectiveCall:
        shown = min(words[9], _SHOWN_DIMS)
        return cls._make([*words[:10], tuple(words[10 : 10 + shown])])

    @property
    def name(self) -> str:
        facts = [Reduction(self.reduction).name.lower()] if self.reduction else []
        facts += [f"root {self.root}"] if self.root != _NO_ROOT else []
        return CallKind(self.kind).name.lower() + (f"({', '.join(facts)})" if facts else "")

    @property
    def load(self) -> str:
        if not self.dtype:
            return "nothing"
        sizes = ", ".join(map(str, self.shape)) + (", …" if self.dims > _SHOWN_DIMS else "")
        one = f"{str(BY_CODE[self.dtype]).removeprefix('torch.')}[{sizes}]"
        return f"{self.tensors} tensors, first {one}" if self.tensors > 1 else one

    def __str__(self) -> str:
        return f"{self.name} of {self.load}" if self.dtype else self.name


def call_of(
    number: int,
    kind: CallKind,
    tensors: Sequence[torch.Tensor],
    items: int,
    extent_bytes: int = 0,
    reduction: int = Reduction.NONE,
    root: int = _NO_ROOT,
) -> CollectiveCall:
    """The record of a call; tensors to be reduced must have one shape (up to sizes of 1) on all ranks."""
    first, count = tensors[0], len(tensors)
    shapes = [tuple([size for size in tensor.shape if size != 1]) for tensor in tensors] if reduction else []
    digest = hash(tuple(shapes)) if reduction else 0
    code, shape = dtype_code(first.dtype), tuple(first.shape[:_SHOWN_DIMS])
    sizes = (items, digest, extent_bytes, count, first.dim(), shape)
    return CollectiveCall(number, kind, code, reduction, root, *sizes)


def dtype_code(dtype: torch.dtype) -> int:
    code = CODES.get(dtype)
    if code is None:
        raise UserError(f"dtype={dtype}: allowed: {', '.join(map(str, CODES))}")
    return code


def ranks_text(ranks: Sequence[int], label: Label = str) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(label, ranks))}"


def describe_mismatch(calls: Sequence[CollectiveCall], label: Label = str) -> str:
    number = calls[0].number
    if len({call.name for call in calls}) == 1:
        loads = _grouped([call.load for call in calls], label, "pass", "passes")
        return f"{calls[0].name} #{number}: {loads}; all ranks must pass tensors of the same shape and dtype"
    texts = _grouped([str(call) for call in calls], label, "call", "calls")
    return f"collective #{number}: {texts}; all ranks must make the same calls in the same order"


def describe_uneven(
    name: str, sends: Sequence[Sequence[int]], expects: Sequence[Sequence[int]], label: Label = str
) -> str:
    """Names ranks that send another number of bytes than expected; `sends[i][j]` should equal `expects[j][i]`."""
    world = range(len(sends))
    wrong = [
        f"rank {label(i)} sends {sends[i][j]} bytes to rank {label(j)}, which expects {expects[j][i]}"
        for i in world
        for j in world
        if sends[i][j] != expects[j][i]
    ]
    more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
    return f"{name}: {'; '.join(wrong[:3])}{more}"


def describe_lateness(
    call: CollectiveCall, waited_s: float, last_seen: Sequence[tuple[int, str]], label: Label = str
) -> str:
    late = ranks_text([rank for rank, _ in last_seen], label)
    seen = "; ".join(f"rank {label(rank)} {where}" for rank, where in last_seen)
    return f"{call} #{call.number}: waited {waited_s:.1f} s for {late}: {seen}"


def _grouped(texts: Sequence[str], label: Label, plural: str, singular: str) -> str:
    groups = {text: [rank for rank, one in enumerate(texts) if one == text] for text in texts}
    return ", ".join(
        f"{ranks_text(group, label)} {plural if len(group) > 1 else singular} {text}"
        for text, group in groups.items()
    )


# Where everything lies in the shared memory of one process group, and how a call is cut into rounds.
#
#     line 0                 magic, version, world size, number of the round before the first (u32)
#     line 1                 the abort word (u32): 0 while all is well, else who stopped the group and why
#     a region per rank      lines with one writer each, see below
#     an area per rank       two halves: round n is staged in half n % 2, so that a fast rank can begin round n + 1
#                            while a slow one still reads round n
#
#     region   0  arrived (word)     the last round whose data this rank has laid out
#            128  done (word)        the last round of which this rank has read all it needs
#            256  wake-up (word)     raised by ranks that have sent this rank something, or freed space for it
#            384  state              left (u32) · what it waits for outside collectives: kind, peer, tag (i64)
#            512  two records        the call that round n belongs to, by n % 2
#            768  two tables         bytes brought for each rank and expected from each rank, by n % 2
#
# A rank is done with round n - 1 before it arrives at round n, and every round waits until all have arrived. So a
# rank that lays out round n knows that all are done with round n - 2, which lay in the same half: this is all the flow
# control there is.

MAGIC: Final = 0x6D683130
VERSION: Final = 1
HEADER_WORDS: Final = 4
ABORT_OFFSET: Final = CACHE_LINE
REGIONS: Final = 2 * CACHE_LINE

ARRIVED: Final = 0
DONE: Final = CACHE_LINE
WAKEUP: Final = 2 * CACHE_LINE
STATE_LEFT: Final = 3 * CACHE_LINE
STATE_WAIT: Final = STATE_LEFT + 8
RECORDS: Final = 4 * CACHE_LINE
RECORD_BYTES: Final = CACHE_LINE
TABLES: Final = RECORDS + 2 * RECORD_BYTES

HALF_BYTES: Final = 256 * 1024
"""One staged block of one rank: small enough for what is staged to stay in the cache until it is read."""

assert RECORD_WORDS * 8 <= RECORD_BYTES, "a record does not fit"


class MemoryLayout(NamedTuple):
    """The sizes that depend on the number of ranks."""

    region_bytes: int
    areas: int  # offset of the first rank's area
    num_bytes: int


def layout_of(world: int) -> MemoryLayout:
    region_bytes = round_up(TABLES + 2 * 2 * 8 * world, CACHE_LINE)
    areas = round_up(REGIONS + world * region_bytes, PAGE)
    return MemoryLayout(region_bytes, areas, areas + world * 2 * HALF_BYTES)


def block_items(count: int, item_bytes: int, half_bytes: int = HALF_BYTES) -> int:
    """Items per round of an all-reduce: as few rounds as fit, of about equal size, in whole cache lines."""
    num_bytes = count * item_bytes
    if num_bytes <= half_bytes:
        return max(count, 1)
    rounds = -(-num_bytes // half_bytes)
    return round_up(-(-num_bytes // rounds), CACHE_LINE) // item_bytes


def chunk_bytes(chunks: int, half_bytes: int = HALF_BYTES) -> int:
    """The room in one half for what goes to one rank, where `chunks` ranks get something of their own."""
    return half_bytes // max(chunks, 1) // CACHE_LINE * CACHE_LINE
