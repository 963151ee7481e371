"""Post-local SGD, DiLoCo, elastic averaging and gossip, each held against replicas that are trained by hand here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from equality import OPTIMIZERS, distance, same_bits
from manyhands.data.store.checkpoint import CheckpointStore
from manyhands.errors import UserError
from manyhands.strategies.local.local_exchange import partner
from manyhands.strategy import Strategy
from replicas import Parameters, by_hand, mean, set_all, small_task, train


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


def test_the_first_steps_of_post_local_end_with_an_average_each() -> None:
    task = small_task(OPTIMIZERS["sgd"])

    def after(step: int, parameters: Parameters) -> None:
        if step <= 5 or step % 4 == 0 or step == 18:
            set_all(parameters)

    results = train(task, "local steps=4 first=5", 3, 18)
    assert all(
        same_bits(dict(one.model.state_dict()), dict(results[0].model.state_dict())) for one in results
    )
    assert distance(dict(results[0].model.state_dict()), by_hand(task, 3, 18, after)[0]) < 1e-9


@pytest.mark.parametrize("first", [0, 4])
def test_diloco_is_torchs_nesterov_on_how_far_the_mean_has_come(first: int) -> None:
    task = small_task(OPTIMIZERS["sgd"])
    outer: list[nn.Parameter] = []
    sgd: list[torch.optim.Optimizer] = []

    def after(step: int, parameters: Parameters) -> None:
        if step <= first:
            set_all(parameters)
            outer[:] = [nn.Parameter(value.clone()) for value in parameters[0]]
            sgd.clear()
            return
        if step % 4 and step != 18:
            return
        if not outer:
            outer.extend(nn.Parameter(value.detach().clone()) for value in task.model().parameters())
        if not sgd:
            sgd.append(torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True))
        for one, tensors in zip(outer, zip(*parameters, strict=True), strict=True):
            one.grad = one.detach() - mean(tensors)
        sgd[0].step()
        for one, tensors in zip(outer, zip(*parameters, strict=True), strict=True):
            for tensor in tensors:
                tensor.copy_(one)

    results = train(task, f"local steps=4 first={first} outer=nesterov", 2, 18)
    assert same_bits(dict(results[0].model.state_dict()), dict(results[1].model.state_dict()))
    assert distance(dict(results[0].model.state_dict()), by_hand(task, 2, 18, after)[0]) < 1e-9


@pytest.mark.parametrize("first", [0, 4])
def test_elastic_averaging_shows_the_centre_and_leaves_the_replicas_apart(first: int) -> None:
    task, world, pull = small_task(OPTIMIZERS["momentum"]), 3, 0.6
    centre = [value.detach().clone() for value in task.model().parameters()]

    def after(step: int, parameters: Parameters) -> None:
        if step <= first:
            set_all(parameters)
            for middle, tensor in zip(centre, parameters[0], strict=True):
                middle.copy_(tensor)
            return
        if step % 4 and step != 18:
            return
        for middle, tensors in zip(centre, zip(*parameters, strict=True), strict=True):
            drawn = middle + pull * (mean(tensors) - middle)
            for tensor in tensors:
                tensor.sub_(pull / world * (tensor - middle))
            middle.copy_(drawn)

    results = train(task, f"local steps=4 first={first} outer=elastic:{pull}", world, 18)
    replicas = by_hand(task, world, 18, after)
    for result, replica in zip(results, replicas, strict=True):
        assert distance(dict(result.model.state_dict()), replica) < 1e-9
    shown = results[0].weights
    assert shown is not None
    assert distance(dict(shown), dict(zip(shown, centre, strict=True))) < 1e-9
    assert distance(dict(shown), replicas[0]) > 1e-6


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gossip_is_a_mean_of_two_after_every_step(world: int) -> None:
    task = small_task(OPTIMIZERS["momentum"])

    def after(step: int, parameters: Parameters) -> None:
        if step == 10:
            set_all(parameters)
            return
        before = [[value.clone() for value in replica] for replica in parameters]
        for rank in range(world):
            other = partner(rank, world, step)
            if other is not None:
                for tensor, theirs in zip(parameters[rank], before[other], strict=True):
                    tensor.add_(theirs).mul_(0.5)

    results = train(task, "local steps=inf gossip=yes", world, 10)
    assert distance(dict(results[0].model.state_dict()), by_hand(task, world, 10, after)[0]) < 1e-9


@pytest.mark.parametrize("world", range(1, 17))
def test_in_a_tournament_everybody_meets_everybody_once(world: int) -> None:
    rounds = world - 1 + world % 2
    met = set()
    for rendezvous in range(rounds):
        pairs = {rank: partner(rank, world, rendezvous) for rank in range(world)}
        assert all(other is None or pairs[other] == rank for rank, other in pairs.items())
        assert list(pairs.values()).count(None) == world % 2
        met |= {(rank, other) for rank, other in pairs.items() if other is not None}
    assert len(met) == world * (world - 1)


@pytest.mark.parametrize("text", ["local steps=4 outer=nesterov", "local steps=4 gossip=yes first=3"])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(text: str, tmp_path: Path) -> None:
    task, store = small_task(OPTIMIZERS["adamw"]), CheckpointStore(tmp_path, keep=10)
    whole = train(task, text, 2, 16, store)
    resumed = train(task, text, 2, 16, store, store.load(8))
    assert same_bits(dict(whole[0].model.state_dict()), dict(resumed[0].model.state_dict()))
    if "nesterov" in text:
        assert store.load(8).extra["exchange"]["outer"], "momentum is kept"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("local outer=nesterv", "did you mean 'nesterov'?"),
        (
            "local outer=nesterov:0.7:1",
            "momentum=1 must be at least 0 and below 1; nesterov:0.7:0.9 is the usual",
        ),
        ("local outer=elastic:0", "pull=0 must be above 0 and at most 1; elastic:0.9 is the usual value"),
        ("local outer=nesterov:fast", "rate 'fast' is not a number"),
        ("local outer=mean:1", "too many numbers for mean"),
        ("local outer=elastic gossip=yes", "leave one out"),
        ("local outer=elastic link=tcp codec=bf16", "leave one out"),
        ("local first=-1", "first=-1: must be an integer of at least 0"),
        ("local gossip=perhaps", "unknown value 'perhaps'; allowed: yes, no"),
    ],
)
def test_settings_that_make_no_sense_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        Strategy.parse(text)
    assert sentence in str(error.value)


def test_text_form() -> None:
    text = "local steps=50 first=100 outer=nesterov:0.7:0.9 gossip=yes link=tcp codec=bf16"
    assert str(Strategy.parse(text)) == text
    assert Strategy.parse("local outer=elastic").facts.instead_of_own_loop
    assert not Strategy.parse("local steps=50 outer=nesterov").facts.instead_of_own_loop
