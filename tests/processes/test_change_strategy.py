"""A run that goes on under one strategy after another ends with the weights of the plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import manyhands as mh
from equality import OPTIMIZERS, distance, make_task, train_plainly
from manyhands.strategies.ps.audit import Verdict, audit_run

CHAINS = {
    "adamw": [
        ("mirrored", 2),
        ("tensor", 2),
        ("ps servers=2", 2),
        ("sharded", 3),
        ("central", 2),
        ("single device_memory=1MiB", 1),
        ("ps servers=3", 1),
        ("mirrored", 2),
    ],
    "momentum": [
        ("central", 2),
        ("mirrored", 3),
        ("ps servers=2 replicas=1", 2),
        ("hogwild order=turns", 2),
        ("ps servers=2", 3),
        ("single", 1),
        ("tensor slices=2", 4),
        ("ps", 1),
    ],
    "sgd": [
        ("local steps=1", 2),
        ("ps servers=2 link=tcp", 3),
        ("allreduce algorithm=ring", 2),
        ("local steps=1", 2),
    ],
}


@pytest.mark.parametrize(
    "optimizer", ["adamw", *(pytest.param(one, marks=pytest.mark.soak) for one in ("momentum", "sgd"))]
)
def test_a_run_goes_on_under_any_strategy_to_the_weights_of_the_plain_loop(
    optimizer: str, tmp_path: Path
) -> None:
    task = make_task(OPTIMIZERS[optimizer])
    for number, (strategy, workers) in enumerate(CHAINS[optimizer]):
        steps = 5 * (number + 1)
        run = mh.fit(task, strategy, workers=workers, steps=steps, out=tmp_path / "r", resume=number > 0)
        assert run.summary["resumed_from_step"] == (steps - 5 or None)
        assert [row["step"] for row in run.history.steps] == list(range(1, steps + 1))
        assert distance(run.model.state_dict(), train_plainly(task, steps)) < 1e-9, strategy
        if strategy.startswith("ps"):
            found = audit_run(tmp_path / "r").found
            assert found.verdict is Verdict.RESTORED, (found.violations, found.missing)
            assert found.lost == 0, "of the batches that were its own"


def test_statistics_of_batch_norm_come_along(tmp_path: Path) -> None:
    """With a momentum of 0 the statistics never move: what the workers end with is what the run went on from."""

    def task(mean: float) -> mh.Task:
        norm = nn.BatchNorm1d(4, momentum=0.0)
        norm.running_mean = torch.full((4,), mean)
        return mh.Task(
            model=lambda: nn.Sequential(norm, nn.Linear(4, 1)),
            loss=lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean(),
            data=(torch.randn(32, 4), torch.randn(32, 1)),
            optimizer=OPTIMIZERS["sgd"],
            batch_size=8,
        )

    mh.fit(task(7.0), "single", steps=2, out=tmp_path / "r")
    run = mh.fit(task(0.0), "ps", workers=1, steps=4, out=tmp_path / "r", resume=True)
    assert run.model.state_dict()["0.running_mean"].tolist() == [7.0] * 4
