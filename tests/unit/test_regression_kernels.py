"""The learning rules against plainly written numpy, and every order of workers against one worker."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.data.row_files import Rows
from manyhands.engine.fitting import fit
from manyhands.errors import NonFinite, UserError
from manyhands.workloads.logreg.examples import Labelled, ParsedBlocks
from manyhands.workloads.logreg.options import LogregOptions
from manyhands.workloads.logreg.task import Bag, LogregTask, table_of

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


def entries(rows: Rows, row: int, bias: bool) -> Iterator[tuple[int, float]]:
    """The bias as feature 0, then the features from 1."""
    if bias:
        yield 0, 1.0
    for entry in range(rows.starts[row], rows.starts[row + 1]):
        yield int(rows.indices[entry]) + 1, float(rows.values[entry])


def plain(
    learner: str, block: Labelled, passes: int, rate: float, l1: float, l2: float, bias: bool = True
) -> tuple[Any, float]:
    """The published rules, one number at a time, in double precision: the weights and the last pass's mean loss."""
    rows = block.rows
    w, n, z = np.zeros(FEATURES + 1), np.zeros(FEATURES + 1), np.zeros(FEATURES + 1)
    beta, seen, mean = 0.1, 0, 0.0
    for _ in range(passes):
        loss = 0.0
        for row in range(len(rows)):
            seen += 1
            margin = sum(w[i] * x for i, x in entries(rows, row, bias))
            chance = 1 / (1 + math.exp(-margin))
            y, c = float(block.targets[row]), float(rows.weights[row])
            loss -= c * (y * math.log(chance) + (1 - y) * math.log(1 - chance))
            for i, x in entries(rows, row, bias):
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


def plain_softmax(
    learner: str, block: Labelled, rate: float, l1: float, l2: float
) -> tuple[np.ndarray, float]:
    """The same of three classes, by vectors: the weights, a row for each feature, and the mean loss of one pass."""
    rows = block.rows
    w, n, z = np.zeros((FEATURES + 1, 3)), np.zeros((FEATURES + 1, 3)), np.zeros((FEATURES + 1, 3))
    loss = 0.0
    for row in range(len(rows)):
        margins = sum((w[i] * x for i, x in entries(rows, row, True)), np.zeros(3))
        chances = np.exp(margins) / np.exp(margins).sum()
        own, c = int(block.targets[row]), float(rows.weights[row])
        loss -= c * math.log(chances[own])
        for i, x in entries(rows, row, True):
            lasso, ridge = (l1, l2) if i else (0.0, 0.0)
            g = c * (chances - np.eye(3)[own]) * x
            if learner == "ftrl":
                z[i] += g - (np.sqrt(n[i] + g * g) - np.sqrt(n[i])) / rate * w[i]
                n[i] += g * g
                shrunk = np.sign(z[i]) * np.maximum(np.abs(z[i]) - lasso, 0)
                w[i] = -shrunk / ((0.1 + np.sqrt(n[i])) / rate + ridge)
                continue
            g += ridge * w[i]
            n[i] += g * g
            own_rate = rate / math.sqrt(row + 1) if learner == "sgd" else rate / np.sqrt(0.01 + n[i])
            moved = w[i] - own_rate * g
            w[i] = np.sign(moved) * np.maximum(np.abs(moved) - own_rate * lasso, 0)
    return w, loss / float(rows.weights.sum())


@pytest.mark.parametrize("learner", ["sgd", "adagrad", "ftrl"])
@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.01, 0.02)])
def test_several_classes_follow_the_published_rules(learner: str, l1: float, l2: float) -> None:
    block = draw(400)
    block.targets[:] = np.random.default_rng(5).integers(0, 3, 400)
    options = LogregOptions(learner=learner, rate=0.3, l1=l1, l2=l2, passes=1)
    task = LogregTask.of(ParsedBlocks([block], outputs=3), options, "float64")
    run = fit(task, "single")
    expected, loss = plain_softmax(learner, block, 0.3, l1, l2)
    found = table_of(run.model.state_dict(), 3)
    np.testing.assert_allclose(found, expected.T, rtol=0, atol=1e-10)
    assert run.history.evaluations[-1]["metrics"]["pass_loss"] == pytest.approx(loss, abs=1e-10)
    by_turns = fit(task, "hogwild order=turns", workers=2)
    np.testing.assert_array_equal(table_of(by_turns.model.state_dict(), 3), found)


