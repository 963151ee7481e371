"""`order=priority` through `fit`: evaluations, checkpoints and a resumed run are those of `order=arrival`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from equality import OPTIMIZERS, make_task, same_bits
from manyhands.engine.worker_processes import exchanging
from manyhands.errors import UserError
from manyhands.observe.analyse.explain import explain
from manyhands.observe.record.recorded import read_run_events
from manyhands.strategy import Strategy

STEPS = 12


def breaking_loss(task: mh.Task, after: int) -> Any:
    calls = []

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        calls.append(len(calls))
        if len(calls) > after:
            raise ArithmeticError("on purpose")
        return task.loss(model, batch)

    return loss


def measured(run: mh.Run) -> list[Any]:
    return [(row["step"], row["metrics"]) for row in run.history.evaluations]


def test_evaluated_saved_and_resumed_as_by_arrival(tmp_path: Path) -> None:
    """All that looks at the model between two steps sees it finished; what is left exposed is told."""
    task = make_task(OPTIMIZERS["adamw"])
    task = replace(
        task,
        evaluation=task.data,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS),
    )
    options = mh.Options(checkpoint_every=4, evaluate_every=3, check_every=2)
    arguments: dict[str, Any] = {"workers": 2, "steps": STEPS, "options": options}
    arrival = mh.fit(task, "allreduce link=tcp", **arguments)
    text = "allreduce link=tcp order=priority credit=256"
    broken = replace(task, loss=breaking_loss(task, after=12))  # it is asked for evaluations, too
    with pytest.raises(Exception, match="on purpose"):
        mh.fit(broken, text, out=tmp_path / "run", **arguments)
    resumed = mh.fit(task, text, out=tmp_path / "run", resume=True, **arguments)
    assert resumed.summary["resumed_from_step"] in (4, 8)
    assert same_bits(resumed.model.state_dict(), arrival.model.state_dict())
    assert measured(resumed) == measured(arrival)
    assert [row["step"] for row in resumed.history.steps] == list(range(1, STEPS + 1))
    explained = explain(read_run_events(tmp_path / "run" / "events").roles, synchronous=True)
    assert 0 < explained.parts.exchange_ms < explained.parts.step_ms


@pytest.mark.parametrize(
    ("text", "changes", "sentence"),
    [
        (
            "allreduce order=priority",
            {},
            "workers share memory and send nothing that could be reordered",
        ),
        ("allreduce link=tcp order=prioriy", {}, "did you mean 'priority'"),
        ("allreduce credit=2MiB", {}, "credit=2MiB needs order=priority"),
        ("allreduce link=tcp order=priority credit=0", {}, "credit=0 must be at least 1"),
        ("allreduce link=tcp order=priority elastic=yes", {}, "leave one out"),
        ("allreduce link=tcp order=priority codec=auto", {}, "codec=auto measures complete exchanges"),
        ("mirrored order=priority", {}, "only allreduce over links"),
        (
            "allreduce link=tcp order=priority",
            {"clip_norm": 1.0},
            "clip_norm=1: order=priority steps the first parameters before the last gradients are there",
        ),
        ("allreduce link=tcp order=priority", {"optimizer": torch.optim.LBFGS}, "LBFGS"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_reason(
    text: str, changes: dict[str, Any], sentence: str
) -> None:
    task = replace(make_task(OPTIMIZERS["sgd"]), **changes)
    with pytest.raises(UserError, match=sentence):
        mh.fit(task, text, workers=2, steps=2)


def test_a_loop_of_ones_own_is_refused() -> None:
    with pytest.raises(UserError, match=r"give mh\.fit a Task for order=priority"):
        exchanging(Strategy.parse("allreduce link=tcp order=priority"))
