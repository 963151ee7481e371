"""Charts as SVG and tables as HTML: pure functions from numbers to text, the same for every view of a run.

All are 360 units wide. A chart says its key numbers in words (`aria-label`), and single values when pointed at
(`<title>`). Every text is escaped; equal numbers give equal bytes.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from manyhands.observe.draw import paper
from manyhands.observe.draw.axes import Axis, Tick, linear, logarithmic, short_number, spans_powers

_WIDTH, _HEIGHT = 360.0, 190.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 10.0, 8.0, 34.0
_ROW, _NAME = 22.0, 78.0  # a horizontal bar: its height, and the width of the names
_NAME_LETTERS = 13
_MAX_POINTS = 400  # points per curve; more would be narrower than a pixel
_MAX_SPOTS = 40  # points per curve that show their values on hover
_MAX_BINS = 24
_STRIPE = 7  # stripe length of curves that overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One named curve; points where either number is not finite are left out, which leaves a gap."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    note: str = ""  # what the paper.legend says beside the name
    dots: Sequence[tuple[float, float]] = ()
    """Points that are drawn by themselves, in the colour of the curve."""


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = False,
    empty: str = "Nothing yet.",
) -> str:
    """Curves over one pair of axes, with a paper.legend; those that lie on one another are striped, and said to.

    On a logarithmic axis values that are not positive are left out. Without any point the picture says `empty`.
    """
    shown = [(one.name, _gaps(one, log_x, log_y)) for one in series]
    points = [point for _, runs in shown for run in runs for point in run]
    if not points:
        return _nothing(title, empty)
    points += [dot for one in series for dot in one.dots]
    across = [x for x, _ in points]
    if log_x:
        xs, x_ticks = logarithmic(across, _LEFT, _WIDTH - _RIGHT)
    else:
        xs, x_ticks = linear(across, _LEFT, _WIDTH - _RIGHT, 5, tight=True)
    upward = [y for _, y in points]
    if log_y:
        ys, y_ticks = logarithmic(upward, _HEIGHT - _BOTTOM, _TOP)
    else:
        ys, y_ticks = linear([0.0, *upward] if from_zero else upward, _HEIGHT - _BOTTOM, _TOP, 5)
    labels = [
        f"{label}, log scale" if is_log else label for label, is_log in ((x_label, log_x), (y_label, log_y))
    ]
    drawn = [*_frame(xs, x_ticks, ys, y_ticks, *labels)]
    for index, one in enumerate(series):
        drawn += [
            f'<circle class="f{index % paper.NUM_COLOURS}" cx="{xs.at(x):.1f}" cy="{ys.at(y):.1f}" r="1.3" '
            'opacity=".5"/>'
            for x, y in one.dots[:: math.ceil(len(one.dots) / _MAX_POINTS) or 1]
        ]
    groups = overlapping([[(xs.at(x), ys.at(y)) for run in runs for x, y in run] for _, runs in shown])
    for index, (name, runs) in enumerate(shown):
        drawn += _curve(index, name, runs, (xs, ys), _stroke(index, groups), (x_label, y_label))
    names_of = [[shown[index][0] for index in group] for group in groups]
    together = "; ".join(f"{', '.join(names[:-1])} and {names[-1]} overlap" for names in names_of)
    words = [f"{title}: {y_label} over {x_label}", _in_words(shown, x_label)] + [together] * bool(together)
    svg = paper.svg_chart(drawn, _WIDTH, _HEIGHT, "; ".join(words)) + (
        paper.quiet(f"{together}.") if together else ""
    )
    names = [f"{one.name} {one.note}".strip() for one in series]
    marks = [paper.line_mark(_stroke(index, groups, striped=False)) for index in range(len(series))]
    return paper.figure(title, svg, paper.legend(names, marks), "plot")


def loss_chart(series: Sequence[Series], *, title: str, x_label: str, empty: str = "Nothing yet.") -> str:
    """Draw losses by the rule of all pages: a logarithmic axis where they span a power of ten, else a linear one."""
    log_y = spans_powers(value for one in series for value in one.ys)
    return line_chart(series, title=title, x_label=x_label, y_label="loss", log_y=log_y, empty=empty)


def bar_chart(
    bars: Sequence[tuple[str, float]], *, title: str, show: Callable[[float], str] | None = None
) -> str:
    show = show or short_number
    finite = [value for _, value in bars if math.isfinite(value)]
    axis = Axis(0.0, max([*finite, 0.0]) or 1.0, _NAME, _WIDTH - 62)
    drawn: list[str] = []
    for index, (name, value) in enumerate(bars):
        y = index * _ROW
        drawn.append(paper.svg_text(_NAME - 7, y + _ROW / 2 + 4, name, "", "end", _NAME_LETTERS))
        end = axis.at(max(0.0, value)) if math.isfinite(value) else axis.begin
        drawn.append(
            paper.svg_rect("f0", axis.begin, y + 3, end - axis.begin, _ROW - 6, f"{name}: {show(value)}")
        )
        drawn.append(paper.svg_text(end + 5, y + _ROW / 2 + 4, show(value)))
    said = f"{title}: " + (", ".join(f"{name} {show(value)}" for name, value in bars) or "nothing yet")
    return paper.figure(
        title, paper.svg_chart(drawn, _WIDTH, max(_ROW, _ROW * len(bars)), said, "chart rows")
    )


def share_bars(
    rows: Sequence[tuple[str, Sequence[float]]],
    parts: Sequence[str],
    *,
    title: str,
    colours: Sequence[int] | None = None,
) -> str:
    """Draw one stacked bar of shares (0 to 1, in the order of `parts`) per name, with the percentages that fit."""
    colours = colours or range(len(parts))
    axis = Axis(0.0, 1.0, _NAME, _WIDTH - 4)
    drawn: list[str] = []
    for index, (name, shares) in enumerate(rows):
        y, before = index * _ROW, 0.0
        drawn.append(paper.svg_text(_NAME - 7, y + _ROW / 2 + 4, name, "", "end", _NAME_LETTERS))
        drawn.append(paper.svg_rect("track", axis.begin, y + 3, axis.end - axis.begin, _ROW - 6))
        for part, share, colour in zip(parts, shares, colours, strict=True):
            share = min(1.0 - before, max(0.0, share)) if math.isfinite(share) else 0.0
            left, right = axis.at(before), axis.at(before + share)
            before += share
            if share <= 0:
                continue
            said = f"{name}: {part} {share:.0%}".replace("%", " %")
            drawn.append(
                paper.svg_rect(f"f{colour % paper.NUM_COLOURS}", left, y + 3, right - left, _ROW - 6, said)
            )
            if right - left >= 30:
                percent = f"{100 * share:.0f} %"
                drawn.append(paper.svg_text((left + right) / 2, y + _ROW / 2 + 3.5, percent, "on", "middle"))
    each = [
        ", ".join(f"{part} {100 * share:.0f} %" for part, share in zip(parts, shares, strict=True))
        for _, shares in rows
    ]
    words = "; ".join(f"{name} {one}" for (name, _), one in zip(rows, each, strict=True))
    said = f"{title}: {words or 'none yet'}"
    svg = paper.svg_chart(drawn, _WIDTH, max(_ROW, _ROW * len(rows)), said, "chart rows")
    swatches = [
        '<svg class="swatch" viewBox="0 0 12 10" aria-hidden="true">'
        f'<rect class="f{colour % paper.NUM_COLOURS}" width="12" height="10" rx="2"/></svg>'
        for colour in colours
    ]
    return paper.figure(title, svg, paper.legend(parts, swatches))


def histogram(
    counts: Mapping[int, int], *, title: str, x_label: str, y_label: str, empty: str = "Nothing yet."
) -> str:
    if not counts:
        return _nothing(title, empty)
    low, high = min(counts), max(counts)
    width = max(1, math.ceil((high - low + 1) / _MAX_BINS))
    bins: dict[int, int] = {}
    for value, count in counts.items():
        bins[(value - low) // width] = bins.get((value - low) // width, 0) + count
    num_bins = max(4, (high - low) // width + 1)
    ys, y_ticks = linear([0.0, *map(float, bins.values())], _HEIGHT - _BOTTOM, _TOP, 4)
    xs = Axis(0.0, float(num_bins), _LEFT, _WIDTH - _RIGHT)
    drawn = [*_frame(xs, [], ys, y_ticks, x_label, y_label)]
    every = math.ceil(num_bins / 12)
    for index in range(num_bins):
        first = low + index * width
        name = str(first) if width == 1 else f"{first} to {first + width - 1}"
        left, right, top = xs.at(index + 0.1), xs.at(index + 0.9), ys.at(bins.get(index, 0))
        if bins.get(index, 0):
            drawn.append(
                paper.svg_rect("f0", left, top, right - left, ys.begin - top, f"{name}: {bins[index]:,}")
            )
        if index % every == 0:
            drawn.append(paper.svg_text((left + right) / 2, ys.begin + 14, str(first), "tick", "middle"))
    total = sum(counts.values())
    mean = sum(value * count for value, count in counts.items()) / max(1, total)
    said = f"{title}: {total:,} in all, from {low} to {high}, mean {mean:.2f}"
    return paper.figure(title, paper.svg_chart(drawn, _WIDTH, _HEIGHT, said), paper.legend((), ()), "plot")


def _gaps(series: Series, positive_x: bool, positive_y: bool) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(series.xs, series.ys, strict=True):
        is_drawn = (x > 0 or not positive_x) and (y > 0 or not positive_y)
        if math.isfinite(x) and math.isfinite(y) and is_drawn:
            runs[-1].append((float(x), float(y)))
        elif runs[-1]:
            runs.append([])
    most = max(2, _MAX_POINTS // len(runs))
    return [_thinned(run, most) for run in runs if run]


def _thinned(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most `most` points: the first, the last, and the extremes of each interval between."""
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


