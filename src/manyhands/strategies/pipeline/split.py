"""Where a chain of layers is cut, by the measured costs of its layers, and what each stage then holds of the model.

The cost of the slowest part is minimised by dynamic programming. A cut is the place in the chain, from 0, of the layer
that begins a part. The first part begins at 0, so a chain in p parts has p − 1 cuts. In a pipeline all stages wait for
the slowest. So the best cut is the one whose most expensive part is cheapest, among those that fit into the memory of a
worker.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from manyhands.errors import UserError, format_bytes
from manyhands.strategies.pipeline.borders import ChainPart
from manyhands.strategy import enough

__all__ = [
    "Holding",
    "balanced",
    "check_cuts",
    "holding_of",
    "layer_costs",
    "part_bytes",
    "parts_of",
    "planned",
    "require_own_statistics",
]

PartBytes: TypeAlias = Callable[[int, int, int], int]
"""(number of the part, its first layer, the layer after its last) -> bytes that its worker needs for it."""

_TRIES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """The cost of one layer of a chain for one micro-batch."""

    seconds: float
    """Seconds of forward and backward together."""
    held_bytes: int = 0
    """Bytes held all the time: parameters, their gradients, the optimizer's state and buffers."""
    activation_bytes: int = 0
    """Bytes that its forward saves for its backward."""
    input_bytes: int = 0
    """Bytes of its input."""
    gives_tensor: bool = True
    """Whether its output is a tensor, which can be sent to another stage, so that a part may end with it."""


def parts_of(cuts: Sequence[int], layers: int) -> list[range]:
    ends = [*cuts, layers]
    return [range(begin, end) for begin, end in zip([0, *cuts], ends, strict=True)]


def check_cuts(cuts: Sequence[int], layers: int, parts: int) -> None:
    shown = ",".join(map(str, cuts))
    if len(cuts) != parts - 1:
        raise UserError(f"cuts={shown}: {parts} parts have {parts - 1} cuts, and these are {len(cuts)}")
    if any(later <= before for before, later in zip([0, *cuts], [*cuts, layers], strict=True)):
        raise UserError(
            f"cuts={shown}: must rise from at least 1 to at most {layers - 1}, each the layer that begins a part; the "
            f"model is a chain of {layers} layers"
        )


def balanced(
    costs: Sequence[float], parts: int, fits: Callable[[int, int, int], bool] = lambda *_: True
) -> tuple[int, ...] | None:
    """The cuts whose most expensive part is cheapest, or None where there is no way to cut.

    Only parts are considered for which `fits` holds: (part, first layer, layer after the last).
    """
    layers = len(costs)
    upto = [0.0]
    for cost in costs:
        upto.append(upto[-1] + cost)
    # best[end]: the lowest possible cost of the most expensive part so far, where the parts cover the layers before
    # `end`.
    best = [0.0] + [math.inf] * layers
    chosen: list[list[int]] = []
    for part in range(parts):
        later = [math.inf] * (layers + 1)
        came = [0] * (layers + 1)
        for end in range(part + 1, layers - (parts - part - 1) + 1):
            for begin in range(part, end):
                cost = max(best[begin], upto[end] - upto[begin])
                if cost < later[end] and fits(part, begin, end):
                    later[end], came[end] = cost, begin
        best = later
        chosen.append(came)
    if not math.isfinite(best[layers]):
        return None
    cuts: list[int] = []
    end = layers
    for part in reversed(range(1, parts)):
        end = chosen[part][end]
        cuts.append(end)
    return tuple(reversed(cuts))


def part_bytes(layers: Sequence[LayerCost], held: Sequence[int], *, recompute: bool) -> PartBytes:
    """Return the function that gives a part's memory need.

    `held` says of how many micro-batches each part keeps activations at once. With `recompute` a part keeps the input
    of each of them, and the activations of one.
    """

    def need(part: int, begin: int, end: int) -> int:
        inside = layers[begin:end]
        always = sum(layer.held_bytes for layer in inside)
        activations = sum(layer.activation_bytes for layer in inside)
        if recompute:
            return always + activations + held[part] * layers[begin].input_bytes
        return always + held[part] * activations

    return need


