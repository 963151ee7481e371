"""What the ranks of an all-reduce send, found without running it: from the tables and the sizes that are executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest

from manyhands.engine.exchange import Traffic
from manyhands.native.group.shared_group import slice_of
from manyhands.strategies.common.collectives.compressed import Compressor
from manyhands.strategies.common.collectives.schedule import Algorithm, span_bounds
from manyhands.wire.codec import ParcelCodec, encodes
from manyhands.wire.parcels import Parcel


def traffic_in_memory(
    parcels: Sequence[Parcel], rank: int, world: int, owned: Sequence[Sequence[range]] = ()
) -> list[Traffic]:
    """By parcel: what its sum takes of one rank of a `SharedCollective`."""
    sent = []
    for parcel, ranges in zip_longest(parcels, owned):
        size, messages = parcel.dtype.itemsize, world - 1
        if ranges is not None:
            mine = ranges[rank]
        else:
            messages, mine = 2 * messages, slice_of(parcel.count, size, rank, world)
        sent.append(Traffic(messages_sent=messages, bytes_sent=messages * len(mine) * size))
    return sent


def sent_in_memory(parcels: Sequence[Parcel], world: int, owned: Sequence[Sequence[range]] = ()) -> Traffic:
    """What all ranks together send of these parcels through shared memory."""
    ranks = (traffic_in_memory(parcels, rank, world, owned) for rank in range(world))
    return sum((one for sent in ranks for one in sent), Traffic())


def sent_over_links(
    algorithm: Algorithm,
    world: int,
    parcels: Sequence[Parcel],
    carries: ParcelCodec | Compressor | None = None,
) -> tuple[Traffic, Traffic]:
    """What all ranks together send of these parcels over links, and what the helpers among `world` ranks send.

    `carries` is what encodes for the executor.
    """
    totals = [Traffic(), Traffic()]
    for parcel in parcels:
        if isinstance(carries, Compressor) and not parcel.exact and carries.encodes(parcel):
            totals[0] += carries.traffic(
                parcel, lambda count, dtype: _plainly(algorithm, world, Parcel.whole(0, count, dtype))
            )
            continue
        codec = carries if isinstance(carries, ParcelCodec) and encodes(carries, parcel) else None
        for role, spans in enumerate(_sent_spans(algorithm, world)):
            totals[role] += _sent(algorithm, world, spans, parcel, codec)
    return totals[0], totals[1]


def _plainly(algorithm: Algorithm, world: int, parcel: Parcel) -> Traffic:
    return sent_over_links(algorithm, world, [parcel])[0]


def _sent(
    algorithm: Algorithm, world: int, spans: Counter[range], parcel: Parcel, codec: ParcelCodec | None
) -> Traffic:
    chunks, num_bytes = algorithm.chunks(world), 0
    for span, times in spans.items():
        begin, end = span_bounds(parcel.count, chunks, span)
        size = (end - begin) * parcel.dtype.itemsize if codec is None else codec.size(parcel.part(begin, end))
        num_bytes += times * size
    return Traffic(messages_sent=spans.total(), bytes_sent=num_bytes)


@lru_cache(maxsize=64)
def _sent_spans(algorithm: Algorithm, world: int) -> tuple[Counter[range], Counter[range]]:
    """How often each run of chunks is sent by ranks with a vector of their own, and by helpers."""
    spans: tuple[Counter[range], Counter[range]] = (Counter(), Counter())
    if algorithm.rotates:  # a thousand tables take half a minute
        times = sum(len(step.sends) for step in algorithm.table(0, world))
        return Counter({range(chunk, chunk + 1): times for chunk in range(world)}), spans[1]
    for rank in range(world):
        table = algorithm.table(rank, world)
        spans[not algorithm.gives(rank, world)].update(send.chunks for step in table for send in step.sends)
    return spans
