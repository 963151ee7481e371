"""How each layer of a network is sliced, as data: {name of a module: how}.

    {"blocks.0.project": "heads=4 fused=3", "blocks.0.mix": "row heads=4", "head": "vocabulary"}

What goes into a layer, and what comes out, is whole (the same on every slice) or sliced (each slice has other features
of it). A layer that leaves its output sliced is followed by one that takes it.

| how | of | in | out |
|---|---|---|---|
| `column` | Linear | whole | sliced by features; whole with `gather` |
| `row` | Linear | sliced by features | whole |
| `heads=H` | Linear, MultiheadAttention | whole | sliced by heads; of MultiheadAttention, whole |
| `vocabulary` | Embedding, Linear | whole | whole; of Linear, put together when somebody looks |
| `channels_out` | convolution | whole | sliced by channels; whole with `gather` |
| `channels_in` | convolution | sliced by channels | whole |
| `inside` | GroupNorm, BatchNorm, Dropout | sliced | sliced |
| `spatial` | Conv2d, pooling, GroupNorm | rows of the image; whole with `scatter` | rows; whole with `gather` |
| `whole` | anything | whole | whole: every slice computes all of it |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, unique

from manyhands.data.batch_plan import split
from manyhands.errors import UserError, nearest

__all__ = ["Plan", "SliceKind", "Slicing", "parts_of"]


@unique
class SliceKind(Enum):
    """A way to slice a layer."""

    COLUMN = "column"
    ROW = "row"
    HEADS = "heads"
    VOCABULARY = "vocabulary"
    CHANNELS_OUT = "channels_out"
    CHANNELS_IN = "channels_in"
    INSIDE = "inside"
    SPATIAL = "spatial"
    WHOLE = "whole"


_WORDS = tuple(kind.value for kind in SliceKind)
_NUMBERS = ("heads", "units", "fused")
_FLAGS = ("scatter", "gather", "channels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """How one layer is sliced; `Slicing.parse` reads the text of it."""

    kind: SliceKind
    units: int = 0
    """Whole units that are never cut, as the heads of an attention; 0: single features."""

    fused: int = 1
    """How many outputs of equal size lie one after another in the layer's, as query, key and value."""

    scatter: bool = False
    """Of a layer on rows of an image: whether the image that goes in is whole."""

    gather: bool = False
    """Whether the output is put together again right away."""

    channels: bool = False
    """Of what lies inside sliced work: whether that is sliced by channels, and not by features."""

    @staticmethod
    def parse(text: str | Slicing) -> Slicing:
        """Read `column gather`, `row heads=4`, `heads=4 fused=3`; UserError names the word that is wrong."""
        if isinstance(text, Slicing):
            return text
        if not isinstance(text, str) or not text.split():
            raise UserError(f"tensor_plan: {text!r} does not say how; {nearest('', _WORDS)}")
        first, *rest = text.split()
        word = first.partition("=")[0]
        if word not in _WORDS:
            raise UserError(f"tensor_plan: {text!r} does not say how; {nearest(word, _WORDS)}")
        numbers: dict[str, int] = {}
        flags = dict.fromkeys(_FLAGS, False)
        for setting in ([first] if "=" in first else []) + rest:
            name, equals, value = setting.partition("=")
            if setting in flags:
                flags[setting] = True
            elif name in _NUMBERS and equals and value.isdigit() and int(value):
                numbers["fused" if name == "fused" else "units"] = int(value)
            else:
                raise UserError(
                    f"tensor_plan: {setting!r} in {text!r} makes no sense; allowed: heads=4, units=4, fused=3, "
                    "scatter, gather, channels"
                )
        kind = SliceKind(word)
        if kind is SliceKind.HEADS and "units" not in numbers:
            raise UserError(f"tensor_plan: {text!r} does not say how many; write heads=4")
        return Slicing(kind=kind, units=numbers.get("units", 0), fused=numbers.get("fused", 1), **flags)

    def __str__(self) -> str:
        word = f"heads={self.units}" if self.kind is SliceKind.HEADS else self.kind.value
        units = f" units={self.units}" if self.units and self.kind is not SliceKind.HEADS else ""
        fused = f" fused={self.fused}" if self.fused > 1 else ""
        return f"{word}{units}{fused}{''.join(f' {flag}' for flag in _FLAGS if getattr(self, flag))}"

    @property
    def leaves_sliced(self) -> bool:
        """Whether the output of a Linear or a convolution stays sliced."""
        return self.kind in (SliceKind.COLUMN, SliceKind.HEADS, SliceKind.CHANNELS_OUT) and not self.gather


Plan = Mapping[str, Slicing]
"""How each module is sliced, by its name in the model; whoever is not named is whole."""


def parts_of(count: int, units: int, slices: int) -> list[range]:
    """Which of `count` items each slice has: whole units of them, sizes that differ by at most one unit."""
    size = count // units if units else 1
    parts = [split(units or count, index, slices) for index in range(slices)]
    return [range(part.start * size, part.stop * size) for part in parts]