def trained(
    blocks: list[Labelled], strategy: str = "single", workers: int = 1, dtype: str = "float32", **options: Any
) -> tuple[Any, list[float]]:
    """The bias and the weights, and the progressive loss of each pass."""
    task = LogregTask.of(ParsedBlocks(blocks), LogregOptions(**options), dtype)
    run = fit(task, strategy, workers=workers)
    losses = [row["metrics"]["pass_loss"] for row in run.history.evaluations]
    return run.model.state_dict()["rows"][:, 0].numpy(), losses


@pytest.mark.parametrize("learner", ["sgd", "adagrad", "ftrl"])
@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.01, 0.02)])
def test_double_precision_follows_the_published_rules(learner: str, l1: float, l2: float) -> None:
    block = draw(400)
    weights, losses = trained([block], dtype="float64", learner=learner, rate=0.3, l1=l1, l2=l2, passes=2)
    expected, loss = plain(learner, block, 2, 0.3, l1, l2)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-10)
    assert losses[1] == pytest.approx(loss, abs=1e-10)


@pytest.mark.parametrize("learner", ["sgd", "adagrad", "ftrl"])
def test_without_a_bias_the_features_alone_learn(learner: str) -> None:
    block = draw(400)
    weights, losses = trained([block], dtype="float64", learner=learner, rate=0.3, bias=False, passes=2)
    expected, loss = plain(learner, block, 2, 0.3, 0.0, 0.0, bias=False)
    assert weights[0] == 0
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-10)
    assert losses[1] == pytest.approx(loss, abs=1e-10)


def test_batches_leave_a_bias_alone_that_is_not_learned() -> None:
    batch = torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), torch.tensor([1.0, 2.0, 3.0]), 2
    for learns in (True, False):
        bag = Bag(3, learns)
        margins, _ = bag(*batch)
        margins.sum().backward()
        assert bag.table.weight.grad is not None
        assert (bag.bias.grad is not None) == learns


def test_l1_of_ftrl_leaves_weights_at_exactly_zero() -> None:
    weights, _ = trained([draw(400)], learner="ftrl", l1=20.0, passes=1)
    assert 0 < (weights[1:] == 0).sum() < FEATURES


@pytest.mark.parametrize("learner", ["sgd", "adagrad", "ftrl"])
def test_turns_give_the_bits_of_one_worker(learner: str) -> None:
    blocks = [draw(4_096 * 3 + 700, 1), draw(7, 2), draw(500, 3)]
    alone, alone_losses = trained(blocks, learner=learner, passes=2)
    by_turns, losses = trained(blocks, "hogwild order=turns", 3, learner=learner, passes=2)
    np.testing.assert_array_equal(by_turns, alone)
    assert losses == alone_losses


@pytest.mark.parametrize("order", ["free", "locked"])
def test_threads_learn_what_one_learns(order: str) -> None:
    blocks = [draw(4_096, seed) for seed in range(4)]
    _, alone = trained(blocks, passes=2)
    _, together = trained(blocks, f"hogwild order={order}", 3, passes=2)
    assert together[1] == pytest.approx(alone[1], rel=0.02)


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (3, 10), (9, 13), (0, 22), (10, 10)])
def test_pieces_of_blocks_are_every_example_once_in_order(begin: int, end: int) -> None:
    blocks = [draw(10, 1), draw(2, 2), draw(10, 3)]
    parsed = ParsedBlocks(blocks)
    found = [
        (before + row, targets is blocks[number].targets)
        for _, targets, span, before in parsed.opened()(begin, end)
        for number in [parsed.ends.index(before + len(targets))]
        for row in range(*span)
    ]
    assert found == [(example, True) for example in range(begin, end)]


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("hogwild", 2), ("hogwild order=turns", 2)])
def test_a_loss_that_breaks_is_named(strategy: str, workers: int) -> None:
    block = draw(9_000)
    block.rows.values[-1] = np.inf
    with pytest.raises(NonFinite, match="the loss is not finite; use a smaller rate"):
        trained([block], strategy, workers, rate=0.1)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"learner": "adam"}, "learner is 'adam'; allowed: sgd"),
        ({"passes": 0}, "passes is 0; it must be an integer of at least 1"),
        ({"batch": 0}, "batch is 0; it must be"),
        ({"rate": 0.0}, "rate is 0.0; it must be a number above 0"),
        ({"l1": -1.0}, "l1 is -1.0; it must be a number of at least 0"),
        ({"l2": math.nan}, "l2 is nan; it must be"),
    ],
)
def test_options_are_checked(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        LogregOptions(**wrong)
