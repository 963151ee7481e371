"""Draws a model's graph with its placement and its cut, as a table and as a self-contained SVG.

In the SVG every module is a box in the colour of its place, from the input at the top to the output at the bottom. An
arrow is what one module passes on to another; one between two places is thick, and says how many bytes travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Final
from xml.sax.saxutils import escape

from manyhands.engine.placement.tracing import Crossing, Graph, Node, TiedParameters, cut_of
from manyhands.errors import format_bytes
from manyhands.observe.draw.axes import aligned

__all__ = ["graph_svg", "graph_text"]

_HEAD: Final = ("module", "kind", "parameters", "output", "bytes", "place")
_WIDTH, _LEFT, _BOX, _HIGH, _GAP = 900, 20, 460, 40, 34
_TOP, _LINE, _LANE, _LANES = 64, 18, 16, 6  # tracks: how far to the right an arrow around other boxes goes
_COLOURS: Final = 8
_STYLE: Final = files("manyhands.foresight").joinpath("graph.css").read_text()


def graph_text(graph: Graph, places: Sequence[str]) -> str:
    """Return a row for each module, then the traffic between places, as plain text."""
    rows = [_HEAD, *(_row(node, place) for node, place in zip(graph.nodes, places, strict=True))]
    cut = cut_of(graph, places)
    lines = ["no edge is cut"]
    if cut:
        total = format_bytes(sum(one.num_bytes for one in cut))
        lines = [f"cut edges: {total} forward, and as much in gradients backward"]
        lines += [f"  {_crossing(graph, one)}" for one in cut]
    lines += [_sharing(graph, one, places) for one in graph.shared]
    return "\n".join([aligned(rows), *lines, ""])


def graph_svg(graph: Graph, places: Sequence[str], title: str) -> str:
    kinds = list(dict.fromkeys(places))
    height = _TOP + len(graph.nodes) * (_HIGH + _GAP) + _LINE
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
        f"<style>\n{_STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'markerUnits="userSpaceOnUse" orient="auto"><path class="tip" d="M0,0L8,4L0,8z"/></marker>'
        '<marker id="cuttip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="11" markerHeight="11" '
        'markerUnits="userSpaceOnUse" orient="auto"><path class="cuttip" d="M0,0L8,4L0,8z"/></marker></defs>',
        f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="{_LEFT}" y="26">{escape(title)}</text>',
        *_legend(kinds),
        *_edges(graph, places),
    ]
    for number, (node, place) in enumerate(zip(graph.nodes, places, strict=True)):
        body += _box(node, _middle(number), kinds.index(place) % _COLOURS)
    return "\n".join([*body, "</svg>\n"])


def _row(node: Node, place: str) -> tuple[str, ...]:
    return (
        node.name,
        node.kind,
        f"{node.parameters:,}",
        _shape(node.shape),
        format_bytes(node.output_bytes),
        place,
    )


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _crossing(graph: Graph, one: Crossing) -> str:
    to = ", ".join(graph.nodes[target].name for target in one.targets)
    size = f"{format_bytes(one.num_bytes)}, {_shape(graph.nodes[one.source].shape)}"
    return f"{graph.nodes[one.source].name} → {to}: {size}, {one.from_place} → {one.to_place}"


def _sharing(graph: Graph, one: TiedParameters, places: Sequence[str]) -> str:
    names = ", ".join(graph.nodes[number].name for number in one.nodes)
    apart = len({places[number] for number in one.nodes}) > 1
    return (
        f"shared parameters: {names}: {format_bytes(one.num_bytes)}{', in several places' if apart else ''}"
    )


def _middle(number: int) -> int:
    return _TOP + number * (_HIGH + _GAP) + _HIGH // 2


def _legend(kinds: Sequence[str]) -> Iterator[str]:
    x = _LEFT
    for number, place in enumerate(kinds):
        yield (
            f'<rect class="box" x="{x}" y="36" width="14" height="14" rx="3" fill="var(--p{number % _COLOURS})"/>'
        )
        yield f'<text class="faint" x="{x + 20}" y="47">{escape(place)}</text>'
        x += 40 + 8 * len(place)


def _box(node: Node, middle: int, colour: int) -> Iterator[str]:
    y = middle - _HIGH // 2
    parameters = f" · {node.parameters:,} parameters" if node.parameters else ""
    yield f'<rect class="box" x="{_LEFT}" y="{y}" width="{_BOX}" height="{_HIGH}" rx="6" fill="var(--p{colour})"/>'
    yield f'<text class="name" x="{_LEFT + 12}" y="{y + 17}">{escape(node.name)}</text>'
    yield (
        f'<text class="faint" x="{_LEFT + 12}" y="{y + 33}">{escape(node.kind)}{parameters} · '
        f"{_shape(node.shape)} · {format_bytes(node.output_bytes)}</text>"
    )


def _edges(graph: Graph, places: Sequence[str]) -> Iterator[str]:
    sizes = {
        (one.source, target): format_bytes(one.num_bytes)
        for one in cut_of(graph, places)
        for target in one.targets
    }
    for edge in graph.edges:
        size = sizes.get((edge.source, edge.target))
        style = (
            'class="edge cut" marker-end="url(#cuttip)"' if size else 'class="edge" marker-end="url(#tip)"'
        )
        if edge.target == edge.source + 1:
            x, begin, end = (
                _LEFT + _BOX // 2,
                _middle(edge.source) + _HIGH // 2,
                _middle(edge.target) - _HIGH // 2,
            )
            yield f'<path {style} d="M{x},{begin}V{end}"/>'
            at = (x + 12, (begin + end) // 2 + 4)
        else:  # around the boxes between them
            x, begin, end = _LEFT + _BOX, _middle(edge.source), _middle(edge.target)
            lane = x + _LANE * (1 + (edge.target - edge.source - 2) % _LANES)
            yield f'<path {style} d="M{x},{begin}H{lane}V{end}H{x}"/>'
            at = (lane + 6, (begin + end) // 2 + 4)
        if size:
            crossing = f"{size} · {places[edge.source]} → {places[edge.target]}"
            yield f'<text class="bytes" x="{at[0]}" y="{at[1]}">{escape(crossing)}</text>'
