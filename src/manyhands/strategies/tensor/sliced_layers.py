"""Sliced layers: the user's modules, with their parameters cut and their class replaced.

A module keeps its identity, so references to it (in a list, a chain, a hook) stay valid and see the slice. Parameters
keep their names. A cut parameter that is read as an attribute (`layer.weight`) is gathered when its value is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.errors import UserError
from manyhands.strategies.common.grid.held import Cut
from manyhands.strategies.tensor.lazy_tensor import LazyWhole, as_whole
from manyhands.strategies.tensor.moves import Port, copied, gathered, summed
from manyhands.strategies.tensor.slicing_plan import SliceKind, Slicing, parts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSlice:
    """What a sliced layer knows of its slicing."""

    port: Port
    how: Slicing
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    """Shapes of the parameters before they were cut."""
    cuts: dict[str, tuple[Cut, ...]] = field(default_factory=dict)
    """For each parameter that is cut: the part that every slice has."""


class SlicedModule(nn.Module):
    """Base class of modules of which this worker holds a slice."""

    sliced: LayerSlice

    @classmethod
    def cuts(cls, module: Any, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        """Which part of each parameter and buffer every slice has; those that are not named stay whole."""
        raise NotImplementedError

    @classmethod
    def beside(cls, _module: Any, _how: Slicing) -> dict[str, tuple[nn.Module, Slicing]]:
        """Submodules that must be sliced along with this one, by their names in it, and how."""
        return {}

    @property
    def port(self) -> Port:
        return self.sliced.port

    def part(self, name: str) -> Any:
        """This slice's part of a parameter; None for a bias that the layer does not have."""
        return self._parameters[name]

    def sizes(self, name: str) -> list[int]:
        return [cut.end - cut.begin for cut in self.sliced.cuts[name]]

    def whole(self, name: str) -> Tensor | None:
        """The whole parameter: a lazily gathered tensor where it is cut."""
        part = self._parameters[name]
        if part is None or name not in self.sliced.cuts:
            return part
        cut, sizes = self.sliced.cuts[name][0], self.sizes(name)
        assert cut.dim is not None, "layers are cut along a dimension"
        dim = cut.dim

        def gather() -> Tensor:
            blocks = part.view(*part.shape[:dim], cut.blocks, -1, *part.shape[dim + 1 :])
            return gathered(blocks, self.port, dim + 1, sizes).flatten(dim, dim + 1)

        return LazyWhole(part, self.sliced.shapes[name], gather)

    def expect(self, x: Tensor, dim: int, size: int, what: str) -> None:
        """Raise UserError unless `x` has the size in `dim` that the plan implies for this layer on this slice."""
        if x.shape[dim] != size:
            raise UserError(
                f"strategy tensor: module {self.port.name!r} is {self.sliced.how}, so it needs {size} {what} on slice "
                f"{self.port.index}, but got {x.shape[dim]}; in tensor_plan, follow a layer with sliced output by one "
                "with sliced input: column then row, channels_out then channels_in"
            )


def whole_attribute(name: str) -> Any:
    return property(lambda self: self.whole(name), doc=f"The whole {name}.")


def along(dim: int, parts: list[range], blocks: int = 1) -> list[Cut]:
    return [Cut(dim=dim, begin=part.start, end=part.stop, blocks=blocks) for part in parts]


