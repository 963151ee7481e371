"""The time of exchanges whose bytes a codec makes smaller: by the codec's own sizes, in the form that it travels in.

The time of encoding and decoding is not modelled.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from manyhands.facts import Machines
from manyhands.strategies.common.collectives.compressed import Compressor, gathers
from manyhands.strategies.common.step_times import all_reduce_s, in_groups_s
from manyhands.wire.codec import codec_named, encodes
from manyhands.wire.names import RAW, auto_error, has_known_size, parse_codec, rounds_hops
from manyhands.wire.parcels import Parcel


def has_known_time(codec: str) -> bool:
    """Whether sizes are known beforehand, of gradients of which only the bytes are known."""
    known = auto_error(codec) is None and has_known_size(codec)
    return codec == RAW or (known and parse_codec(codec)[0].word != "powersgd")  # factors are of matrices


def left_by(codec: str, num_bytes: float) -> float:
    """How many bytes a vector of so many takes encoded."""
    return float(_encoded(codec, round(num_bytes / 4)))


def carries_values(codec: str) -> bool:
    """Whether servers answer in it as well."""
    made = codec_named(codec)
    return made is not None and made.carries_values


def coded_all_reduce_s(
    codec: str, algorithm: str, machines: Machines, num_bytes: float, helpers: int = 0
) -> float:
    """Time of one all-reduce on the links: hop by hop by the algorithm, or gathered, or by the owners of chunks."""
    if rounds_hops(codec):
        return all_reduce_s(algorithm, machines, left_by(codec, num_bytes), helpers)
    world, parcel = machines.workers, _parcel(round(num_bytes / 4))
    if world == 1:
        return 0.0
    form = Compressor(codec, feedback=False, seed=0, rank=0, world=world)
    if not form.encodes(parcel):
        return all_reduce_s(algorithm, machines, num_bytes)
    each, rounds = world - 1, 1 if _gathers(codec, parcel, world) else 2
    sent = left_by(codec, num_bytes) if rounds == 1 else left_by(codec, num_bytes / world)
    return rounds * in_groups_s(machines, world, each * sent, each)


def _parcel(items: int) -> Parcel:
    return Parcel.whole(0, max(1, items), torch.float32)


@lru_cache(maxsize=1024)
def _encoded(codec: str, items: int) -> int:
    made, parcel = codec_named(codec, feedback=False), _parcel(items)
    return made.size(parcel) if made is not None and encodes(made, parcel) else parcel.num_bytes


@lru_cache(maxsize=1024)
def _gathers(codec: str, parcel: Parcel, world: int) -> bool:
    made = codec_named(codec, feedback=False)
    assert made is not None, "raw needs no form"
    return gathers(made, parcel, world)
