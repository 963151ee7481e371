"""Draws a model's graph with its placement and its cut, as a table and as a self-contained SVG.

In the SVG every module is a box in the colour of its place, from the input at the top to the output at the bottom. An
arrow is what one module passes on to another; one between two places is thick, and says how many bytes travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Final
from xml.sax.saxutils import escape

from manyhands.engine.placement.tracing import Graph, cut_of
from manyhands.errors import format_bytes
from manyhands.observe.draw.axes import aligned

__all__ = ["graph_svg", "graph_text"]

_HEAD: Final = ("module", "kind", "parameters", "output", "bytes", "place")
_WIDTH, _LEFT, _BOX, _HIGH, _GAP = 900, 20, 460, 40, 34
_TOP, _LINE, _TRACK, _TRACKS = 64, 18, 16, 6  # tracks: how far to the right an arrow around other boxes goes
_COLOURS: Final = 8
_STYLE: Final = files("manyhands.foresight").joinpath("graph.css").read_text()


def graph_text(graph: Graph, places: Sequence[str]) -> str:
    """Return a row for each module, then the traffic between places, as plain text."""
    rows = [_HEAD]
    for node, place in zip(graph.nodes, places, strict=True):
        size = format_bytes(node.output_bytes)
        rows.append((node.name, node.kind, f"{node.parameters:,}", _shape(node.shape), size, place))
    cut, names = cut_of(graph, places), [node.name for node in graph.nodes]
    lines = ["no edge is cut"]
    if cut:
        total = format_bytes(sum(one.num_bytes for one in cut))
        lines = [f"cut edges: {total} forward, and the same in gradients backward"]
    for one in cut:
        to = ", ".join(names[target] for target in one.targets)
        size = f"{format_bytes(one.num_bytes)}, {_shape(graph.nodes[one.source].shape)}"
        lines.append(f"  {names[one.source]} → {to}: {size}, {one.from_place} → {one.to_place}")
    for tied in graph.shared:
        apart = ", in several places" if len({places[number] for number in tied.nodes}) > 1 else ""
        sharing = ", ".join(names[number] for number in tied.nodes)
        lines.append(f"shared parameters: {sharing}: {format_bytes(tied.num_bytes)}{apart}")
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
        y, colour = _middle(number) - _HIGH // 2, kinds.index(place) % _COLOURS
        parameters = f" · {node.parameters:,} parameters" if node.parameters else ""
        what = f"{escape(node.kind)}{parameters} · {_shape(node.shape)} · {format_bytes(node.output_bytes)}"
        body += [
            f'<rect class="box" x="{_LEFT}" y="{y}" width="{_BOX}" height="{_HIGH}" rx="6" fill="var(--p{colour})"/>',
            f'<text class="name" x="{_LEFT + 12}" y="{y + 17}">{escape(node.name)}</text>',
            f'<text class="faint" x="{_LEFT + 12}" y="{y + 33}">{what}</text>',
        ]
    return "\n".join([*body, "</svg>\n"])


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _middle(number: int) -> int:
    return _TOP + number * (_HIGH + _GAP) + _HIGH // 2


def _legend(kinds: Sequence[str]) -> Iterator[str]:
    x = _LEFT
    for number, place in enumerate(kinds):
        at, colour = f'x="{x}" y="36" width="14" height="14"', number % _COLOURS
        yield f'<rect class="box" {at} rx="3" fill="var(--p{colour})"/>'
        yield f'<text class="faint" x="{x + 20}" y="47">{escape(place)}</text>'
        x += 40 + 8 * len(place)


def _edges(graph: Graph, places: Sequence[str]) -> Iterator[str]:
    cut = cut_of(graph, places)
    sizes = {(one.source, target): format_bytes(one.num_bytes) for one in cut for target in one.targets}
    for edge in graph.edges:
        size = sizes.get((edge.source, edge.target))
        kind, tip = ("edge cut", "cuttip") if size else ("edge", "tip")
        begin, end = _middle(edge.source), _middle(edge.target)
        label_y = (begin + end) // 2 + 4
        if edge.target == edge.source + 1:
            x = _LEFT + _BOX // 2
            path, label_x = f"M{x},{begin + _HIGH // 2}V{end - _HIGH // 2}", x + 12
        else:  # around the boxes between them
            x = _LEFT + _BOX
            track = x + _TRACK * (1 + (edge.target - edge.source - 2) % _TRACKS)
            path, label_x = f"M{x},{begin}H{track}V{end}H{x}", track + 6
        yield f'<path class="{kind}" marker-end="url(#{tip})" d="{path}"/>'
        if size:
            crossing = f"{size} · {places[edge.source]} → {places[edge.target]}"
            yield f'<text class="bytes" x="{label_x}" y="{label_y}">{escape(crossing)}</text>'
