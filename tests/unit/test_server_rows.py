"""Lazy row optimizers against torch's dense ones, and tables as parts of a shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from manyhands.engine.computing import Built, Computer, TrainingPlan
from manyhands.optim import FTRL, ProximalSGD
from manyhands.strategies.common.tables.row_tables import RowGradient, RowTable, place
from manyhands.strategies.ps.shard_layout import FlatLayout, merge, split
from manyhands.strategies.ps.shard_store import Contribution, ShardStore
from manyhands.task import Task

Make = Callable[[Any], optim.Optimizer]
ROWS, WIDTH = 12, 5

SAME_WHERE_ALL_COME: dict[str, Make] = {
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=1e-2),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "decayed sgd": lambda p: optim.SGD(p, lr=0.1, weight_decay=1e-2),
    "decayed adagrad": lambda p: optim.Adagrad(p, lr=0.1, weight_decay=1e-2, initial_accumulator_value=0.5),
    "adam": lambda p: optim.Adam(p, lr=0.1, betas=(0.8, 0.95), weight_decay=1e-2),
    "adamw": lambda p: optim.AdamW(p, lr=0.1, maximize=True),
    "proximal": lambda p: ProximalSGD(p, lr=0.1, l1=3.0),
}
SAME_ALWAYS: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "ftrl": lambda p: FTRL(p, lr=0.5, l1=0.2, l2=0.1),
    "proximal without l1": lambda p: ProximalSGD(p, lr=0.1),
}


class Side:
    """A table with a lazy optimizer, beside torch's dense one."""

    def __init__(self, make: Make) -> None:
        self._generator = torch.Generator().manual_seed(2)
        start = self.random(ROWS, WIDTH)
        self.dense = nn.Parameter(start.clone())
        self.optimizer = make([self.dense])
        self.lazy = RowTable("table", start.clone(), type(self.optimizer), place(len(start), 1))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def step(self, rows: Tensor) -> None:
        """One step with a gradient in these rows, which may be named twice."""
        gradient = self.random(len(rows), WIDTH)
        self.dense.grad = torch.zeros_like(self.dense).index_add_(0, rows, gradient)
        self.lazy.apply(RowGradient(rows=rows, values=gradient), self.optimizer.param_groups[0])
        self.optimizer.step()

    def assert_equal(self) -> None:
        torch.testing.assert_close(self.lazy.values, self.dense.detach(), rtol=1e-12, atol=1e-12)
        for name, value in self.optimizer.state[self.dense].items():
            torch.testing.assert_close(self.lazy.state[name], value, rtol=1e-12, atol=1e-12)


EVERY = SAME_WHERE_ALL_COME | SAME_ALWAYS


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_lazy_is_dense_where_every_row_comes(make: Make) -> None:
    side = Side(make)
    schedule = optim.lr_scheduler.ExponentialLR(side.optimizer, 0.9)
    for number in range(15):
        rows = torch.randperm(ROWS)
        side.step(torch.cat([rows, rows[: number % 4]]))
        side.assert_equal()
        schedule.step()


@pytest.mark.parametrize("make", SAME_ALWAYS.values(), ids=SAME_ALWAYS)
def test_lazy_is_dense_always_where_a_zero_gradient_does_nothing(make: Make) -> None:
    side = Side(make)
    schedule = optim.lr_scheduler.ExponentialLR(side.optimizer, 0.9)
    for number in range(15):
        side.step(torch.tensor([3, 7, 3, number % ROWS]))
        schedule.step()
    side.step(torch.tensor([], dtype=torch.int64))
    side.assert_equal()


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_rows_that_do_not_come_are_not_touched(make: Make) -> None:
    side = Side(make)
    side.step(torch.arange(ROWS))
    before = {name: value.clone() for name, value in side.lazy.state.items()} | {
        "v": side.lazy.values.clone()
    }
    side.step(torch.tensor([2, 5]))
    remote = [row for row in range(ROWS) if row not in (2, 5)]
    for name, value in (side.lazy.state | {"v": side.lazy.values}).items():
        if value.dim():
            assert torch.equal(value[remote], before[name][remote])
    assert not torch.equal(side.lazy.values[2], before["v"][2])