class ColumnLinear(SlicedModule, nn.Linear):
    """Column-parallel linear layer: computes some of the output features from the whole input."""

    weight = whole_attribute("weight")
    bias = whole_attribute("bias")

    @classmethod
    def cuts(cls, module: nn.Linear, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        parts = parts_of(module.out_features // how.fused, how.units, slices)
        return {name: along(0, parts, how.fused) for name in ("weight", "bias")}

    def forward(self, x: Tensor) -> Tensor:
        x = as_whole(x)
        self.expect(x, -1, self.in_features, "features")
        if self.sliced.how.leaves_sliced:
            self.port.state.enter(x)
        weight = self.part("weight")
        y = F.linear(copied(x, self.port), weight, self.part("bias"))
        return gathered(y, self.port, -1, self.sizes("weight")) if self.sliced.how.gather else y


class VocabularyLinear(ColumnLinear):
    """Column-parallel linear layer whose output, the scores of some classes, is gathered only when it is used."""

    def forward(self, x: Tensor) -> Tensor:
        return LazyWhole.scores(super().forward(x), self.port, self.sizes("weight"))


class RowLinear(SlicedModule, nn.Linear):
    """Row-parallel linear layer: takes some of the input features; the slices' results are summed."""

    weight = whole_attribute("weight")

    @classmethod
    def cuts(cls, module: nn.Linear, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        """Cut the columns of the weight; the bias stays whole and is added once, after the sum."""
        return {"weight": along(1, parts_of(module.in_features, how.units, slices))}

    def forward(self, x: Tensor) -> Tensor:
        weight = self.part("weight")
        self.expect(x, -1, weight.shape[1], "features")
        y = summed(F.linear(x, weight), self.port)
        self.port.state.leave(x)
        bias = self.part("bias")
        return y if bias is None else y + bias


class VocabularyEmbedding(SlicedModule, nn.Embedding):
    """Embedding with some of the rows: tokens of other slices give zeros, and the slices' results are summed."""

    weight = whole_attribute("weight")

    @classmethod
    def cuts(cls, module: nn.Embedding, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        return {"weight": along(0, parts_of(module.num_embeddings, how.units, slices))}

    def forward(self, tokens: Tensor) -> Tensor:
        weight, cut = self.part("weight"), self.sliced.cuts["weight"][self.port.index]
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.num_embeddings:
            raise IndexError(
                f"module {self.port.name!r}: tokens must be between 0 and {self.num_embeddings - 1}"
            )
        mine = (tokens >= cut.begin) & (tokens < cut.end)
        padding = self.padding_idx
        here = padding - cut.begin if padding is not None and cut.begin <= padding < cut.end else None
        rows = F.embedding((tokens - cut.begin).where(mine, 0), weight, here)
        return summed(rows * mine[..., None], self.port)


class HeadsAttention(SlicedModule, nn.MultiheadAttention):
    """Torch's MultiheadAttention with some of its heads, whose contributions are summed; results are the same."""

    in_proj_weight = whole_attribute("in_proj_weight")
    in_proj_bias = whole_attribute("in_proj_bias")

    @classmethod
    def cuts(cls, module: nn.MultiheadAttention, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        """Cut the same heads of query, key and value; UserError for an attention that cannot be cut by heads."""
        if how.units != module.num_heads:
            raise UserError(
                f"tensor_plan: heads={how.units}, but the attention has {module.num_heads} heads; write "
                f"heads={module.num_heads}"
            )
        if module.bias_k is not None or module.add_zero_attn or not module._qkv_same_embed_dim:
            raise UserError(
                "tensor_plan: an attention with add_bias_kv, add_zero_attn, kdim or vdim cannot be sliced by heads; "
                "use 'whole'"
            )
        parts = parts_of(module.embed_dim, how.units, slices)
        return {name: along(0, parts, 3) for name in ("in_proj_weight", "in_proj_bias")}

    @classmethod
    def beside(cls, module: nn.MultiheadAttention, how: Slicing) -> dict[str, tuple[nn.Module, Slicing]]:
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
        given = as_whole(query), as_whole(key), as_whole(value)
        alone = given[0].dim() == 2
        self.port.state.enter(given[0])
        copies = {id(one): copied(one, self.port) for one in given}  # one copy where one tensor is all three
        inputs = [copies[id(one)] for one in given]
        if alone:
            inputs = [one.unsqueeze(0) for one in inputs]
        elif not self.batch_first:
            inputs = [one.transpose(0, 1) for one in inputs]
        weight, bias = self.part("in_proj_weight"), self.part("in_proj_bias")
        biases = bias.chunk(3) if bias is not None else [None] * 3
        q, k, v = (
            F.linear(one, part, its_bias).view(*one.shape[:2], -1, self.head_dim).transpose(1, 2)
            for one, part, its_bias in zip(inputs, weight.chunk(3), biases, strict=True)
        )
        mask = self._mask(attn_mask, key_padding_mask, q, k, alone=alone)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            mixed = F.dropout(weights, dropout, self.training) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        output: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if alone:
            output = output.squeeze(0)
        elif not self.batch_first:
            output = output.transpose(0, 1)
        if weights is None:
            return output, None
        if average_attn_weights:
            weights = summed(weights.sum(1), self.port) / self.num_heads
        else:
            sizes = [len(one) for one in parts_of(self.num_heads, 0, self.port.world)]
            weights = LazyWhole.scores(weights.movedim(1, -1), self.port, sizes).whole().movedim(-1, 1)
        return output, weights.squeeze(0) if alone else weights

    def _mask(
        self, attn: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor, *, alone: bool
    ) -> Tensor | None:
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


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)
    return mask.to(dtype)
