"""A shard that averages pushed parameters: the mean, the way it goes, and what stays as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn, optim

from manyhands.engine.computing import Built
from manyhands.errors import UserError
from manyhands.facts import Answer, ModelFootprint
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_store import Averaging, Contribution, ShardStore
from manyhands.strategy import Strategy


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moved = nn.Parameter(torch.arange(6.0, dtype=torch.float64))
        self.still = nn.Parameter(torch.ones(3, dtype=torch.float64) / 3)  # no optimizer has it


def shard(averaging: Averaging) -> tuple[ShardStore, FlatLayout]:
    model = Model()
    optimizer = optim.SGD([model.moved], lr=0.1, momentum=0.9)
    layout = FlatLayout.of(model, optimizer, 1)
    store = ShardStore(Built(model=model, optimizer=optimizer), layout, 0)
    store.averaging = averaging
    return store, layout


def pushed(layout: FlatLayout, values: Tensor, weight: float, factor: float = 1.0) -> Contribution:
    """What a worker pushes: its parameters times the part of the batch that they are of."""
    memory = torch.zeros(layout.range_bytes(0), dtype=torch.uint8)
    part = layout.range_in(memory, 0)
    layout.views(memory)["moved"].copy_(values * weight)
    return Contribution(gradient=part, present=layout.flags(0, {"moved"}), factor=factor)


def held(store: ShardStore) -> Tensor:
    return store.state().model["moved"].clone()


START = torch.arange(6.0, dtype=torch.float64)
A, B = torch.full((6,), 3.0, dtype=torch.float64), START * 2


def test_where_all_are_waited_for_a_step_ends_with_the_weighted_mean() -> None:
    store, layout = shard(Averaging(workers=2, together=True))
    store.apply([pushed(layout, A, 0.25), pushed(layout, B, 0.75)])
    assert torch.equal(held(store), 0.25 * A + 0.75 * B)
    assert store.state().batches == 1
    assert store.state().optimizer["state"] == {}, "nobody stepped here"
    # A worker's part is missing: the policy makes the weights of the others whole.
    store.apply([pushed(layout, A, 0.25, factor=4.0)])
    assert torch.equal(held(store), A)


@pytest.mark.parametrize(("workers", "rate", "way"), [(4, 1.0, 0.25), (2, 0.5, 0.25), (1, 1.0, 1.0)])
def test_a_push_of_its_own_draws_the_shard_a_part_of_the_way(workers: int, rate: float, way: float) -> None:
    store, layout = shard(Averaging(workers=workers, together=False))
    store.apply([pushed(layout, A, 1.0)], rate)
    assert torch.allclose(held(store), START + way * (A - START), atol=1e-15)


def test_several_pushes_of_a_step_go_as_far_as_each_would() -> None:
    store, layout = shard(Averaging(workers=4, together=False))
    store.apply([pushed(layout, A, 1.0, factor=0.5), pushed(layout, B, 1.0, factor=0.5)])
    assert torch.allclose(held(store), START + 0.5 * ((A + B) / 2 - START), atol=1e-15)
    assert Averaging(workers=2, together=False).way(3, 1.0) == 1.0


def test_what_no_worker_steps_keeps_its_bits() -> None:
    store, layout = shard(Averaging(workers=2, together=True))
    before = store.state().model["still"].clone()
    store.apply([pushed(layout, A, 1 / 3), pushed(layout, A, 2 / 3)])
    assert torch.equal(store.state().model["still"], before)
    assert torch.allclose(held(store), A, atol=1e-15)


def test_settings() -> None:
    strategy = Strategy.parse("ps push=parameters")
    assert str(strategy) == "ps push=parameters"
    assert strategy.facts.promises.same_numbers.answer is Answer.PARTLY
    assert "optimizer starts without state" in strategy.facts.promises.worker_dies.words
    assert "anew" not in Strategy.parse("ps").facts.promises.worker_dies.words
    for text, sentence in (
        ("ps push=weights", "unknown push 'weights'"),
        ("ps link=tcp codec=bf16 push=parameters", "would round away a step"),
    ):
        with pytest.raises(UserError, match=sentence):
            Strategy.parse(text)
    model = ModelFootprint(parameters=10, gradients=10, state=20, buffers=0)
    worker, server = strategy.needs(model, 2)
    assert (worker.state, server.state) == (20, 0)
    assert replace(strategy, push="gradients").needs(model, 2)[1].state == 20
