"""Where everything lies in the shared memory of one process group, and how a call is cut into rounds. Pure.

    line 0                 magic, version, world size, number of the round before the first (u32)
    line 1                 the abort word (u32): 0 while all is well, else who stopped the group and why
    a region per rank      lines with one writer each, see below
    an area per rank       two halves: round n is staged in half n % 2, so that a fast rank can begin round n + 1
                           while a slow one still reads round n

    region   0  arrived (word)     the last round whose data this rank has laid out
           128  done (word)        the last round of which this rank has read all it needs
           256  wake-up (word)     raised by ranks that have sent this rank something, or freed space for it
           384  state              left (u32) · what it waits for outside collectives: kind, peer, tag (i64)
           512  two records        the call that round n belongs to, by n % 2
           768  two tables         bytes brought for each rank and expected from each rank, by n % 2

A rank is done with round n - 1 before it arrives at round n, and every round waits until all have arrived. So a
rank that lays out round n knows that all are done with round n - 2, which lay in the same half: this is all the flow
control there is.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from manyhands.interop.c10d.collective_calls import RECORD_WORDS
from manyhands.native.segment import CACHE_LINE, PAGE, round_up

__all__ = [
    "ABORT_OFFSET",
    "ARRIVED",
    "DONE",
    "HALF_BYTES",
    "HEADER_WORDS",
    "MAGIC",
    "RECORDS",
    "RECORD_BYTES",
    "REGIONS",
    "STATE_LEFT",
    "STATE_WAIT",
    "TABLES",
    "VERSION",
    "WAKEUP",
    "MemoryLayout",
    "block_items",
    "lane_bytes",
    "layout_of",
]

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

if RECORD_WORDS * 8 > RECORD_BYTES:
    raise ImportError(
        f"c10d/layout.py: a record of {RECORD_WORDS} words does not fit into {RECORD_BYTES} bytes"
    )


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


def lane_bytes(lanes: int, half_bytes: int = HALF_BYTES) -> int:
    """The room in one half for what goes to one rank, where `lanes` ranks get something of their own."""
    return half_bytes // max(lanes, 1) // CACHE_LINE * CACHE_LINE
