"""Charts as SVG and tables as HTML: pure functions from numbers to text, the same for every view of a run.

All are 360 units wide and readable at that many pixels. A chart says its key numbers in words (`aria-label`),
and single values when pointed at (`<title>`). Every text is escaped; equal numbers give equal bytes. The
colours and the page around a chart are those of `paper`, which this module passes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from manyhands.draw.paper import NUM_COLOURS, NUM_DASHES, NUM_HEATS, STYLE, document, quiet, section

__all__ = [
    "STYLE",
    "Series",
    "bar_chart",
    "data_table",
    "document",
    "histogram",
    "line_chart",
    "matrix",
    "quiet",
    "section",
    "share_bars",
    "short_number",
]

_WIDTH, _HEIGHT = 360.0, 190.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 10.0, 8.0, 34.0
_ROW, _NAME = 22.0, 78.0  # of a horizontal bar: its height, the width of the names
_NAME_LETTERS = 13
_MAX_POINTS = 400  # of a curve; more would be narrower than a pixel
_MAX_SPOTS = 40  # of a curve that say their numbers when pointed at
_MAX_BINS = 24


_VAST, _TINY = 1e300, 1e-290  # beyond and below these, differences of numbers are none


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One named curve; points where either number is not finite are left out, and the curve has a gap there."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True, slots=True)
class _Axis:
    """From numbers to units of the picture; on a logarithmic axis the numbers are powers of ten already."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        value = math.log10(_within(_TINY, value)) if self.is_log else _within(-_VAST, value)
        return self.begin + (self.end - self.begin) * (value - self.low) / (self.high - self.low)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_y: bool = False,
    from_zero: bool = False,
) -> str:
    """Curves over one pair of axes, with a legend where there is more than one.

    With `log_y` values that are not positive are left out. `from_zero` begins the upward axis at 0.
    """
    shown = [(one.name, _gaps(one, log_y)) for one in series]
    points = [point for _, runs in shown for run in runs for point in run]
    xs, x_ticks = _linear([x for x, _ in points], _LEFT, _WIDTH - _RIGHT, 5, tight=True)
    upward = [y for _, y in points]
    if log_y:
        ys, y_ticks = _logarithmic(upward, _HEIGHT - _BOTTOM, _TOP)
    else:
        ys, y_ticks = _linear([0.0, *upward] if from_zero else upward, _HEIGHT - _BOTTOM, _TOP, 5)
    drawn = [*_frame(xs, x_ticks, ys, y_ticks, x_label, y_label)]
    for index, (name, runs) in enumerate(shown):
        drawn += _curve(index, name, runs, xs, ys, (x_label, y_label))
    if not points:
        drawn.append(_text(_WIDTH / 2, _HEIGHT / 2, "nothing yet", "label", "middle"))
    said = f"{title}: {y_label} over {x_label}; " + _in_words(shown, x_label)
    return _figure(title, _svg(drawn, _HEIGHT, said), _legend([one.name for one in series], lines=True))


def bar_chart(
    bars: Sequence[tuple[str, float]],
    *,
    title: str,
    show: Callable[[float], str] | None = None,
) -> str:
    """One bar to the right for each name, with its number as `show` writes it."""
    show = show or short_number
    finite = [value for _, value in bars if math.isfinite(value)]
    axis = _Axis(0.0, max([*finite, 0.0]) or 1.0, _NAME, _WIDTH - 62)
    drawn: list[str] = []
    for index, (name, value) in enumerate(bars):
        y = index * _ROW
        drawn.append(_row_name(name, y))
        end = axis.at(max(0.0, value)) if math.isfinite(value) else axis.begin
        drawn.append(_rect("f0", axis.begin, y + 3, end - axis.begin, _ROW - 6, f"{name}: {show(value)}"))
        drawn.append(_text(end + 5, y + _ROW / 2 + 4, show(value)))
    said = f"{title}: " + (", ".join(f"{name} {show(value)}" for name, value in bars) or "nothing yet")
    return _figure(title, _svg(drawn, max(_ROW, _ROW * len(bars)), said, "chart rows"))


