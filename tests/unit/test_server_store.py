"""Shards fed with parts of a gradient take the steps of torch's optimizer on whole parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from manyhands.data.store.checkpoint import CheckpointStore, Snapshot
from manyhands.engine.computing import Built, Computer, TrainingPlan
from manyhands.strategies.ps.shard_layout import FlatLayout, ShardState, merge, split
from manyhands.strategies.ps.shard_store import Contribution, ShardStore
from manyhands.task import Task

Make = Callable[[Any], optim.Optimizer]


class Careful(optim.SGD):
    """Looks across the items of a tensor, so its tensors stay whole."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for one in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            one.grad.div_(one.grad.norm() + 1)
        return super().step(closure)


def two_groups(parameters: Any) -> optim.Optimizer:
    first, *others = list(parameters)
    return optim.AdamW([{"params": others, "weight_decay": 0.1}, {"params": [first], "lr": 3e-2}], lr=1e-2)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=1e-2),
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "adamw": lambda p: optim.AdamW(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9),
    "groups": two_groups,
    "whole": lambda p: Careful(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
}


class Model(nn.Module):
    """Tied, frozen, scalar and buffered; `late` is what some gradients do not reach."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.late = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.out = nn.Linear(5, 9)
        self.out.weight = self.embed.weight
        self.to(dtype)


def built(make: Make, *, schedule: bool = False, dtype: torch.dtype = torch.float64) -> Built:
    task = Task(
        model=lambda: Model(dtype),
        loss=lambda model, batch: model(batch).mean(),
        data=torch.zeros(2),
        optimizer=make,
        scheduler=(lambda one: optim.lr_scheduler.ExponentialLR(one, gamma=0.9)) if schedule else None,
    )
    plan = TrainingPlan(task=task, steps=1, seed=5, evaluate_every=0, checkpoint_every=0)
    return Computer(plan, worker_rank=0).build()


class Shards:
    """Stores of all shards, beside one process that trains the same model with torch alone."""

    def __init__(self, make: Make, count: int, **options: Any) -> None:
        self._make, self._options = make, options
        self.single = built(make, **options)
        one = built(make, **options)
        self.layout = FlatLayout.of(one.model, one.optimizer, count)
        self.stores = [self.new_store(shard) for shard in range(count)]
        self.parameters = {name: p for name, p in self.single.model.named_parameters() if p.requires_grad}
        self._generator = torch.Generator().manual_seed(3)

    def new_store(self, shard: int) -> ShardStore:
        return ShardStore(built(self._make, **self._options), self.layout, shard)

    def gradient(self, *, without: str = "-") -> tuple[Tensor, set[str]]:
        """A buffer with a gradient, and the names that it reaches; the rest of the buffer is not a number."""
        buffer = torch.full((self.layout.num_bytes,), 255, dtype=torch.uint8)
        reached = {name for name in self.parameters if not name.startswith(without)}
        for name, view in self.layout.views(buffer).items():
            if name in reached:
                view.copy_(torch.randn(view.shape, generator=self._generator, dtype=torch.float64))
        return buffer, reached

    def contribution(
        self, shard: int, gradient: tuple[Tensor, set[str]], factor: float = 1.0
    ) -> Contribution:
        buffer, reached = gradient
        return Contribution(
            gradient=self.layout.part(buffer, shard),
            present=self.layout.flags(shard, reached),
            factor=factor,
        )

    def step(
        self,
        gradients: list[tuple[Tensor, set[str]]],
        factors: list[float],
        *,
        rate: float = 1.0,
        batches: int = 1,
    ) -> None:
        """One step everywhere; torch alone gets the sum."""
        given = [
            (self.layout.views(buffer), reached, factor)
            for (buffer, reached), factor in zip(gradients, factors, strict=True)
        ]
        for name, parameter in self.parameters.items():
            terms = [factor * views[name] for views, reached, factor in given if name in reached]
            parameter.grad = torch.stack(terms).sum(dim=0) if terms else None
        assert rate == 1, "torch has no rate of its own"
        self.single.optimizer.step()
        if self.single.scheduler is not None:
            for _ in range(batches):
                self.single.scheduler.step()
        self.apply(gradients, factors, rate=rate, batches=batches)

    def apply(
        self, gradients: list[tuple[Tensor, set[str]]], factors: list[float], *, rate: float, batches: int = 1
    ) -> None:
        for shard, store in enumerate(self.stores):
            given = [
                self.contribution(shard, one, factor) for one, factor in zip(gradients, factors, strict=True)
            ]
            store.apply(given, rate, batches)

    def values(self) -> dict[str, Tensor]:
        buffer = torch.zeros(self.layout.num_bytes, dtype=torch.uint8)
        for shard, store in enumerate(self.stores):
            begin, end = self.layout.bounds[shard]
            store.read_into(buffer[begin:end])
        return self.layout.views(buffer)

    def assert_equal(self, tolerance: float = 1e-12) -> None:
        for name, value in self.values().items():
            expected = self.parameters[name].detach()
            torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)

    def expected_optimizer(self) -> dict[str, Any]:
        """That of one process, but for what Adagrad's constructor made for frozen parameters."""
        state_dict = self.single.optimizer.state_dict()
        trainable = {entry.position for entry in self.layout.entries}
        state = {key: value for key, value in state_dict["state"].items() if key in trainable}
        return {**state_dict, "state": state}

    def merged(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        template = built(self._make, **self._options).model.state_dict()
        return merge(self.layout, [store.state() for store in self.stores], template)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_shards_take_the_steps_of_one_process(make: Make, count: int) -> None:
    shards = Shards(make, count, schedule=True)
    for number in range(20):
        left_out = "late" if number in (0, 7) else "-"
        gradients = [shards.gradient(without=left_out) for _ in range(1 + number % 3)]
        shards.step(gradients, [1.0] * len(gradients), batches=1 + number % 2)
    shards.assert_equal()


@pytest.mark.parametrize("count", [1, 3])
def test_a_sum_has_factors_and_gradients_that_reach_different_parameters(count: int) -> None:
    shards = Shards(OPTIMIZERS["momentum"], count)
    for _ in range(5):
        gradients = [shards.gradient(without=name) for name in ("late", "scale", "-")]
        shards.step(gradients, [0.5, 1.0, 0.25])
        shards.step(gradients[:1], [0.3])
    shards.assert_equal()


def test_a_single_gradient_is_read_where_it_lies_and_stays_as_it_is() -> None:
    shards = Shards(OPTIMIZERS["sgd"], 1)
    gradient = shards.gradient()
    before = gradient[0].clone()
    size = shards.stores[0].nbytes
    shards.step([gradient], [1.0])
    shards.step([gradient, gradient], [0.5, 0.25])
    shards.assert_equal()
    assert torch.equal(gradient[0], before)
    assert shards.stores[0].nbytes == size + shards.layout.num_bytes, "a sum needs room once"


def test_mixed_types_are_summed_and_stepped_each_in_its_own() -> None:
    shards = Shards(OPTIMIZERS["sgd"], 2, dtype=torch.float32)
    assert {entry.dtype for entry in shards.layout.entries} == {torch.float32}
    torch.manual_seed(0)

    def mixed(parameters: Any) -> optim.Optimizer:
        return optim.SGD(parameters, lr=0.5)

    model = nn.Module()
    model.register_parameter("a", nn.Parameter(torch.randn(37, dtype=torch.float64)))
    model.register_parameter("b", nn.Parameter(torch.randn(50).to(torch.bfloat16)))
    model.register_parameter("c", nn.Parameter(torch.randn(3, 3)))
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = mixed(model.parameters())
    layout = FlatLayout.of(model, optimizer, 3)
    stores = [
        ShardStore(Built(model=one, optimizer=mixed(one.parameters()), scheduler=None), layout, shard)
        for shard, one in enumerate(copy.deepcopy(model) for _ in range(3))
    ]
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for view in layout.views(buffer).values():
        view.fill_(0.25)
    for shard, store in enumerate(stores):
        one = Contribution(gradient=layout.part(buffer, shard), present=layout.flags(shard, "abc"))
        store.apply([one, one])
        begin, end = layout.bounds[shard]
        store.read_into(buffer[begin:end])
    for name, view in layout.views(buffer).items():
        assert torch.equal(view, expected[name] - 0.25)


@pytest.mark.parametrize("count", [1, 2])
def test_the_rate_scales_the_step_of_sgd(count: int) -> None:
    shards = Shards(OPTIMIZERS["sgd"], count)
    before = {name: value.clone() for name, value in shards.values().items()}
    gradient = shards.gradient()
    shards.apply([gradient], [1.0], rate=0.25)
    moved = shards.values()
    for name, view in shards.layout.views(gradient[0]).items():
        torch.testing.assert_close(moved[name], before[name] - 0.25 * 0.1 * view, rtol=1e-14, atol=1e-14)
    shards.apply([gradient], [1.0], rate=1.0)
    for name, view in shards.layout.views(gradient[0]).items():
        torch.testing.assert_close(
            shards.values()[name], before[name] - 1.25 * 0.1 * view, rtol=1e-13, atol=1e-13
        )


def test_the_rate_scales_the_step_of_adam() -> None:
    """The first step of Adam is lr * g / (|g| + eps), however large the gradient is."""
    shards = Shards(OPTIMIZERS["adam"], 2)
    before = {name: value.clone() for name, value in shards.values().items()}
    gradient = shards.gradient()
    shards.apply([gradient], [1.0], rate=0.25)
    for name, view in shards.layout.views(gradient[0]).items():
        step = 0.25 * 0.1 * view / (view.abs() + 1e-8)
        torch.testing.assert_close(shards.values()[name], before[name] - step, rtol=1e-12, atol=1e-12)
    assert all(store.state().optimizer["param_groups"][0]["lr"] == 0.1 for store in shards.stores)


def test_no_contribution_moves_nothing_but_the_schedule() -> None:
    shards = Shards(OPTIMIZERS["momentum"], 2, schedule=True)
    for store in shards.stores:
        store.apply([], batches=2)
    shards.assert_equal(0)
    assert shards.stores[0].state().optimizer["param_groups"][0]["lr"] == pytest.approx(0.1 * 0.9**2)
    assert shards.stores[0].state().batches == 2


@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "adamw", "groups", "whole", "adafactor"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_merged_states_are_those_of_one_process(name: str, count: int) -> None:
    shards = Shards(OPTIMIZERS[name], count, schedule=True)
    for number in range(4):
        shards.step([shards.gradient(without="late" if number < 2 else "-")], [1.0])
    model, optimizer = shards.merged()
    expected = shards.single.model.state_dict()
    assert list(model) == list(expected)
    assert _same(model, dict(expected), 1e-12)
    assert _same(optimizer, shards.expected_optimizer(), 1e-12)


@pytest.mark.parametrize("name", ["momentum", "adagrad", "adamw", "groups", "adafactor"])
def test_any_number_of_shards_goes_on_from_the_state_of_another(name: str) -> None:
    three, two = (Shards(OPTIMIZERS[name], count, schedule=True) for count in (3, 2))
    for _ in range(3):
        three.step([three.gradient()], [1.0])
    model, optimizer = three.merged()
    for shard, store in enumerate(two.stores):
        store.load_state(split(two.layout, shard, model, optimizer, batches=3))
    two.single, two.parameters = three.single, three.parameters
    two.assert_equal()
    for _ in range(3):
        two.step([two.gradient()], [1.0])
    two.assert_equal()


@pytest.mark.parametrize("name", ["momentum", "adagrad", "adamw", "groups", "adafactor"])
def test_a_store_that_was_given_a_state_goes_on_bit_for_bit(name: str, tmp_path: Any) -> None:
    shards = Shards(OPTIMIZERS[name], 2, schedule=True)
    for _ in range(3):
        shards.step([shards.gradient()], [1.0])
    others = []
    for shard, store in enumerate(shards.stores):
        state = store.state()
        snapshots = CheckpointStore(tmp_path / str(shard))  # the state is a checkpoint's too
        snapshots.save(Snapshot(step=state.batches, model=state.model, optimizer=state.optimizer))
        loaded = snapshots.load()
        other = shards.new_store(shard)
        other.load_state(ShardState(model=loaded.model, optimizer=loaded.optimizer, batches=loaded.step))
        others.append(other)
    gradient = shards.gradient()
    for shard, (store, other) in enumerate(zip(shards.stores, others, strict=True)):
        for one in (store, other):
            one.apply([shards.contribution(shard, gradient)], 0.5)
        assert _same(store.state().model, other.state().model)
        assert _same(store.state().optimizer, other.state().optimizer)


def _same(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.allclose(one, other, rtol=tolerance, atol=tolerance)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key], tolerance) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(a, b, tolerance) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def test_a_state_of_another_shard_or_of_the_past_is_refused() -> None:
    shards = Shards(OPTIMIZERS["momentum"], 2, schedule=True)
    first = shards.new_store(0).state()
    with pytest.raises(ValueError, match="shard 1 has"):
        shards.stores[1].load_state(first)
    shards.stores[0].apply([])
    with pytest.raises(ValueError, match="the state is of batch 0, but the scheduler is already at 1"):
        shards.stores[0].load_state(first)


