"""Runs that end when their evaluations no longer improve: after the same step under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import UserError

ONES = torch.ones(16, 1, dtype=torch.float64)
RULE = mh.EarlyStopping(patience=3)


class Slope(nn.Module):
    """One weight, from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def task() -> mh.Task:
    """Training goes to 2; what is evaluated is best at 1, and worse from there on."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        error: Tensor = model(x) - y
        return error.square().mean()

    return mh.Task(
        model=Slope,
        loss=loss,
        data=(ONES, 2 * ONES),
        evaluation=(ONES, ONES),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batch_size=8,
    )


def expected() -> tuple[int, int]:
    """By hand: the weight after each step, the step with the best evaluation, and the one of the third after it."""
    weight, evaluated = 0.0, []
    for _ in range(100):
        weight -= 0.05 * 2 * (weight - 2)
        evaluated.append((weight - 1) ** 2)
    best = min(range(0, 100, 2), key=lambda step: evaluated[step + 1]) + 2
    return best, best + 6


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("single", 1), ("mirrored", 2), ("central", 2), ("local steps=2", 2), ("hogwild order=turns", 2)],
)
@pytest.mark.filterwarnings("ignore:hogwild on a dense model")
def test_a_run_ends_after_the_third_evaluation_that_is_no_better(
    strategy: str, workers: int, tmp_path: Path
) -> None:
    options = mh.Options(evaluate_every=2, early_stopping=RULE)
    run = mh.fit(task(), strategy, workers=workers, steps=100, out=tmp_path / "run", options=options)
    best, end = expected()
    assert (run.summary["steps"], run.summary["stopped_early"]) == (end, True)
    assert [row["step"] for row in run.history.evaluations] == list(range(2, end + 1, 2))
    report = [note for note in run.summary["notes"] if note.startswith(f"stopped after step {end}: ")]
    assert len(report) == 1
    assert report[0].endswith(f"after step {best}")


def test_a_run_that_is_resumed_ends_where_it_would_have(tmp_path: Path) -> None:
    options = mh.Options(evaluate_every=2, checkpoint_every=1, early_stopping=RULE)
    best, end = expected()
    mh.fit(task(), "single", steps=best + 2, out=tmp_path / "run", options=options)
    run = mh.fit(task(), "single", steps=100, out=tmp_path / "run", resume=True, options=options)
    assert (run.summary["steps"], run.summary["stopped_early"]) == (end, True)


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("ps", 2)])
def test_a_run_that_is_resumed_with_fewer_steps_says_so_and_keeps_what_it_has(
    strategy: str, workers: int, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    before = mh.fit(task(), strategy, workers=workers, steps=8, out=out)
    with pytest.raises(UserError, match="it has done 8 steps, but steps=5 is fewer; give 8 or more"):
        mh.fit(task(), strategy, workers=workers, steps=5, out=out, resume=True)
    again = mh.fit(task(), strategy, workers=workers, steps=8, out=out, resume=True)
    assert again.history.loss == before.history.loss
    assert torch.equal(again.model.state_dict()["weight"], before.model.state_dict()["weight"])


def test_what_cannot_end_early_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match="early_stopping: workers of ps take turns evaluating"):
        mh.fit(task(), "ps", workers=2, steps=2, options=mh.Options(early_stopping=RULE))
    wrong = mh.Options(early_stopping=mh.EarlyStopping(metric="evaluation_los"))
    with pytest.raises(UserError, match="did you mean 'evaluation_loss'"):
        mh.fit(task(), "single", steps=2, options=wrong)
