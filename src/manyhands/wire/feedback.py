"""Error feedback: what a codec leaves out is kept, and added to what is sent next (Seide et al., Interspeech 2014).

All that was ever sent, and what is still kept, add up to all that was ever given: Σ sent + memory = Σ given. So what is
left out is late and not lost, and a biased codec converges like none (Karimireddy et al., ICML 2019).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from manyhands.wire.codec import ParcelCodec
from manyhands.wire.parcels import Parcel

__all__ = ["ErrorFeedback"]


class ErrorFeedback(ParcelCodec):
    """Wraps any codec and keeps its residual of each parcel, in the parcel's type.

    Values that are not finite are sent and not kept.
    """

    def __init__(self, codec: ParcelCodec) -> None:
        self.inner = codec
        self.carries_values = codec.carries_values
        self.sums_vote = codec.sums_vote
        self._kept: dict[str, Tensor] = {}

    def size(self, parcel: Parcel) -> int:
        return self.inner.size(parcel)

    def usual_size(self, parcel: Parcel) -> int:
        return self.inner.usual_size(parcel)

    def encode(self, parcel: Parcel, values: Tensor, into: Tensor) -> int:
        """Encode `values` plus the residual; keep what is left out as the new residual."""
        residual = self.with_residual(parcel, values)
        num_bytes = self.inner.encode(parcel, residual, into)
        self.inner.add(parcel, into[:num_bytes], residual, -1.0)
        self.keep(residual)
        return num_bytes

    def decode(self, parcel: Parcel, encoded: Tensor, into: Tensor) -> None:
        self.inner.decode(parcel, encoded, into)

    def add(self, parcel: Parcel, encoded: Tensor, into: Tensor, alpha: float = 1.0) -> None:
        self.inner.add(parcel, encoded, into, alpha)

    def settle(self, parcel: Parcel, total: Tensor) -> None:
        self.inner.settle(parcel, total)

    def at(self, step: int) -> None:
        super().at(step)
        self.inner.at(step)

    def from_worker(self, seed: int, worker: int) -> None:
        super().from_worker(seed, worker)
        self.inner.from_worker(seed, worker)

    def with_residual(self, parcel: Parcel, values: Tensor) -> Tensor:
        """Add `values` to the parcel's residual, in place, and return it; the caller subtracts what it sends."""
        kept = self._kept.get(parcel.key)
        if kept is None:
            kept = self._kept[parcel.key] = torch.zeros_like(values)
        return kept.add_(values)

    def keep(self, residual: Tensor) -> None:
        """Clear what is not finite from a residual, or it would stay there forever."""
        if not residual.sum().isfinite():
            residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def memory(self) -> dict[str, Tensor]:
        """The residual of each parcel, and the codec's state."""
        return {f"left/{key}": kept for key, kept in self._kept.items()} | self.inner.memory()

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        mine = {name: kept for name, kept in memory.items() if name.startswith("left/")}
        self._kept = {name.removeprefix("left/"): kept.clone() for name, kept in mine.items()}
        self.inner.remember({name: kept for name, kept in memory.items() if name not in mine})
