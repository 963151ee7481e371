"""Attention sliced by heads: each slice computes some heads, and their contributions to the output are summed."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.errors import UserError
from manyhands.strategies.common.grid.held import Cut
from manyhands.strategies.tensor.lazy_tensor import LazyWhole, settled
from manyhands.strategies.tensor.moves import copied, summed
from manyhands.strategies.tensor.sliced_layers import SlicedModule, along, whole_attribute
from manyhands.strategies.tensor.slicing_plan import SliceKind, Slicing, parts_of

__all__ = ["ATTENTION"]


class HeadsAttention(SlicedModule, nn.MultiheadAttention):
    """Torch's MultiheadAttention with some of its heads; same arguments and results, in every batch layout."""

    in_proj_weight = whole_attribute("in_proj_weight")
    in_proj_bias = whole_attribute("in_proj_bias")

    @classmethod
    def cuts(cls, module: nn.MultiheadAttention, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        """Cut the same heads of query, key and value; UserError for an attention that cannot be cut by heads."""
        if how.units != module.num_heads:
            raise UserError(
                f"tensor_plan: heads={how.units} of an attention that has {module.num_heads} heads; write "
                f"heads={module.num_heads}"
            )
        if module.bias_k is not None or module.add_zero_attn or not module._qkv_same_embed_dim:
            raise UserError(
                "tensor_plan: an attention with add_bias_kv, add_zero_attn, kdim or vdim cannot be sliced by heads; "
                "say 'whole'"
            )
        parts = parts_of(module.embed_dim, how.units, slices)
        return {name: along(0, parts, 3) for name in ("in_proj_weight", "in_proj_bias")}

    @classmethod
    def beside(cls, module: nn.MultiheadAttention, how: Slicing) -> dict[str, tuple[nn.Module, Slicing]]:
        """Slice the output projection by rows, so that it takes this slice's heads."""
        return {"out_proj": (module.out_proj, Slicing(kind=SliceKind.ROW, units=how.units))}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and, where requested, the attention weights, as torch does; both whole on every slice."""
        del is_causal  # only a hint: a caller that sets it passes the mask as well
        given = settled(query), settled(key), settled(value)
        alone = given[0].dim() == 2
        self.sliced.draws.enter(given[0])
        copies = {id(one): copied(one, self.port) for one in given}  # one copy where one tensor is all three
        q, k, v = self._projected([self._batch_first(copies[id(one)]) for one in given])
        mask = self._mask(attn_mask, key_padding_mask, q, k, alone=alone)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            weights = self._weights(q, k, mask)
            mixed = F.dropout(weights, dropout, self.training) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        output: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if alone:
            output = output.squeeze(0)
        elif not self.batch_first:
            output = output.transpose(0, 1)
        return output, None if weights is None else self._told(weights, average_attn_weights, alone=alone)

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _projected(self, given: list[Tensor]) -> list[Tensor]:
        """Query, key and value of this slice's heads: (batch, heads, time, features of a head)."""
        weight, bias = self.part("in_proj_weight"), self.part("in_proj_bias")
        assert weight is not None, "one projection for all three"
        biases = bias.chunk(3) if bias is not None else (None, None, None)
        return [
            F.linear(one, part, its_bias).view(*one.shape[:2], -1, self.head_dim).transpose(1, 2)
            for one, part, its_bias in zip(given, weight.chunk(3), biases, strict=True)
        ]

    def _mask(
        self, attn: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor, *, alone: bool
    ) -> Tensor | None:
        """The additive mask for the scores of this slice's heads."""
        total = None
        if attn is not None:
            total = _added(attn, q.dtype)
            if total.dim() == 3:
                mine = parts_of(self.num_heads, 0, self.port.world)[self.port.index]
                total = total.view(q.shape[0], self.num_heads, *total.shape[1:])[:, mine.start : mine.stop]
        if padding is not None:
            padding = _added(padding.unsqueeze(0) if alone else padding, q.dtype)[:, None, None, :]
            total = padding if total is None else total + padding
        return total if total is None else total.expand(*q.shape[:3], k.shape[2])

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        return (scores if mask is None else scores + mask).softmax(-1)

    def _told(self, weights: Tensor, average: bool, *, alone: bool) -> Tensor:
        """Collective: the attention weights of all heads."""
        sizes = [len(one) for one in parts_of(self.num_heads, 0, self.port.world)]
        whole: Tensor
        if average:
            whole = summed(weights.sum(1), self.port) / self.num_heads
        else:
            last = weights.movedim(1, -1)
            whole = LazyWhole.scores(last, self.port, sizes).whole().movedim(-1, 1)
        return whole.squeeze(0) if alone else whole


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask into one that is added to the scores."""
    if mask.dtype is torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)
    return mask.to(dtype)


ATTENTION: dict[SliceKind, type[SlicedModule]] = {SliceKind.HEADS: HeadsAttention}
