"""A timeline as one self-contained SVG: the classic picture of a row per worker, with bars for what it did.

Each window of steps is a panel with its own axis of milliseconds since the run began; what reaches far beyond its steps
is cut at the edge. A step is a pale box around its parts, with a line at its end; in a synchronous run the lines of
all rows meet, which is the barrier. Every bar says its numbers when pointed at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from manyhands.observe.analyse.timeline import Row, Slice, Timeline, Window
from manyhands.observe.draw.axes import nice
from manyhands.observe.draw.paper import svg_line, svg_rect, svg_text
from manyhands.observe.record.events import NO_STEP, NOBODY, EventKind

MAX_SVG_SLICES = 6_000  # steps and parts that a picture holds at most: about 1.5 MB

MAX_SVG_STEPS = 24  # steps that a picture holds at most: more would be too narrow to tell apart

_WIDTH, _LEFT, _RIGHT = 1120, 110, 20
_ROW, _BAR, _LABELS = 44, 24, 14  # heights of a row, of its bars, of the step numbers above them
_HEAD, _AXIS, _SPACE = 30, 34, 18  # heights of a panel's title and axis, and the space between panels
_TITLE, _LEGEND, _GAP = 40, 20, 8  # heights of the title and of a legend line, and the space below it
_BEYOND = 0.25  # share of a panel's steps that is shown before and after them at most
_LETTER = 6.7  # approximate width of one
_MIN_LABEL_PX = 26  # a narrower step gets no number
_TICKS = 8

_DRAWN = (
    *(EventKind.INPUT, EventKind.COMPUTE, EventKind.EXCHANGE, EventKind.WAIT, EventKind.EVALUATE),
    *(EventKind.CHECKPOINT, EventKind.APPLY, EventKind.RECEIVE, EventKind.SEND),
)
_WORDS = {kind: "waiting" if kind is EventKind.WAIT else kind.name.lower() for kind in _DRAWN}
_PEER_WORDS = {
    EventKind.WAIT: "for",
    EventKind.APPLY: "an update of",
    EventKind.RECEIVE: "from",
    EventKind.SEND: "to",
}
_LEGEND_WORDS = {
    "step": "in the step, none of these",
    "arrow": "arrived, and ended a wait",
    "message": "a message",
}
_MARK_WIDTHS = {"arrow": 22, "message": 22}  # kinds drawn as a line in the legend; the others are squares
_MARK_WORDS = {EventKind.JOIN: "joined", EventKind.LEAVE: "left", EventKind.FAULT: "fault"}

_STYLE = files("manyhands.observe.draw").joinpath("timeline.css").read_text()


@dataclass(frozen=True, slots=True)
class _Scale:
    """The mapping from nanoseconds of the run to pixels of one panel, and the panel's upper edge."""

    begin_ns: int
    end_ns: int
    top: float

    def x(self, at_ns: int) -> float:
        inside = _WIDTH - _LEFT - _RIGHT
        return _LEFT + inside * (at_ns - self.begin_ns) / max(1, self.end_ns - self.begin_ns)

    def holds(self, at_ns: int) -> bool:
        return self.begin_ns <= at_ns <= self.end_ns


def timeline_svg(timeline: Timeline, title: str) -> str:
    names = {row.role: row.name for row in timeline.rows}
    height_of_panel = _HEAD + _ROW * len(timeline.rows) + _AXIS
    body: list[str] = []
    legend = list(_legend(timeline))
    top = float(_TITLE + _LEGEND * (1 + max(line for line, _, _ in legend)) + _GAP)
    for window in timeline.windows:
        body += _panel(timeline, window, top, names)
        top += height_of_panel + _SPACE
    faults = [  # which may lie outside every panel
        f"{row.name} at {_ms(mark.end_ns)}{_blame(mark, names)}"
        for row in timeline.rows
        for mark in row.marks
        if mark.kind is EventKind.FAULT
    ]
    more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
    for note in [*timeline.left_out, *([f"faults: {', '.join(faults[:5])}{more}"] if faults else [])]:
        body.append(svg_text(_LEFT, top, note, "faint"))
        top += 16
    height = math.ceil(top + 4)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(title)}">',
        f"<style>\n{_STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" '
        'orient="auto"><path class="tip" d="M0 0 6 3 0 6z"/></marker></defs>',
        f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
        svg_text(_LEFT, 26, title, "title"),
    ]
    for line, x, word in legend:
        y, wide = _TITLE + _LEGEND * line, _MARK_WIDTHS.get(word, 12)
        if word in _MARK_WIDTHS:
            head.append(svg_line(f"{word} key", x, y + 6, x + wide, y + 6))
        else:
            head.append(f'<rect class="{word}" x="{x:g}" y="{y:g}" width="{wide}" height="12" rx="2"/>')
        head.append(svg_text(x + wide + 5, y + 10, _LEGEND_WORDS.get(word, word)))
    return "\n".join([*head, *body, "</svg>", ""])


def _legend(timeline: Timeline) -> Iterator[tuple[int, float, str]]:
    kinds = {part.kind for row in timeline.rows for part in row.slices}
    words = [*(word for kind, word in _WORDS.items() if kind in kinds), "step"]
    words += ["arrow"] if any(not arrow.is_message for arrow in timeline.arrows) else []
    words += ["message"] if any(arrow.is_message for arrow in timeline.arrows) else []
    line, x = 0, float(_LEFT)
    for word in words:
        width = _MARK_WIDTHS.get(word, 12) + 5 + _LETTER * len(_LEGEND_WORDS.get(word, word))
        if x > _LEFT and x + width > _WIDTH - _RIGHT:
            line, x = line + 1, float(_LEFT)
        yield line, x, word
        x += width + 15


