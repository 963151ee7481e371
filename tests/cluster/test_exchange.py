"""What every exchange promises a loop of one's own: clipping, accumulation and the optimizer's state, against torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn, optim

from equality import Awkward, distance, loss, same_bits
from manyhands.engine.clipping import clip_norm
from manyhands.engine.exchange import Exchange, LocalStep
from manyhands.errors import UserError
from manyhands.strategies.allreduce.exchange import AllReduceExchange
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.strategies.common.collectives.schedule_collective import ScheduleCollective
from manyhands.transport.link.simulated_network import SimulatedNetwork
from ways import BUCKET_BYTES, with_exchanges

WAYS = [("single", 1), ("mirrored", 1), ("mirrored", 3), ("central", 1), ("central", 2), ("central", 3)]
WAYS += [("central on ab", 2), ("central on aab", 3)]
LONG = ("central on aab", 3)
"""The way that every optimizer goes for more steps than the others."""
BATCH = 14
MAX_NORM = 0.145  # below the norm of some steps and above that of others

Weights = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": parameters[:2], "lr": 0.2, "weight_decay": 0.0},
        {"params": parameters[2:], "weight_decay": 1e-2},
    ]


def momentum(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(groups(model), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(groups(model), lr=0.02)


Make = Callable[[nn.Module], optim.Optimizer]


def schedule(optimizer: optim.Optimizer) -> optim.lr_scheduler.LRScheduler:
    return optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.2, total_iters=15)


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    for _ in range(steps):
        yield (
            torch.randint(0, 11, (BATCH, 4), generator=generator),
            torch.randint(0, 11, (BATCH,), generator=generator),
        )


@cache
def train_plainly(
    make: Make, *, steps: int, micro: int = 1, max_norm: float | None = None
) -> tuple[Weights, Any]:
    """The loop that a user writes with torch alone; the weights, and the norms or the optimizer's state."""
    model = Awkward(torch.float64)
    optimizer = make(model)
    scheduler = schedule(optimizer)
    norms = []
    for tokens, targets in batches(steps):
        for part in torch.arange(BATCH).chunk(micro):
            (loss(model, (tokens[part], targets[part])) * len(part) / BATCH).backward()
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return copy.deepcopy(model.state_dict()), norms if max_norm is not None else optimizer.state_dict()


def train(
    exchange: Exchange, make: Make, *, steps: int, micro: int = 1, max_norm: float | None = None
) -> tuple[Weights, Any]:
    """The same loop through an exchange; each worker takes its part of every piece of the batch."""
    model = Awkward(torch.float64)
    optimizer = make(model)
    exchange.attach(model, optimizer)
    scheduler = schedule(optimizer)
    norms = []
    for tokens, targets in batches(steps):
        pieces = [part[exchange.rank :: exchange.world] for part in torch.arange(BATCH).chunk(micro)]
        shares = [len(piece) / BATCH for piece in pieces]
        with exchange.hooks.holding() if exchange.hooks is not None else nullcontext():
            for piece, share in zip(pieces[:-1], shares, strict=False):
                exchange.backward(loss(model, (tokens[piece], targets[piece])), share)
        if shares[-1]:
            last = pieces[-1]
            exchange.backward(loss(model, (tokens[last], targets[last])), shares[-1])
        assert not exchange.agree(LocalStep(loss=0.0, share=sum(shares))).bad_workers
        if max_norm is not None:
            norms.append(clip_norm(exchange, model, max_norm))
        exchange.apply()
        scheduler.step()
    state = exchange.optimizer_state()
    return copy.deepcopy(model.state_dict()), norms if max_norm is not None else copy.deepcopy(state)


@pytest.mark.parametrize("make", [momentum, adamw])
@pytest.mark.parametrize(("way", "world"), WAYS)
def test_clipping_equals_torchs(way: str, world: int, make: Make) -> None:
    steps = 20 if (way, world) == LONG else 10
    reference, norms = train_plainly(make, steps=steps, max_norm=MAX_NORM)
    assert min(norms) < MAX_NORM < max(norms), "the bound must matter, but not always"
    for weights, found in with_exchanges(
        way, world, lambda exchange: train(exchange, make, steps=steps, max_norm=MAX_NORM)
    ):
        assert distance(weights, reference) < 1e-9
        assert found == pytest.approx(norms, rel=1e-9)


