"""What workers hold of a model: the user's optimizer on parts steps as on the whole, and the whole comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from manyhands.data.batches import split
from manyhands.errors import ManyhandsError
from manyhands.strategies.common.grid.grid_group import LinkGroup
from manyhands.strategies.common.grid.held import Cut, Held, HeldModel, Outline
from manyhands.transport.link.simulated_network import SimulatedNetwork

Build = Callable[[nn.Module], Optimizer]


def by_decay(model: nn.Module) -> Optimizer:
    """Two groups, as many training scripts have them: one of matrices, and one of vectors without weight decay."""
    parameters = list(model.parameters())
    return AdamW(
        [
            {"params": [one for one in parameters if one.ndim > 1], "weight_decay": 0.1},
            {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
    )


OPTIMIZERS: dict[str, Build] = {
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda model: Adam(model.parameters(), lr=0.01),
    "groups": by_decay,
}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, dtype=torch.float64)
        self.second = nn.Linear(5, 7, bias=False, dtype=torch.float64)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))


def model_of(seed: int) -> Tied:
    torch.manual_seed(seed)
    model = Tied()
    model.norm.running_mean += 2
    return model


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    """Steps with made-up gradients."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        optimizer.step()


def cut_of(parameter: nn.Parameter, index: int, world: int, dim: int | None) -> Cut | None:
    """Matrices along `dim`, or everything in one row where that is None; else all of it."""
    if dim is None and parameter.dim():
        part = split(parameter.numel(), index, world)
    elif dim is not None and parameter.dim() > dim:
        part = split(parameter.shape[dim], index, world)
    else:
        return None
    return Cut(dim=dim, begin=part.start, end=part.stop)


def hold(model: nn.Module, optimizer: Optimizer, index: int, world: int, dim: int | None) -> HeldModel:
    outline = Outline.of(model)
    held = []
    for parameter in model.parameters():
        cut = cut_of(parameter, index, world, dim)
        local = nn.Parameter(cut.of(parameter.detach())) if cut is not None else parameter
        held.append(
            Held(
                whole=parameter,
                local=local,
                shape=parameter.shape,
                cut=cut,
                reports=cut is not None or index == 0,
            )
        )
    return HeldModel(outline, optimizer, held, dict(model.named_buffers()) if index == 0 else {})


def step_held(held: HeldModel, optimizer: Optimizer, steps: int) -> None:
    """The same made-up gradients, each worker its part."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for one in held.held:
            gradient = torch.randn(one.shape, generator=generator, dtype=torch.float64)
            one.local.grad = one.cut.of(gradient) if one.cut is not None else gradient
        optimizer.step()


def together(world: int, work: Callable[[LinkGroup], Any]) -> list[Any]:
    network = SimulatedNetwork()

    def role(rank: int) -> Callable[[], Any]:
        links = {peer: network.link(str(rank), str(peer)) for peer in range(world) if peer != rank}
        return lambda: work(LinkGroup(rank, range(world), links, 5.0, kind=7))

    results = network.run({str(rank): role(rank) for rank in range(world)})
    return [results[str(rank)] for rank in range(world)]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, Sequence) and not isinstance(first, str):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_is_that_of_one_process_that_stepped_it(name: str, dim: int | None, world: int) -> None:
    """After two steps of the whole and three in parts: as a run that was resumed under another strategy."""
    started = model_of(1)
    given = OPTIMIZERS[name](started)
    train(started, given, 2)
    kept = copy.deepcopy(started.state_dict()), copy.deepcopy(given.state_dict())
    alone = model_of(1)
    optimizer = OPTIMIZERS[name](alone)
    alone.load_state_dict(kept[0])
    optimizer.load_state_dict(copy.deepcopy(kept[1]))
    train(alone, optimizer, 3)

    def work(group: LinkGroup) -> Any:
        model = model_of(1)
        mine = OPTIMIZERS[name](model)
        model.load_state_dict(kept[0])
        mine.load_state_dict(copy.deepcopy(kept[1]))
        held = hold(model, mine, group.index, group.world, dim)
        held.drop_rest()
        step_held(held, mine, 3)
        return held.optimizer_state(group), held.model_state(group)

    (optimizer_state, model_state), *others = together(world, work)
    assert others == [(None, None)] * (world - 1)
    assert same(model_state, dict(alone.state_dict()))
    assert model_state["first.weight"] is model_state["second.weight"], "tied ones are one"
    assert same(optimizer_state, optimizer.state_dict())


def test_memory_of_what_is_not_held_is_free() -> None:
    model = model_of(1)
    held = hold(model, SGD(model.parameters(), lr=1), 0, 2, 0)
    held.drop_rest()
    assert model.first.weight.numel() == 0
    assert [one.local.shape for one in held.held][:3] == [(), (4, 5), (4,)]


def test_a_tensor_that_nobody_tells_of_is_named() -> None:
    def work(group: LinkGroup) -> Any:
        model = model_of(1)
        outline = Outline.of(model)
        held = HeldModel(outline, SGD(model.parameters(), lr=1), [], {})
        return held.model_state(group)

    with pytest.raises(ManyhandsError, match="no worker sent the tensor 'scale'"):
        together(1, work)


def test_empty_tensors_travel_too() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.register_buffer("nothing", torch.zeros(0, 3))
            self.register_buffer("flags", torch.tensor([True, False]))

    def work(group: LinkGroup) -> Any:
        model = Empty()
        own = dict(model.named_buffers()) if group.index else {}
        held = [Held(whole=model.weight, local=model.weight, shape=torch.Size([2]), reports=group.index == 0)]
        return HeldModel(Outline.of(model), SGD(model.parameters(), lr=1), held, own).model_state(group)

    state, _ = together(2, work)
    assert state["nothing"].shape == (0, 3)
    assert state["flags"].tolist() == [True, False]
