"""`central` with ranks that are threads: the weights of the plain loop, one copy of them, and nothing written early."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

import manyhands as mh
from equality import TWICE, distance, make_task, same_bits, train_in_threads, train_plainly
from manyhands.engine.exchange import Exchange, LocalStep
from manyhands.errors import UserError
from manyhands.native.group import shared_group
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles
from manyhands.strategies.central.exchange import CentralExchange
from ways import BUCKET_BYTES, connect, in_threads, join, train_on, with_exchanges


class Whole(optim.AdamW):
    """A subclass might look at whole tensors, so it is given whole tensors."""


def two_groups(kind: Callable[..., optim.Optimizer], **settings: Any) -> Callable[[Any], optim.Optimizer]:
    def make(parameters: Any) -> optim.Optimizer:
        rows = list(parameters)
        return kind(
            [{"params": rows[1:3], "lr": 0.05, "weight_decay": 0.0}, {"params": rows[3:] + rows[:1]}],
            **settings,
        )

    return make


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, weight_decay=1e-3),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, weight_decay=1e-3),
    "adam": lambda p: optim.Adam(p, lr=1e-2, weight_decay=1e-3),
    "adamw": lambda p: optim.AdamW(p, lr=1e-2),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.9, weight_decay=1e-3),
    "groups-momentum": two_groups(optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "groups-adamw": two_groups(optim.AdamW, lr=1e-2, weight_decay=1e-2),
    "whole-adamw": two_groups(Whole, lr=1e-2, weight_decay=1e-2),
    "whole-adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
}
MORE: dict[str, Callable[[Any], optim.Optimizer]] = {
    "amsgrad": lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "nadam": lambda p: optim.NAdam(p, lr=1e-2),
    "radam": lambda p: optim.RAdam(p, lr=1e-2),
    "adadelta": lambda p: optim.Adadelta(p, lr=1e-1),
    "rprop": lambda p: optim.Rprop(p, lr=1e-3),
    "asgd": lambda p: optim.ASGD(p, lr=1e-1),
    "foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
}
STEPS = TWICE


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


@cache
def task_and_reference(name: str) -> tuple[mh.Task, dict[str, torch.Tensor]]:
    task = make_task((OPTIMIZERS | MORE)[name])
    return task, train_plainly(task, STEPS)


def train_centrally(task: mh.Task, world: int, steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    with SharedGroupFiles.create(world) as files:
        return train_in_threads(task, world, lambda rank: connect("central", files, rank), steps)


@pytest.mark.parametrize(
    ("name", "world"),
    [(name, world) for name in OPTIMIZERS for world in range(1, 5)] + [(name, 3) for name in MORE],
)
def test_weights_equal_the_plain_loop(name: str, world: int) -> None:
    task, reference = task_and_reference(name)
    weights = train_centrally(task, world)
    assert distance(weights[0], reference) < 1e-9
    for other in weights:
        assert same_bits(weights[0], other)


def test_weights_equal_the_plain_loop_after_many_steps() -> None:
    task, steps = make_task(OPTIMIZERS["groups-adamw"]), 30
    expected = train_plainly(task, steps)
    for weights in train_centrally(task, 3, steps):
        assert distance(weights, expected) < 1e-9


def test_a_schedule_changes_the_rate_of_the_pieces() -> None:
    plain = make_task(OPTIMIZERS["groups-adamw"])
    task = mh.Task(
        model=plain.model,
        loss=plain.loss,
        data=plain.data,
        optimizer=plain.optimizer,
        batch_size=plain.batch_size,
        scheduler=lambda optimizer: optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.05, total_steps=STEPS + 1
        ),
    )
    reference = train_plainly(task, STEPS)
    assert distance(reference, train_plainly(plain, STEPS)) > 1e-3
    assert distance(train_centrally(task, 3)[0], reference) < 1e-9


def test_float32_and_two_runs_alike() -> None:
    task = make_task(OPTIMIZERS["sgd"], torch.float32)
    first, second = train_centrally(task, 4), train_centrally(task, 4)
    assert distance(first[0], train_plainly(task, STEPS)) < 1e-5
    assert same_bits(first[0], second[0])


class Mixed(nn.Module):
    """Trainable, frozen and empty parameters of several types, a scalar, tied weights, a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.frozen = nn.Parameter(torch.randn(5, 3, generator=generator), requires_grad=False)
        self.wide = nn.Parameter(torch.randn(3, 40, generator=generator, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(40, generator=generator).to(torch.bfloat16))
        self.scale = nn.Parameter(torch.randn((), generator=generator))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.tied = self.wide
        self.register_buffer("offset", torch.randn(2, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x @ self.frozen).double() @ self.wide
        return ((hidden * self.narrow.double()).sum(1) + self.tied.sum()) * self.scale.double()


def test_all_see_one_copy_and_worker_0_s_values_win() -> None:
    def act(exchange: Exchange) -> list[torch.Tensor]:
        model = Mixed(seed=exchange.rank)
        exchange.attach(model, optim.AdamW(model.parameters()))
        assert model.tied is model.wide
        found = [value.clone() for value in model.state_dict().values()]
        nothing = torch.zeros(1, dtype=torch.float64)
        exchange.total(nothing)
        if exchange.rank == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(7)
        exchange.total(nothing)
        assert all(parameter.eq(7).all() for parameter in model.parameters()), (
            "another worker's write is not seen"
        )
        return found

    expected = list(Mixed(seed=0).state_dict().values())
    for found in with_exchanges("central", 3, act):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [optim.AdamW, Whole])
def test_types_frozen_scalars_and_empty_parameters_train_and_are_gathered(kind: type[optim.AdamW]) -> None:
    x = torch.arange(30.0).reshape(6, 5) / 30

    def plain() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        model = Mixed(seed=0)
        optimizer = kind(model.parameters(), lr=0.01)
        for _ in range(5):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict(), optimizer.state_dict()

    def act(exchange: Exchange) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
        model = Mixed(seed=0)
        exchange.attach(model, kind(model.parameters(), lr=0.01))
        for _ in range(5):
            exchange.backward(model(x).square().mean(), 0.5)
            exchange.agree(LocalStep(loss=0.0, share=0.5))
            exchange.apply()
        state = exchange.optimizer_state()
        return {name: value.clone() for name, value in model.state_dict().items()}, state

    weights, state = plain()
    (found, gathered), (_, nothing) = with_exchanges("central", 2, act)
    assert nothing is None
    assert gathered is not None
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
    assert gathered["state"].keys() == state["state"].keys()
    for number, entries in state["state"].items():
        for name, value in entries.items():
            assert gathered["state"][number][name].shape == value.shape
            torch.testing.assert_close(gathered["state"][number][name], value, rtol=1e-4, atol=1e-5)


def until_someone_waits_for(group: SharedGroup) -> None:
    """Wait until another rank sleeps because the owner of `group` has not arrived."""
    words = group._control.array(shared_group.word_offset(group.rank, shared_group.ARRIVED), 2, np.uint32)
    deadline = time.monotonic() + 180
    while words[1] == 0:
        assert time.monotonic() < deadline, "nobody fell asleep"
        os.sched_yield()


def test_nothing_is_written_while_a_backward_runs() -> None:
    """Worker 0 is through with its part of the step and waits; worker 1's backward must still find the old weights."""
    in_backward = threading.Event()
    seen: list[bool] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
            context.parameter, context.before = parameter, parameter.detach().clone()
            return x.clone()

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            in_backward.set()
            until_someone_waits_for(groups[1])
            seen.append(torch.equal(context.parameter.detach(), context.before))
            return gradients[0], None

    def act(exchange: Exchange) -> bool:
        model = nn.Linear(300, 4)
        exchange.attach(model, optim.SGD(model.parameters(), lr=1.0))
        before = model.weight.detach().clone()
        output = model(torch.ones(1, 300))
        if exchange.rank == 1:
            output = Watched.apply(output, model.weight)
        exchange.backward(output.sum(), 0.5)
        if exchange.rank == 0:
            assert in_backward.wait(240)
        exchange.agree(LocalStep(loss=0.0, share=0.5))
        exchange.apply()
        return not torch.equal(before, model.weight)

    with SharedGroupFiles.create(2) as files:
        groups = [join(files, rank) for rank in range(2)]
        exchanges = [CentralExchange(group, BUCKET_BYTES) for group in groups]
        assert in_threads(2, lambda rank: act(exchanges[rank])) == [True, True]
        for exchange in exchanges:
            exchange.close()
    assert seen == [True]


def test_autograd_notices_that_the_weights_have_changed() -> None:
    def act(exchange: Exchange) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        exchange.attach(model, optim.SGD(model.parameters(), lr=0.1))
        loss = model(torch.ones(1, 3)).sum()
        with exchange.hooks.holding():
            (loss / 2).backward(retain_graph=True)
        exchange.agree(LocalStep(loss=0.0, share=0.5))
        exchange.apply()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    with_exchanges("central", 2, act)


def test_slices_cross_once_where_an_all_reduce_crosses_twice() -> None:
    def act(exchange: Exchange) -> int:
        model = nn.Linear(64, 64, bias=False)
        exchange.attach(model, optim.SGD(model.parameters(), lr=0.1))
        exchange.total(torch.zeros(1, dtype=torch.float64))
        before = exchange.meter.traffic()
        exchange.total(torch.zeros(1, dtype=torch.float64))
        status = exchange.meter.traffic() - before
        exchange.backward(model(torch.ones(1, 64)).sum(), 1.0)
        exchange.agree(LocalStep(loss=0.0, share=1.0))
        exchange.apply()
        return (exchange.meter.traffic() - before).bytes_sent - 2 * status.bytes_sent

    world, num_bytes = 3, 64 * 64 * 4
    assert sum(with_exchanges("central", world, act)) == (world - 1) * num_bytes
    assert sum(with_exchanges("mirrored", world, act)) == 2 * (world - 1) * num_bytes


def test_what_can_not_be_shared_is_refused_by_name() -> None:
    def attach(model: nn.Module, make: Callable[..., optim.Optimizer] = optim.SGD, world: int = 1) -> str:
        with pytest.raises(UserError) as caught:
            with_exchanges(
                "central", world, lambda exchange: exchange.attach(model, make(model.parameters()))
            )
        return str(caught.value)

    assert "LBFGS" in attach(nn.Linear(2, 2), optim.LBFGS, world=2)
    two = nn.Module()
    two.one = nn.Parameter(torch.ones(4, 4))
    two.other = nn.Parameter(two.one.data[2:])
    assert "'one' and 'other' share memory but are different parameters" in attach(two)
    assert "'weight' is on meta" in attach(nn.Linear(2, 2, device="meta"))
    whole = nn.Module()
    whole.number = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    assert "'number' is torch.complex64" in attach(whole)


def test_the_state_can_not_be_had_in_the_middle_of_a_step() -> None:
    def act(exchange: Exchange) -> None:
        model = nn.Linear(3, 2)
        exchange.attach(model, optim.SGD(model.parameters(), lr=0.1))
        exchange.backward(model(torch.ones(1, 3)).sum(), 1.0)
        with pytest.raises(UserError, match="between steps"):
            exchange.optimizer_state()
        exchange.agree(LocalStep(loss=0.0, share=1.0))
        with pytest.raises(UserError, match="between steps"):
            exchange.optimizer_state()
        exchange.apply()
        assert (exchange.optimizer_state() is None) == (exchange.rank > 0)

    with_exchanges("central", 2, act)


@pytest.mark.parametrize("name", ["groups-adamw", "momentum", "adagrad", "whole-adafactor"])
def test_a_checkpoint_is_gone_on_from_by_any_strategy(name: str, tmp_path: Path) -> None:
    task = make_task(OPTIMIZERS[name])
    start = None
    for number, (way, world) in enumerate([("central", 3), ("single", 1), ("central", 4), ("mirrored", 2)]):
        steps = 5 * (number + 1)
        weights = train_on(task, way, world, tmp_path, steps, start)[0]
        start = steps
    assert distance(weights, train_plainly(task, 20)) < 1e-9


@pytest.mark.parametrize("name", ["groups-adamw", "momentum", "whole-adafactor"])
def test_resumed_on_as_many_workers_it_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    task = make_task(OPTIMIZERS[name], torch.float32)
    whole = train_on(task, "central", 3, tmp_path / "whole", 14, None)[0]
    train_on(task, "central", 3, tmp_path / "parts", 8, None)
    assert same_bits(whole, train_on(task, "central", 3, tmp_path / "parts", 14, 8)[0])


def test_the_model_outlives_the_exchange() -> None:
    def act(exchange: Exchange) -> nn.Module:
        model = nn.Linear(3, 2)
        exchange.attach(model, optim.SGD(model.parameters(), lr=0.1))
        return model

    for model in with_exchanges("central", 2, act):
        assert model(torch.zeros(3)).shape == (2,)
        assert all(parameter.grad is None for parameter in model.parameters())
