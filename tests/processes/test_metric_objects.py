"""Metrics of torchmetrics' shape, which have a state, under several strategies: as torchmetrics has them of all data.

The workers import this file with torchmetrics, which takes seconds: other tests of `fit` are elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics.classification as measures
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import UserError
from three_classes import accuracy, loss, samples, task


class Middle:
    """The median of the largest scores: of no mean over batches, and without a rule to merge states."""

    def __init__(self) -> None:
        self.scores: list[Tensor] = []

    def update(self, scores: Tensor, labels: Tensor) -> None:
        assert len(scores) == len(labels)
        self.scores.append(scores.max(1).values)

    def compute(self) -> float:
        return float(torch.cat(self.scores).median())

    def reset(self) -> None:
        self.scores = []


MEASURES: dict[str, Any] = {
    "auroc": measures.MulticlassAUROC(num_classes=3),
    "f1": measures.MulticlassF1Score(num_classes=3, average="macro"),
    "accuracy": accuracy,
    "middle": (Middle(), lambda model, batch: (model(batch[0]), batch[1])),
}


def expected(model: nn.Module) -> dict[str, float]:
    """By torchmetrics, of all evaluation data at once."""
    inputs, labels = samples(37, 9)
    with torch.no_grad():
        scores = model(inputs)
    own = Middle()
    own.update(scores, labels)
    return {
        "auroc": float(measures.MulticlassAUROC(num_classes=3)(scores, labels)),
        "f1": float(measures.MulticlassF1Score(num_classes=3, average="macro")(scores, labels)),
        "accuracy": float((scores.argmax(1) == labels).double().mean()),
        "middle": own.compute(),
    }


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("single", 1),
        ("mirrored", 2),
        ("allreduce algorithm=ring link=tcp", 3),
        ("central", 2),
        ("sharded", 2),
        ("ps servers=1", 2),
        ("hogwild order=turns", 2),
        ("local steps=2", 2),
        ("pipeline", 2),
        ("tensor slices=2", 2),
        ("federated clients=4", 2),
    ],
)
def test_metrics_with_a_state_are_those_of_one_process(strategy: str, workers: int) -> None:
    length = {"rounds": 3} if strategy.startswith("federated") else {"steps": 8}
    run = mh.fit(task(metrics=MEASURES), strategy, workers=workers, **length)
    final = run.summary["final"]
    for name, value in expected(run.model).items():
        assert final[name] == pytest.approx(value, abs=1e-6), name
    assert list(run.history.evaluations[-1]["metrics"]) == ["evaluation_loss", *MEASURES]
    if strategy.startswith("federated"):
        assert set(run.summary["fairness"]) >= {"auroc", "f1", "middle"}


def test_metrics_that_make_no_sense_are_refused() -> None:
    many = measures.MulticlassF1Score(num_classes=3, average="none")
    with pytest.raises(
        UserError, match=r"metrics\['f1'\]: MulticlassF1Score.compute\(\) gives more than one"
    ):
        mh.fit(task(metrics={"f1": many}), "single", steps=2)
    named = {"x": samples(60, 1)[0], "y": samples(60, 1)[1]}
    by_name = task(
        data=named,
        evaluation=named,
        loss=lambda model, batch: loss(model, (batch["x"], batch["y"])),
        metrics={"auroc": measures.MulticlassAUROC(num_classes=3)},
    )
    with pytest.raises(
        UserError, match=r"metrics\['auroc'\]: a batch is not \(inputs, targets\); give a pair"
    ):
        mh.fit(by_name, "single", steps=2)
    with pytest.raises(UserError, match=r"metrics\['f1'\]: 3 is not a function"):
        task(metrics={"f1": (many, 3)})
    with pytest.raises(UserError, match="or an object with update, compute and reset"):
        task(metrics={"f1": 3})