def planned(
    layers: Sequence[LayerCost], stages: int, chunks: int, need: PartBytes, limit: int
) -> tuple[int, ...]:
    """The best cuts into `stages` × `chunks` parts such that no worker needs more than `limit` bytes (0: no limit).

    A worker with several parts has an equal share of the limit for each. Where nothing fits, the UserError says how
    much would be needed.
    """
    parts, seconds = stages * chunks, [layer.seconds for layer in layers]
    found = balanced(seconds, parts, lambda _, __, end: _may_end(layers, end))
    if found is None:
        ends = sum(_may_end(layers, end) for end in range(1, len(layers) + 1))
        raise UserError(
            f"stages={stages}: between two stages goes one tensor, and {len(layers) - ends} of {len(layers)} layers "
            f"give something else, so no cut makes {parts} parts; use at most {ends // chunks} stages"
        )
    if not limit:
        return found
    each = limit // chunks
    found = balanced(seconds, parts, partial(_fits, layers, need, each))
    if found is not None:
        return found
    least = _least(layers, parts, need) * chunks
    largest = max(
        range(len(layers)), key=lambda layer: layers[layer].held_bytes + layers[layer].activation_bytes
    )
    raise UserError(
        f"memory={format_bytes(limit)}: no cut of {len(layers)} layers into {parts} parts fits; the best needs "
        f"{format_bytes(least)} on a worker (the largest layer is number {largest}): give "
        f"memory={enough(least)}, more stages, a schedule that keeps fewer micro-batches (1f1b) or "
        "recompute=yes"
    )


def _may_end(layers: Sequence[LayerCost], end: int) -> bool:
    """Whether a part may end before layer `end`: its output must be a tensor, unless it goes to the loss."""
    return end == len(layers) or layers[end - 1].gives_tensor


def _fits(layers: Sequence[LayerCost], need: PartBytes, limit: int, part: int, begin: int, end: int) -> bool:
    return _may_end(layers, end) and need(part, begin, end) <= limit


def _least(chain: Sequence[LayerCost], parts: int, need: PartBytes) -> int:
    layers = len(chain)
    spans = [(begin, end) for begin in range(layers) for end in range(begin + 1, layers + 1)]
    sizes = sorted({need(part, begin, end) for part in range(parts) for begin, end in spans})
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        fits = partial(_fits, chain, need, sizes[middle])
        if balanced([0.0] * layers, parts, fits) is None:
            low = middle + 1
        else:
            high = middle
    return sizes[low]


def layer_costs(
    chain: Sequence[nn.Module],
    x: Any,
    *,
    device: torch.device,
    state_copies: float,
    begin: Callable[[int], None],
) -> list[LayerCost]:
    """Measure the cost of each layer for a micro-batch whose input is `x`; the modules are left as they were.

    `state_copies` is how many numbers the optimizer keeps per trained parameter. `begin` seeds the random generators
    for the layer at that place in the chain. Of several tries the fastest counts.
    """
    costs = []
    for place, module in enumerate(chain):
        with _visiting(module, device):
            best, kept, output = float("inf"), 0, None
            for _ in range(_TRIES):
                begin(place)
                seconds, kept, output = _try(module, x)
                best = min(best, seconds)
        trained = sum(one.nbytes for one in module.parameters() if one.requires_grad)
        whole = sum(one.nbytes for one in (*module.parameters(), *module.buffers()))
        costs.append(
            LayerCost(
                seconds=best,
                held_bytes=int(whole + trained * (1 + state_copies)),
                activation_bytes=kept,
                input_bytes=x.nbytes if isinstance(x, Tensor) else 0,
                gives_tensor=isinstance(output, Tensor),
            )
        )
        x = output
    return costs


def _try(module: nn.Module, x: Any) -> tuple[float, int, Any]:
    # A copy: the module may change it in place.
    given = _each(x, lambda one: one.detach().requires_grad_(one.is_floating_point()).clone())
    saved: dict[int, int] = {}
    own = {one.untyped_storage().data_ptr() for one in (*module.parameters(), *module.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    began = time.perf_counter()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(given)
    roots: list[Tensor] = []
    _each(output, lambda one: roots.append(one) if one.requires_grad else None)
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])
        if roots[0].device.type == "cuda":
            torch.cuda.synchronize(roots[0].device)
    seconds = time.perf_counter() - began
    return seconds, sum(saved.values()), _each(output, Tensor.detach)


