"""Sliced layers: the user's modules, with their parameters cut and their class replaced.

A module keeps its identity, so references to it (in a list, a chain, a hook) stay valid and see the slice. Parameters
keep their names. A cut parameter that is read as an attribute (`layer.weight`) is gathered when its value is used.
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
    """Keeps the random number generators of the slices equal wherever activations are whole.

    Between a layer that leaves its output sliced and the layer that takes it, slices of different sizes draw
    different amounts. So the layer that ends sliced work sets the generator to a state derived from the one at its
    beginning. Where nothing was drawn, the generator stays as it is.
    """

    def __init__(self) -> None:
        self._before: Tensor | None = None

    def enter(self, x: Tensor) -> None:
        """Remember the generator's state where sliced work begins."""
        self._before = _generator(x).get_state()

    def leave(self, x: Tensor) -> None:
        """Where sliced work ends, reseed from the remembered state if anything was drawn since."""
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
    """The full height of the image that is passing through layers sliced by rows."""

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
    def beside(cls, module: Any, how: Slicing) -> dict[str, tuple[nn.Module, Slicing]]:
        """Submodules that must be sliced along with this one, by their names in it, and how."""
        del module, how
        return {}

    @property
    def port(self) -> Port:
        """The endpoint to the other slices."""
        return self.sliced.port

    def part(self, name: str) -> Tensor | None:
        """This slice's part of a parameter, or the whole parameter where it is not cut."""
        return self._parameters[name]

    def sizes(self, name: str) -> list[int]:
        """How many items every slice has along the dimension in which a parameter is cut."""
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
                f"strategy tensor: module {self.port.name!r} is {self.sliced.how}, so it takes {size} {what} on slice "
                f"{self.port.index}, and got {x.shape[dim]}; in tensor_plan a layer that leaves its output sliced is "
                "followed by one that takes it: column then row, channels_out then channels_in"
            )


def whole_attribute(name: str) -> Any:
    """Make a property that reads a cut parameter as a whole."""
    return property(lambda self: self.whole(name), doc=f"The whole {name}.")


def along(dim: int, parts: list[range], blocks: int = 1) -> list[Cut]:
    """The cuts that give each slice its part along a dimension."""
    return [Cut(dim=dim, begin=part.start, end=part.stop, blocks=blocks) for part in parts]


class ColumnLinear(SlicedModule, nn.Linear):
    """Column-parallel linear layer: computes some of the output features from the whole input."""

    weight = whole_attribute("weight")
    bias = whole_attribute("bias")

    @classmethod
    def cuts(cls, module: nn.Linear, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        """Cut the rows of the weight, and the bias."""
        parts = parts_of(module.out_features // how.fused, how.units, slices)
        return {name: along(0, parts, how.fused) for name in ("weight", "bias")}

    def forward(self, x: Tensor) -> Tensor:
        """Return this slice's output features, or all of them where the plan gathers."""
        x = settled(x)
        self.expect(x, -1, self.in_features, "features")
        if self.sliced.how.leaves_sliced:
            self.sliced.draws.enter(x)
        weight = self.part("weight")
        assert weight is not None, "a linear layer has a weight"
        y = F.linear(copied(x, self.port), weight, self.part("bias"))
        return gathered(y, self.port, -1, self.sizes("weight")) if self.sliced.how.gather else y


class VocabularyLinear(ColumnLinear):
    """Column-parallel linear layer whose output, the scores of some classes, is gathered only when it is used."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a lazy tensor that stands for the scores of all classes."""
        return LazyWhole.scores(super().forward(x), self.port, self.sizes("weight"))


class RowLinear(SlicedModule, nn.Linear):
    """Row-parallel linear layer: takes some of the input features; the slices' results are summed."""

    weight = whole_attribute("weight")

    @classmethod
    def cuts(cls, module: nn.Linear, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        """Cut the columns of the weight; the bias stays whole and is added once, after the sum."""
        return {"weight": along(1, parts_of(module.in_features, how.units, slices))}

    def forward(self, x: Tensor) -> Tensor:
        """Collective: return the whole output."""
        weight = self.part("weight")
        assert weight is not None, "a linear layer has a weight"
        self.expect(x, -1, weight.shape[1], "features")
        y = summed(F.linear(x, weight), self.port)
        self.sliced.draws.leave(x)
        bias = self.part("bias")
        return y if bias is None else y + bias


class VocabularyEmbedding(SlicedModule, nn.Embedding):
    """Embedding with some of the rows: tokens of other slices give zeros, and the slices' results are summed."""

    weight = whole_attribute("weight")

    @classmethod
    def cuts(cls, module: nn.Embedding, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        """Cut the rows of the table."""
        return {"weight": along(0, parts_of(module.num_embeddings, how.units, slices))}

    def forward(self, tokens: Tensor) -> Tensor:
        """Collective: return the whole embeddings; IndexError where a token is outside the vocabulary."""
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
