"""Deep gradient compression (Lin et al., ICLR 2018): the largest items of a momentum that every worker keeps.

    u ← momentum · u + clipped gradient        v ← v + u
    the largest items of v are sent; where they were, v and u begin at 0 again

So what is late still has the momentum it would have had. The optimizer must then have none of its own. In the first
`warmup` steps a quarter, a sixteenth, … of the items are sent, a quarter of these steps each, until `fraction` is.
`clip` is the largest norm that the gradient of a parcel may have, 0 for any.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from manyhands.wire.codec import ParcelCodec
from manyhands.wire.codecs.topk import largest_of
from manyhands.wire.floats import Floats
from manyhands.wire.parcels import Parcel
from manyhands.wire.sparse import Indices, SparseCodec, empty_gaps, few

_FIRST = 0.25
_QUARTERS = 4


class _Warming(SparseCodec):
    """Top-k of a fraction of the items, with more of them in the first steps."""

    def __init__(self, fraction: float = 0.001, warmup: int = 0, values: ParcelCodec | None = None) -> None:
        super().__init__(values)
        self._fraction = fraction
        self._warmup = warmup

    def density(self, step: int) -> float:
        if step >= self._warmup:
            return self._fraction
        return max(self._fraction, _FIRST ** (1 + _QUARTERS * step // self._warmup))

    def most(self, parcel: Parcel) -> int:
        return few(self.density(0), parcel)

    def usual_size(self, parcel: Parcel) -> int:
        """The mean over the warm-up: so even that takes less than what is not encoded, in the form that is chosen."""
        if not self._warmup:
            return self.size(parcel)
        shares = [max(self._fraction, _FIRST ** (1 + quarter)) for quarter in range(_QUARTERS)]
        return sum(self._size_of(parcel, few(share, parcel)) for share in shares) // _QUARTERS

    def choose(self, parcel: Parcel, values: Floats) -> tuple[Indices, Floats]:
        return largest_of(values, few(self.density(self.step), parcel))


class DgcSums(_Warming):
    """The variant for sums, which include their momentum already."""


class Dgc(_Warming):
    """The variant that keeps momentum and residual, in the parcel's type."""

    def __init__(
        self,
        fraction: float = 0.001,
        momentum: float = 0.9,
        clip: float = 0.0,
        warmup: int = 0,
        values: ParcelCodec | None = None,
    ) -> None:
        super().__init__(fraction, warmup, values)
        self.momentum = momentum
        self._clip = clip
        self._velocity: dict[str, Tensor] = {}
        self._residual: dict[str, Tensor] = {}

    def encode(self, parcel: Parcel, values: Tensor, into: Tensor) -> int:
        """Update momentum and residual, and send the largest items of the residual."""
        empty_gaps(parcel, values)
        velocity = self._velocity.setdefault(parcel.key, torch.zeros_like(values))
        residual = self._residual.setdefault(parcel.key, torch.zeros_like(values))
        velocity.mul_(self.momentum).add_(values, alpha=self._share(values))
        residual.add_(velocity)
        indices, kept = self.choose(parcel, residual.to(torch.float32).numpy())
        num_bytes = self.write(parcel, indices, kept, into)
        places = torch.from_numpy(indices.astype(np.int64))
        velocity[places] = 0.0
        self.add(parcel, into[:num_bytes], residual, -1.0)
        for one in (velocity, residual):
            if not one.sum().isfinite():
                one.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return num_bytes

    def memory(self) -> dict[str, Tensor]:
        kept = {f"velocity/{key}": one for key, one in self._velocity.items()}
        return kept | {f"owed/{key}": one for key, one in self._residual.items()}

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        for name, one in memory.items():
            kind, _, key = name.partition("/")
            {"velocity": self._velocity, "owed": self._residual}[kind][key] = one.clone()

    def _share(self, values: Tensor) -> float:
        """The factor by which clipping scales a gradient."""
        norm = float(values.norm()) if self._clip else 0.0
        return self._clip / norm if norm > self._clip else 1.0
