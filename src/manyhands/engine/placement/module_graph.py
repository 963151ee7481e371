"""A model as a graph: its modules in the order in which they ran, and what each passes on to which; pure.

Where its nodes are, is an *assignment*: a place for each node, the name of a device, a stage or a worker. Its cut
follows: the edges between two places, and the bytes that travel on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyhands.engine.placement.patterns import assigned

__all__ = ["Crossing", "Edge", "Graph", "Node", "TiedParameters", "cut_of", "places_by_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One module of a model, as it ran once."""

    name: str
    """In the model; a part of a chain that has several modules is called after all: `tokens+positions`."""

    kind: str
    """The module's class."""

    modules: tuple[str, ...]
    """The names of the modules that it is made of, in the model; empty for one that is not the model's own."""

    parameters: int
    """How many numbers it has to learn; what it shares with another node is in both."""

    shape: tuple[int, ...]
    """Of its output."""

    output_bytes: int
    """Of its output."""

    seconds: float = 0.0
    """What its forward took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A dependency: the value of node `source` that another node needs, by node number."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameters:
    """Parameters that several nodes share, as tied weights; across places, their gradients must be summed."""

    nodes: tuple[int, ...]
    """The numbers of the nodes that have them."""

    num_bytes: int
    """Of these parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The modules of a model and the values between them, for one batch."""

    nodes: tuple[Node, ...]
    """In the order in which they ran."""

    edges: tuple[Edge, ...]
    """By target, then by source."""

    samples: int
    """Of the batch that all sizes are of."""

    parameters: int
    """Of the whole model, those that several modules share counted once."""

    parameter_bytes: int
    """Of the whole model."""

    shared: tuple[TiedParameters, ...]
    """What several nodes share of them."""

    is_chain: bool
    """Whether each node needs the one before it alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value that is sent from one place to another; its gradient, of the same size, is sent back."""

    source: int
    """The node that gives it."""

    targets: tuple[int, ...]
    """The nodes there that need it: it travels once for all of them."""

    from_place: str
    to_place: str
    num_bytes: int
    """Of a batch."""


def cut_of(graph: Graph, places: Sequence[str]) -> tuple[Crossing, ...]:
    """The values sent between places, ordered by source; `places` has one entry per node."""
    if len(places) != len(graph.nodes):
        raise ValueError(f"{len(places)} places for {len(graph.nodes)} nodes")
    targets: dict[tuple[int, str], list[int]] = {}
    for edge in graph.edges:
        if places[edge.source] != places[edge.target]:
            targets.setdefault((edge.source, places[edge.target]), []).append(edge.target)
    return tuple(
        Crossing(
            source=source,
            targets=tuple(found),
            from_place=places[source],
            to_place=place,
            num_bytes=graph.nodes[source].output_bytes,
        )
        for (source, place), found in sorted(targets.items())
    )


def places_by_name(
    graph: Graph, names: Sequence[str], where: Mapping[str, str], otherwise: str
) -> tuple[str, ...]:
    """Where patterns of names put each node, as `mh.place` would; `names` are those of all modules of the model.

    A node of several modules is where the first of them is that a pattern reaches.
    """
    found = assigned(names, where)
    return tuple(
        next((found[name] for name in node.modules if name in found), otherwise) for node in graph.nodes
    )
