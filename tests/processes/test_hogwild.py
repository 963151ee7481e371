"""`hogwild` with real worker processes: turns are the plain loop, sparse models train as well as in one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from equality import OPTIMIZERS, make_task, same_bits
from manyhands.errors import UserError, WorkerFailed


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_turns_are_the_plain_loop_and_a_run_goes_on_under_another_strategy(tmp_path: Path) -> None:
    task = make_task(OPTIMIZERS["adamw"])
    plain = mh.fit(task, "single", steps=20)
    run = mh.fit(task, "hogwild order=turns", workers=2, steps=14, out=tmp_path / "run")
    assert run.history.loss == plain.history.loss[:14]
    assert [row["step"] for row in run.history] == list(range(1, 15))
    summary = run.summary
    assert summary["strategy"] == "hogwild order=turns"
    assert summary["samples"] == 3 * 45 + 2 * 13
    assert summary["overlap"] == {"mean": 0.0, "max": 0, "histogram": {"0": 14}}
    assert [worker["steps"] for worker in summary["per_worker"]] == [7, 7]
    assert summary["bytes_sent"] == 0
    resumed = mh.fit(task, "single", steps=20, out=tmp_path / "run", resume=True)
    assert resumed.summary["resumed_from_step"] == 14
    assert same_bits(resumed.model.state_dict(), plain.model.state_dict())


FEATURES, ACTIVE, SAMPLES, UNSEEN = 3000, 12, 4000, 2000


class Sparse(nn.Module):
    """Logistic regression on features that are mostly absent."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Embedding(FEATURES, 1)
        nn.init.zeros_(self.weight.weight)

    def forward(self, features: Tensor) -> Tensor:
        return self.weight(features).sum(dim=(1, 2))


def sparse_task() -> mh.Task:
    """Trained on some samples and evaluated on others, so that a loss says what was learnt."""
    draw = torch.Generator().manual_seed(5)
    features = torch.randint(0, FEATURES, (SAMPLES + UNSEEN, ACTIVE), generator=draw)
    truth = torch.randn(FEATURES, generator=draw)
    chances = truth[features].sum(1).sigmoid()
    labels = (torch.rand(len(features), generator=draw) < chances).float()
    return mh.Task(
        model=Sparse,
        loss=lambda model, batch: F.binary_cross_entropy_with_logits(model(batch[0]), batch[1]),
        data=(features[:SAMPLES], labels[:SAMPLES]),
        evaluation=(features[SAMPLES:], labels[SAMPLES:]),
        optimizer=lambda p: torch.optim.Adagrad(p, lr=0.2),
        batch_size=20,
        sparse={"weight.weight": lambda batch: batch[0]},
    )


def test_a_sparse_model_trains_without_locks_as_in_one_process() -> None:
    task = sparse_task()
    plain = mh.fit(task, "single")
    run = mh.fit(task, "hogwild", workers=2)
    final = [one.summary["final"]["evaluation_loss"] for one in (plain, run)]
    assert final[1] == pytest.approx(final[0], rel=0.01)
    assert final[0] < 0.66  # it is 0.69 before training
    assert run.summary["samples"] == SAMPLES
    assert sum(run.summary["overlap"]["histogram"].values()) == 200
    assert [row["step"] for row in run.history.steps] == list(range(1, 201))
    assert [row["step"] for row in run.history.evaluations] == [200]


def dense_task(loss: Any) -> mh.Task:
    data = torch.ones(40, 2)
    data[17] = 2
    return mh.Task(
        model=lambda: nn.Linear(2, 1),
        loss=loss,
        data=data,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch_size=2,
    )


WARNING = "its theory needs sparse updates"


def test_a_dense_model_is_warned_of_once(tmp_path: Path) -> None:
    task = dense_task(lambda model, batch: model(batch).square().mean())
    (tmp_path / "taken").write_text("so the run does not begin")
    with pytest.warns(UserWarning, match=WARNING) as warned, pytest.raises(UserError, match="taken"):
        mh.fit(task, "hogwild", workers=2, out=tmp_path / "taken")
    assert len(warned) == 1


@pytest.mark.soak
def test_a_worker_that_dies_is_named() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        if float(batch.max()) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch).square().mean()

    with pytest.warns(UserWarning, match=WARNING), pytest.raises(WorkerFailed, match=r"worker \d.*SIGKILL"):
        mh.fit(dense_task(loss), "hogwild", workers=2)


def test_what_fit_can_not_do_is_refused_with_what_can() -> None:
    with pytest.raises(UserError, match=r"only glove and logreg, .*, can use threads; leave hands out"):
        mh.fit(make_task(OPTIMIZERS["sgd"]), "hogwild hands=threads", workers=2, steps=3)