def test_lazy_adam_corrects_its_bias_by_the_steps_of_the_table() -> None:
    """A row that comes first in step 3 moves by lr * m / (1 - b1^3) / (sqrt(v / (1 - b2^3)) + eps)."""
    table = RowTable("t", torch.zeros(2, 1, dtype=torch.float64), optim.Adam, place(2, 1))
    settings = optim.Adam([nn.Parameter(torch.zeros(1))], lr=0.1).param_groups[0]
    gradient = torch.ones(1, 1, dtype=torch.float64)
    for row in (0, 0, 1):
        table.apply(RowGradient(rows=torch.tensor([row]), values=gradient), settings)
    mean, square = 0.1 / (1 - 0.9**3), 0.001 / (1 - 0.999**3)
    assert table.values[1].item() == pytest.approx(-0.1 * mean / (square**0.5 + 1e-8), rel=1e-12)


def test_the_rate_scales_the_step_alone() -> None:
    for make, factor in ((SAME_ALWAYS["sgd"], 0.25), (SAME_WHERE_ALL_COME["adam"], 0.25)):
        whole, scaled = Side(make), Side(make)
        gradient = RowGradient(rows=torch.arange(ROWS), values=whole.random(ROWS, WIDTH))
        start = whole.lazy.values.clone()
        whole.lazy.apply(gradient, whole.optimizer.param_groups[0])
        scaled.lazy.apply(gradient, scaled.optimizer.param_groups[0], rate=factor)
        torch.testing.assert_close(
            scaled.lazy.values - start, factor * (whole.lazy.values - start), rtol=1e-12, atol=1e-14
        )


def test_float32_is_close_to_torchs() -> None:
    torch.manual_seed(0)
    dense = nn.Parameter(torch.randn(ROWS, WIDTH))
    optimizer = optim.Adam([dense], lr=0.01)
    lazy = RowTable("t", dense.detach().clone(), optim.Adam, place(len(dense), 1))
    for _ in range(10):
        dense.grad = torch.randn(ROWS, WIDTH)
        lazy.apply(RowGradient(rows=torch.arange(ROWS), values=dense.grad), optimizer.param_groups[0])
        optimizer.step()
    torch.testing.assert_close(lazy.values, dense.detach())


def test_gathered_rows_are_those_of_the_table() -> None:
    values = torch.arange(20, dtype=torch.float32).view(10, 2)
    placement = place(10, 2)
    own = placement.rows(1)
    part = RowTable("words", values[own].clone(), optim.SGD, placement, shard=1)
    rows = own[[-1, 0, 0]]
    assert torch.equal(part.gather(rows), values[rows])
    out = torch.empty(3, 2)
    assert part.gather(rows, out) is out
    assert torch.equal(out, values[rows])


def test_a_wrong_row_or_gradient_is_named_and_changes_nothing() -> None:
    placement = place(10, 2)
    own, others = placement.rows(1), placement.rows(0)
    part = RowTable("words", torch.ones(len(own), 2), optim.SGD, placement, shard=1)
    settings = optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).param_groups[0]
    for row in (int(others[0]), 10, -1):
        rows = torch.tensor([int(own[0]), row])
        with pytest.raises(
            IndexError, match=f"row {row} of table 'words' is missing; shard 1 has {len(own)}"
        ):
            part.gather(rows)
        with pytest.raises(IndexError, match=f"row {row} of table 'words'"):
            part.apply(RowGradient(rows=rows, values=torch.ones(2, 2)), settings)
    with pytest.raises(ValueError, match=r"gradient of 1 rows of table 'words' is \(2, 2\)"):
        part.apply(RowGradient(rows=own[:1], values=torch.ones(2, 2)), settings)
    with pytest.raises(ValueError, match="int64 in one dimension"):
        part.apply(RowGradient(rows=torch.tensor([5.0]), values=torch.ones(1, 2)), settings)
    assert torch.equal(part.values, torch.ones(len(own), 2))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.out = nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.embed(words)).square().mean()  # type: ignore[no-any-return]


