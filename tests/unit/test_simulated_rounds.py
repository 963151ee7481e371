"""Simulated clients that are asked in excess, drop out or come late, by the core that also serves devices."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.errors import DataError, ManyhandsError, UserError
from manyhands.strategies.federated.algorithms import algorithm_named
from manyhands.strategies.federated.algorithms.buff import duration_s
from manyhands.strategies.federated.client_data import Partition, selected
from manyhands.strategies.federated.client_updates import ClientAssignment
from manyhands.strategies.federated.clients import ClientTrainer, LocalWork, held
from manyhands.strategies.federated.round_core import RoundPhase
from manyhands.strategies.federated.simulation import (
    SimulatedCourse,
    SimulatedRounds,
    simulated_rounds,
)
from manyhands.strategies.federated.strategy import Federated
from manyhands.strategy import Strategy
from rounds import Played, play_rounds

CLIENTS = 20


def rounds_of(words: str = "", clients: int = CLIENTS, seed: int = 3) -> SimulatedRounds:
    strategy = Strategy.parse(f"federated clients={clients} {words}")
    assert isinstance(strategy, Federated)
    return simulated_rounds(strategy, clients, seed)


def courses(rounds: SimulatedRounds, count: int, begin: int = 0) -> list[SimulatedCourse]:
    found = []
    for number in range(begin, begin + count):
        found.append(rounds.begin(number))
        assert rounds.close()
    return found


@pytest.mark.parametrize("words", ["", "fraction=0.3", "fraction=0.01", "fraction=0.4 secure=yes"])
def test_by_default_everybody_who_is_drawn_counts_and_nothing_is_kept(words: str) -> None:
    rounds = rounds_of(words)
    strategy = Strategy.parse(f"federated clients={CLIENTS} {words}")
    assert isinstance(strategy, Federated)
    for number, course in enumerate(courses(rounds, 7)):
        drawn = tuple(selected(3, number, CLIENTS, strategy.per_round(CLIENTS)))
        assert (course.attempt, course.asked, course.counted) == (number + 1, drawn, drawn)
    assert rounds.memory() == {}
    assert rounds.all_report


def test_of_more_who_are_asked_the_first_to_report_count() -> None:
    rounds, took_s = rounds_of("fraction=0.25 over=2.4"), 0.0
    assert not rounds.all_report
    for course in courses(rounds, 8):
        assert len(course.asked) == 12
        assert course.asked == tuple(selected(3, course.attempt - 1, CLIENTS, 12))
        times = {client: duration_s(3, client, course.attempt * CLIENTS + client) for client in course.asked}
        assert course.counted == tuple(sorted(sorted(times, key=times.__getitem__)[:5]))
        took_s += sorted(times.values())[4]
    report = rounds.summary()
    assert (report["attempts"], report["abandoned"], report["asked"]) == (8, 0, 96)
    assert (report["dropped"], report["late"]) == (0, 56)
    assert report["simulated_s"] == pytest.approx(took_s)


@pytest.mark.parametrize("secure", ["", " secure=yes"])
def test_who_comes_after_the_deadline_does_not_count(secure: str) -> None:
    rounds = rounds_of(f"deadline=1.5 min_reports=3 fraction=0.6{secure}")
    late = 0
    for course in courses(rounds, 5):
        times = {client: duration_s(3, client, course.attempt * CLIENTS + client) for client in course.asked}
        assert course.counted == tuple(client for client in course.asked if times[client] < 1.5)
        late += len(course.asked) - len(course.counted)
    assert late > 0
    if not rounds.state.abandoned:
        assert rounds.summary()["late"] == late


def test_clients_drop_out_as_often_as_was_said_and_the_same_ones_again() -> None:
    words = "dropout=0.3 min_reports=1"
    rounds = rounds_of(words, clients=50)
    found = courses(rounds, 60)
    report, expected = rounds.summary(), 60 * 50 * 0.3
    assert abs(report["dropped"] - expected) < 4 * math.sqrt(expected * 0.7)
    assert sum(len(one.counted) for one in found) == report["asked"] - report["dropped"]
    assert courses(rounds_of(words, clients=50), 60) == found
    assert courses(rounds_of(words, clients=50, seed=4), 5) != found[:5]


@pytest.mark.parametrize(
    ("words", "least"),
    [
        ("dropout=0.4 min_reports=7 fraction=0.5", 7),
        ("dropout=0.2 secure=yes fraction=0.5", 7),  # above two thirds of ten
    ],
)
def test_attempts_fail_as_often_as_the_binomial_distribution_says(words: str, least: int) -> None:
    """An attempt at a round of ten counts if `least` of them stay."""
    rounds = rounds_of(words)
    stay = 1 - rounds._dropout
    counts = sum(math.comb(10, k) * stay**k * (1 - stay) ** (10 - k) for k in range(least, 11))
    for number, course in enumerate(courses(rounds, 150)):
        assert len(course.counted) >= least, number
    attempts = rounds.state.attempt
    assert rounds.state.abandoned == attempts - 150 > 0
    assert abs(150 - attempts * counts) < 4 * math.sqrt(attempts * counts * (1 - counts))


@pytest.mark.parametrize(
    "words",
    [
        "dropout=0.4 min_reports=6 fraction=0.5",
        "over=1.5 dropout=0.3 deadline=2 min_reports=5 fraction=0.5",
        "over=1.4 dropout=0.1 secure=yes fraction=0.5",
    ],
)
def test_rounds_go_on_from_what_was_kept_at_every_point(words: str) -> None:
    whole = rounds_of(words)
    expected = courses(whole, 12)
    for stop in range(12):
        first = rounds_of(words)
        courses(first, stop)
        first.begin(stop)  # the process dies in the middle of a round: what is kept is that of the last one
        kept = json.loads(json.dumps(first.memory()))
        again = rounds_of(words)
        again.load_state(kept)
        assert courses(again, 12 - stop, stop) == expected[stop:]
        assert again.summary() == pytest.approx(whole.summary())
        assert again.state.phase is RoundPhase.SELECTING


def test_what_was_kept_and_damaged_is_refused() -> None:
    rounds = rounds_of("dropout=0.2")
    courses(rounds, 2)
    kept = rounds.memory()
    for damaged in ({**kept, "state": {}}, {"state": kept["state"]}, {**kept, "participation": {"x": 1}}):
        with pytest.raises(DataError):
            rounds_of("dropout=0.2").load_state(damaged)


def test_updates_that_are_refused_leave_too_few_or_enough() -> None:
    for words in ("min_reports=8 fraction=0.5", "min_reports=8 fraction=0.5 over=1.5"):
        rounds = rounds_of(words)
        first = rounds.begin(0)
        assert rounds.close(first.counted[:2])
        assert (rounds.state.done, rounds.state.abandoned) == (1, 0)
        second = rounds.begin(1)
        assert not rounds.close(second.counted[:3]), "nobody who was not trained takes their places"
        assert (rounds.state.done, rounds.state.abandoned) == (1, 1)
        third = rounds.begin(1)
        assert (second.attempt, third.attempt) == (2, 3)
        assert third.asked != second.asked


def test_a_deadline_that_no_binary_fraction_is_ends_every_attempt() -> None:
    for deadline in (0.1, 0.7, 1.2, 1.9):
        with pytest.raises(ManyhandsError, match="too few"):
            rounds_of(f"deadline={deadline} min_reports=20 dropout=0.9").begin(0)


def test_a_round_that_never_has_enough_is_given_up() -> None:
    rounds = rounds_of("dropout=0.95 min_reports=10 fraction=0.5")
    with pytest.raises(
        ManyhandsError, match=r"round 1: too few .* \(10 are needed\); use a smaller min_reports"
    ):
        rounds.begin(0)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("over=0.9", "over=0.9"),
        ("over=inf", "over=inf"),
        ("over=nan", "over=nan"),
        ("dropout=1", "dropout=1"),
        ("dropout=-0.1", "dropout=-0.1"),
        ("deadline=-1", "deadline=-1"),
        ("deadline=inf", "deadline=inf"),
        ("min_reports=0", "min_reports=0"),
        ("min_reports=21", "min_reports=21: a round ends at 20 reports"),
        ("dropout=0.1 algorithm=fedbuff:2", "not with algorithm=fedbuff:2: its rounds do not wait"),
        ("over=2 clip=1", "not with clip=1 yet"),
        ("dropout=0.1 algorithm=krum:1", "needs 5 clients a round"),
        ("secure=yes bits=32 max_samples=800000000 over=3 fraction=0.2", "overflow"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        rounds_of(words)


# Beside loops by hand


def points(count: int = 60) -> mh.Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 3, generator=generator)
    targets = inputs @ torch.tensor([[2.0], [-1.0], [0.5]])
    return mh.Task(
        model=lambda: torch.nn.Linear(3, 1),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(inputs, targets),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batch_size=20,
    )


def by_hand(chosen: list[list[int]], clients: int, seed: int) -> list[torch.Tensor]:
    """FedAvg over these clients, round by round."""
    task = points()
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    work = LocalWork(epochs=2, batch=4)
    trainer = ClientTrainer(task, model, algorithm_named("fedavg"), work, seed)
    split = Partition.parse("iid").split(task.data, task.samples, clients, seed)
    weights = held(model)
    for number, asked in enumerate(chosen):
        given = [
            ClientAssignment(client=one, samples=split[one], weights=weights, number=number) for one in asked
        ]
        sums = [torch.zeros_like(one, dtype=torch.float64) for one in weights]
        total = 0.0
        for update in trainer.play(given, optimizer):
            for mine, change in zip(sums, update.change, strict=True):
                mine.add_(change, alpha=float(update.samples))
            total += update.samples
        for mine, change in zip(weights, sums, strict=True):
            mine.add_((change / total).to(mine.dtype))
    return weights


WORDS = "federated clients=10 fraction=0.5 epochs=2 batch=4 together=1"


def test_a_run_without_trouble_has_the_bits_of_clients_drawn_and_averaged_by_hand() -> None:
    run = play_rounds(points(), WORDS, 4, seed=5)
    drawn = [selected(5, number, 10, 5) for number in range(4)]
    for mine, theirs in zip(held(run.model), by_hand(drawn, 10, 5), strict=True):
        assert torch.equal(mine, theirs)
    assert run.exchange.kept.gather() == {}
    assert run.exchange.row_facts() == {"clients": drawn[-1]}
    assert "participation" not in run.exchange.summary()


@pytest.mark.parametrize(
    "more", ["dropout=0.4 min_reports=3", "over=1.6 dropout=0.2", "deadline=1.2 min_reports=2 over=1.2"]
)
def test_a_run_with_trouble_averages_those_who_count_and_goes_on_from_every_round(more: str) -> None:
    words = f"{WORDS} {more}"
    whole = play_rounds(points(), words, 6, seed=5)
    parts: Played | None = None
    facts = []
    for _ in range(6):
        parts = play_rounds(points(), words, 1, after=parts, seed=5)
        facts.append(parts.exchange.row_facts())
    assert parts is not None
    expected = by_hand([list(row["clients"]) for row in facts], 10, 5)
    for run in (whole, parts):
        for mine, theirs in zip(held(run.model), expected, strict=True):
            assert torch.equal(mine, theirs)
    assert any(len(row["clients"]) < len(row["asked"]) for row in facts)
    report, again = (run.exchange.summary()["participation"] for run in (whole, parts))
    assert report == pytest.approx(again)
    assert report["attempts"] == facts[-1]["attempt"] == 6 + report["abandoned"]


def test_secure_sums_are_of_those_who_stay() -> None:
    words = f"{WORDS} dropout=0.25 over=1.2".replace("fraction=0.5", "fraction=0.8")
    secure = play_rounds(points(), f"{words} secure=yes range=4 bits=30", 1, seed=5)
    facts = secure.exchange.row_facts()
    assert 0 < len(facts["clients"]) < len(facts["asked"]) == 10
    for mine, theirs in zip(held(secure.model), by_hand([list(facts["clients"])], 10, 5), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_too_few_finite_updates_end_a_run_as_none_do() -> None:
    task = points()
    inputs = task.data[0].clone()
    split = Partition.parse("iid").split(task.data, task.samples, 10, 0)
    for client in (1, 4):
        inputs[np.asarray(split[client])] = torch.nan
    broken = replace(task, data=(inputs, task.data[1]))
    words = "federated clients=10 batch=all together=1"
    enough = play_rounds(broken, f"{words} min_reports=8", 1)
    assert math.isfinite(enough.losses[0])
    assert enough.exchange.summary()["updates_refused"] == 2
    assert math.isnan(play_rounds(broken, f"{words} min_reports=9", 1).losses[0])
