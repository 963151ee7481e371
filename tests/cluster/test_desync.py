"""Workers whose parameters drift apart by one bit: parameter, rank and step are named, and never in vain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import manyhands as mh
from equality import OPTIMIZERS, Silent, make_task
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.desync_check import describe_difference, parameter_hashes
from manyhands.engine.exchange import Exchange
from manyhands.engine.worker import Trainer
from manyhands.errors import Desync, UserError
from manyhands.strategies.allreduce.exchange import AllReduceExchange
from own_loop import on_workers
from ways import with_exchanges


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


def flip_lowest_bit(tensor: torch.Tensor) -> None:
    """Change the number by as little as can be."""
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.int64).bitwise_xor_(1)


def spoil(exchange: Exchange, name: str, after_step: int) -> None:
    """Flip a bit of this worker's parameter right after a step."""
    assert isinstance(exchange, AllReduceExchange)
    attach, apply, steps = exchange.attach, exchange.apply, 0
    parameters: dict[str, nn.Parameter] = {}

    def attach_and_keep(model: nn.Module, optimizer: Optimizer) -> None:
        attach(model, optimizer)
        parameters.update(model.named_parameters())

    def apply_and_flip() -> None:
        nonlocal steps
        apply()
        steps += 1
        if steps == after_step:
            flip_lowest_bit(parameters[name])

    exchange.attach = attach_and_keep  # type: ignore[method-assign]
    exchange.apply = apply_and_flip  # type: ignore[method-assign]


def train(exchange: Exchange, *, ranks: tuple[int, ...], name: str, after_step: int, check_every: int) -> str:
    """What went wrong on this worker."""
    task = make_task(OPTIMIZERS["sgd"], torch.float64)
    plan = TrainingPlan(
        task=task, steps=20, seed=0, evaluate_every=0, checkpoint_every=0, check_every=check_every
    )
    if exchange.rank in ranks:
        spoil(exchange, name, after_step)
    with pytest.raises(Desync) as caught:
        Trainer(plan, exchange, Silent()).run()
    return str(caught.value)


@pytest.mark.parametrize(
    ("world", "ranks", "name", "after_step", "check_every", "said"),
    [
        (
            2,
            (1,),
            "mix.bias",
            6,
            4,
            "after step 8 * ranks 0 and 1 differ in 'mix.bias'* after step 4 they still did",
        ),
        (
            3,
            (2,),
            "never",
            1,
            1,
            "after step 1 * rank 2 differs from the other 2 in 'never'; after step 0 they",
        ),
        (4, (0, 2), "mix.weight", 5, 5, "ranks 0, 2 and ranks 1, 3 differ from each other in 'mix.weight'"),
        (
            4,
            (0,),
            "rare.weight",
            20,
            7,
            "after step 20 * rank 0 differs from the other 3 in 'rare.weight'; after step 14",
        ),
    ],
)
def test_one_bit_on_one_rank_is_named(
    world: int, ranks: tuple[int, ...], name: str, after_step: int, check_every: int, said: str
) -> None:
    def act(exchange: Exchange) -> str:
        return train(exchange, ranks=ranks, name=name, after_step=after_step, check_every=check_every)

    errors = with_exchanges("mirrored", world, act)
    assert len(set(errors)) == 1, "every worker says the same"
    for part in said.split("*"):
        assert part.strip() in errors[0]


def test_a_parameter_that_spoils_others_is_the_first_in_the_models_order() -> None:
    hashes = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [1, 9, 3, 8]], np.uint64)
    assert describe_difference(["a", "b", "c", "d"], hashes) == (
        "rank 2 differs from the other 2 in 'b' and in 1 other parameter"
    )
    assert describe_difference(["a"], hashes[1:, 1:2], [3, 5]) == "ranks 3 and 5 differ in 'a'"


def test_hashes_see_every_bit_whatever_the_type_and_layout() -> None:
    model = nn.ParameterList(
        [
            nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
            nn.Parameter(torch.zeros(4, 2).t()),
            nn.Parameter(torch.zeros(())),
            nn.Parameter(torch.zeros(0)),
        ]
    )
    before = parameter_hashes(model.named_parameters())
    with torch.no_grad():
        model[0][2] = -0.0
    assert (parameter_hashes(model.named_parameters()) != before).tolist() == [True, False, False, False]
    assert parameter_hashes([("elsewhere", None)]).tolist() == [0]


def own_loop(group: Any, *, skips: bool) -> int:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))  # every parameter has a gradient
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = group.prepare(model, optimizer)
    for step in range(7):
        model(torch.randn(4, 3)).square().sum().backward()
        if not (skips and group.rank == 1 and step == 3):
            optimizer.step()
        optimizer.zero_grad()
    return 7


def test_a_step_left_out_in_an_own_loop_is_named() -> None:
    errors = on_workers(2, lambda group: own_loop(group, skips=True), check_every=2, errors=True)
    assert any(
        isinstance(error, Desync)
        and "after step 4" in str(error)
        and "ranks 0 and 1 differ in '0.weight'" in str(error)
        and "after step 2 they still did" in str(error)
        for error in errors
    ), errors


@pytest.mark.parametrize("strategy", ["mirrored", "central", "allreduce algorithm=ring"])
def test_an_own_loop_that_does_everything_together_raises_no_alarm(strategy: str) -> None:
    assert on_workers(3, lambda g: own_loop(g, skips=False), strategy=strategy, check_every=1) == [7, 7, 7]


def test_a_worker_that_leaves_early_differs_in_peace() -> None:
    def uneven(group: Any) -> int:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = group.prepare(model, optimizer)
        for _ in range(6 - 2 * group.rank):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        return group.rank

    assert on_workers(2, uneven, check_every=1) == [0, 1]


def test_how_often_is_a_number_that_makes_sense() -> None:
    with pytest.raises(UserError, match="check_every=-1 must be at least 1, or 0"):
        mh.Options(check_every=-1)
    with pytest.raises(UserError, match="check_every=-1 must be at least 1, or 0"):
        on_workers(1, lambda group: group.rank, check_every=-1)
