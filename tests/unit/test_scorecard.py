"""The scorecard's other measures, on closed cases: joins and leaves, and what is counted as ease."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from manyhands import Strategy
from manyhands.facts import Answer
from manyhands.lab.faults.ease import ease_of, joined_loop, plain_loop, stepped_loop
from manyhands.lab.faults.elasticity import ElasticCost, StepsTaken, broken_elasticity, elastic_cost
from manyhands.lab.faults.scorecard import _may_resize
from manyhands.strategies.registry import STRATEGIES

S = 10**9
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def seen(first_s: float, each_s: float, count: int, samples: int) -> StepsTaken:
    starts = np.asarray([(first_s + place * each_s) * S for place in range(count)], np.int64)
    return StepsTaken(starts_ns=starts, ends_ns=starts + int(each_s * S), samples=np.full(count, samples))


def test_each_worker_is_as_fast_as_its_samples_in_each_span() -> None:
    # Two workers of 100 samples/s each; a third of 50/s is asked for at 4 s, begins at 5 s; 0 is to leave at 9 s.
    workers = {0: seen(0.0, 1.0, 10, 100), 1: seen(0.0, 0.5, 32, 50), 2: seen(5.0, 1.0, 11, 50)}
    cost = elastic_cost(workers, newcomer=2, joined_ns=4 * S, left_ns=9 * S)
    assert cost.computes_s == 1.0
    assert cost.leaves_s == 1.0
    assert cost.each == (100.0, pytest.approx((100 + 100 + 50) / 3), pytest.approx((100 + 50) / 2))


def test_a_newcomer_that_never_computes_breaks_the_promise() -> None:
    workers = {0: seen(0.0, 1.0, 10, 100), 1: seen(0.0, 1.0, 16, 100)}
    cost = elastic_cost(workers, newcomer=2, joined_ns=4 * S, left_ns=9 * S)
    assert cost.computes_s is None
    said = broken_elasticity(Strategy.parse("ps"), cost)
    assert said == "ps: it promises that workers may join and leave: the newcomer computed nothing"
    assert not broken_elasticity(Strategy.parse("single"), cost)
    assert not broken_elasticity(Strategy.parse("ps"), ElasticCost(went_on=True, computes_s=0.1))


@pytest.mark.parametrize("text", [*STRATEGIES, "allreduce elastic=yes", "ps consistency=async"])
def test_who_can_change_workers_promises_it(text: str) -> None:
    facts = Strategy.parse(text).facts
    assert facts.can_change_workers == (facts.promises.workers_join.answer is Answer.YES)
    assert _may_resize(Strategy.parse(text)) == facts.can_change_workers


def test_the_counted_loops_do_the_same() -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 4, dtype=torch.float64)
    model = nn.Linear(4, 1).double()
    ends = []
    for loop in (plain_loop, joined_loop, stepped_loop):
        one = copy.deepcopy(model)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=13)
        loop(one, torch.optim.SGD(one.parameters(), lr=0.1), loader)
        ends.append(one.weight)
    assert not torch.equal(ends[0], model.weight)
    assert all(torch.allclose(ends[0], end, atol=1e-12) for end in ends)


def test_ease_is_counted() -> None:
    assert ease_of(Strategy.parse("mirrored"), 2).lines == 3  # the import, the block, the call of prepare
    assert ease_of(Strategy.parse("pipeline"), 2).lines == 5  # these, the loop's head, and one call for two
    ease = ease_of(Strategy.parse("ps servers=2"), 3)
    assert ease.processes == {"worker": 3, "server": 2}
    assert ease.settings == 0
    assert ease_of(Strategy.parse("federated"), 2).lines is None
    assert ease_of(Strategy.parse("single"), 1).shares == "nothing"


def test_every_promise_is_backed_by_a_measured_cell() -> None:
    """Of the strategies that were measured; the tables reject a promise that a run did not keep, or that has no run."""
    strategies = json.loads((RESULTS / "scorecard.json").read_text())["strategies"]
    apart = json.loads((RESULTS / "scorecard-numbers.json").read_text())["apart"]
    for word in ("ps", "ps servers=2 replicas=1", "allreduce elastic=yes"):
        promises = Strategy.parse(word).facts.promises
        faults = {row["fault"]: row for row in strategies[word]["rows"]}
        for promise, fault in (("worker_dies", "worker killed"), ("server_dies", "server killed")):
            if getattr(promises, promise).answer in (Answer.YES, Answer.PARTLY):
                assert faults[fault]["went_on"], (word, promise)
        (resized,) = strategies[word]["elastic"]
        assert resized["computes_s"] > 0
        assert strategies[word]["alone"]["strategies"][0]["promises"] == {
            one.name: getattr(promises, one.name).answer.value for one in dataclasses.fields(promises)
        }, f"{word} promises something else than when it was measured; measure it again"
    for word in STRATEGIES:
        if Strategy.parse(word).facts.promises.same_numbers.answer is Answer.YES and word not in (
            "single",
            "auto",
        ):
            assert apart[word] < 1e-9, word
