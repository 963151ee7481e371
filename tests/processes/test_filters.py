"""Filters of row gradients on real servers and workers: the minimum of an L1 problem, replayed and resumed."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import manyhands as mh
from manyhands.optim import FTRL, ProximalSGD

EXAMPLES, FEATURES, L1 = 120, 400, 0.01
STEPS = 400
QUIET = mh.Options(progress="none")
Part = tuple[Tensor, Tensor]


def parts() -> list[Part]:
    """The examples of each of two workers: features of size 1, most of which tell nothing of the label."""
    draw = np.random.default_rng(3)
    values = (draw.random((EXAMPLES, FEATURES)) < 0.05) * draw.choice([-1.0, 1.0], (EXAMPLES, FEATURES))
    values[:, ::20] = draw.choice([-1.0, 1.0], (EXAMPLES, FEATURES // 20))
    labels = (values[:, ::20] @ draw.normal(size=FEATURES // 20) > 0).astype(np.float64)
    whole = torch.from_numpy(values), torch.from_numpy(labels)
    return [(whole[0][half::2], whole[1][half::2]) for half in (0, 1)]


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(FEATURES, 1, _weight=torch.zeros(FEATURES, 1, dtype=torch.float64))

    def forward(self, values: Tensor, rows: Tensor) -> Tensor:
        return values[:, rows] @ self.table(rows).squeeze(1)


def rows_of(part: Part) -> Tensor:
    return part[0].any(dim=0).nonzero().squeeze(1)


def loss(model: nn.Module, part: Part) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(part[0], rows_of(part)), part[1])


def first(samples: list[Part]) -> Part:
    """Each worker has one; a single process both."""
    values, labels = zip(*samples, strict=True)
    return torch.cat(values), torch.cat(labels)


def task(optimizer: str) -> mh.Task:
    makes = {
        "proximal": partial(ProximalSGD, lr=3.8, l1=L1),
        "ftrl": partial(FTRL, lr=0.5, l1=0.2),
        "sgd": partial(torch.optim.SGD, lr=0.5),
    }
    return mh.Task(
        model=Linear,
        loss=loss,
        data=parts(),
        collate=first,
        optimizer=makes[optimizer],
        batch_size=2,
        sparse={"table.weight": rows_of},
    )


def weights_of(run: mh.Run) -> np.ndarray:
    weights: np.ndarray = run.model.state_dict()["table.weight"][:, 0].numpy()
    return weights


def objective(weights: np.ndarray) -> float:
    values, labels = (one.numpy() for one in first(parts()))
    margins = values @ weights
    return float((np.logaddexp(0, margins) - margins * labels).mean() + L1 * np.abs(weights).sum())


@pytest.fixture(scope="module")
def least() -> float:
    values, labels = (one.numpy() for one in first(parts()))
    strength = 1 / (L1 * EXAMPLES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn 1.8 renames the penalty
        found = LogisticRegression(
            penalty="l1", solver="liblinear", C=strength, fit_intercept=False, tol=1e-12, max_iter=10**6
        ).fit(values, labels)
    assert 5 < (found.coef_ != 0).sum() < FEATURES / 4
    return objective(found.coef_[0])


def test_the_minimum_is_the_same_with_fewer_bytes(least: float) -> None:
    """Listed keys, names for them, each filter and all: the minimum of LIBLINEAR, and every one sends less."""
    sent = {}
    for settings in ("keys=listed", "keys=named", "filter=kkt", "filter=kkt+significant:0.001"):
        text = f"ps servers=2 link=tcp {settings}"
        run = mh.fit(task("proximal"), text, workers=2, steps=STEPS, options=QUIET)
        assert objective(weights_of(run)) == pytest.approx(least, rel=1e-6), settings
        sent[settings] = run.summary["bytes_sent"]
    print(sent)
    assert sent["keys=named"] < 0.6 * sent["keys=listed"]
    assert sent["filter=kkt"] < 0.6 * sent["keys=named"]


def test_under_ftrl_no_weight_leaves_0_late() -> None:
    """One process without a filter is close after every step: rates alone differ, by what came in one sum."""
    alone = mh.fit(task("ftrl"), "single", steps=60, options=QUIET)
    run = mh.fit(task("ftrl"), "ps filter=kkt", workers=2, steps=60, options=QUIET)
    assert run.history.loss[-1] == pytest.approx(alone.history.loss[-1], rel=0.02)


@pytest.mark.parametrize("optimizer", ["proximal", "ftrl"])
@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_a_run_is_replayed_to_the_bit(consistency: str, optimizer: str, tmp_path: Path) -> None:
    text = f"ps servers=2 replicas=1 consistency={consistency} filter=kkt+significant:0.05"
    mh.fit(task(optimizer), text, workers=2, steps=40, out=tmp_path / "run", options=QUIET)
    assert mh.replay(tmp_path / "run", task(optimizer)).same_bytes


def test_a_resumed_run_has_what_workers_had_kept(tmp_path: Path) -> None:
    text = "ps link=tcp filter=kkt+significant:0.3"
    whole = mh.fit(task("ftrl"), text, workers=2, steps=40, options=QUIET)
    out = tmp_path / "run"
    mh.fit(task("ftrl"), text, workers=2, steps=17, out=out, options=QUIET)
    resumed = mh.fit(task("ftrl"), text, workers=2, steps=40, out=out, resume=True, options=QUIET)
    assert np.array_equal(weights_of(resumed), weights_of(whole))


def test_a_filter_that_makes_no_sense_is_refused_before_it_trains() -> None:
    with pytest.raises(mh.UserError, match="kkt needs an L1 penalty, which SGD"):
        mh.fit(task("sgd"), "ps filter=kkt", workers=2, steps=2, options=QUIET)
