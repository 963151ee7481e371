"""All-reduce of what is encoded once or twice, and not at every hop: in two forms, and one of its own for factors.

    gather      every worker sends its encoded bucket to all, who decode and add them up: (P - 1) c n bytes from each
    two-phase   every worker sends each chunk to its owner, who decodes, adds up, encodes the sum and sends it to all:
                2 (P - 1) / P c n bytes, for a second loss; what that leaves out is kept as well (as in 1-bit Adam,
                Tang et al., ICML 2021)
    factors     PowerSGD's are summed like any vector, by the schedule

where c is the share of the n bytes that is left, its mean over a warm-up. Gathering is for c < 2 / P. All add up what
they decoded in the order of ranks, themselves included: so all have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from manyhands.engine.exchange import Traffic
from manyhands.native.segment import CACHE_LINE, round_up
from manyhands.strategies.common.collectives.mailbox import LinkMessage, Mailbox
from manyhands.strategies.common.collectives.schedule import chunk_bounds
from manyhands.wire.codec import BadBytes, ErrorFeedback, ParcelCodec, codec_named, encodes
from manyhands.wire.codecs.powersgd import PowerSgd, sum_factors
from manyhands.wire.parcels import Parcel

_SUMS = 1 << 20  # worker numbers are below this; sums seed their draws with higher ones


def gathers(codec: ParcelCodec, parcel: Parcel, world: int) -> bool:
    """Whether a parcel is sent to all workers, and not through the owners of its chunks."""
    return codec.sums_vote or codec.usual_size(parcel) * world < 2 * parcel.num_bytes


class Compressor:
    """One rank's codecs, for its parts and for the sums that it sends, and the forms in which they travel."""

    def __init__(self, text: str, *, feedback: bool, seed: int, rank: int, world: int) -> None:
        given = codec_named(text, feedback=feedback, seed=seed, worker=rank)
        sums = codec_named(text, feedback=feedback, seed=seed, worker=_SUMS + rank, sums=True)
        assert given is not None, "raw needs none"
        assert sums is not None, "raw needs none"
        self.rank, self.world = rank, world
        self._given, self._sums = given, sums
        self._rooms: dict[str, Tensor] = {}

    def at(self, step: int) -> None:
        self._given.at(step)
        self._sums.at(step)

    def encodes(self, parcel: Parcel) -> bool:
        return encodes(self._given, parcel)

    def memory(self) -> dict[str, Tensor]:
        codecs = {"given": self._given, "sums": self._sums}
        return {
            f"{key}:{name}": kept for key, codec in codecs.items() for name, kept in codec.memory().items()
        }

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        for prefix, codec in (("given:", self._given), ("sums:", self._sums)):
            codec.remember(
                {name.removeprefix(prefix): kept for name, kept in memory.items() if name.startswith(prefix)}
            )

    def all_reduce(
        self,
        vector: Tensor,
        parcel: Parcel,
        mailbox: Mailbox,
        enter: Callable[[int], None],
        add_up: Callable[[Tensor], object],
    ) -> None:
        """Collective: every rank's `vector` becomes the sum of what is decoded.

        `enter` says which round begins; `add_up` sums a small vector over ranks as it is.
        """
        feedback = self._given if isinstance(self._given, ErrorFeedback) else None
        codec = feedback.inner if feedback is not None else self._given
        if isinstance(codec, PowerSgd):
            sum_factors(codec, feedback, parcel, vector, add_up)
            return
        world = range(self.world)
        # The other ranks, starting with the next one, so that not all send to the same rank at once.
        peers = [(self.rank + distance) % self.world for distance in world[1:]]
        gathered = gathers(self._given, parcel, self.world)
        if gathered:
            chunks, places = [parcel] * self.world, [vector] * self.world
        else:
            bounds = [chunk_bounds(parcel.count, self.world, rank) for rank in world]
            chunks = [parcel.part(*bound) for bound in bounds]
            places = [vector[begin:end] for begin, end in bounds]
        owned, total = chunks[self.rank], places[self.rank]
        enter(1)
        if gathered:
            encoded = [self._put(self._given, parcel, vector, "out")] * self.world
        else:
            encoded = [self._put(self._given, chunks[rank], places[rank], f"out{rank}") for rank in world]
        refused = mailbox.post([(peer, encoded[peer]) for peer in peers])
        total.zero_()
        for rank in world:
            refused = self._add(self._given, owned, encoded[rank], total, rank, mailbox, refused)
        mailbox.flush(refused, peers)
        self._given.finalize(owned, total)
        if gathered:
            return
        enter(2)
        mine = self._put(self._sums, owned, total, "out")
        refused = mailbox.post([(peer, mine) for peer in peers])
        for rank in world:
            places[rank].zero_()
            refused = self._add(self._sums, chunks[rank], mine, places[rank], rank, mailbox, refused)
        mailbox.flush(refused, peers)

    def traffic(self, parcel: Parcel, of_sum: Callable[[int, torch.dtype], Traffic]) -> Traffic:
        """What all ranks together send for a parcel; `of_sum` says what a vector of so many items takes as it is."""
        codec = self._given.inner if isinstance(self._given, ErrorFeedback) else self._given
        if isinstance(codec, PowerSgd):
            left, right = codec.factor_items(parcel)
            dtype = codec.factor_type(parcel)
            return of_sum(left, dtype) + of_sum(right, dtype)
        others = self.world - 1
        if gathers(self._given, parcel, self.world):
            messages = self.world * others
            return Traffic(messages_sent=messages, bytes_sent=messages * self._given.size(parcel))
        total = Traffic()
        for rank in range(self.world):
            chunk = parcel.part(*chunk_bounds(parcel.count, self.world, rank))
            for one in (self._given, self._sums):  # its parts go to the owner, and the sum to all
                size = one.size(chunk) if encodes(one, chunk) else chunk.num_bytes
                total += Traffic(messages_sent=others, bytes_sent=others * size)
        return total

    def _put(self, codec: ParcelCodec, parcel: Parcel, values: Tensor, name: str) -> Tensor:
        if not encodes(codec, parcel):
            return values.clone().view(torch.uint8)
        room = self._room(name, codec.size(parcel))
        return room[: codec.encode(parcel, values, room)]

    def _add(
        self,
        codec: ParcelCodec,
        parcel: Parcel,
        came: Tensor,
        into: Tensor,
        rank: int,
        mailbox: Mailbox,
        refused: list[LinkMessage],
    ) -> list[LinkMessage]:
        """Add what `rank` sends, or `came` where that is this rank; return what is left to post."""
        is_encoded = encodes(codec, parcel)
        if rank != self.rank:
            room = self._room("in", codec.size(parcel) if is_encoded else parcel.num_bytes)
            refused, num_bytes = mailbox.receive(rank, room, refused, or_less=True)
            came = room[:num_bytes]
        try:
            if is_encoded:
                codec.add(parcel, came, into)
            elif came.numel() == parcel.num_bytes:
                into.add_(came.view(parcel.dtype))
            else:
                raise BadBytes(f"received {came.numel()} bytes; expected {parcel.num_bytes}")
        except BadBytes as error:
            mailbox.refuse(rank, str(error))
        return refused

    def _room(self, name: str, num_bytes: int) -> Tensor:
        room = self._rooms.get(name)
        if room is None or room.numel() < num_bytes:
            room = self._rooms[name] = torch.empty(round_up(num_bytes, CACHE_LINE), dtype=torch.uint8)
        return room[:num_bytes]
