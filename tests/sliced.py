"""Sliced modules held against the whole: outputs, input gradients and weight gradients, slice by slice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import manyhands as mh
from equality import Silent
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import Exchange
from manyhands.engine.worker import Trainer
from manyhands.strategies.common.grid.grid_group import LinkGroup
from manyhands.strategies.common.grid.grid_layout import Grid
from manyhands.strategies.tensor.exchange import TensorExchange
from manyhands.strategies.tensor.slicing import Sliced, slice_modules
from manyhands.strategies.tensor.slicing_plan import Slicing, find_plan
from manyhands.transport.link.simulated_network import SimulatedNetwork

EXACT = 1e-12
SLICES = [1, 2, 3, 4]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def words(model: nn.Module, slices: int = 2) -> dict[str, str]:
    return {name: str(how) for name, how in find_plan(model, slices).items()}


def reduced(num_bytes: int, slices: int) -> int:
    """What each slice sends for an all-reduce of so many bytes, by the documentation's formula."""
    return num_bytes * (slices - 1) if num_bytes <= 128 << 10 else 2 * num_bytes * (slices - 1) // slices


def together(world: int, work: Callable[[LinkGroup], Any]) -> list[Any]:
    """Run `work` on every member of a group, in virtual time."""
    network = SimulatedNetwork()

    def role(rank: int) -> Callable[[], Any]:
        links = {peer: network.link(str(rank), str(peer)) for peer in range(world) if peer != rank}
        return lambda: work(LinkGroup(rank, range(world), links, 5.0, kind=7))

    results = network.run({str(rank): role(rank) for rank in range(world)})
    return [results[str(rank)] for rank in range(world)]


def planned(plan: Mapping[str, str] | None) -> dict[str, Slicing] | None:
    return None if plan is None else {name: Slicing.parse(how) for name, how in plan.items()}


def run(
    model: nn.Module, x: Tensor, call: Callable[[nn.Module, Tensor], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The output of a model, whose gradients are there afterwards, and the gradient of its input."""
    x = x.clone().requires_grad_(x.is_floating_point())
    y = call(model, x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (y * weights).sum().backward()
    return y.detach() * 1, x.grad


def hold_against_the_whole(
    model: nn.Module,
    x: Tensor,
    slices: int,
    plan: Mapping[str, str] | None = None,
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
) -> list[Sliced]:
    """Every slice has the whole's output and input gradient, and its part of the weights' gradients."""
    model = model.double()
    whole = copy.deepcopy(model)
    y, x_gradient = run(whole, x, call)
    named = dict(whole.named_parameters())

    def work(group: LinkGroup) -> Sliced:
        mine = copy.deepcopy(model)
        names = {id(parameter): name for name, parameter in mine.named_parameters()}
        wholes = dict(mine.named_parameters())
        sliced = slice_modules(mine, group, planned(plan))
        own_y, own_gradient = run(mine, x, call)
        assert_close(own_y, y, "output")
        if x_gradient is not None:
            assert_close(own_gradient, x_gradient, "input gradient")
        for identity, name in names.items():
            cut = sliced.cut.get(identity)
            expected, found = named[name].grad, (cut.local if cut is not None else wholes[name]).grad
            if expected is not None and cut is not None:
                expected = cut.cut.of(expected)
            assert_close(found, expected, name)
        return sliced

    return together(slices, work)


def assert_close(found: Tensor | None, expected: Tensor | None, what: str) -> None:
    assert (found is None) == (expected is None), what
    if found is None or expected is None:
        return
    assert found.shape == expected.shape, what
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    assert float((found - expected).abs().max() if expected.numel() else 0) <= EXACT * scale, what


def train(task: mh.Task, exchange: Exchange, steps: int, start: Any = None) -> Any:
    """What a worker's training ended with: the whole model, the optimizer's state, the evaluation."""
    plan = TrainingPlan(task=task, steps=steps, seed=0, evaluate_every=0, checkpoint_every=0, check_every=7)
    trainer = Trainer(plan, exchange, Silent())
    trained = trainer.run(copy.deepcopy(start))
    evaluated = exchange.evaluate(trainer._computer, trained.model)
    weights = trained.weights if trained.weights is not None else trained.model.state_dict()
    model = {name: value.clone() for name, value in weights.items()}
    return model, copy.deepcopy(exchange.optimizer_state()), evaluated


def train_sliced(task: mh.Task, grid: Grid, steps: int, start: Any = None) -> list[Any]:
    """The same of every worker of `tensor`, in virtual time."""
    network, world = SimulatedNetwork(), grid.workers

    def role(rank: int) -> Callable[[], Any]:
        links = {peer: network.link(str(rank), str(peer)) for peer in range(world) if peer != rank}
        return lambda: train(task, TensorExchange(rank, grid, links, 5.0), steps, start)

    results = network.run({str(rank): role(rank) for rank in range(world)})
    return [results[str(rank)] for rank in range(world)]
