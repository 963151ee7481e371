"""How a shard's range travels over TCP: as it lies, or each run of one type encoded as a parcel.

    bytes of each run (u64 each, padded to a line) · run · run …        every run padded to a line

Gradients are rounded where they were made before anybody has them, so that worker, server and replay use the same
numbers. Parameters are rounded on their way to a worker only: the server keeps them unrounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.native.segment import round_up
from manyhands.strategies.ps.shard_layout import FlatLayout, ShardRange
from manyhands.transport.messages import ProtocolError
from manyhands.wire.codec import BadBytes, codec_named, encodes
from manyhands.wire.flat_layout import LINE_BYTES
from manyhands.wire.parcels import Parcel, gaps_between

_LENGTH_BYTES = 8


class RangeCoding:
    """Encodes and decodes all ranges of a layout with one codec; the residuals belong to this process."""

    def __init__(self, layout: FlatLayout, word: str, *, feedback: bool = True, seed: int = 0) -> None:
        self.codec = codec_named(word, feedback=feedback)
        self.codes_gradients = self.codec is not None
        self.codes_values = self.codec is not None and self.codec.carries_values
        self._seed = seed
        self._parcels: list[list[Parcel]] = []
        for shard in range(layout.shards if self.codec is not None else 0):
            memory = torch.empty(layout.range_bytes(shard), dtype=torch.uint8)
            given = layout.range_in(memory, shard)
            self._parcels.append([])
            for run in given.runs:
                first, offset = run.data_ptr(), run.data_ptr() - memory.data_ptr()
                spans = [
                    (begin, begin + piece.numel())
                    for piece in given.pieces
                    if 0 <= (begin := (piece.data_ptr() - first) // run.itemsize) < run.numel()
                ]
                gaps = gaps_between(spans, run.numel())
                self._parcels[-1].append(
                    Parcel(number=shard, begin=offset, end=offset + run.nbytes, dtype=run.dtype, gaps=gaps)
                )

    def begin(self, batch: int, part: int) -> None:
        """Seed the codec for this part of this batch, so that its randomness does not depend on the process."""
        if self.codec is not None:
            self.codec.from_worker(self._seed, part)
            self.codec.at(batch)

    def least_bytes(self, shard: int) -> int:
        return round_up(_LENGTH_BYTES * len(self._parcels[shard]), LINE_BYTES)

    def most_bytes(self, shard: int) -> int:
        return self.least_bytes(shard) + sum(map(self._room_bytes, self._parcels[shard]))

    def encode(self, shard: int, given: ShardRange) -> Tensor:
        assert self.codec is not None, "there is something to encode by"
        encoded = torch.empty(self.most_bytes(shard), dtype=torch.uint8)
        at, lengths = self.least_bytes(shard), []
        for parcel, run in zip(self._parcels[shard], given.runs, strict=True):
            room = encoded[at : at + self._room_bytes(parcel)]
            if encodes(self.codec, parcel):
                lengths.append(self.codec.encode(parcel, run, room))
            else:
                room[: run.nbytes].copy_(run.view(torch.uint8))
                lengths.append(run.nbytes)
            at += round_up(lengths[-1], LINE_BYTES)
        head = encoded[: self.least_bytes(shard)].view(torch.int64)
        head.zero_()
        head[: len(lengths)] = torch.tensor(lengths, dtype=torch.int64)
        return encoded[:at]

    def length(self, shard: int, payload: Tensor) -> int:
        """The length of the encoded range at the start of a payload; ProtocolError if it is invalid."""
        at, lengths = self._lengths(shard, payload)
        end = at + sum(round_up(length, LINE_BYTES) for length in lengths)
        fits = all(
            0 <= length <= self._room_bytes(parcel)
            for parcel, length in zip(self._parcels[shard], lengths, strict=True)
        )
        if not fits or end > payload.numel():
            raise ProtocolError(
                "payload_bytes",
                f"parcels of {lengths} bytes for shard {shard} do not fit its payload of {payload.numel()} bytes",
            )
        return end

    def decode(self, shard: int, payload: Tensor, into: ShardRange) -> None:
        """Fill a range from the start of a payload; ProtocolError if it is invalid."""
        assert self.codec is not None, "there is something to decode by"
        self.length(shard, payload)
        at, lengths = self._lengths(shard, payload)
        for parcel, run, length in zip(self._parcels[shard], into.runs, lengths, strict=True):
            encoded = payload[at : at + length]
            try:
                if encodes(self.codec, parcel):
                    self.codec.decode(parcel, encoded, run)
                else:
                    run.view(torch.uint8).copy_(encoded)
            except (RuntimeError, BadBytes) as error:  # torch's word, and ours, for what is no such values
                raise ProtocolError("payload_bytes", f"a parcel of shard {shard}: {error}") from error
            at += round_up(length, LINE_BYTES)

    def round(self, shard: int, given: ShardRange) -> Tensor:
        """Encode a range, and replace it with what receivers will decode; returns the bytes to send."""
        encoded = self.encode(shard, given)
        self.decode(shard, encoded, given)
        return encoded

    def _lengths(self, shard: int, payload: Tensor) -> tuple[int, list[int]]:
        """Where the first run begins, and the length of each."""
        head = self.least_bytes(shard)
        if payload.numel() < head:
            raise ProtocolError(
                "payload_bytes", f"{payload.numel()} bytes are too few: the lengths alone take {head}"
            )
        return head, payload[:head].view(torch.int64)[: len(self._parcels[shard])].tolist()

    def _room_bytes(self, parcel: Parcel) -> int:
        assert self.codec is not None, "there is something to encode by"
        size = self.codec.size(parcel) if encodes(self.codec, parcel) else parcel.num_bytes
        return round_up(size, LINE_BYTES)


def as_tensor(payload: memoryview) -> Tensor:
    """The bytes of a payload, which begin at a multiple of 16 as all fresh memory does."""
    array: Any = np.frombuffer(payload, np.uint8)
    if not array.flags.writeable or array.ctypes.data % _LENGTH_BYTES:
        array = array.copy()
    return torch.from_numpy(array)