def _each(value: Any, act: Callable[[Tensor], Any]) -> Any:
    """Apply `act` to a tensor, or to each one in tuples, lists and dicts; anything else is returned unchanged."""
    if isinstance(value, Tensor):
        return act(value)
    if isinstance(value, dict):
        return {key: _each(one, act) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_each(one, act) for one in value)
    return value


@contextmanager
def _visiting(module: nn.Module, device: torch.device) -> Iterator[None]:
    """The module on another device; afterwards it is back, with its gradients and buffers (running statistics)."""
    devices = {one.device for one in module.parameters()}
    module.to(device)
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    gradients = [(one, one.grad) for one in module.parameters()]
    for one, _ in gradients:
        one.grad = None
    yield
    for buffer, value in before:
        with torch.no_grad():
            buffer.copy_(value)
    for one, gradient in gradients:
        one.grad = gradient
    if len(devices) == 1:
        module.to(devices.pop())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holding:
    """What one stage holds of the model."""

    parts: tuple[ChainPart, ...]
    """The stage's parts of the chain, in order."""
    parameters: tuple[nn.Parameter, ...]
    """The parameters it computes with, each once; including those that belong to no layer, which any may use."""
    first: frozenset[int]
    """Identities of the parameters that no earlier stage holds: this stage reports them."""
    tied: tuple[tuple[tuple[int, ...], tuple[nn.Parameter, ...]], ...]
    """Parameters shared with other stages, grouped by the stages that hold them, in the same order on all stages."""
    own: tuple[Tensor, ...]
    """Parameters and buffers that belong to the model itself and to no layer."""
    buffers: tuple[str, ...]
    """Names of the buffers that this stage reports."""


def holding_of(
    model: nn.Module, chain: Sequence[nn.Module], cuts: Sequence[int], stages: int, stage: int
) -> Holding:
    """What `stage` holds of a model with these cuts; part k is on stage k mod `stages`."""
    places = parts_of(cuts, len(chain))
    holders: dict[int, set[int]] = {}  # stages by parameter or buffer, of those that layers have
    for number, within in enumerate(places):
        for module in chain[within.start : within.stop]:
            for one in (*module.parameters(), *module.buffers()):
                holders.setdefault(id(one), set()).add(number % stages)
    parameters, buffers = list(model.parameters()), dict(model.named_buffers())
    own = [one for one in (*parameters, *buffers.values()) if id(one) not in holders]
    of_model = [one for one in own if isinstance(one, nn.Parameter)]
    parts = [
        ChainPart(number, within.start, chain[within.start : within.stop], of_model)
        for number, within in enumerate(places)
    ]
    mine, first = [], set()
    tied: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        having = tuple(sorted(holders.get(id(parameter), range(stages))))
        if stage in having:
            mine.append(parameter)
            if having[0] == stage:
                first.add(id(parameter))
            if len(having) > 1:
                tied.setdefault(having, []).append(parameter)
    return Holding(
        parts=tuple(part for part in parts if part.number % stages == stage),
        parameters=tuple(mine),
        first=frozenset(first),
        tied=tuple((having, tuple(tied[having])) for having in sorted(tied)),
        own=tuple(own),
        buffers=tuple(name for name, buffer in buffers.items() if min(holders.get(id(buffer), {0})) == stage),
    )


def require_own_statistics(
    model: nn.Module, chain: Sequence[nn.Module], cuts: Sequence[int], stages: int
) -> None:
    """Raise UserError for a layer with running statistics that is on several stages: the copies would diverge."""
    having: dict[int, set[int]] = {}
    for number, within in enumerate(parts_of(cuts, len(chain))):
        for layer in chain[within.start : within.stop]:
            for module in layer.modules():
                having.setdefault(id(module), set()).add(number % stages)
    for name, module in model.named_modules():
        found = sorted(having.get(id(module), ()))
        keeps = isinstance(module, _NormBase) and module.running_mean is not None
        if keeps and len(found) > 1 and module.train().training:  # some stay in evaluation mode
            raise UserError(
                f"layer {name!r} ({type(module).__name__}) is in stages {' and '.join(map(str, found))}, and each "
                "would keep running statistics of its own; use a layer for each place, or cuts= that keep both in one "
                "stage"
            )
