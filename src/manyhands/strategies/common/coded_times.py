"""What exchanges take whose bytes a codec makes smaller: by its own sizes, in the form that it travels in.

Encoding and decoding take the time of the machines' `codecs`. What a codec leaves out it keeps until the next step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from manyhands.facts import CodecRate, Machines
from manyhands.strategies.common.collectives.compressed import Compressor, gathers
from manyhands.strategies.common.step_times import all_reduce_s, in_groups_s
from manyhands.wire.codec import codec_named, encodes
from manyhands.wire.names import (
    CODECS,
    RAW,
    auto_error,
    has_feedback,
    has_known_size,
    parse_codec,
    remembers,
    rounds_hops,
)
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
    world, parcel = machines.workers, _parcel(round(num_bytes / 4))
    if world == 1:
        return 0.0
    if rounds_hops(codec):  # what is summed is encoded anew; what is then handed on is not
        coding_s = coding_rate(codec, machines).seconds(num_bytes, 2 * (world - 1) / world * num_bytes)
        return coding_s + all_reduce_s(algorithm, machines, left_by(codec, num_bytes), helpers)
    form = Compressor(codec, feedback=False, seed=0, rank=0, world=world)
    if not form.encodes(parcel):
        return all_reduce_s(algorithm, machines, num_bytes)
    each, keeps = world - 1, num_bytes if has_feedback(codec) else 0.0
    if _gathers(codec, parcel, world):
        coding_s = coding_rate(codec, machines).seconds(num_bytes, keeps + world * num_bytes)
        return coding_s + in_groups_s(machines, world, each * left_by(codec, num_bytes), each)
    # Parts of the owned chunk are decoded, and the whole sum of all chunks; the sum of the own one is encoded.
    own = 1 + 1 / world
    coding_s = coding_rate(codec, machines).seconds(own * num_bytes, own * keeps + 2 * num_bytes)
    return coding_s + 2 * in_groups_s(machines, world, each * left_by(codec, num_bytes / world), each)


def coding_rate(codec: str, machines: Machines) -> CodecRate:
    return machines.codecs.get(codec, CodecRate())


def pushed_and_pulled_s(codec: str, machines: Machines, num_bytes: float, servers: int, each: int) -> float:
    """Coding by a worker that pushes so many gradients and pulls, and by each server for `each` worker of a step."""
    rate, keeps = coding_rate(codec, machines), num_bytes if has_feedback(codec) else 0.0
    answered = num_bytes if carries_values(codec) else 0.0
    served_s = each * rate.seconds(answered, num_bytes) / servers
    return rate.seconds(num_bytes, keeps + answered) + served_s


class CodedMemory(NamedTuple):
    """Bytes of one worker."""

    kept: int  # what the codec left out, and rooms for what is encoded
    working: int  # while a parcel is encoded or decoded


def pushing_memory(codec: str, num_bytes: float, *, feedback: bool) -> int:
    """What a worker keeps that pushes so many bytes of gradients."""
    return 0 if codec == RAW or auto_error(codec) else round(_copies(codec, feedback) * num_bytes)


def coded_memory(
    codec: str, num_bytes: float, largest: float, workers: int, *, feedback: bool
) -> CodedMemory:
    """Of an all-reduce of so many bytes, in parcels of which the largest has so many."""
    if codec == RAW or workers == 1 or auto_error(codec) is not None or rounds_hops(codec):
        return CodedMemory(0, 0)
    first, own = parse_codec(codec)[0].word, _copies(codec, feedback) * num_bytes
    if first == "powersgd":  # what it has sent is subtracted
        return CodedMemory(round(own), round(largest) if own else 0)
    gathered = _gathers(codec, _parcel(round(largest / 4)), workers)
    chunk = largest if gathered else largest / workers
    rooms = (2 if gathered else workers + 2) * _room(codec, chunk)  # for what leaves, and for what comes
    sums = 0.0 if gathered else (feedback and has_feedback(codec)) * num_bytes / workers
    return CodedMemory(round(own + sums + rooms), 0 if _is_sparse(codec) else round(chunk))


def _copies(codec: str, feedback: bool) -> int:
    """How many times the size of gradients it keeps; a momentum is one of them."""
    if remembers(codec):
        return 2
    return int(feedback and has_feedback(codec))


def _room(codec: str, num_bytes: float) -> int:
    """What is reserved, whatever the values."""
    made = codec_named(codec, feedback=False)
    assert made is not None, "raw needs no room"
    return made.size(_parcel(round(num_bytes / 4)))


def _is_sparse(codec: str) -> bool:
    """Whether what is decoded is added in place."""
    return CODECS[parse_codec(codec)[0].word].sparse


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