def test_a_gradient_that_is_not_finite_is_named() -> None:
    shards = Shards(OPTIMIZERS["sgd"], 2)
    buffer, reached = shards.gradient(without="late")
    bad = [
        store.first_bad(shards.contribution(n, (buffer, reached))) for n, store in enumerate(shards.stores)
    ]
    assert bad == [None, None], "what a gradient did not reach is not looked at"
    buffer, reached = shards.gradient()
    shards.layout.views(buffer)["out.bias"][2] = torch.inf
    shards.layout.views(buffer)["out.bias"][3] = -torch.inf
    shards.layout.views(buffer)["late.weight"][6, 4] = torch.nan
    bad = [
        store.first_bad(shards.contribution(n, (buffer, reached))) for n, store in enumerate(shards.stores)
    ]
    assert "late.weight" in bad
    views = shards.layout.views(buffer)
    for view in views.values():
        view.fill_(1e308)  # the sum overflows, no item does
    assert all(
        store.first_bad(shards.contribution(n, (buffer, reached))) is None
        for n, store in enumerate(shards.stores)
    )


def test_more_shards_than_there_is_to_share() -> None:
    shards = Shards(OPTIMIZERS["adamw"], 40)
    assert any(shards.layout.range_bytes(shard) == 0 for shard in range(40))
    for _ in range(3):
        shards.step([shards.gradient(), shards.gradient()], [0.5, 0.5])
    shards.assert_equal()
    _, optimizer = shards.merged()
    assert _same(optimizer, shards.expected_optimizer(), 1e-12)


def test_a_shard_keeps_its_share_of_memory_and_lets_the_rest_go() -> None:
    one = Built(
        model=(model := nn.Linear(1000, 1000)), optimizer=optim.AdamW(model.parameters()), scheduler=None
    )
    layout = FlatLayout.of(model, one.optimizer, 4)
    store = ShardStore(one, layout, 1)
    buffer = torch.ones(layout.num_bytes, dtype=torch.uint8)
    store.apply([Contribution(gradient=layout.part(buffer, 1), present=layout.flags(1, {"weight", "bias"}))])
    assert store.nbytes == pytest.approx(3 * layout.num_bytes / 4, rel=0.01)
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 8
