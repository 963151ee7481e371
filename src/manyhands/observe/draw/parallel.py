"""Parallel coordinates: runs as lines over vertical axes, one per setting and one per result.

Pure, as all charts: equal numbers give equal bytes. The best line is thick and on top; the others go from its colour's
neighbour to grey, third by third, so that what good runs have in common can be seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from manyhands.observe.draw.axes import Axis, linear, logarithmic, short_number, spans_powers
from manyhands.observe.draw.paper import figure, legend, line_mark, quiet, svg_chart, svg_line, svg_text

__all__ = ["ParallelAxis", "parallel_coordinates"]

_HEIGHT, _TOP, _BOTTOM, _SIDE = 240.0, 34.0, 14.0, 46.0
_LEAST_WIDTH, _APART = 360.0, 104.0
_NAME_LETTERS, _VALUE_LETTERS = 18, 16
_KINDS = (("s0", 3.0, 1.0, "the best"), ("s2", 1.6, 0.9, "best third"), ("s4", 1.3, 0.7, "middle third"))
_LAST = ("s7", 1.1, 0.55, "last third")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelAxis:
    """One axis: its name, and each line's value on it; texts are placed evenly in order of appearance."""

    name: str
    values: Sequence[str | float]

    @property
    def numbers(self) -> list[float] | None:
        found = []
        for value in self.values:
            try:
                found.append(float(value))
            except ValueError:
                return None
        return found


@dataclass(frozen=True, slots=True)
class _Placed:
    """An axis in the picture: each line's crossing, and its ticks as (place, words)."""

    x: float
    name: str
    places: list[float]
    ticks: list[tuple[float, str]]


def parallel_coordinates(
    axes: Sequence[ParallelAxis], names: Sequence[str], *, title: str, empty: str = "No run has ended."
) -> str:
    """Draw lines, best first; line i crosses every axis at its value i and is named `names[i]`.

    A line with a value that is not finite is left out.
    """
    keep = [
        n
        for n in range(len(names))
        if all(isinstance(axis.values[n], str) or math.isfinite(axis.values[n]) for axis in axes)  # type: ignore[arg-type]
    ]
    if not keep or not axes:
        return figure(title, quiet(empty), kind="plot")
    kept = [ParallelAxis(name=axis.name, values=[axis.values[n] for n in keep]) for axis in axes]
    width = max(_LEAST_WIDTH, 2 * _SIDE + _APART * (len(kept) - 1))
    gap = (width - 2 * _SIDE) / max(1, len(kept) - 1)
    placed = [_place(axis, _SIDE + gap * place) for place, axis in enumerate(kept)]
    lines = [_line(placed, names[n], rank, len(keep)) for rank, n in enumerate(keep)]
    drawn = [*reversed(lines)]
    for axis in placed:
        drawn.append(svg_line("axis", axis.x, _TOP, axis.x, _HEIGHT - _BOTTOM))
        drawn.append(svg_text(axis.x, 14.0, axis.name, "label", "middle", _NAME_LETTERS))
        for y, words in axis.ticks:
            drawn.append(svg_text(axis.x + 4, y + 3.5, words, "tick", "start", _VALUE_LETTERS))
    ranges = "; ".join(f"{axis.name} {_range(axis)}" for axis in kept)
    said = f"{title}: {len(keep)} runs; {ranges}; the best is {names[keep[0]]}"
    kinds = list(dict.fromkeys(_kind(rank, len(keep)) for rank in range(len(keep))))
    marks = [line_mark(f'class="curve {colour}" stroke-width="{wide:g}"') for colour, wide, _, _ in kinds]
    explained = legend([name for _, _, _, name in kinds], marks)
    return figure(title, svg_chart(drawn, width, _HEIGHT, said), explained, "plot")


def _place(axis: ParallelAxis, x: float) -> _Placed:
    bottom, numbers = _HEIGHT - _BOTTOM, axis.numbers
    if numbers is None:
        words = list(dict.fromkeys(map(str, axis.values)))
        scale = Axis(-0.5, len(words) - 0.5, bottom, _TOP)
        at = {word: scale.at(place) for place, word in enumerate(words)}
        return _Placed(x, axis.name, [at[str(value)] for value in axis.values], [(at[w], w) for w in words])
    few = sorted(set(numbers))
    if spans_powers(numbers):
        scale, ticks = logarithmic(numbers, bottom, _TOP)
    else:
        scale, ticks = linear(numbers, bottom, _TOP, 4)
    if len(few) <= 6 and isinstance(axis.values[0], str):  # a setting: its given values are the ticks
        ticks = [(value, short_number(value)) for value in few]
    return _Placed(x, axis.name, [scale.at(n) for n in numbers], [(scale.at(n), said) for n, said in ticks])


def _line(placed: Sequence[_Placed], name: str, rank: int, count: int) -> str:
    path = "M" + " ".join(f"{axis.x:.1f},{axis.places[rank]:.1f}" for axis in placed)
    if len(placed) == 1:
        path += "h6"
    colour, width, opacity, _ = _kind(rank, count)
    return (
        f'<path class="curve {colour}" stroke-width="{width:g}" stroke-opacity="{opacity:g}" d="{path}">'
        f"<title>{escape(f'{rank + 1}. {name}')}</title></path>"
    )


def _kind(rank: int, count: int) -> tuple[str, float, float, str]:
    if rank == 0:
        return _KINDS[0]
    third = 3 * rank // count
    return _KINDS[third + 1] if third < 2 else _LAST


def _range(axis: ParallelAxis) -> str:
    numbers = axis.numbers
    if numbers is None:
        return ", ".join(dict.fromkeys(map(str, axis.values)))
    return f"from {short_number(min(numbers))} to {short_number(max(numbers))}"
