"""How fast a worker here encodes and decodes by a codec: measured within milliseconds on random numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import cache

import torch

from manyhands.facts import CodecRate
from manyhands.wire.codec import codec_named, encodes
from manyhands.wire.names import RAW, auto_error
from manyhands.wire.parcels import Parcel

_ITEMS = 1 << 18  # a bucket of a usual size
_ROUNDS = 5


def codec_rates(codecs: Iterable[str]) -> dict[str, CodecRate]:
    """By the codec's text; of those that have no fixed form, or encode nothing here, none."""
    rates = {codec: _measured(codec) for codec in dict.fromkeys(codecs)}
    return {codec: rate for codec, rate in rates.items() if rate is not None}


@cache
def _measured(codec: str) -> CodecRate | None:
    if codec == RAW or auto_error(codec) is not None:
        return None
    made, parcel = codec_named(codec, feedback=False), Parcel.whole(0, _ITEMS, torch.float32)
    if made is None or not encodes(made, parcel):
        return None
    values = torch.randn(_ITEMS, generator=torch.Generator().manual_seed(0))
    room, total = torch.empty(made.size(parcel), dtype=torch.uint8), torch.zeros(_ITEMS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a worker's others compute
    try:
        size = made.encode(parcel, values, room)
        made.add(parcel, room[:size], total)  # which loads what is compiled
        return CodecRate(
            encoded_per_s=parcel.num_bytes / _shortest_s(lambda: made.encode(parcel, values, room)),
            decoded_per_s=parcel.num_bytes / _shortest_s(lambda: made.add(parcel, room[:size], total)),
        )
    finally:
        torch.set_num_threads(threads)


def _shortest_s(work: Callable[[], object]) -> float:
    took_s = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        took_s.append(time.perf_counter() - began)
    return min(took_s)
