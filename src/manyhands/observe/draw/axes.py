"""Chart axes: the mapping from numbers to coordinates, and round tick values; and numbers as text.

An axis covers every number it was made for. Where none is negative it does not go below 0, and where all lie between
0 and 1, as shares do, it does not exceed 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Tick = tuple[float, str]  # A number, and how it is written

_VAST, _TINY = 1e300, 1e-290  # outside this range, float differences vanish
_POWERS = 10.0  # ratio of greatest to least from which a logarithmic axis is better
_EARLY = 0.12  # a range that begins in this part of an axis is extended to 0


@dataclass(frozen=True, slots=True)
class Axis:
    """From numbers to units of the picture; on a logarithmic axis `low` and `high` are powers of ten."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        value = math.log10(_within(_TINY, value)) if self.is_log else _within(-_VAST, value)
        return self.begin + (self.end - self.begin) * (value - self.low) / (self.high - self.low)


def spans_powers(values: Iterable[float]) -> bool:
    """Return whether a logarithmic axis suits these: finite ones positive, the greatest ten times the least."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) >= _POWERS * min(finite)


def linear(
    values: Sequence[float], begin: float, end: float, ticks: int, *, tight: bool = False
) -> tuple[Axis, list[Tick]]:
    """Return an axis and its ticks; it ends at ticks unless it is `tight`, where integers get integer ticks."""
    low, high = _range(values, tight)
    spacing = nice((high - low) / ticks)
    if tight and all(value == int(value) for value in values if math.isfinite(value)):
        spacing = max(1.0, spacing)
    first, last = math.floor(low / spacing + 1e-9), math.ceil(high / spacing - 1e-9)
    if not tight:
        low, high = first * spacing, last * spacing
    places = [
        n * spacing
        for n in range(first, last + 1)
        if low - 1e-9 * spacing <= n * spacing <= high + 1e-9 * spacing
    ]
    return Axis(low, high, begin, end), [(place, _written(place, spacing, high)) for place in places]


def _range(values: Sequence[float], tight: bool) -> tuple[float, float]:
    """Return the least and the greatest value, widened where they are equal."""
    least, most = _within(-_VAST, min(values, default=0.0)), _within(-_VAST, max(values, default=1.0))
    if tight and 0 < least <= _EARLY * most:
        return 0.0, most
    if most - least > max(_TINY, 1e-12 * max(abs(most), abs(least))):
        return least, most
    if tight and most > 0:
        return 0.0, most
    margin = max(_TINY, abs(most) / 5) if most else 1.0
    low, high = least - margin, most + margin
    return (max(0.0, low) if least >= 0 else low), (min(1.0, high) if 0 < least <= 1 else high)


def logarithmic(values: Sequence[float], begin: float, end: float) -> tuple[Axis, list[Tick]]:
    """Return a logarithmic axis between 1, 2 or 5 times powers of ten, with those powers, or all if few, as ticks."""
    low, high = _within(_TINY, min(values, default=0.1)), _within(_TINY, max(values, default=1.0))
    few = math.log10(high / low) < 2
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    places = [step * 10.0**power for power in powers for step in (1.0, 2.0, 5.0)]
    below = max(place for place in places if place <= low * (1 + 1e-12))
    above = min(place for place in places if place >= high * (1 - 1e-12) and place > below)
    if not few:
        places = [10.0**power for power in powers]
    places = [place for place in places if below <= place <= above]
    every = math.ceil(len(places) / 6)
    axis = Axis(math.log10(below), math.log10(above), begin, end, is_log=True)
    return axis, [(place, f"{place:g}") for place in places[::every]]


def nice(spacing: float) -> float:
    """Return the next of 1, 2, 5, 10, 20 ... that is not smaller."""
    power = 10.0 ** math.floor(math.log10(max(spacing, 1e-300)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= spacing * 0.999)


def short_number(value: float) -> str:
    """Format with about three digits: `0.0123`, `4.57`, `123`, `12.3k`, `4.5M`; non-finite values by name."""
    if not math.isfinite(value):
        return str(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (limit if unit != 'k' else 1e3):.3g}{unit}"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _within(least: float, value: float) -> float:
    return max(least, min(_VAST, value))


def _written(place: float, spacing: float, highest: float) -> str:
    if abs(place) < spacing / 2:
        return "0"
    digits = max(0, -math.floor(math.log10(spacing) + 1e-9))
    if digits > 4 or (abs(highest) >= 1e4 and spacing >= abs(highest) / 100):
        return short_number(place)
    return f"{place:,.{digits}f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return one line per row, with the first column left-aligned and the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [word.rjust(wide) for word, wide in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines) + "\n"
