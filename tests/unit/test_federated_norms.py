"""Updates that are too large beside the others': who is rejected, what the sums are without them, and who is named."""

from __future__ import annotations

import json
import math
import random
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import manyhands as mh
from manyhands.engine.computing import Computer, TrainingPlan
from manyhands.errors import NonFinite, UserError
from manyhands.strategies.federated.client_data import Partition
from manyhands.strategies.federated.client_updates import (
    ClientUpdate,
    RoundNorms,
    RoundTally,
    TallySum,
    described_norms,
    norm_class,
    rejected_by_norm,
)
from manyhands.strategies.federated.round_core import (
    AbandonRound,
    ClientsSeen,
    CloseRound,
    ReportCame,
    RoundState,
    RoundTerms,
    as_json,
    handle,
    state_of,
)
from manyhands.strategies.federated.update_tally import KeptTally, PlainTally
from rounds import play_rounds

HUGE = 1.8e19


@pytest.mark.parametrize(
    ("norms", "ratio", "rejected"),
    [
        ([1.0, 1.1, HUGE], 100, (2,)),
        ([HUGE, 1.0, 1.1], 100, (0,)),
        ([1.0, HUGE], 100, ()),  # of two nobody can say who is wrong
        ([1.0, 1.1, HUGE], 0, ()),  # switched off
        ([1.0, 1.0, 127.9], 100, ()),  # 128 is the power of two above 100 times the median
        ([1.0, 1.0, 128.0], 100, (2,)),
        ([1.0, 1.0, 2.0], 1, (2,)),
        ([1.0, 1.0, 1.99], 1, ()),
        ([0.0, 0.0, 5.0], 100, ()),  # most sent nothing: there is nothing to compare with
        ([0.0, 1.0, 1.0, HUGE, HUGE], 100, (3, 4)),
        ([1e-30, 1e-30, 1e-30, 1.0], 100, (3,)),
        ([1.0, 2.0, HUGE, 4.0], 100, (2,)),
        ([HUGE, HUGE, HUGE], 100, ()),
        ([1e308, 1e308, 1e308], 100, ()),  # 100 times that is no number
    ],
)
def test_an_update_is_rejected_by_the_median_of_the_norms(
    norms: list[float], ratio: float, rejected: tuple[int, ...]
) -> None:
    assert rejected_by_norm(dict(enumerate(norms)), ratio) == rejected


def test_a_minority_can_neither_stay_in_nor_push_others_out() -> None:
    draw = random.Random(0)
    for _ in range(300):
        count = draw.randrange(3, 20)
        honest = [draw.uniform(0.5, 5.0) for _ in range(count)]
        for at in draw.sample(range(count), (count - 1) // 2):
            honest[at] = draw.choice([0.0, 1e-30, HUGE, 1e6])
        norms = dict(enumerate(honest))
        assert set(rejected_by_norm(norms, 100)) == {client for client, norm in norms.items() if norm > 1000}
        for client in rejected_by_norm(norms, 7.0):
            assert norms[client] > 7.0 * statistics.median(honest), "nobody within the ratio is rejected"


def test_a_class_is_a_power_of_two() -> None:
    for norm in (1e-300, 0.5, 0.75, 1.0, math.nextafter(2.0, 0), 2.0, HUGE):
        assert 2.0 ** (norm_class(norm) - 1) <= norm < 2.0 ** norm_class(norm)
    assert norm_class(0.0) < norm_class(5e-324)


def test_those_who_sent_most_are_named_first() -> None:
    assert described_norms({3: 0.5, 1: HUGE}) == "client 1 (norm 1.8e+19), client 3 (norm 0.5)"
    many = described_norms({client: float(client) for client in range(8)})
    assert many.startswith("client 7 (norm 7), ")
    assert many.endswith("client 3 (norm 3) and 3 with at most 2")


# The core


def closed_with(norms: list[float], **terms: Any) -> tuple[RoundState, object]:
    usual = RoundTerms(
        rounds=2, clients=len(norms), goal=len(norms), over=1.0, **{"norm_ratio": 100.0, **terms}
    )
    everybody = ClientsSeen(clients=tuple(range(len(norms))), at_s=0.0)
    state, _ = handle(usual, RoundState(), everybody)
    decisions: tuple[object, ...] = ()
    for client, norm in enumerate(norms):
        report = ReportCame(client=client, attempt=1, digest="a", at_s=1.0, norm=norm)
        state, decisions = handle(usual, state_of(json.loads(json.dumps(as_json(state)))), report)
    return state, decisions[-1]


def test_a_round_closes_without_whom_it_rejects() -> None:
    state, closed = closed_with([1.0, HUGE, 1.2, 1.1])
    assert closed == CloseRound(attempt=1, number=0, counted=(0, 2, 3), rejected=(1,))
    assert (state.done, state.rejected, state.norms) == (1, 1, {})
    _, open_to_all = closed_with([1.0, HUGE, 1.2, 1.1], norm_ratio=0.0)
    assert open_to_all == CloseRound(attempt=1, number=0, counted=(0, 1, 2, 3))


def test_a_round_with_too_few_updates_left_is_abandoned_and_names_whom_it_rejected() -> None:
    state, decision = closed_with([1.0, HUGE, 1.2, 1.1], minimum=4)
    assert isinstance(decision, AbandonRound)
    assert "3 updates count, but 4 are needed" in decision.why
    assert "client 1 (norm 1.8e+19)" in decision.why
    assert (state.done, state.abandoned, state.rejected) == (0, 1, 1)


def test_a_state_from_before_there_were_norms_is_read() -> None:
    state, _ = closed_with([1.0, 1.0, 1.0])
    earlier = {name: value for name, value in as_json(state).items() if name not in ("norms", "rejected")}
    assert state_of(earlier) == state


# Sums


LIKE = [torch.zeros(2, 3), torch.zeros(4, dtype=torch.float64)]


def update(client: int, scale: float = 1.0) -> ClientUpdate:
    generator = torch.Generator().manual_seed(client)
    change = [scale * torch.randn(one.shape, generator=generator, dtype=one.dtype) for one in LIKE]
    return ClientUpdate(client=client, change=change, samples=client + 1, steps=2, loss=0.5 * client)


def test_the_norm_is_that_of_all_items_in_double_precision() -> None:
    sent = update(3, scale=1e19)
    flat = np.concatenate([one.double().flatten().numpy() for one in sent.change])
    assert sent.norm == pytest.approx(np.linalg.norm(flat), rel=1e-14)


@pytest.mark.parametrize("kind", ["plain", "kept"])
def test_workers_reject_the_same_updates_and_sum_the_others_exactly(kind: str) -> None:
    clients = [1, 4, 6, 7, 9]
    sent = {client: update(client, HUGE if client == 6 else 1.0 + client) for client in clients}
    barrier, given = Barrier(2, timeout=240), [torch.zeros(0)] * 2

    def worker(rank: int) -> tuple[RoundNorms, TallySum]:
        def total(values: Tensor) -> Tensor:
            given[rank] = values
            barrier.wait()
            found = torch.stack(given).sum(0)
            barrier.wait()
            return found

        tally: RoundTally
        tally = PlainTally(total, LIKE) if kind == "plain" else KeptTally(total, clients, LIKE)
        norms = RoundNorms(100.0)
        for client in clients[rank::2]:
            norms.add(sent[client])
            tally.add(sent[client], client + 1)
        return norms, tally.total(norms.judge(clients, total))

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(worker, range(2)))
    counted = [sent[client] for client in clients if client != 6]
    for norms, found in results:
        assert norms.rejected == {6: sent[6].norm}
        assert found.weight == sum(one.samples for one in counted)
        for at, total_of in enumerate(found.sums):
            exact = torch.stack([one.samples * one.change[at].double() for one in counted]).sum(0)
            torch.testing.assert_close(total_of, exact, rtol=1e-14, atol=1e-13)
    assert [norms.total_rejected for norms, _ in results] == [1, 0], "counted where it was played"


