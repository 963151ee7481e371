"""A learning rate that follows a metric is the plain loop's, the same on every worker, and goes on after a resume."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import manyhands as mh
from equality import Silent, distance
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import Exchange
from manyhands.engine.worker import Trainer
from manyhands.errors import UserError
from ways import with_exchanges

STEPS, EVERY = 40, 4
GENERATOR = torch.Generator().manual_seed(5)
DATA = tuple(torch.randn(24, width, generator=GENERATOR, dtype=torch.float64) for width in (5, 3))
HELD_OUT = tuple(torch.randn(11, width, generator=GENERATOR, dtype=torch.float64) for width in (5, 3))
MODEL = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def worst(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).abs().mean()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)


def plateau(steps: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(steps, factor=0.5, patience=1)


def task(metric: str | None = "evaluation_loss", **changes: Any) -> mh.Task:
    """Every step sees all samples, so that nothing depends on how batches are drawn."""
    settings: dict[str, Any] = {
        "model": lambda: copy.deepcopy(MODEL),
        "loss": loss,
        "data": DATA,
        "optimizer": optimizer,
        "batch_size": 24,
        "evaluation": HELD_OUT,
        "metrics": {"worst": worst},
        "scheduler": plateau,
        "scheduler_metric": metric,
    }
    return mh.Task(**{**settings, **changes})


def plain_loop(metric: Any = loss) -> tuple[dict[str, Tensor], float]:
    """What a user writes without us; the rate that it ends with, too."""
    model = copy.deepcopy(MODEL)
    steps = optimizer(model.parameters())
    schedule = plateau(steps)
    for step in range(1, STEPS + 1):
        steps.zero_grad()
        loss(model, DATA).backward()  # type: ignore[no-untyped-call]
        steps.step()
        if step % EVERY == 0:
            with torch.no_grad():
                schedule.step(float(metric(model, HELD_OUT)))
    return model.state_dict(), steps.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("way", "world"), [("single", 1), ("mirrored", 3), ("central", 3), ("local steps=2", 1)]
)
def test_the_rate_follows_the_metric_on_every_worker(way: str, world: int) -> None:
    plan = TrainingPlan(task=task(), steps=STEPS, seed=0, evaluate_every=EVERY, checkpoint_every=0)

    def act(exchange: Exchange) -> tuple[dict[str, Tensor], list[float]]:
        made: list[torch.optim.Optimizer] = []
        trainer = Trainer(plan, exchange, Silent())
        attach = exchange.attach

        def noting(model: nn.Module, steps: torch.optim.Optimizer) -> None:
            made.append(steps)
            attach(model, steps)

        exchange.attach = noting  # type: ignore[method-assign]
        weights = {name: value.clone() for name, value in trainer.run().model.state_dict().items()}
        return weights, [steps.param_groups[0]["lr"] for steps in made]

    expected, rate = plain_loop()
    assert rate < 0.5, "it was reduced"
    for weights, rates in with_exchanges(way, world, act):
        assert rates == [rate]
        assert distance(weights, expected) < 1e-9


def test_another_metric_makes_another_schedule() -> None:
    options = mh.Options(evaluate_every=EVERY)
    run = mh.fit(task("worst"), "single", steps=STEPS, options=options)
    assert distance(run.model.state_dict(), plain_loop(worst)[0]) < 1e-9


@pytest.mark.filterwarnings("ignore:hogwild on a dense model")
@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("hogwild order=turns", 2)])
def test_a_resumed_run_goes_on_with_the_schedule(strategy: str, workers: int, tmp_path: Path) -> None:
    options = mh.Options(evaluate_every=EVERY, checkpoint_every=1)
    arguments: dict[str, Any] = {"workers": workers, "out": tmp_path / "run", "options": options}
    mh.fit(task(), strategy, steps=18, **arguments)  # ends between two evaluations that the whole run makes
    run = mh.fit(task(), strategy, steps=STEPS, resume=True, **arguments)
    assert distance(run.model.state_dict(), plain_loop()[0]) < 1e-9


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match=r"a ReduceLROnPlateau, which needs a metric; give scheduler_metric"):
        mh.fit(task(None), "single", steps=1)
    with pytest.raises(UserError, match=r"scheduler_metric is 'wurst'; .*did you mean 'worst'"):
        task("wurst")
    with pytest.raises(UserError, match="but scheduler is None"):
        task(scheduler=None)
    with pytest.raises(UserError, match="but evaluation is None"):
        task(evaluation=None, metrics={})
    with pytest.raises(UserError, match=r"task\.scheduler_metric=worst: workers of ps take turns evaluating"):
        mh.fit(task("worst"), "ps", workers=2, steps=1)