def share_bars(
    rows: Sequence[tuple[str, Sequence[float]]],
    parts: Sequence[str],
    *,
    title: str,
    colours: Sequence[int] | None = None,
) -> str:
    """For each name one bar of shares (0 to 1, in the order of `parts`), with the percentages that have room."""
    colours = colours or range(len(parts))
    axis = _Axis(0.0, 1.0, _NAME, _WIDTH - 4)
    drawn: list[str] = []
    for index, (name, shares) in enumerate(rows):
        y, before = index * _ROW, 0.0
        drawn.append(_row_name(name, y))
        drawn.append(_rect("track", axis.begin, y + 3, axis.end - axis.begin, _ROW - 6))
        for part, share, colour in zip(parts, shares, colours, strict=True):
            share = min(1.0 - before, max(0.0, share)) if math.isfinite(share) else 0.0
            left, right = axis.at(before), axis.at(before + share)
            before += share
            if share <= 0:
                continue
            said = f"{name}: {part} {share:.0%}".replace("%", " %")
            drawn.append(_rect(f"f{colour % NUM_COLOURS}", left, y + 3, right - left, _ROW - 6, said))
            if right - left >= 30:
                percent = f"{100 * share:.0f} %"
                drawn.append(_text((left + right) / 2, y + _ROW / 2 + 3.5, percent, "on", "middle"))
    said = f"{title}: " + (
        "; ".join(_shares_in_words(name, shares, parts) for name, shares in rows) or "none yet"
    )
    svg = _svg(drawn, max(_ROW, _ROW * len(rows)), said, "chart rows")
    return _figure(title, svg, _legend(parts, lines=False, colours=colours))


def histogram(counts: Mapping[int, int], *, title: str, x_label: str, y_label: str) -> str:
    """How often each whole number came; where they spread wide, neighbours share a bar."""
    low, high = min(counts, default=0), max(counts, default=0)
    width = max(1, math.ceil((high - low + 1) / _MAX_BINS))
    bins: dict[int, int] = {}
    for value, count in counts.items():
        bins[(value - low) // width] = bins.get((value - low) // width, 0) + count
    num_bins = max(4, (high - low) // width + 1)
    ys, y_ticks = _linear([0.0, *map(float, bins.values())], _HEIGHT - _BOTTOM, _TOP, 4)
    xs = _Axis(0.0, float(num_bins), _LEFT, _WIDTH - _RIGHT)
    drawn = [*_frame(xs, [], ys, y_ticks, x_label, y_label)]
    every = math.ceil(num_bins / 12)
    for index in range(num_bins):
        first = low + index * width
        name = str(first) if width == 1 else f"{first} to {first + width - 1}"
        left, right, top = xs.at(index + 0.1), xs.at(index + 0.9), ys.at(bins.get(index, 0))
        if bins.get(index, 0):
            drawn.append(_rect("f0", left, top, right - left, ys.begin - top, f"{name}: {bins[index]:,}"))
        if index % every == 0:
            drawn.append(_text((left + right) / 2, ys.begin + 14, str(first), "tick", "middle"))
    total = sum(counts.values())
    mean = sum(value * count for value, count in counts.items()) / total if total else 0.0
    said = (
        f"{title}: {total:,} in all, from {low} to {high}, mean {mean:.2f}"
        if total
        else f"{title}: nothing yet"
    )
    return _figure(title, _svg(drawn, _HEIGHT, said))


def matrix(
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    corner: str = "",
    show: Callable[[float], str] | None = None,
    scrolls: bool = True,
) -> str:
    """Numbers as a table whose cells are the stronger coloured the greater they are; 0 is a quiet dot.

    Where it `scrolls` it is a region of its own that the keyboard reaches.
    """
    show = show or short_number
    greatest = max((abs(v) for row in values for v in row if math.isfinite(v)), default=0.0) or 1.0
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = ""
    for name, row in zip(rows, values, strict=True):
        cells = "".join(_cell(value, greatest, show) for value in row)
        body += f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'
    return _scroll(
        title,
        f'<table class="heat"><caption>{escape(title)}</caption><thead><tr>'
        f'<th scope="col" class="corner">{escape(corner)}</th>{head}</tr></thead><tbody>{body}</tbody></table>',
        scrolls,
    )


def data_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str,
    words: Sequence[int] = (0,),
    scrolls: bool = True,
) -> str:
    """Rows of text under their columns; those of `words` are read from the left, the others are numbers.

    Where it `scrolls` it is a region of its own that the keyboard reaches.
    """
    kinds = ["" if index in words else ' class="number"' for index in range(len(columns))]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(columns, kinds, strict=True)
    )
    body = ""
    for first, *others in rows:
        cells = "".join(
            f"<td{kind}>{escape(text)}</td>" for text, kind in zip(others, kinds[1:], strict=True)
        )
        body += f'<tr><th scope="row"{kinds[0]}>{escape(first)}</th>{cells}</tr>'
    return _scroll(
        title,
        f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
        scrolls,
    )