# Simulated rounds


def points(scale: float, hostile: tuple[int, ...] = (2,), clients: int = 5) -> mh.Task:
    """A line; the targets of some clients are so large that their updates are."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 3, generator=generator)
    targets = inputs @ torch.tensor([[2.0], [-1.0], [0.5]])
    split = Partition.parse("iid").split((inputs, targets), 60, clients, 0)
    for client in hostile:
        targets[np.asarray(split[client])] *= scale
    return mh.Task(
        model=lambda: torch.nn.Linear(3, 1),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(inputs, targets),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batch_size=20,
    )


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "median", "fednova"])
def test_a_simulated_round_counts_without_the_update_that_is_too_large(algorithm: str) -> None:
    words = f"federated clients=5 batch=all together=1 algorithm={algorithm}"
    spoiled, honest = play_rounds(points(1e12), words, 2), play_rounds(points(1.0), words, 2)
    reported = spoiled.exchange.summary()
    assert (reported["updates_rejected"], reported["updates_refused"]) == (2, 0)
    assert list(spoiled.exchange.row_facts()["rejected"]) == ["2"]
    assert "rejected" not in honest.exchange.row_facts()
    assert all(math.isfinite(loss) and loss < 100 for loss in spoiled.losses)
    assert play_rounds(points(1e12), f"{words} norm_ratio=0", 1).exchange.summary()["updates_rejected"] == 0
    alone = play_rounds(points(1e12), f"{words} min_reports=5", 1)
    assert math.isnan(alone.losses[0]), "and not where every report is needed"


def test_a_codec_owes_a_client_whose_update_was_rejected_what_it_owed_before() -> None:
    words = "federated clients=5 batch=all together=1 codec=topk:0.3"
    played = play_rounds(points(1e12), words, 1)
    assert sorted(played.exchange._coding.states) == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("norm_ratio=0.5", "norm_ratio=0.5: must be a number of at least 1, or 0"),
        ("norm_ratio=-1", "at least 1"),
        ("norm_ratio=nan", "at least 1"),
        ("norm_ratio=inf", "at least 1"),
        ("norm_ratio=50 secure=yes", "secure=yes: the server sees no norm"),
        ("norm_ratio=50 clip=1.0", "clip=1.0, which bounds every"),
    ],
)
def test_a_bound_that_would_bound_nothing_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(UserError, match=r"federated norm_ratio=") as refused:
        mh.Strategy.parse(f"federated {words}")
    assert sentence in str(refused.value)


def test_a_run_whose_evaluation_is_not_finite_ends_and_names_the_round_and_its_updates() -> None:
    task = points(1e18, hostile=(0,), clients=2)
    task = replace(task, evaluation=(1e4 * task.data[0], task.data[1]))
    played = play_rounds(task, "federated clients=2 batch=all together=1", 1)
    computer = Computer(TrainingPlan(task=task, steps=1, seed=0, evaluate_every=1, checkpoint_every=0), 0)
    with pytest.raises(NonFinite) as ended:
        played.exchange.evaluate(computer, played.model)
    said = str(ended.value)
    assert "round 1 broke the model: its evaluation_loss is inf" in said
    assert said.index("client 0 (norm") < said.index("client 1 (norm"), "the largest first"
    assert math.isfinite(played.losses[0]), "the clients' losses did not show it"
