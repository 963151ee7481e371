"""The learning rules against plainly written numpy, and every order of workers against one worker."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from manyhands.data.rows import Rows
from manyhands.errors import NonFinite, UserError
from manyhands.regression.examples import Labelled
from manyhands.regression.online import CHUNK, OnlineLearner, mean_loss, shares
from manyhands.regression.options import LogregOptions

FEATURES = 50


def draw(examples: int, seed: int = 3) -> Labelled:
    """Random rows, some without features, some with one twice; weights from 0 to 3."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 9, examples)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    indices = random.integers(0, FEATURES, starts[-1]).astype(np.int32)
    values = random.normal(size=starts[-1]).astype(np.float32)
    truth = random.normal(size=FEATURES)
    margins = np.array([truth[indices[a:b]] @ values[a:b] for a, b in pairwise(starts)])
    targets = (margins + random.logistic(size=examples) > 0).astype(np.float32)
    weights = random.integers(0, 4, examples).astype(np.float32)
    rows = Rows(
        starts=starts.astype(np.int64),
        indices=indices,
        values=values,
        labels=targets,
        weights=weights,
        size=FEATURES,
    )
    return Labelled(rows, targets)


def entries(rows: Rows, row: int) -> Iterator[tuple[int, float]]:
    """The bias as feature 0, then the features from 1."""
    yield 0, 1.0
    for entry in range(rows.starts[row], rows.starts[row + 1]):
        yield int(rows.indices[entry]) + 1, float(rows.values[entry])


def plain(learner: str, block: Labelled, passes: int, rate: float, l1: float, l2: float) -> tuple[Any, float]:
    """The published rules, one number at a time, in double precision: the weights and the last pass's mean loss."""
    rows = block.rows
    w, n, z = np.zeros(FEATURES + 1), np.zeros(FEATURES + 1), np.zeros(FEATURES + 1)
    beta, seen, mean = 0.1, 0, 0.0
    for _ in range(passes):
        loss = 0.0
        for row in range(len(rows)):
            seen += 1
            margin = sum(w[i] * x for i, x in entries(rows, row))
            chance = 1 / (1 + math.exp(-margin))
            y, c = float(block.targets[row]), float(rows.weights[row])
            loss -= c * (y * math.log(chance) + (1 - y) * math.log(1 - chance))
            for i, x in entries(rows, row):
                lasso, ridge = (l1, l2) if i else (0.0, 0.0)
                g = c * (chance - y) * x
                if learner == "ftrl":
                    sigma = (math.sqrt(n[i] + g * g) - math.sqrt(n[i])) / rate
                    z[i] += g - sigma * w[i]
                    n[i] += g * g
                    shrunk = math.copysign(max(abs(z[i]) - lasso, 0), z[i])
                    w[i] = -shrunk / ((beta + math.sqrt(n[i])) / rate + ridge)
                    continue
                g += ridge * w[i]
                n[i] += g * g
                own = rate / math.sqrt(seen) if learner == "sgd" else rate / math.sqrt(beta * beta + n[i])
                moved = w[i] - own * g
                w[i] = math.copysign(max(abs(moved) - own * lasso, 0), moved)
        mean = loss / float(rows.weights.sum())
    return w, mean


@pytest.mark.parametrize("learner", ["sgd", "adagrad", "ftrl"])
@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.01, 0.02)])
def test_double_precision_follows_the_published_rules(learner: str, l1: float, l2: float) -> None:
    block = draw(400)
    options = LogregOptions(learner=learner, rate=0.3, l1=l1, l2=l2, passes=2)
    with OnlineLearner(options, "free", 1, dtype=np.float64) as online:
        for _ in range(2):
            sums = online.learn([block], lambda _count: None)
        weights = online.table(FEATURES)
    expected, loss = plain(learner, block, 2, 0.3, l1, l2)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-10)
    assert mean_loss(sums, 2) == pytest.approx(loss, abs=1e-10)


def test_l1_of_ftrl_leaves_weights_at_exactly_zero() -> None:
    with OnlineLearner(LogregOptions(learner="ftrl", l1=20.0), "free", 1) as online:
        online.learn([draw(400)], lambda _count: None)
        weights = online.weights(FEATURES)
    assert 0 < (weights[1:] == 0).sum() < FEATURES


def trained(learner: str, order: str, workers: int, blocks: list[Labelled]) -> tuple[Any, Any]:
    done: list[int] = []
    with OnlineLearner(LogregOptions(learner=learner), order, workers) as online:
        for _ in range(2):
            sums = online.learn(blocks, done.append)
        assert sum(done) == 2 * sum(len(block.rows) for block in blocks)
        return online.weights(FEATURES), sums


@pytest.mark.parametrize("learner", ["sgd", "adagrad", "ftrl"])
def test_turns_give_the_bits_of_one_worker(learner: str) -> None:
    blocks = [draw(CHUNK + 700, 1), draw(7, 2), draw(500, 3)]
    alone, _ = trained(learner, "free", 1, blocks)
    by_turns, _ = trained(learner, "turns", 3, blocks)
    np.testing.assert_array_equal(by_turns, alone)


@pytest.mark.parametrize("order", ["free", "locked"])
def test_threads_learn_what_one_learns(order: str) -> None:
    blocks = [draw(2 * CHUNK, seed) for seed in range(4)]
    _, alone = trained("adagrad", "free", 1, blocks)
    _, together = trained("adagrad", order, 3, blocks)
    assert mean_loss(together, 1) == pytest.approx(mean_loss(alone, 1), rel=0.02)


def test_a_thread_that_fails_ends_all() -> None:
    blocks = [draw(CHUNK, seed) for seed in range(4)]
    calls: list[int] = []

    def fail(count: int) -> None:
        calls.append(count)
        if len(calls) == 2:  # one of them only: the others wait for its turn, or go on
            raise RuntimeError("no")

    for order in ("free", "locked", "turns"):
        with OnlineLearner(LogregOptions(), order, 3) as online:
            calls.clear()
            with pytest.raises(RuntimeError, match="no"):
                online.learn(blocks, fail)
            online.learn([draw(10)], lambda _count: None)


@pytest.mark.parametrize(("workers", "seen"), [(1, 0), (3, 0), (3, 5), (7, 100)])
def test_turns_share_out_every_example_once(workers: int, seen: int) -> None:
    lengths = [CHUNK + 3, 1, 2 * CHUNK]
    taken = [
        (block, row, rank)
        for rank in range(workers)
        for block, span, _ in shares(lengths, seen, True, rank, workers)
        for row in range(*span)
    ]
    assert len(taken) == sum(lengths)
    before = {0: seen, 1: seen + lengths[0], 2: seen + lengths[0] + 1}
    assert all((before[block] + row) % workers == rank for block, row, rank in taken)


def test_a_loss_that_breaks_is_named() -> None:
    with pytest.raises(NonFinite, match="the loss is nan in pass 2; use a smaller rate"):
        mean_loss(np.array([np.nan, 3.0]), 2)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"learner": "adam"}, "unknown learner 'adam'"),
        ({"passes": 0}, "passes=0 must be a whole number of at least 1"),
        ({"batch": 0}, "batch=0 must be"),
        ({"rate": 0.0}, "rate=0.0 must be a number above 0"),
        ({"l1": -1.0}, "l1=-1.0 must be a number of at least 0"),
        ({"l2": math.nan}, "l2=nan must be"),
    ],
)
def test_options_are_checked(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        LogregOptions(**wrong)
