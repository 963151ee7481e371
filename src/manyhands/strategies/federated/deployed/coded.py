"""The wire form of a device's update: the model's tensors as they are, or one flat vector compressed by a codec.

With `codec=` the body is a safetensors file with one tensor of bytes, `update`: the encoded vector. The sender
chooses its length, up to the most that the codec can need; the decoded size is always the model's. The residual of a
biased codec stays on the device and is added to its next update.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from manyhands.errors import DataError
from manyhands.native.dtypes import NAMED
from manyhands.strategies.federated.deployed.protocol import MessageRejected, TensorForm
from manyhands.strategies.federated.strategy import Federated
from manyhands.wire.codec import BadBytes, ParcelCodec, codec_named, encodes
from manyhands.wire.names import has_feedback
from manyhands.wire.parcels import Parcel

__all__ = ["UpdateForm"]

_NAME: Final = "update"
_LENGTH: Final = struct.Struct("<Q")


class UpdateForm:
    """How updates of a model are encoded in a run; both ends build it from the plan."""

    def __init__(self, form: TensorForm, strategy: Federated, seed: int) -> None:
        self._form, self._text, self._seed = form, strategy.codec, seed
        wide = any(NAMED[dtype] == torch.float64 for _, dtype, _ in form.rows)
        count = sum(form.items)
        self._parcel = Parcel.whole(0, count, torch.float64 if wide else torch.float32)
        codec = self._codec(0)
        self.is_coded: Final = encodes(codec, self._parcel)
        """Whether a codec makes updates smaller; for a few numbers some do not."""
        self.keeps: Final = (
            self.is_coded and strategy.feedback and has_feedback(strategy.codec)  # else nothing is left out
        )
        """Whether a device keeps what was left out of its updates."""
        self._most = codec.size(self._parcel) if codec is not None and self.is_coded else 0

    def _codec(self, client: int) -> ParcelCodec | None:
        return codec_named(self._text, feedback=False, seed=self._seed, worker=client)

    @property
    def most_bytes(self) -> int:
        """The most bytes that a body may have."""
        return _coded_form(self._most).most_bytes if self.is_coded else self._form.most_bytes

    def encode(
        self,
        change: Sequence[Tensor],
        about: Mapping[str, str],
        left: Tensor | None,
        *,
        client: int,
        number: int,
    ) -> tuple[bytes, Tensor | None]:
        """A body, from the model after `number` rounds; and what is left out of it, of this update and those before."""
        if not self.is_coded:
            return self._form.encode(change, about), None
        codec = self._codec(client)
        assert codec is not None, "raw has none"
        codec.at(number)
        row = torch.cat([one.detach().flatten().to("cpu", self._parcel.dtype) for one in change])
        if left is not None:
            row += left
        room = torch.empty(self._most, dtype=torch.uint8)
        encoded = room[: codec.encode(self._parcel, row, room)]
        body = _coded_form(len(encoded)).encode([encoded], about)
        if not self.keeps:
            return body, None
        read = torch.empty_like(row)
        codec.decode(self._parcel, encoded, read)
        return body, row - read

    def decode(self, body: bytes, *, client: int) -> tuple[list[Tensor], dict[str, Any]]:
        """The tensors of a client's update, and what the header says besides; MessageRejected with what is wrong."""
        if not self.is_coded:
            return self._form.decode(body)
        length = _LENGTH.unpack_from(body)[0] if len(body) >= _LENGTH.size else 0
        [encoded], about = _coded_form(min(self._most, max(0, len(body) - _LENGTH.size - length))).decode(
            body
        )
        codec = self._codec(client)
        assert codec is not None, "raw has none"
        row = torch.empty(self._parcel.count, dtype=self._parcel.dtype)
        try:
            codec.decode(self._parcel, encoded, row)
        except BadBytes as error:
            raise MessageRejected(422, f"the update is no {self._text}: {error}") from error
        pieces = torch.split(row, list(self._form.items))
        rows = zip(pieces, self._form.rows, strict=True)
        return [piece.view(shape).to(NAMED[dtype]) for piece, (_, dtype, shape) in rows], about

    def require_left(self, left: Tensor, where: str) -> Tensor:
        """What was kept; DataError where it is not of this run's updates."""
        if left.shape != (self._parcel.count,) or left.dtype != self._parcel.dtype:
            raise DataError(f"{where}: is not of this model's updates; remove it")
        if not bool(left.isfinite().all()):
            raise DataError(f"{where}: has a number that is not finite; remove it")
        return left


def _coded_form(num_bytes: int) -> TensorForm:
    return TensorForm(((_NAME, "uint8", (num_bytes,)),))
