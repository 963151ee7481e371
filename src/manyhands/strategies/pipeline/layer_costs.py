"""Measures the time and memory of each layer of a chain on one micro-batch, before the chain is cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from manyhands.strategies.pipeline.split import LayerCost

__all__ = ["layer_costs"]

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
        with _visiting(module, device), _as_before(module):
            best, kept, output = float("inf"), 0, None
            for _ in range(_TRIES):
                begin(place)
                seconds, kept, output = _try(module, x)
                best = min(best, seconds)
        costs.append(
            LayerCost(
                seconds=best,
                held_bytes=_held(module, state_copies),
                activation_bytes=kept,
                input_bytes=x.nbytes if isinstance(x, Tensor) else 0,
                gives_tensor=isinstance(output, Tensor),
            )
        )
        x = output
    return costs


def _try(module: nn.Module, x: Any) -> tuple[float, int, Any]:
    """Seconds of forward and backward, bytes saved between them, and the output."""
    given = _each(x, lambda one: _leaf(one).clone())  # a copy: the module may change it in place
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
        _finish(roots[0])
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


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _finish(output: Tensor) -> None:
    if output.device.type == "cuda":
        torch.cuda.synchronize(output.device)


def _held(module: nn.Module, state_copies: float) -> int:
    trained = sum(one.nbytes for one in module.parameters() if one.requires_grad)
    whole = sum(one.nbytes for one in (*module.parameters(), *module.buffers()))
    return int(whole + trained * (1 + state_copies))


@contextmanager
def _visiting(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Move the module to the device for the duration of the block, and back afterwards."""
    homes = {one.device for one in module.parameters()}
    module.to(device)
    yield
    if len(homes) == 1:
        module.to(homes.pop())


@contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """Restore gradients and buffers (running statistics) after the block."""
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
