"""Pictures of a schedule at work on numbers: what every worker holds after every round, as text and as SVG.

`python -m manyhands.strategies.common.collectives.collective_drawing` prints the worked example of four workers for
every algorithm; with `docs` behind it, writes it into the documentation (`allreduce.md` and `figures/`).

In the text an item is `5` while it is the worker's own, `(26)` once it is a partial sum and `[37]` when it
is the sum of all; columns are lettered, and `0→1:b` says that worker 0 sends its item b to worker 1. In the
SVG a bar under each item shows whose contributions are in it, and arrows have the colour of their sender.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

from manyhands.errors import UserError, format_bytes
from manyhands.observe.draw.axes import aligned
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.schedule import Algorithm, chunk_bounds, span_bounds
from manyhands.strategies.common.collectives.schedule_proof import cost, replay

EXAMPLE: Final = ((17, 11, 1, 9), (5, 13, 23, 14), (3, 6, 10, 8), (12, 7, 2, 12))
"""The worked example: four workers with four numbers each, whose sum is 37 37 36 43."""


class Item(NamedTuple):
    """A number, and the ranks whose contributions are in it."""

    number: float
    ranks: frozenset[int]


class MessageArrow(NamedTuple):
    """A message of a round: items `begin` to `end` from one rank to another."""

    source: int
    to: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Picture:
    """An all-reduce seen from outside: what rank r holds after round k is `rows[k][r]`, row 0 is the start.

    `arrows[k]` are the messages of round k, between rows k - 1 and k; row 0 has none.
    """

    world: int
    count: int  # items of each rank
    rows: tuple[tuple[tuple[Item, ...], ...], ...]
    arrows: tuple[tuple[MessageArrow, ...], ...]


def watch(algorithm: Algorithm, vectors: Sequence[Sequence[float]]) -> Picture:
    world, count = len(vectors), len(vectors[0])
    if any(len(vector) != count for vector in vectors):
        raise UserError(
            f"vectors of lengths {[len(vector) for vector in vectors]}: all must have the same length"
        )
    chunks = algorithm.chunks(world)

    def start(rank: int, chunk: int) -> tuple[Item, ...]:
        begin, end = chunk_bounds(count, chunks, chunk)
        return tuple(Item(number, frozenset({rank})) for number in vectors[rank][begin:end])

    rows = [
        tuple(tuple(item for chunk in range(chunks) for item in start(rank, chunk)) for rank in range(world))
    ]

    def add(addends: Sequence[tuple[Item, ...]]) -> tuple[Item, ...]:
        return tuple(
            Item(sum(item.number for item in items), frozenset().union(*(item.ranks for item in items)))
            for items in zip(*addends, strict=True)
        )

    for held in replay(algorithm, world, start, add):
        rows.append(tuple(tuple(item for chunk in one for item in chunk) for one in held))
    arrows = [
        tuple(
            MessageArrow(rank, send.to, *span_bounds(count, chunks, send.chunks))
            for rank, step in enumerate(steps)
            for send in step.sends
        )
        for steps in zip(*algorithm.tables(world), strict=True)
    ]
    return Picture(world, count, rows=tuple(rows), arrows=((), *arrows))


def as_text(picture: Picture) -> str:
    width = max((len(f"{item.number:g}") for row in picture.rows for rank in row for item in rank), default=1)

    def line(label: str, cells: Iterable[str]) -> str:
        return f"{label:<9}{'  |  '.join(cells)}".rstrip()

    letter = [chr(ord("a") + index) if index < 26 else str(index) for index in range(picture.count)]
    letters = " ".join(f" {one:>{width}} " for one in letter)
    names = (f"worker {rank}".ljust(len(letters)) for rank in range(picture.world))
    lines = [line("", names), line("", [letters] * picture.world)]

    def marked(item: Item) -> str:
        left, right = "  " if len(item.ranks) == 1 else "[]" if len(item.ranks) == picture.world else "()"
        return f"{left}{item.number:>{width}g}{right}"

    for number, (row, arrows) in enumerate(zip(picture.rows, picture.arrows, strict=True)):
        words = [f"{a.source}→{a.to}:{''.join(letter[a.begin : a.end])}" for a in arrows]
        if words:
            lines += ["", *(f"{'':<9}{'  '.join(words[at : at + 8])}" for at in range(0, len(words), 8))]
        cells = (" ".join(marked(item) for item in rank) for rank in row)
        lines.append(line(f"round {number}" if number else "start", cells))
    return "\n".join(lines) + "\n"


def figure(name: str) -> str:
    return f"![{name} on four workers](figures/allreduce-{name}.svg)\n"


def example(world: int) -> tuple[tuple[int, ...], ...]:
    if world == len(EXAMPLE):
        return EXAMPLE
    return tuple(tuple((7 * rank + 3 * item) % 19 + 1 for item in range(world)) for rank in range(world))


def costs_text(
    algorithm: Algorithm, worlds: Sequence[int], num_bytes: int, rates: tuple[float, float, float]
) -> str:
    """A small table: what an all-reduce of `num_bytes` costs against the number of workers.

    `rates` are alpha, beta and gamma, in seconds for a message, a byte sent and a byte added.
    """
    rows = [("workers", "steps", "messages", "bytes of the busiest", "bytes of all", "time")]
    for world in worlds:
        found = cost(algorithm, world, num_bytes)
        busiest, of_all = format_bytes(max(found.bytes_sent)), format_bytes(sum(found.bytes_sent))
        counts = str(world), str(found.steps), str(sum(found.messages))
        rows.append((*counts, busiest, of_all, f"{1e3 * found.time(*rates):,.2f} ms"))
    return aligned(rows)


def refresh(page: str, drawn: Callable[[str], str]) -> str:
    """The page with every figure between its two comments `drawn` afresh, by its name."""
    figures = re.compile(r"(<!-- figure: (\S+) -->)\n.*?(<!-- end of figure -->)", flags=re.DOTALL)
    return figures.sub(lambda found: f"{found[1]}\n{drawn(found[2])}{found[3]}", page)


_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#b8860b", "#56b4e9", "#7f3c8d", "#666666")
_BOX_W, _BOX_H, _GAP, _PITCH, _LEFT, _TOP = 38, 30, 34, 92, 72, 40
_STYLE: Final = files("manyhands.strategies.common.collectives").joinpath("collective.css").read_text()


def as_svg(picture: Picture) -> str:
    width = _LEFT + picture.world * (picture.count * _BOX_W + _GAP)
    height, segment = _TOP + (len(picture.rows) - 1) * _PITCH + _BOX_H + 16, (_BOX_W - 2) / picture.world
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">',
        f"<style>\n{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for rank in range(picture.world):
        x = _x(picture, rank, picture.count / 2)
        parts += [
            f'<marker id="head{rank}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{_COLOURS[rank % 8]}"/></marker>',
            f'<text class="head" x="{x:g}" y="24" fill="{_COLOURS[rank % 8]}">worker {rank}</text>',
        ]
    for number, row in enumerate(picture.rows):
        y = _TOP + number * _PITCH
        label = f"round {number}" if number else "start"
        parts.append(f'<text class="label" x="8" y="{y + 20}">{label}</text>')
        leaving, reaching = (
            _fan(picture.arrows[number], key) for key in (lambda a: a.source, lambda a: a.to)
        )
        parts += [
            f'<line x1="{_x(picture, arrow.source, leaving[arrow]):g}" y1="{y - _PITCH + _BOX_H + 2}" '
            f'x2="{_x(picture, arrow.to, reaching[arrow]):g}" y2="{y - 3}" stroke="{_COLOURS[arrow.source % 8]}" '
            f'marker-end="url(#head{arrow.source})"/>'
            for arrow in picture.arrows[number]
        ]
        for place, items in enumerate(row):
            for index, item in enumerate(items):
                x, state = _x(picture, place, index), "done" if len(item.ranks) == picture.world else "part"
                parts += [
                    f'<rect class="{state}" x="{x:g}" y="{y:g}" width="{_BOX_W - 2}" height="{_BOX_H}"/>'
                    + "".join(  # a segment in the colour of each rank that is in it
                        f'<rect x="{x + rank * segment:g}" y="{y + _BOX_H - 6:g}" width="{segment:g}" height="6" '
                        f'fill="{_COLOURS[rank % 8]}"/>'
                        for rank in sorted(item.ranks)
                    )
                    + f'<text class="{state}" x="{x + _BOX_W / 2 - 1:g}" y="{y + 18:g}">{item.number:g}</text>'
                ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(picture: Picture, rank: int, index: float) -> float:
    return _LEFT + rank * (picture.count * _BOX_W + _GAP) + index * _BOX_W


def _fan(arrows: Sequence[MessageArrow], rank_of: Callable[[MessageArrow], int]) -> dict[MessageArrow, float]:
    """Where each arrow touches its rank, in items: spread evenly over the items it carries."""
    places = defaultdict(list)
    for arrow in arrows:
        places[rank_of(arrow), arrow.begin, arrow.end].append(arrow)
    return {
        arrow: begin + (end - begin) * (index + 1) / (len(group) + 1)
        for (_, begin, end), group in places.items()
        for index, arrow in enumerate(sorted(group, key=lambda a: (a.source, a.to)))
    }


def write_figures(page: Path, svgs: Mapping[str, str], drawn: Callable[[str], str]) -> None:
    """Write drawings by name into `figures` beside a page of the documentation, and the page's figures afresh."""
    folder = page.parent / "figures"
    folder.mkdir(exist_ok=True)
    for name, svg in svgs.items():
        (folder / f"{name}.svg").write_text(svg)
    page.write_text(refresh(page.read_text(), drawn))


def main(arguments: Sequence[str]) -> None:
    """Print the text of every figure, or write all figures into the given documentation folder."""
    if not arguments:
        for algorithm in ALGORITHMS.values():
            print(f"{algorithm.name}: {algorithm.description}\n\n{as_text(watch(algorithm, EXAMPLE))}")
        return
    svgs = {f"allreduce-{one.name}": as_svg(watch(one, EXAMPLE)) for one in ALGORITHMS.values()}
    write_figures(Path(arguments[0]) / "allreduce.md", svgs, figure)


if __name__ == "__main__":
    main(sys.argv[1:])
