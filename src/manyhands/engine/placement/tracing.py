"""A model's graph, found by running it once on a batch.

A chain is followed module by module. Any other model is run as it is: hooks see which of its innermost modules run, and
a function mode follows their outputs through the operations between them, so that a sum of two outputs is known to
come from both.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from manyhands.engine.chain import ChainFunction, SaysChain, applied, named_chain
from manyhands.engine.placement.placed import assigned, num_bytes, tensors_in
from manyhands.errors import UserError

_TRIES = 3


def trace(model: nn.Module, run: Callable[[nn.Module], Any], samples: int) -> Graph:
    """The graph of `model`; `run` calls it on a batch of `samples` samples, as a task's loss does."""
    with torch.no_grad():
        args, kwargs = _called_with(model, run)
        plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
        if (plain or isinstance(model, SaysChain)) and len(args) == 1:
            nodes, modules, x = [], [], args[0]
            names = {id(module): name for name, module in model.named_modules()}
            for name, module in named_chain(model):
                given, took = x, float("inf")
                for _ in range(_TRIES):
                    began = time.perf_counter()
                    x = applied(module, given, kwargs)
                    took = min(took, time.perf_counter() - began)
                nodes.append(_node(name, module, names, x, took))
                modules.append(module)
            edges = [Edge(source=at, target=at + 1) for at in range(len(nodes) - 1)]
        else:
            with _Following(model) as following:
                model(*args, **kwargs)
            nodes, edges, modules = following.nodes, following.edges, following.modules
    if not nodes:
        raise UserError(f"{type(model).__name__} ran none of its modules; there is no graph to draw")
    whole = list(model.parameters())
    return Graph(
        nodes=tuple(nodes),
        edges=tuple(sorted(edges, key=lambda edge: (edge.target, edge.source))),
        samples=samples,
        parameters=sum(one.numel() for one in whole),
        parameter_bytes=num_bytes(whole),
        shared=tuple(_shared(modules)),
        is_chain=all(edge.target == edge.source + 1 for edge in edges) and len(edges) == len(nodes) - 1,
    )


def _called_with(model: nn.Module, run: Callable[[nn.Module], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))

    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        run(model)
    finally:
        handle.remove()
    if not calls:
        raise UserError(f"the loss does not call {type(model).__name__}; there is no graph to draw")
    return calls[0]


def _shared(modules: Sequence[nn.Module]) -> Iterator[TiedParameters]:
    """Parameters that several nodes share, by node; a module that ran twice shares all with itself."""
    holders: dict[nn.Parameter, list[int]] = {}
    for number, module in enumerate(modules):
        for parameter in dict.fromkeys(module.parameters()):
            holders.setdefault(parameter, []).append(number)
    sizes: Counter[tuple[int, ...]] = Counter()
    for parameter, nodes in holders.items():
        if len(nodes) > 1:
            sizes[tuple(nodes)] += num_bytes([parameter])
    for nodes_of_it, size in sizes.items():
        yield TiedParameters(nodes=nodes_of_it, num_bytes=size)


def _node(name: str, module: nn.Module, names: Mapping[int, str], output: Any, seconds: float) -> Node:
    own = [names[id(module)]] if id(module) in names else []
    within = [names[id(child)] for child in module.children() if id(child) in names]
    joined = "+".join(type(child).__name__ for child in module.children())
    made = tensors_in(output)
    return Node(
        name=name,
        kind=joined if isinstance(module, ChainFunction) else type(module).__name__,
        modules=tuple(own or within),
        parameters=sum(one.numel() for one in module.parameters()),
        shape=tuple(made[0].shape) if made else (),
        output_bytes=num_bytes(made),
        seconds=seconds,
    )


class _Following(TorchFunctionMode):
    """Traces one run of a model: which innermost modules ran, and whose outputs each of them received."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.modules: list[nn.Module] = []  # of the nodes
        self._names = {id(module): name for name, module in model.named_modules()}
        self._leaves = [module for module in model.modules() if not any(module.children())]
        self._sources: dict[int, frozenset[int]] = {}
        self._kept: list[Tensor] = []  # keep tensors alive, so that no id is reused
        self._within, self._began = 0, 0.0
        self._handles: list[Any] = []

    def __enter__(self) -> _Following:
        for leaf in self._leaves:
            self._handles.append(leaf.register_forward_pre_hook(self._enters, with_kwargs=True))
            self._handles.append(leaf.register_forward_hook(self._left, with_kwargs=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch in place of each of its functions: outputs derive from the sources of the inputs."""
        del types
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        if not self._within:
            self._give(result, self._sources_of((args, kwargs)))
        return result

    def _enters(self, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        self._within += 1
        self._began = time.perf_counter()

    def _left(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        took = time.perf_counter() - self._began
        self._within -= 1
        name, number = self._names[id(module)], len(self.nodes)
        again = sum(ran is module for ran in self.modules)
        shown = f"{name} ({again + 1})" if again else name
        for source in sorted(self._sources_of((args, kwargs))):
            self.edges.append(Edge(source=source, target=number))
        self.nodes.append(_node(shown, module, self._names, output, took))
        self.modules.append(module)
        self._give(output, frozenset({number}))

    def _sources_of(self, value: Any) -> frozenset[int]:
        found = [self._sources.get(id(tensor), frozenset()) for tensor in tensors_in(value)]
        return frozenset().union(*found)

    def _give(self, value: Any, sources: frozenset[int]) -> None:
        for tensor in tensors_in(value) if sources else ():
            self._sources[id(tensor)] = sources
            self._kept.append(tensor)


# A model as a graph: its modules in the order in which they ran, and what each passes on to which; pure.
# Where its nodes are, is an *assignment*: a place for each node, the name of a device, a stage or a worker. Its cut
# follows: the edges between two places, and the bytes that travel on them.
@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One module of a model, as it ran once."""

    # In the model; a part of a chain that has several modules is called after all: `tokens+positions`
    name: str
    kind: str  # the module's class
    # The names of the modules that it is made of, in the model; empty for one that is not the model's own
    modules: tuple[str, ...]
    parameters: int  # how many numbers it has to learn; what it shares with another node is in both
    shape: tuple[int, ...]  # of its output
    output_bytes: int  # of its output
    seconds: float = 0.0  # what its forward took


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A dependency: the value of node `source` that another node needs, by node number."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameters:
    """Parameters that several nodes share, as tied weights; across places, their gradients must be summed."""

    nodes: tuple[int, ...]  # the numbers of the nodes that have them
    num_bytes: int  # of these parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The modules of a model and the values between them, for one batch."""

    nodes: tuple[Node, ...]  # in the order in which they ran
    edges: tuple[Edge, ...]  # by target, then by source
    samples: int  # of the batch that all sizes are of
    parameters: int  # of the whole model, those that several modules share counted once
    parameter_bytes: int  # of the whole model
    shared: tuple[TiedParameters, ...]  # what several nodes share of them
    is_chain: bool  # whether each node needs the one before it alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value that is sent from one place to another; its gradient, of the same size, is sent back."""

    source: int  # the node that gives it
    targets: tuple[int, ...]  # the nodes there that need it: it travels once for all of them
    from_place: str
    to_place: str
    num_bytes: int  # of a batch


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
    """Where patterns put each node, as `mh.place` would with all modules' `names`: its first reached module."""
    found = assigned(names, where)
    return tuple(
        next((found[name] for name in node.modules if name in found), otherwise) for node in graph.nodes
    )