@pytest.mark.parametrize("make", [momentum, adamw])
@pytest.mark.parametrize(("way", "world"), WAYS)
def test_accumulated_gradients_equal_those_of_one_loop(way: str, world: int, make: Make) -> None:
    """Five pieces of 3, 3, 3, 3 and 2 samples: with three workers one has no part of the last."""
    steps = 15 if (way, world) == LONG else 6
    reference, _ = train_plainly(make, steps=steps, micro=5)
    results = with_exchanges(way, world, lambda exchange: train(exchange, make, steps=steps, micro=5))
    for weights, _ in results:
        assert distance(weights, reference) < 1e-9
        assert same_bits(weights, results[0][0])


def test_accumulation_and_clipping_over_links() -> None:
    world = 3
    reference, norms = train_plainly(momentum, steps=8, micro=5, max_norm=MAX_NORM)
    network = SimulatedNetwork(seed=1, latency_s=0.001)

    def work(rank: int) -> tuple[Weights, Any]:
        links = {peer: network.link(f"rank {rank}", f"rank {peer}") for peer in range(world) if peer != rank}
        executor = ScheduleExecutor(ALGORITHMS["ring"], rank, world, links, timeout_s=30)
        exchange = AllReduceExchange(ScheduleCollective(executor, links), BUCKET_BYTES)
        try:
            return train(exchange, momentum, steps=8, micro=5, max_norm=MAX_NORM)
        finally:
            exchange.close()

    results = network.run({f"rank {rank}": lambda rank=rank: work(rank) for rank in range(world)})
    for weights, found in results.values():
        assert distance(weights, reference) < 1e-9
        assert found == pytest.approx(norms, rel=1e-9)


@pytest.mark.parametrize("make", [momentum, adamw])
@pytest.mark.parametrize(("way", "world"), WAYS)
def test_worker_0_has_the_state_of_a_plain_optimizer(way: str, world: int, make: Make) -> None:
    _, expected = train_plainly(make, steps=6)
    results = with_exchanges(way, world, lambda exchange: train(exchange, make, steps=6))
    assert [state is None for _, state in results] == [rank > 0 for rank in range(world)]
    state = results[0][1]
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys(), "but for the parameter that is never reached"
    for number, entries in expected["state"].items():
        assert state["state"][number].keys() == entries.keys()
        for name, value in entries.items():
            found = state["state"][number][name]
            assert found.dtype == value.dtype
            torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("way", "world"), [("single", 1), ("mirrored", 2), ("central", 2), ("central on aab", 3)]
)
def test_sums_of_several_rounds_add_up_until_the_step(way: str, world: int) -> None:
    """The second round does not reach a parameter that the first one did: its gradient stays."""
    tokens, targets = torch.randint(1, 11, (6, 4)), torch.arange(6)
    rounds = [tokens.clone(), tokens]
    rounds[0][:, 0] = 0

    def plain() -> Weights:
        model = Awkward(torch.float64)
        optimizer = momentum(model)
        for _ in range(3):
            for each in rounds:
                loss(model, (each, targets)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    def act(exchange: Exchange) -> Weights:
        model = Awkward(torch.float64)
        exchange.attach(model, momentum(model))
        for _ in range(3):
            for each in rounds:
                exchange.backward(loss(model, (each, targets)), 1 / world)
                exchange.agree(LocalStep(loss=0.0, share=1 / world))
            exchange.apply()
        return copy.deepcopy(model.state_dict())

    for weights in with_exchanges(way, world, act):
        assert distance(weights, plain()) < 1e-9


@pytest.mark.parametrize("way", ["mirrored", "central"])
def test_a_second_backward_outside_accumulate_is_refused(way: str) -> None:
    def act(exchange: Exchange) -> str:
        model = nn.Linear(3, 2)
        exchange.attach(model, optim.SGD(model.parameters()))
        exchange.backward(model(torch.ones(1, 3)).sum(), 1.0)
        with pytest.raises(UserError, match="second gradient after the first was sent") as caught:
            exchange.backward(model(torch.ones(1, 3)).sum(), 1.0)
        return str(caught.value)

    for sentence in with_exchanges(way, 2, act):
        assert "'bias'" in sentence or "'weight'" in sentence
        assert "accumulate()" in sentence


@pytest.mark.parametrize("way", ["single", "mirrored", "central"])
def test_a_gradient_that_is_not_finite_keeps_its_norm(way: str) -> None:
    def act(exchange: Exchange) -> float:
        model = nn.Linear(3, 2)
        exchange.attach(model, optim.SGD(model.parameters()))
        exchange.backward(model(torch.full((1, 3), float("inf"))).sum(), 1.0)
        exchange.agree(LocalStep(loss=0.0, share=1.0))
        return clip_norm(exchange, model, 1.0)

    assert with_exchanges(way, 1, act) == [float("inf")]