def built(make: Make) -> Built:
    task = Task(
        model=Words,
        loss=lambda model, batch: model(batch),
        data=torch.zeros(2),
        optimizer=make,
        scheduler=lambda optimizer: optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        sparse={"embed.weight": lambda batch: batch.unique()},
    )
    plan = TrainingPlan(task=task, steps=1, seed=5, evaluate_every=0, checkpoint_every=0)
    return Computer(plan, worker_rank=0).build()


class SparseShards:
    def __init__(self, make: Make, count: int) -> None:
        one = built(make)
        self.layout = FlatLayout.of(one.model, one.optimizer, count, ("embed.weight",))
        self.stores = [ShardStore(built(make), self.layout, shard) for shard in range(count)]

    def step(self, model: nn.Module) -> None:
        """Push what a backward left in `model`: dense gradients, and the rows that are not 0 of the table's."""
        parameters = dict(model.named_parameters())
        buffer = torch.zeros(self.layout.num_bytes, dtype=torch.uint8)
        for name, view in self.layout.views(buffer).items():
            gradient = parameters[name].grad
            assert gradient is not None
            view.copy_(gradient)
        table = parameters["embed.weight"].grad
        assert table is not None
        rows = table.abs().sum(dim=1).nonzero().view(-1)
        split = self.layout.tables[0].placed(len(self.stores)).split(rows)
        for shard, (store, mine) in enumerate(zip(self.stores, split, strict=True)):
            half = RowGradient(rows=mine, values=table[mine])
            part, flags = self.layout.part(buffer, shard), self.layout.flags(shard, set(parameters))
            contribution = Contribution(gradient=part, present=flags, factor=0.5, rows={"embed.weight": half})
            store.apply([contribution, contribution])


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "ftrl"])
def test_a_model_with_a_table_trains_as_in_one_process(name: str, count: int) -> None:
    single, shards = built(SAME_ALWAYS[name]), SparseShards(SAME_ALWAYS[name], count)
    assert single.scheduler is not None
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        single.optimizer.zero_grad()
        single.model(torch.randint(0, ROWS, (4,), generator=generator)).backward()
        shards.step(single.model)
        single.optimizer.step()
        single.scheduler.step()
    states = [store.state() for store in shards.stores]
    model, optimizer = merge(shards.layout, states, single.model.state_dict())
    torch.testing.assert_close(model, dict(single.model.state_dict()), rtol=1e-12, atol=1e-12)
    expected = single.optimizer.state_dict()
    assert optimizer["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(optimizer["state"], expected["state"], rtol=1e-12, atol=1e-12)
    other = SparseShards(SAME_ALWAYS[name], count)
    for shard, store in enumerate(other.stores):
        store.load_state(split(other.layout, shard, model, optimizer, batches=20))
    shards.step(single.model)
    other.step(single.model)
    for one, same in zip(shards.stores, other.stores, strict=True):
        for key, value in one.state().model.items():
            assert torch.equal(value, same.state().model[key])
        rows = shards.layout.tables[0].placed(count).rows(shards.stores.index(one))
        assert torch.equal(one.tables["embed.weight"].gather(rows), same.tables["embed.weight"].gather(rows))


def test_a_bad_gradient_of_a_table_is_named() -> None:
    shards = SparseShards(SAME_ALWAYS["sgd"], 1)
    buffer = torch.zeros(shards.layout.num_bytes, dtype=torch.uint8)
    values = torch.zeros(1, WIDTH, dtype=torch.float64)
    contribution = Contribution(
        gradient=shards.layout.part(buffer, 0),
        present=shards.layout.flags(0, ()),
        rows={"embed.weight": RowGradient(rows=torch.tensor([1]), values=values)},
    )
    assert shards.stores[0].first_bad(contribution) is None
    values[0, 2] = torch.nan
    assert shards.stores[0].first_bad(contribution) == "embed.weight"