def _nothing(title: str, sentence: str) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    drawn = [
        f'<path class="axis" fill="none" d="M{_LEFT:g},{_TOP:g} {_LEFT:g},{bottom:g} {right:g},{bottom:g}"/>',
        paper.svg_text((_LEFT + right) / 2, (_TOP + bottom) / 2, sentence, "none", "middle"),
    ]
    return paper.figure(
        title, paper.svg_chart(drawn, _WIDTH, _HEIGHT, f"{title}: {sentence}"), paper.legend((), ()), "plot"
    )


def _stroke(index: int, groups: Sequence[tuple[int, ...]], *, striped: bool = True) -> str:
    """The attributes of a curve's line: its colour and dash, or, where `striped`, its stripes of what it shares."""
    colour = f"s{index % paper.NUM_COLOURS}"
    for group in groups:
        if index in group:
            if not striped:
                return f'class="curve {colour}"'
            place, others = group.index(index), len(group) - 1
            dashes = f'stroke-dasharray="{_STRIPE} {_STRIPE * others}" stroke-dashoffset="{-_STRIPE * place}"'
            return f'class="curve striped {colour}" {dashes}'
    return f'class="curve {colour} d{index % paper.NUM_DASHES}"'


def _curve(
    index: int,
    name: str,
    runs: list[list[tuple[float, float]]],
    axes: tuple[Axis, Axis],
    stroke: str,
    labels: tuple[str, str],
) -> Iterator[str]:
    (xs, ys), (x_label, y_label) = axes, labels
    path = " ".join(
        "M" + " ".join(f"{xs.at(x):.1f},{ys.at(y):.1f}" for x, y in run) + ("h0" if len(run) == 1 else "")
        for run in runs
    )
    if not path:
        return
    yield f'<path {stroke} d="{path}"><title>{escape(name)}</title></path>'
    points = [point for run in runs for point in run]
    last_x, last_y = points[-1]
    yield f'<circle class="f{index % paper.NUM_COLOURS}" cx="{xs.at(last_x):.1f}" cy="{ys.at(last_y):.1f}" r="2.6"/>'
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


