"""The measured costs of a chain's layers, and what each stage holds of the model after a cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from manyhands.errors import UserError
from manyhands.strategies.pipeline.cuts import LayerCost, parts_of
from manyhands.strategies.pipeline.stage_messages import ChainPart

__all__ = ["Holding", "holding_of", "layer_costs", "require_own_statistics"]

_TRIES: Final = 3


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
            tries = []
            for _ in range(_TRIES):
                begin(place)
                tries.append(_try(module, x))
        _, kept, output = tries[-1]
        trained = sum(one.nbytes for one in module.parameters() if one.requires_grad)
        whole = sum(one.nbytes for one in (*module.parameters(), *module.buffers()))
        costs.append(
            LayerCost(
                seconds=min(seconds for seconds, _, _ in tries),
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

    parts: tuple[ChainPart, ...]  # the stage's parts of the chain, in order
    parameters: tuple[nn.Parameter, ...]
    """The parameters it computes with, each once; including those that belong to no layer, which any may use."""
    first: frozenset[int]  # identities of the parameters that no earlier stage holds: this stage reports them
    tied: tuple[tuple[tuple[int, ...], tuple[nn.Parameter, ...]], ...]
    """Parameters shared with other stages, grouped by the stages that hold them, in the same order on all stages."""
    own: tuple[Tensor, ...]  # parameters and buffers that belong to the model itself and to no layer
    buffers: tuple[str, ...]  # names of the buffers that this stage reports


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