def _panel(timeline: Timeline, window: Window, top: float, names: Mapping[int, str]) -> Iterator[str]:
    scale = _scale(timeline, window, top + _HEAD)
    kept = range(window.first_step, window.last_step + 1)
    why = "" if window.label == "all" else f" ({window.label})"
    steps = f"steps {kept[0]} to {kept[-1]}" if len(kept) > 1 else f"step {kept[0]}"
    yield svg_text(_LEFT, top + 14, steps + why, "panel")
    rows = len(timeline.rows)
    bottom = scale.top + _ROW * rows
    spacing_ms = nice(max(1e-6, (scale.end_ns - scale.begin_ns) / 1e6 / _TICKS))
    digits = max(0, -math.floor(math.log10(spacing_ms)))
    tick = math.ceil(scale.begin_ns / 1e6 / spacing_ms)
    while tick * spacing_ms * 1e6 <= scale.end_ns:
        x = scale.x(round(tick * spacing_ms * 1e6))
        yield svg_line("line", x, scale.top, x, bottom + 4)
        yield svg_text(x, bottom + 17, f"{tick * spacing_ms:,.{digits}f}", "faint", "middle")
        tick += 1
    yield svg_text(_LEFT - 34, bottom + 17, "ms", "faint", "end")
    places = {row.role: scale.top + _ROW * index + _LABELS for index, row in enumerate(timeline.rows)}
    for row in timeline.rows:
        y = places[row.role]
        yield svg_text(_LEFT - 10, y + _BAR / 2 + 4, row.name, "", "end")
        ends = []
        for step in row.steps:
            if step.step in kept:
                left, right = scale.x(step.start_ns), scale.x(step.end_ns)
                loss = f", loss {step.value:.4g}" if math.isfinite(step.value) else ""
                said = f"{row.name}, step {step.step}: {_ms(step.end_ns - step.start_ns)}{loss}"
                yield svg_rect("step", left, y - 2, right - left, _BAR + 4, said)
                if right - left >= _MIN_LABEL_PX:
                    yield svg_text((left + right) / 2, y - 5, str(step.step), "faint", "middle")
                ends.append(right)
        yield from (
            _bar(part, row, names, scale, y)
            for part in row.slices
            if part.start_ns < scale.end_ns and part.end_ns > scale.begin_ns
        )
        yield from (svg_line("end", x, y - 6, x, y + _BAR + 6) for x in ends)
        for mark in row.marks:
            if scale.holds(mark.end_ns):
                x, kind = scale.x(mark.end_ns), "mark fault" if mark.kind is EventKind.FAULT else "mark"
                said = f"{row.name} {_MARK_WORDS[mark.kind]} at {_ms(mark.end_ns)}{_blame(mark, names)}"
                yield svg_line(kind, x, y - 6, x, y + _BAR + 6, said)
    for arrow in timeline.arrows:
        if scale.holds(arrow.source_ns) and scale.holds(arrow.target_ns):
            source, target = names[arrow.source], names[arrow.target]
            down = places[arrow.target] > places[arrow.source]
            y1 = places[arrow.source] + (_BAR if down else 0)
            y2 = places[arrow.target] + (0 if down else _BAR)
            said = f"step {arrow.step}: {source} arrived, {target} continued"
            if arrow.is_message:
                said = f"{source} to {target}: {arrow.num_bytes:,} bytes"
            kind = "message" if arrow.is_message else "arrow"
            yield svg_line(kind, scale.x(arrow.source_ns), y1, scale.x(arrow.target_ns), y2, said)


def _scale(timeline: Timeline, window: Window, top: float) -> _Scale:
    """From the first to the last step of the window, with what belongs to them or follows at once, up to a bound.

    Only rows with steps count: what a server calls a step may be a number of another kind.
    """
    with_steps = [row for row in timeline.rows if row.steps]
    parts = [part for row in with_steps for part in row.slices if _is_in(part, window)]
    inner = [step for row in with_steps for step in row.steps if _is_in(step, window)] or [
        part for row in timeline.rows for part in row.slices if _is_in(part, window)
    ]
    begin, end = min(span.start_ns for span in inner), max(span.end_ns for span in inner)
    beyond = round(_BEYOND * (end - begin))
    leaves = [mark.end_ns for row in timeline.rows for mark in row.marks if end < mark.end_ns <= end + beyond]
    return _Scale(
        max(begin - beyond, min([begin, *(part.start_ns for part in parts)])),
        min(end + beyond, max([end, *(part.end_ns for part in parts), *leaves])),
        top,
    )


def _is_in(span: Slice, window: Window) -> bool:
    return window.first_step <= span.step <= window.last_step


def _bar(part: Slice, row: Row, names: Mapping[int, str], scale: _Scale, y: float) -> str:
    left, right = scale.x(max(part.start_ns, scale.begin_ns)), scale.x(min(part.end_ns, scale.end_ns))
    word = _WORDS[part.kind]
    peer = ""
    if part.kind in _PEER_WORDS and part.peer != NOBODY:
        peer = f" {_PEER_WORDS[part.kind]} {names.get(part.peer, part.peer)}"
    size = f", {part.num_bytes:,} bytes" if part.num_bytes else ""
    step = f", step {part.step}" if part.step != NO_STEP else ""
    said = f"{row.name}{step}: {word}{peer} {_ms(part.end_ns - part.start_ns)}{size}"
    return svg_rect(word, left, y, max(0.4, right - left), _BAR, said)


def _blame(mark: Slice, names: Mapping[int, str]) -> str:
    blamed = mark.kind is EventKind.FAULT and mark.peer != NOBODY
    return f" because of {names.get(mark.peer, mark.peer)}" if blamed else ""


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:,.3f} ms"
