"""How the items of a schedule's messages travel: as they lie in the vector, or encoded.

Encoded, what leaves is rounded at the sender, too, in place: so every rank that adds or passes on a number has the same
one. What a rank computed last by itself, and nobody had from it, is rounded at the end. Sums are taken in the vector's
own type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from manyhands.allreduce.mailbox import Letter, Mailbox
from manyhands.allreduce.plan import Departure, Landing
from manyhands.memory.segment import CACHE_LINE, round_up
from manyhands.wire.codec import ParcelCodec, round_trip
from manyhands.wire.parcels import Parcel

__all__ = ["AsItLies", "Carrying", "Encoded"]


class Carrying(ABC):
    """The way of one vector's items to other ranks and back."""

    @abstractmethod
    def letters(self, departures: Sequence[Departure]) -> list[Letter]:
        """What to post; it must not change until all of it has left."""

    @abstractmethod
    def receive(
        self, mailbox: Mailbox, landing: Landing, space: torch.Tensor, refused: list[Letter]
    ) -> list[Letter]:
        """Fill `space` with what comes, posting again meanwhile what was refused; return what is left of that."""

    @abstractmethod
    def settle(self, spans: Sequence[tuple[int, int]]) -> None:
        """Make these items, computed here, what other ranks have in their place."""


class AsItLies(Carrying):
    """Nothing is copied on the way out."""

    def __init__(self, vector: torch.Tensor) -> None:
        self._vector = vector

    def letters(self, departures: Sequence[Departure]) -> list[Letter]:
        """Views of the vector."""
        return [(one.to, self._vector[one.begin : one.end]) for one in departures]

    def receive(
        self, mailbox: Mailbox, landing: Landing, space: torch.Tensor, refused: list[Letter]
    ) -> list[Letter]:
        """Straight to its place."""
        return mailbox.receive(landing.source, space, refused)

    def settle(self, spans: Sequence[tuple[int, int]]) -> None:
        """All ranks compute the same."""


class Encoded(Carrying):
    """Encoded into a room of its own before it leaves, and decoded to its place; `room` gives memory by name."""

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

    def letters(self, departures: Sequence[Departure]) -> list[Letter]:
        """Each span once, whoever it goes to."""
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
        self, mailbox: Mailbox, landing: Landing, space: torch.Tensor, refused: list[Letter]
    ) -> list[Letter]:
        """Through a room of as many bytes as it can take."""
        parcel = self._parcel.part(landing.begin, landing.end)
        size = self._codec.size(parcel)
        room = self._room("in", size)[:size]
        refused, num_bytes = mailbox.receive_at_most(landing.source, room, refused)
        self._codec.decode(parcel, room[:num_bytes], space)
        return refused

    def settle(self, spans: Sequence[tuple[int, int]]) -> None:
        """Round it, as if it were sent."""
        for begin, end in spans:
            parcel = self._parcel.part(begin, end)
            room = self._room("out", self._codec.size(parcel))
            round_trip(self._codec, parcel, self._vector[begin:end], room)