def _frame(
    xs: Axis, x_ticks: Sequence[Tick], ys: Axis, y_ticks: Sequence[Tick], x_label: str, y_label: str
) -> Iterator[str]:
    for place, said in y_ticks:
        y = ys.at(place)
        yield paper.svg_line("grid", xs.begin, y, xs.end, y)
        yield paper.svg_text(xs.begin - 5, y + 3.5, said, "tick y", "end")
    for place, said in x_ticks:
        x = xs.at(place)
        yield paper.svg_line("axis", x, ys.begin, x, ys.begin + 3)
        yield paper.svg_text(min(x, _WIDTH - 3.2 * len(said)), ys.begin + 14, said, "tick x", "middle")
    yield paper.svg_line("axis", xs.begin, ys.begin, xs.end, ys.begin)
    yield paper.svg_text((xs.begin + xs.end) / 2, _HEIGHT - 5, x_label, "label", "middle")
    middle = (ys.begin + ys.end) / 2
    yield (
        f'<text class="label" x="8" y="{middle:g}" text-anchor="middle" transform="rotate(-90 8 {middle:g})">'
        f"{escape(y_label)}</text>"
    )


_NEAR = 1.5  # distance in picture units below which a stroke hides another
_SAMPLES = 48
_ALIKE = 0.95  # share of the samples that must be near
_SHARED = 0.9  # share of a curve's width that must overlap with the other

Points = Sequence[tuple[float, float]]


def overlapping(curves: Sequence[Points]) -> list[tuple[int, ...]]:
    """Return groups of two or more curves, by number, that nearly coincide in units of the picture."""
    groups: list[tuple[int, ...]] = []
    free = [number for number, points in enumerate(curves) if points]
    while free:
        first, *others = free
        alike = [other for other in others if _are_alike(curves[first], curves[other])]
        if alike:
            groups.append((first, *alike))
        free = [other for other in others if other not in alike]
    return groups


def _are_alike(one: Points, other: Points) -> bool:
    begin, end = max(one[0][0], other[0][0]), min(one[-1][0], other[-1][0])
    widest = max(points[-1][0] - points[0][0] for points in (one, other))
    if end - begin < _SHARED * widest:
        return False
    places = [begin + (end - begin) * n / (_SAMPLES - 1) for n in range(_SAMPLES)]
    near = sum(abs(_height(one, x) - _height(other, x)) <= _NEAR for x in places)
    return near >= _ALIKE * _SAMPLES


def _height(points: Points, x: float) -> float:
    right = bisect.bisect_left(points, x, key=lambda point: point[0])
    if right == 0 or right == len(points):
        return points[min(right, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
