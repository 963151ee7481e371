"""Layers of which this worker has a slice: the user's own modules, whose parameters were cut and whose class changed.

A module keeps its identity, so whoever holds it (a list, a chain, a hook) goes on with the slice. Its parameters keep
their names; read as an attribute (`layer.weight`), one that was cut is put together when somebody looks at it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.errors import UserError
from manyhands.strategies.common.grid.held import Cut
from manyhands.strategies.tensor.lazy_tensor import LazyWhole, settled
from manyhands.strategies.tensor.moves import Port, copied, gathered, summed
from manyhands.strategies.tensor.slicing_plan import SliceKind, Slicing, parts_of

__all__ = [
    "EMBEDDING",
    "LINEAR",
    "ImageRows",
    "LayerSlice",
    "SameDraws",
    "SlicedModule",
    "along",
    "whole_attribute",
]


class SameDraws:
    """Keeps the slices' random numbers the same where activations are whole.

    Between a layer that leaves its output sliced and the one that takes it, slices of different sizes draw different
    amounts. So whoever ends sliced work sets the generator to a state that follows from the one at its beginning;
    where nothing was drawn, nothing changes.
    """

    def __init__(self) -> None:
        self._before: Tensor | None = None

    def enter(self, x: Tensor) -> None:
        """Sliced work begins."""
        self._before = _generator(x).get_state()

    def leave(self, x: Tensor) -> None:
        """Sliced work ends."""
        before, self._before = self._before, None
        if before is None:
            return
        generator = _generator(x)
        if not torch.equal(before, generator.get_state()):
            generator.set_state(before)
            seed = torch.randint(2**62, (), generator=generator, device=generator.device)
            generator.manual_seed(int(seed))


def _generator(x: Tensor) -> torch.Generator:
    if x.is_cuda:
        return torch.cuda.default_generators[x.device.index or 0]
    return torch.default_generator


class ImageRows:
    """How many rows the image has that is on its way through layers sliced by rows."""

    def __init__(self) -> None:
        self.height = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSlice:
    """What a sliced layer knows of its slicing."""

    port: Port
    how: Slicing
    draws: SameDraws
    rows: ImageRows
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    """Of its parameters, when they were whole."""

    cuts: dict[str, tuple[Cut, ...]] = field(default_factory=dict)
    """Of each parameter that is cut: what every slice has."""


class SlicedModule(nn.Module):
    """A module that has become a slice."""

    sliced: LayerSlice

    @classmethod
    def cuts(cls, module: Any, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        """Which part of each parameter and buffer every slice has; those that are not named stay whole."""
        raise NotImplementedError

    @classmethod
    def beside(cls, module: Any, how: Slicing) -> dict[str, tuple[nn.Module, Slicing]]:
        """Submodules that are sliced with it, by their names in it."""
        del module, how
        return {}

    @property
    def port(self) -> Port:
        """To the other slices."""
        return self.sliced.port

    def part(self, name: str) -> Tensor | None:
        """This slice's part of a parameter, or all of it where it is not cut."""
        return self._parameters[name]

    def sizes(self, name: str) -> list[int]:
        """How many items every slice has along the dimension in which a parameter is cut."""
        return [cut.end - cut.begin for cut in self.sliced.cuts[name]]

    def whole(self, name: str) -> Tensor | None:
        """The whole of a parameter: a stand-in where it is cut."""
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
        """UserError where `x` is not sliced, or is, against what the plan says of this layer."""
        if x.shape[dim] != size:
            raise UserError(
                f"strategy tensor: module {self.port.name!r} is {self.sliced.how}, so it takes {size} {what} on slice "
                f"{self.port.index}, and got {x.shape[dim]}; in tensor_plan a layer that leaves its output sliced is "
                "followed by one that takes it: column then row, channels_out then channels_in"
            )


def whole_attribute(name: str) -> Any:
    """An attribute that reads a parameter as a whole."""
    return property(lambda self: self.whole(name), doc=f"The whole {name}.")


def along(dim: int, parts: list[range], blocks: int = 1) -> list[Cut]:
    """What each slice has along a dimension."""
    return [Cut(dim=dim, begin=part.start, end=part.stop, blocks=blocks) for part in parts]


class ColumnLinear(SlicedModule, nn.Linear):
    """Some of the output features: the slice computes them from the whole input."""

    weight = whole_attribute("weight")
    bias = whole_attribute("bias")

    @classmethod
    def cuts(cls, module: nn.Linear, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        """Rows of the weight, and of the bias."""
        parts = parts_of(module.out_features // how.fused, how.units, slices)
        return {name: along(0, parts, how.fused) for name in ("weight", "bias")}

    def forward(self, x: Tensor) -> Tensor:
        """Sliced by features; whole where the plan gathers."""
        x = settled(x)
        self.expect(x, -1, self.in_features, "features")
        if self.sliced.how.leaves_sliced:
            self.sliced.draws.enter(x)
        weight = self.part("weight")
        assert weight is not None, "a linear layer has a weight"
        y = F.linear(copied(x, self.port), weight, self.part("bias"))
        return gathered(y, self.port, -1, self.sizes("weight")) if self.sliced.how.gather else y


class VocabularyLinear(ColumnLinear):
    """The scores of some classes; put together when somebody looks at them."""

    def forward(self, x: Tensor) -> Tensor:
        """A stand-in for the whole."""
        return LazyWhole.scores(super().forward(x), self.port, self.sizes("weight"))


class RowLinear(SlicedModule, nn.Linear):
    """Some of the input features: what the slices compute from theirs is added up."""

    weight = whole_attribute("weight")

    @classmethod
    def cuts(cls, module: nn.Linear, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        """Columns of the weight; the bias is everyone's, and is added once."""
        return {"weight": along(1, parts_of(module.in_features, how.units, slices))}

    def forward(self, x: Tensor) -> Tensor:
        """Whole."""
        weight = self.part("weight")
        assert weight is not None, "a linear layer has a weight"
        self.expect(x, -1, weight.shape[1], "features")
        y = summed(F.linear(x, weight), self.port)
        self.sliced.draws.leave(x)
        bias = self.part("bias")
        return y if bias is None else y + bias


class VocabularyEmbedding(SlicedModule, nn.Embedding):
    """Some of the rows: what is not here is zero, and the slices' rows are added up."""

    weight = whole_attribute("weight")

    @classmethod
    def cuts(cls, module: nn.Embedding, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        """Rows of the table."""
        return {"weight": along(0, parts_of(module.num_embeddings, how.units, slices))}

    def forward(self, tokens: Tensor) -> Tensor:
        """Whole."""
        weight, cut = self.part("weight"), self.sliced.cuts["weight"][self.port.index]
        assert weight is not None, "an embedding has a weight"
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.num_embeddings:
            raise IndexError(f"module {self.port.name!r}: a token is outside 0..{self.num_embeddings - 1}")
        mine = (tokens >= cut.begin) & (tokens < cut.end)
        padding = self.padding_idx
        here = padding - cut.begin if padding is not None and cut.begin <= padding < cut.end else None
        rows = F.embedding((tokens - cut.begin).where(mine, 0), weight, here)
        return summed(rows * mine[..., None], self.port)


LINEAR: dict[SliceKind, type[SlicedModule]] = {
    SliceKind.COLUMN: ColumnLinear,
    SliceKind.HEADS: ColumnLinear,
    SliceKind.ROW: RowLinear,
    SliceKind.VOCABULARY: VocabularyLinear,
}
EMBEDDING: dict[SliceKind, type[SlicedModule]] = {SliceKind.VOCABULARY: VocabularyEmbedding}
