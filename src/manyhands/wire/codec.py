"""How parcels are made smaller on their way: a codec is one file with three methods, and a setting of a strategy.

Where parcels travel, `codec=bf16` rounds them to half the bytes. What is sent is replaced at the sender by what the
receivers read, so that all go on with the same numbers; sums are taken in the parcel's own type. Decoding and encoding
again must give the same bytes: so what is passed on arrives everywhere the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import ClassVar, cast

from torch import Tensor

from manyhands.wire.names import CODECS, RAW
from manyhands.wire.parcels import Parcel

__all__ = ["ParcelCodec", "codec_named", "encodes", "round_trip"]


class ParcelCodec(ABC):
    """One worker's end: what it keeps for a parcel, if anything, is its own; `number` stands for it in events."""

    carries_values: ClassVar[bool] = True
    """Whether parameters may travel in it, and not only gradients and other changes, parts of which may come later."""

    @abstractmethod
    def size(self, parcel: Parcel) -> int:
        """The most bytes that `parcel` takes encoded, whatever its values; receivers keep that much room."""

    @abstractmethod
    def encode(self, parcel: Parcel, values: Tensor, into: Tensor) -> int:
        """Write the encoded `values`, flat and of the parcel's type, to the first bytes of `into`; how many those are.

        `into` is of bytes, begins at a multiple of 64 and has room for `size`.
        """

    @abstractmethod
    def decode(self, parcel: Parcel, encoded: Tensor, into: Tensor) -> None:
        """Write to `into`, flat and of the parcel's type, what the bytes of `encoded` stand for."""


def codec_named(word: str) -> ParcelCodec | None:
    """A new codec of that name, for one worker; None for parcels that travel as they are."""
    if word == RAW:
        return None
    module, _, name = CODECS[word].home.partition(":")
    return cast(ParcelCodec, getattr(import_module(f"manyhands.wire.codecs.{module}"), name)())


def encodes(codec: ParcelCodec | None, parcel: Parcel) -> bool:
    """Whether a parcel travels encoded: if it need not be exact, and is smaller then."""
    return codec is not None and not parcel.exact and codec.size(parcel) < parcel.num_bytes


def round_trip(codec: ParcelCodec, parcel: Parcel, values: Tensor, room: Tensor) -> Tensor:
    """Encode `values` into `room`, and make them what receivers will read; the bytes to send."""
    encoded = room[: codec.encode(parcel, values, room)]
    codec.decode(parcel, encoded, values)
    return encoded
