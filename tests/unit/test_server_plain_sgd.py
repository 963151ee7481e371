"""The compiled step of plain SGD against torch's own, to the bit, and what it is not for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from manyhands.engine.computing import Built, Computer, TrainingPlan
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_store import Contribution, ShardStore
from manyhands.task import Task

SIZES = (1, 3, 16, 37, 256, 1001)


class Sizes(nn.Module):
    """Parameters of awkward sizes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.values = nn.ParameterList(
            nn.Parameter(torch.randn(size, generator=draw, dtype=dtype)) for size in SIZES
        )


def built(make: Callable[[Any], Any], dtype: torch.dtype = torch.float32, **task: Any) -> Built:
    plan = TrainingPlan(
        task=Task(
            model=lambda: Sizes(dtype),
            loss=lambda model, _: model.values[0].sum(),
            data=torch.zeros(2),
            optimizer=make,
            **task,
        ),
        steps=1,
        seed=0,
        evaluate_every=0,
        checkpoint_every=0,
    )
    return Computer(plan, worker_rank=0).build()


def sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1)


def store_of(one: Built, shards: int = 1, shard: int = 0) -> tuple[FlatLayout, ShardStore]:
    layout = FlatLayout.of(one.model, one.optimizer, shards)
    return layout, ShardStore(one, layout, shard)


@pytest.mark.parametrize("shards", [1, 3])
def test_steps_have_the_bits_of_torchs_own(shards: int) -> None:
    draw = torch.Generator().manual_seed(1)
    for shard in range(shards):
        layout, plain = store_of(built(sgd), shards, shard)
        _, other = store_of(built(sgd), shards, shard)
        other.plain = None
        gradient = layout.range_in(torch.zeros(layout.range_bytes(shard), dtype=torch.uint8), shard)
        for step in range(20):
            for piece in gradient.pieces:
                piece.copy_(torch.randn(piece.shape, generator=draw))
            flags = torch.zeros(layout.flag_bytes(shard), dtype=torch.uint8)
            flags[: len(gradient.pieces)] = 1
            if step % 3 == 2:  # not all are reached, and what lies there is never looked at
                flags[step % len(gradient.pieces)] = 0
                gradient.pieces[step % len(gradient.pieces)].fill_(float("nan"))
            rate = (1.0, 1 / 3)[step % 2]
            contribution = Contribution(gradient=gradient, present=flags)
            assert plain.first_bad(contribution) is None
            other.apply([contribution], rate)
            plain.apply([contribution], rate)
            assert torch.equal(plain.values.memory, other.values.memory), step
        assert plain.state().batches == other.state().batches == 20


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_is_named(bad: float) -> None:
    layout, store = store_of(built(sgd))
    gradient = layout.range_in(torch.zeros(layout.range_bytes(0), dtype=torch.uint8), 0)
    gradient.pieces[-1][-1] = bad
    flags = layout.flags(0, {entry.name for entry in layout.entries})
    contribution = Contribution(gradient=gradient, present=flags)
    assert store.first_bad(contribution) == layout.entries[layout.pieces[0][-1].parameter].name
    gradient.pieces[-1][-1] = torch.finfo(torch.float32).max  # finite, though a sum of such is not
    assert store.first_bad(contribution) is None


def hooked(parameters: Any) -> optim.Optimizer:
    optimizer = optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def half_known(parameters: Any) -> optim.Optimizer:
    return optim.SGD(list(parameters)[1:], lr=0.1)


def two_groups(parameters: Any) -> optim.Optimizer:
    first, *others = parameters
    return optim.SGD([{"params": [first], "lr": 0.2}, {"params": others}], lr=0.1)


class Careful(optim.SGD):
    """It may do anything."""


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1),
        lambda p: optim.SGD(p, lr=0.1, maximize=True),
        lambda p: optim.SGD(p, lr=0.1, foreach=True),
        lambda p: optim.SGD(p, lr=0.1, foreach=False),
        lambda p: optim.SGD(p, lr=0.1, fused=False),
        lambda p: optim.SGD(p, lr=torch.tensor(0.1)),
        lambda p: optim.Adam(p, lr=0.1),
        lambda p: Careful(p, lr=0.1),
        hooked,
        half_known,
        two_groups,
    ],
)
def test_it_is_for_nothing_but_plain_sgd(make: Callable[[Any], Any]) -> None:
    assert store_of(built(make))[1].plain is None


def test_it_is_not_for_other_types_and_not_beside_a_scheduler() -> None:
    assert store_of(built(sgd))[1].plain is not None
    assert store_of(built(sgd, dtype=torch.float64))[1].plain is None
    schedule = {"scheduler": lambda one: optim.lr_scheduler.ExponentialLR(one, gamma=0.9)}
    assert store_of(built(sgd, **schedule))[1].plain is None


def test_settings_that_a_state_brings_are_followed() -> None:
    def values_after(one: ShardStore, layout: FlatLayout, lr: float) -> Tensor:
        state = one.state()
        state.optimizer["param_groups"][0]["lr"] = lr
        one.load_state(state)
        gradient = torch.ones(layout.range_bytes(0) // 4).view(torch.uint8)
        flags = layout.flags(0, {entry.name for entry in layout.entries})
        one.apply([Contribution(gradient=layout.range_in(gradient, 0), present=flags)])
        return one.values.pieces[-1].clone()

    layout, store = store_of(built(sgd))
    before = store.values.pieces[-1].clone()
    assert torch.equal(values_after(store, layout, 0.5), before - 0.5)
