"""How each layer of a network is sliced, as data: {name of a module: how}.

    {"blocks.0.project": "heads=4 fused=3", "blocks.0.mix": "row heads=4", "head": "vocabulary"}

The input and the output of a layer are each whole (the same on every slice) or sliced (each slice has different
features). A layer that leaves its output sliced must be followed by one that takes it.

| how | of | in | out |
|---|---|---|---|
| `column` | Linear | whole | sliced by features; whole with `gather` |
| `row` | Linear | sliced by features | whole |
| `heads=H` | Linear, MultiheadAttention | whole | sliced by heads; of MultiheadAttention, whole |
| `vocabulary` | Embedding, Linear | whole | whole; of Linear, gathered when it is used |
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

from manyhands.data.batches import split
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
    """Number of units that are never cut, such as the heads of an attention; 0: single features."""
    fused: int = 1
    """How many outputs of equal size are concatenated in the layer's output, such as query, key and value."""
    scatter: bool = False
    """For a layer sliced by rows: whether its input is the whole image."""
    gather: bool = False
    """Whether the output is gathered right away."""
    channels: bool = False
    """For a layer inside sliced work: whether its input is sliced by channels rather than by features."""

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
        return self.kind in (SliceKind.COLUMN, SliceKind.HEADS, SliceKind.CHANNELS_OUT) and not self.gather


Plan = Mapping[str, Slicing]
"""How each module is sliced, by its name in the model; modules that are not named stay whole."""


def parts_of(count: int, units: int, slices: int) -> list[range]:
    """Which of `count` items each slice has: whole units of them, sizes that differ by at most one unit."""
    size = count // units if units else 1
    parts = [split(units or count, index, slices) for index in range(slices)]
    return [range(part.start * size, part.stop * size) for part in parts]
