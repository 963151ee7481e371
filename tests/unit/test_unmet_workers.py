"""A loop of the user's own whose workers do not meet: what a push carries, what they agree on, and what a successor
finds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    ExponentialLR,
    LRScheduler,
    SequentialLR,
    StepLR,
)

from manyhands.engine.computing import Built
from manyhands.engine.loop_end import GroupStore, changed_settings, plain_settings, settings_text
from manyhands.errors import PeerTimeout, UserError
from manyhands.interop.own_loop.free_rounds import LoopSchedule, StoreWords
from manyhands.interop.own_loop.small_sums import Call
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_store import Contribution, ShardStore
from manyhands.strategy import Strategy


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "weight_decay": 0.1}]
    return model, torch.optim.AdamW(groups, lr=0.1)


def test_only_settings_that_changed_travel() -> None:
    _, optimizer = model_and_optimizer()
    first = plain_settings(optimizer)
    assert changed_settings(first, optimizer) == {}
    optimizer.param_groups[1]["lr"] = 0.05
    optimizer.param_groups[1]["betas"] = (0.8, 0.9)
    assert changed_settings(first, optimizer) == {"1": {"lr": 0.05, "betas": (0.8, 0.9)}}
    optimizer.add_param_group({"params": nn.Parameter(torch.zeros(1))})
    with pytest.raises(UserError, match="parameter group was added after prepare"):
        changed_settings(first, optimizer)


@pytest.mark.parametrize("clip", [None, 0.01, 1e9])
def test_a_shard_steps_by_the_settings_of_the_push_as_torch_does(clip: float | None) -> None:
    model, optimizer = model_and_optimizer()
    twin, theirs = copy.deepcopy((model, optimizer))
    layout = FlatLayout.of(model, optimizer, 1)
    first = plain_settings(optimizer)
    store = ShardStore(Built(model=model, optimizer=optimizer), layout, 0)
    for rate in (0.1, 0.02, 0.1):
        theirs.param_groups[0]["lr"] = rate
        twin(torch.ones(2, 3, dtype=torch.float64)).square().mean().backward()
        memory = torch.zeros(layout.range_bytes(0), dtype=torch.uint8)
        own = layout.range_in(memory, 0)
        for piece, parameter in zip(own.pieces, twin.parameters(), strict=True):
            piece.copy_(parameter.grad)
        settings: dict[str, Any] = changed_settings(first, theirs)
        if clip is not None:
            settings["clip"] = clip
            nn.utils.clip_grad_norm_(twin.parameters(), clip)
        present = torch.ones(len(own.pieces), dtype=torch.uint8)
        store.apply([Contribution(gradient=own, present=present)], settings=settings_text(settings))
        theirs.step()
        theirs.zero_grad()
    for piece, parameter in zip(store.values.pieces, twin.parameters(), strict=True):
        assert torch.allclose(piece, parameter, rtol=0, atol=1e-12)


def words(store: HashStore, rank: int, world: int = 2, timeout_s: float = 5.0) -> StoreWords:
    end: Any = SimpleNamespace(rank=rank, world=world, store=GroupStore(store, timeout_s))
    return StoreWords(end)


def talk(one: StoreWords) -> tuple[list[float], list[float], list[int]]:
    one.meet(Call.MEAN)
    total = one.total(torch.tensor([1.0 + one.rank], dtype=torch.float64)).tolist()
    rows = one.gather(torch.full((1 + one.rank,), one.rank * 1.0)).tolist()
    content = torch.full((3,), 7 + one.rank, dtype=torch.uint8)
    one.broadcast(content)
    return total, rows, content.tolist()


def test_a_successor_finds_what_its_predecessor_took_part_in() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(talk, [words(store, 0), words(store, 1)]))
    assert found == [([3.0], [0.0, 1.0, 1.0], [7, 7, 7])] * 2
    assert talk(words(store, 1)) == found[1]  # alone, and without waiting
    late = words(store, 1, timeout_s=0.05)
    late.position = lambda: "1"
    with pytest.raises(PeerTimeout, match="worker 0 did not come"):
        late.meet(Call.BARRIER)


def test_what_was_exchanged_inside_batches_that_are_done_is_forgotten() -> None:
    """As many values as there are in two batches, however many there were; those between loops stay."""
    store = HashStore()

    def train(rank: int) -> list[list[float]]:
        one, at = words(store, rank), "0"
        one.position = lambda: at
        sums = [one.total(torch.ones(1)).tolist()]
        for batch in range(20):
            at = f"{batch} inside"
            sums += [one.total(torch.tensor([1.0 * batch])).tolist() for _ in range(3)]
        at = "20"
        return [*sums, one.total(torch.ones(1)).tolist()]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(train, range(2)))
    assert found == [[[2.0], *([2.0 * batch] for batch in range(20) for _ in range(3)), [2.0]]] * 2
    assert store.num_keys() <= 2 * (2 + 2 * 3)
    assert store.check(["@0/1/0", "@20/1/1", "@19 inside/3/0"])


def test_workers_at_batches_of_their_own_exchange_nothing() -> None:
    alone = words(HashStore(), 1, timeout_s=0.0)
    alone.is_apart = lambda: True
    assert talk(alone) == ([2.0], [1.0, 1.0], [8, 8, 8])


def step_by_step(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, 1, gamma=0.5)


def one_after_another(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [step_by_step(optimizer), ExponentialLR(optimizer, 0.5)], milestones=[50])


def together(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ChainedScheduler([step_by_step(optimizer), ConstantLR(optimizer, 1.0)])


@pytest.mark.parametrize("make", [step_by_step, one_after_another, together])
def test_a_schedule_counts_the_batches_of_the_others(
    make: Callable[[torch.optim.Optimizer], LRScheduler],
) -> None:
    def worker(store: GroupStore, batches: list[int]) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler, schedule, rates = make(optimizer), LoopSchedule(store), []
        schedule.schedulers.append(scheduler)
        for index in batches:
            schedule.asked_for_more()
            schedule.handed_out(index)
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        schedule.asked_for_more()
        return rates

    store = GroupStore(HashStore(), 1.0)
    assert worker(store, [0, 3, 4]) == [1.0, 0.5**3, 0.5**4]
    assert worker(store, [5, 9]) == [0.5**5, 0.5**9]  # one that was started again


@pytest.mark.parametrize("text", ["ps push=parameters", "hogwild hands=threads"])
def test_what_has_no_meaning_in_a_loop_says_so(text: str) -> None:
    assert Strategy.parse(text).facts.instead_of_own_loop
