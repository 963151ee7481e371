"""How the items of a schedule's messages are encoded.

What is sent is also rounded in place at the sender, so every rank that adds or forwards a number has the same one.
What a rank computed last and did not send is rounded at the end. Sums are computed in the vector's own type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from manyhands.native.segment import CACHE_LINE, round_up
from manyhands.strategies.common.collectives.mailbox import LinkMessage, Mailbox
from manyhands.strategies.common.collectives.vector_plan import Departure, Landing
from manyhands.wire.codec import ParcelCodec, round_trip
from manyhands.wire.parcels import Parcel

__all__ = ["Encoded"]


class Encoded:
    """Items of one vector, encoded into separate memory before they are sent, and decoded into place.

    `room` allocates memory by name.
    """

    def __init__(
        self,
        codec: ParcelCodec,
        parcel: Parcel,
        vector: torch.Tensor,
        room: Callable[[str, int], torch.Tensor],
    ) -> None:
        self._codec = codec
        self._parcel = parcel
        self._vector = vector
        self._room = room

    def letters(self, departures: Sequence[Departure]) -> list[LinkMessage]:
        """Return the messages to post, each span encoded once for all receivers; constant until all are sent."""
        spans = list(dict.fromkeys((one.begin, one.end) for one in departures))
        parcels = [self._parcel.part(*span) for span in spans]
        sizes = [round_up(self._codec.size(parcel), CACHE_LINE) for parcel in parcels]
        room, at, encoded = self._room("out", sum(sizes)), 0, {}
        for span, parcel, size in zip(spans, parcels, sizes, strict=True):
            values = self._vector[span[0] : span[1]]
            encoded[span] = round_trip(self._codec, parcel, values, room[at : at + size])
            at += size
        return [(one.to, encoded[one.begin, one.end]) for one in departures]

    def receive(
        self, mailbox: Mailbox, landing: Landing, space: torch.Tensor, refused: list[LinkMessage]
    ) -> list[LinkMessage]:
        """Fill `space` with the next message, posting refused ones meanwhile; return what is left to post."""
        parcel = self._parcel.part(landing.begin, landing.end)
        size = self._codec.size(parcel)
        room = self._room("in", size)[:size]
        refused, num_bytes = mailbox.receive(landing.source, room, refused, or_less=True)
        self._codec.decode(parcel, room[:num_bytes], space)
        return refused

    def settle(self, spans: Sequence[tuple[int, int]]) -> None:
        """Round these items, computed here, as if they were sent, so that all ranks hold the same values."""
        for begin, end in spans:
            parcel = self._parcel.part(begin, end)
            room = self._room("out", self._codec.size(parcel))
            round_trip(self._codec, parcel, self._vector[begin:end], room)