def short_number(value: float) -> str:
    """About three digits: `0.0123`, `4.57`, `123`, `12.3k`, `4.5M`; anything not finite as its name."""
    if not math.isfinite(value):
        return str(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (limit if unit != 'k' else 1e3):.3g}{unit}"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _gaps(series: Series, positive: bool) -> list[list[tuple[float, float]]]:
    """The points that can be drawn, parted where some cannot."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(series.xs, series.ys, strict=True):
        if math.isfinite(x) and math.isfinite(y) and (y > 0 or not positive):
            runs[-1].append((float(x), float(y)))
        elif runs[-1]:
            runs.append([])
    most = max(2, _MAX_POINTS // len(runs))
    return [_thinned(run, most) for run in runs if run]


def _thinned(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most `most` points: the first, the last, and the lowest and highest of each stretch between."""
    if len(points) <= most:
        return points
    inner, stretches = points[1:-1], max(1, most // 2 - 1)
    kept = [points[0]]
    for index in range(stretches):
        stretch = inner[index * len(inner) // stretches : (index + 1) * len(inner) // stretches]
        if stretch:
            low, high = (pick(stretch, key=lambda point: point[1]) for pick in (min, max))
            kept += [low] if low == high else sorted((low, high))
    return [*kept, points[-1]]


def _curve(
    index: int,
    name: str,
    runs: list[list[tuple[float, float]]],
    xs: _Axis,
    ys: _Axis,
    labels: tuple[str, str],
) -> Iterator[str]:
    x_label, y_label = labels
    path = " ".join(
        "M" + " ".join(f"{xs.at(x):.1f},{ys.at(y):.1f}" for x, y in run) + ("h0" if len(run) == 1 else "")
        for run in runs
    )
    if not path:
        return
    yield f'<path class="curve {_series(index)}" d="{path}"><title>{escape(name)}</title></path>'
    points = [point for run in runs for point in run]
    last_x, last_y = points[-1]
    yield f'<circle class="f{index % NUM_COLOURS}" cx="{xs.at(last_x):.1f}" cy="{ys.at(last_y):.1f}" r="2.6"/>'
    every = math.ceil(len(points) / _MAX_SPOTS)
    for x, y in points[::-1][::every]:
        said = f"{name}: {y_label} {short_number(y)} at {x_label} {short_number(x)}"
        yield (
            f'<circle class="spot" cx="{xs.at(x):.1f}" cy="{ys.at(y):.1f}" r="4">'
            f"<title>{escape(said)}</title></circle>"
        )


def _in_words(shown: Sequence[tuple[str, list[list[tuple[float, float]]]]], x_label: str) -> str:
    said = []
    for name, runs in shown:
        points = [point for run in runs for point in run]
        if points:
            (first_x, first_y), (last_x, last_y) = points[0], points[-1]
            said.append(
                f"{name} from {short_number(first_y)} at {x_label} {short_number(first_x)} "
                f"to {short_number(last_y)} at {short_number(last_x)}"
            )
    return "; ".join(said) or "nothing yet"


def _linear(
    values: Sequence[float], begin: float, end: float, ticks: int, *, tight: bool = False
) -> tuple[_Axis, list[tuple[float, str]]]:
    """An axis that holds `values`, and its ticks; it ends at ticks unless it is `tight`."""
    low, high = _within(-_VAST, min(values, default=0.0)), _within(-_VAST, max(values, default=1.0))
    if tight and 0 < low <= 0.12 * high:
        low = 0.0  # what begins that early reads better from the beginning
    if high - low <= max(_TINY, 1e-12 * max(abs(high), abs(low))):
        margin = max(_TINY, abs(high) / 2) if high else 1.0
        low, high = (0.0 if 0 <= low <= margin else low - margin), high + margin
    spacing = _nice((high - low) / ticks)
    first, last = math.floor(low / spacing + 1e-9), math.ceil(high / spacing - 1e-9)
    if not tight:
        low, high = first * spacing, last * spacing
    places = [
        n * spacing
        for n in range(first, last + 1)
        if low - 1e-9 * spacing <= n * spacing <= high + 1e-9 * spacing
    ]
    return _Axis(low, high, begin, end), [(place, _tick(place, spacing, high)) for place in places]


def _logarithmic(values: Sequence[float], begin: float, end: float) -> tuple[_Axis, list[tuple[float, str]]]:
    """A logarithmic axis from power to power of ten, or from 1, 2, 5 to 1, 2, 5 where it spans little."""
    low, high = _within(_TINY, min(values, default=0.1)), _within(_TINY, max(values, default=1.0))
    few = math.log10(high / low) < 2
    steps = (1.0, 2.0, 5.0) if few else (1.0,)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    places = [step * 10.0**power for power in powers for step in steps]
    below = max(place for place in places if place <= low * (1 + 1e-12))
    above = min(place for place in places if place >= high * (1 - 1e-12) and place > below)
    places = [place for place in places if below <= place <= above]
    every = math.ceil(len(places) / 6)
    axis = _Axis(math.log10(below), math.log10(above), begin, end, is_log=True)
    return axis, [(place, f"{place:g}") for place in places[::every]]


def _within(least: float, value: float) -> float:
    """The number nearest to `value` that a picture can be reckoned with."""
    return max(least, min(_VAST, value))


def _nice(spacing: float) -> float:
    """The next of 1, 2, 5, 10, 20 ... that is no smaller."""
    power = 10.0 ** math.floor(math.log10(max(spacing, 1e-300)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= spacing * 0.999)


def _tick(place: float, spacing: float, highest: float) -> str:
    """The number of a tick, with the digits that tell it from the next."""
    if abs(place) < spacing / 2:
        return "0"
    digits = max(0, -math.floor(math.log10(spacing) + 1e-9))
    if digits > 4 or (abs(highest) >= 1e4 and spacing >= abs(highest) / 100):
        return short_number(place)
    return f"{place:,.{digits}f}"


def _frame(
    xs: _Axis,
    x_ticks: Sequence[tuple[float, str]],
    ys: _Axis,
    y_ticks: Sequence[tuple[float, str]],
    x_label: str,
    y_label: str,
) -> Iterator[str]:
    for place, said in y_ticks:
        y = ys.at(place)
        yield f'<line class="grid" x1="{xs.begin:g}" y1="{y:.1f}" x2="{xs.end:g}" y2="{y:.1f}"/>'
        yield _text(xs.begin - 5, y + 3.5, said, "tick y", "end")
    for place, said in x_ticks:
        x = xs.at(place)
        yield f'<line class="axis" x1="{x:.1f}" y1="{ys.begin:g}" x2="{x:.1f}" y2="{ys.begin + 3:g}"/>'
        yield _text(min(x, _WIDTH - 3.2 * len(said)), ys.begin + 14, said, "tick x", "middle")
    yield f'<line class="axis" x1="{xs.begin:g}" y1="{ys.begin:g}" x2="{xs.end:g}" y2="{ys.begin:g}"/>'
    yield _text((xs.begin + xs.end) / 2, _HEIGHT - 5, x_label, "label", "middle")
    middle = (ys.begin + ys.end) / 2
    yield (
        f'<text class="label" x="8" y="{middle:g}" text-anchor="middle" transform="rotate(-90 8 {middle:g})">'
        f"{escape(y_label)}</text>"
    )


def _legend(names: Sequence[str], *, lines: bool, colours: Sequence[int] | None = None) -> str:
    if len(names) < 2:
        return ""
    items = ""
    for index, name in enumerate(names):
        colour = (colours[index] if colours else index) % NUM_COLOURS
        mark = (
            f'<line class="curve {_series(index)}" x1="1" y1="5" x2="25" y2="5"/>'
            if lines
            else f'<rect class="f{colour}" x="7" y="0" width="12" height="10" rx="2"/>'
        )
        items += f'<li><svg viewBox="0 0 26 10" aria-hidden="true">{mark}</svg>{escape(name)}</li>'
    return f'<ul class="legend">{items}</ul>'


def _shares_in_words(name: str, shares: Sequence[float], parts: Sequence[str]) -> str:
    return f"{name} " + ", ".join(
        f"{part} {100 * share:.0f} %" for part, share in zip(parts, shares, strict=True)
    )


def _cell(value: float, greatest: float, show: Callable[[float], str]) -> str:
    if value == 0 or not math.isfinite(value):
        return f'<td class="quiet">{"·" if value == 0 else escape(show(value))}</td>'
    heat = min(NUM_HEATS - 1, max(1, round((NUM_HEATS - 1) * (abs(value) / greatest))))
    return f'<td class="h{heat}">{escape(show(value))}</td>'


def _series(index: int) -> str:
    return f"s{index % NUM_COLOURS} d{index % NUM_DASHES}"


def _row_name(name: str, y: float) -> str:
    short = name if len(name) <= _NAME_LETTERS else name[: _NAME_LETTERS - 1] + "…"
    return (
        f'<text x="{_NAME - 7:g}" y="{y + _ROW / 2 + 4:g}" text-anchor="end">{escape(short)}'
        f"<title>{escape(name)}</title></text>"
    )


def _rect(kind: str, x: float, y: float, width: float, height: float, said: str = "") -> str:
    inside = f"<title>{escape(said)}</title>" if said else ""
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}">{inside}</rect>'
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(drawn: Iterable[str], height: float, said: str, kind: str = "chart") -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" viewBox="0 0 {_WIDTH:g} {height:g}" role="img" '
        f'aria-label="{escape(said)}">' + "".join(drawn) + "</svg>"
    )


def _figure(title: str, svg: str, legend: str = "") -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{legend}{svg}</figure>"


def _scroll(title: str, table: str, scrolls: bool) -> str:
    if not scrolls:
        return table
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">{table}</div>'
