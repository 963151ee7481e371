"""Pictures of a pipeline's schedule: a row for each stage, a column for each tick, as text and as SVG.

`python -m manyhands.strategies.pipeline.schedule_drawing` prints the schedules of four stages; with `docs`
behind it, writes them into the documentation (`pipeline.md` and `figures/`).

`F3` is the forward of micro-batch 3, `B3` its backward and `W3` its weight gradient; where a stage has several parts,
`F3a` is that of the first and `F3b` that of the second. In the SVG the letters stand in boxes of three colours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final

from manyhands.errors import format_bytes
from manyhands.observe.draw.axes import aligned
from manyhands.strategies.common.collectives.collective_drawing import write_figures
from manyhands.strategies.pipeline.schedule_cost import Boundary, PipelineCost
from manyhands.strategies.pipeline.schedules import SCHEDULES, Pass, Schedule, StageWork
from manyhands.strategies.pipeline.strategy import Pipeline

LETTERS: Final = {Pass.FORWARD: "F", Pass.BACKWARD: "B", Pass.WEIGHTS: "W"}
"""The letter of a work item in a drawing, before the number of its micro-batch."""

FIGURES: Final = {"naive": 4, "gpipe": 8, "1f1b": 8, "interleaved": 4, "zb-h1": 8, "wavefront": 8}
"""The schedules of the documentation, all of four stages, and the micro-batches of each."""

_TICKS_LABELLED: Final = 5
_WAITS: Final = "·"


def heading(schedule: Schedule) -> str:
    chunks = f" · {schedule.chunks} parts each" if schedule.chunks > 1 else ""
    pieces = _many(schedule.microbatches, "time slice" if schedule.over_time else "micro-batch")
    return f"{schedule.name} · {_many(schedule.stages, 'stage')}{chunks} · {pieces}"


def as_text(schedule: Schedule, width: int | None = None) -> str:
    """Lines of aligned text; what is wider than `width` continues below."""
    ticks = _ticks(schedule)
    names = {(item.stage, item.tick): _name(schedule, item) for item in schedule.work_items}
    cell = max(map(len, names.values())) + 1
    left = len(f"stage {schedule.stages - 1}") + 2
    per_block = ticks if width is None else max(1, (width - left) // cell)
    blocks = []
    for begin in range(0, ticks, per_block):
        shown = range(begin, min(ticks, begin + per_block))
        line = "tick".ljust(left)
        for tick in shown:
            if tick % _TICKS_LABELLED == 0 and len(line) <= left + cell * (tick - shown[0]):
                line = line.ljust(left + cell * (tick - shown[0])) + str(tick)
        lines = [line]
        for stage in range(schedule.stages):
            row = "".join(f" {names.get((stage, tick), _WAITS):<{cell - 1}}" for tick in shown)
            lines.append((f"stage {stage}".ljust(left) + row[1:]).rstrip())
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def costs_text(schedule: Schedule, found: PipelineCost) -> str:
    def row(name: str, bubble: float, peak: str, sent: Sequence[Boundary], to: str) -> tuple[str, ...]:
        messages, num_bytes = sum(one.messages for one in sent), sum(one.num_bytes for one in sent)
        return name, f"{bubble:.1%}", peak, str(messages), format_bytes(num_bytes), to

    rows: list[tuple[str, ...]] = [("", "bubble", "activations", "messages", "bytes", "to stages")]
    for stage in range(schedule.stages):
        out = [one for one in found.boundaries if one.source == stage]
        to = ", ".join(f"{one.to}" for one in out) or "-"
        rows.append(row(f"stage {stage}", found.bubbles[stage], str(found.peaks[stage]), out, to))
    rows.append(row("all", found.bubble, f"{max(found.peaks)} at most", found.boundaries, ""))
    return aligned(rows)


def figure(name: str) -> str:
    return f"![{heading(SCHEDULES[name](4, FIGURES[name]))}](figures/pipeline-{name}.svg)\n"


def _many(number: int, what: str) -> str:
    plural = "" if number == 1 else "es" if what.endswith("ch") else "s"
    return f"{number} {what}{plural}"


def _ticks(schedule: Schedule) -> int:
    return schedule.work_items[-1].tick + 1


def _name(schedule: Schedule, item: StageWork) -> str:
    chunk = _letter(item.chunk) if schedule.chunks > 1 else ""
    return f"{LETTERS[item.work]}{item.microbatch}{chunk}"


def _letter(chunk: int) -> str:
    return chr(ord("a") + chunk) if chunk < 26 else f".{chunk}"


_LEFT, _TOP, _ROW, _BOX = 72, 62, 32, 26
_KINDS: Final = {
    Pass.FORWARD: ("forward", "F forward"),
    Pass.BACKWARD: ("backward", "B backward"),
    Pass.WEIGHTS: ("weights", "W weight gradient"),
}
_STYLE: Final = files("manyhands.strategies.pipeline").joinpath("schedule.css").read_text()


def as_svg(schedule: Schedule) -> str:
    ticks = _ticks(schedule)
    cell = max(27, 6 + 7 * max(len(_name(schedule, item)) for item in schedule.work_items))
    width = max(_LEFT + ticks * cell + 12, 430)
    height = _TOP + schedule.stages * _ROW + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{heading(schedule)}">',
        f"<style>\n{_STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text class="title" x="8" y="20">{heading(schedule)}</text>',
        *_legend(schedule),
    ]
    for stage in range(schedule.stages):
        y = _TOP + stage * _ROW
        parts.append(f'<text x="8" y="{y + 17}">stage {stage}</text>')
        parts.append(f'<rect class="track" x="{_LEFT}" y="{y}" width="{ticks * cell - 1}" height="{_BOX}"/>')
    parts += [_box(schedule, item, cell) for item in schedule.work_items]
    bottom = _TOP + schedule.stages * _ROW + 12
    parts += [
        f'<text class="faint tick" x="{_LEFT + tick * cell + cell / 2:g}" y="{bottom}">{tick}</text>'
        for tick in range(0, ticks, _TICKS_LABELLED)
    ]
    parts.append(f'<text class="faint" x="8" y="{bottom}">tick</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def strategy_svg(strategy: Pipeline) -> str:
    return as_svg(strategy.table())


def _legend(schedule: Schedule) -> Iterator[str]:
    x = float(_LEFT)
    for work in Pass:
        kind, words = _KINDS[work]
        if work is not Pass.WEIGHTS or schedule.splits_backward:
            yield f'<rect class="{kind}" x="{x:g}" y="34" width="12" height="12" rx="2"/>'
            yield f'<text x="{x + 17:g}" y="44">{words}</text>'
            x += 17 + 6.6 * len(words) + 16
    if not schedule.splits_backward:
        yield f'<text class="faint" x="{x:g}" y="44">weight gradients are in B</text>'


def _box(schedule: Schedule, item: StageWork, cell: int) -> str:
    """One work item; the number of lines at the foot of its box is the number of its chunk."""
    x, y = _LEFT + item.tick * cell, _TOP + item.stage * _ROW
    chunk = f", part {_letter(item.chunk)}" if schedule.chunks > 1 else ""
    title = f"tick {item.tick}, stage {item.stage}: {item.work.value} of {item.microbatch}{chunk}"
    lines = "".join(
        f'<rect class="later" x="{x + 3}" y="{y + _BOX - 4 - 3 * number}" width="{cell - 7}" height="1.5"/>'
        for number in range(min(item.chunk, 3))
    )
    return (
        f'<rect class="{_KINDS[item.work][0]}" x="{x}" y="{y}" width="{cell - 1}" height="{_BOX}" rx="2">'
        f"<title>{title}</title></rect>{lines}"
        f'<text class="on" x="{x + (cell - 1) / 2:g}" y="{y + 17}">{_name(schedule, item)}</text>'
    )


def main(arguments: Sequence[str]) -> None:
    """Print the text of every figure, or write all figures into the given documentation folder."""
    examples = {name: SCHEDULES[name](4, microbatches) for name, microbatches in FIGURES.items()}
    if not arguments:
        for schedule in examples.values():
            print(f"{heading(schedule)}\n\n{as_text(schedule)}")
        return
    svgs = {f"pipeline-{name}": as_svg(schedule) for name, schedule in examples.items()}
    write_figures(Path(arguments[0]) / "pipeline.md", svgs, figure)


if __name__ == "__main__":
    main(sys.argv[1:])
