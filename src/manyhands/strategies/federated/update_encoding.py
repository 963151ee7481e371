"""Updates compressed on their way to the server, by the codecs of `wire/`.

A client's update is one parcel of the model's tensors, and one of what the algorithm adds to them; single numbers are
sent as they are. The residual of a biased codec stays on the client and is added to what it sends the next time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from manyhands.strategies.federated.client_updates import ClientUpdate
from manyhands.strategies.federated.states import ClientStates
from manyhands.wire.codec import ParcelCodec, codec_named, encodes, round_trip
from manyhands.wire.names import RAW, has_feedback
from manyhands.wire.parcels import Parcel

__all__ = ["UpdateCoding"]


class UpdateCoding:
    """How updates are encoded on their way to the server; `raw` leaves them as they are."""

    def __init__(self, text: str = RAW, *, feedback: bool = True, seed: int = 0) -> None:
        self._text = text
        self._feedback = feedback and text != RAW and has_feedback(text)
        self._seed = seed
        self.states: ClientStates = {}
        """What was left out of each client's updates so far, a row for each parcel."""
        self._before: dict[
            int, list[Tensor] | None
        ] = {}  # of the clients whose updates were coded in this round

    def kept(self, like: Sequence[Tensor], weights: int) -> Sequence[Tensor]:
        """What is like that, for updates of tensors like these, of which the first so many are the model's."""
        if not self._feedback:
            return ()
        return [
            torch.zeros(sum(like[at].numel() for at in group), dtype=_dtype(like, group))
            for group in _groups(like, weights)
        ]

    def carried(self, update: ClientUpdate, number: int, weights: int) -> ClientUpdate:
        """The update as the server decodes it in round `number`, and how many bytes it took."""
        if self._text == RAW:
            return update
        codec = codec_named(self._text, feedback=self._feedback, seed=self._seed, worker=update.client)
        assert codec is not None, "raw has none"
        codec.at(number)
        groups = _groups(update.change, weights)
        parcels = [
            Parcel.whole(at, sum(update.change[one].numel() for one in group), _dtype(update.change, group))
            for at, group in enumerate(groups)
        ]
        names = [f"left/{parcel.key}" for parcel in parcels]
        if self._feedback and update.client in self.states:
            codec.remember(dict(zip(names, self.states[update.client], strict=True)))
        change = list(update.change)
        num_bytes = update.num_bytes
        for parcel, group in zip(parcels, groups, strict=True):
            if encodes(codec, parcel):
                num_bytes -= sum(change[at].numel() * change[at].element_size() for at in group)
                num_bytes += _code(codec, parcel, group, change)
        if self._feedback:
            memory = codec.memory()
            self._before[update.client] = self.states.get(update.client)
            self.states[update.client] = [
                memory[name].clone() if name in memory else torch.zeros(parcel.count, dtype=parcel.dtype)
                for name, parcel in zip(names, parcels, strict=True)
            ]
        return replace(update, change=change, encoded_bytes=num_bytes)

    def begin_round(self) -> None:
        """What was coded before stands."""
        self._before = {}

    def refused(self, client: int) -> None:
        """The last encoded update of this client was not counted: restore the residual it had before."""
        if not self._feedback:
            return
        before = self._before.pop(client, None)
        if before is None:
            self.states.pop(client, None)
        else:
            self.states[client] = before


def _groups(like: Sequence[Tensor], weights: int) -> list[list[int]]:
    added = [at for at in range(weights, len(like)) if like[at].numel() > 1]
    return [list(range(weights)), *([added] if added else [])]


def _dtype(like: Sequence[Tensor], group: Sequence[int]) -> torch.dtype:
    wide = any(like[at].dtype == torch.float64 for at in group)
    return torch.float64 if wide else torch.float32


def _code(codec: ParcelCodec, parcel: Parcel, group: Sequence[int], change: list[Tensor]) -> int:
    flat = torch.cat([change[at].detach().flatten().to("cpu", parcel.dtype) for at in group])
    encoded = round_trip(codec, parcel, flat, torch.empty(codec.size(parcel), dtype=torch.uint8))
    pieces = torch.split(flat, [change[at].numel() for at in group])
    for at, piece in zip(group, pieces, strict=True):
        change[at] = piece.view(change[at].shape).to(change[at].device, change[at].dtype)
    return len(encoded)
