"""A metric is that of the model which the run hands over: batch norm, dropout and tied weights under every strategy.

Metrics are computed again here, by a plain forward of the model, after a live run and after resumed ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from equality import OPTIMIZERS, distance
from manyhands.errors import UserError
from manyhands.registry import STRATEGIES
from manyhands.store.checkpoint import CheckpointStore
from manyhands.strategy import Strategy

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:hogwild on a dense model"),
]

STEPS = 6
SOAK = pytest.mark.soak
WORKERS = [pytest.param(1, marks=SOAK), 2, 3, pytest.param(4, marks=SOAK)]


class Network(nn.Sequential):
    """Layers in a chain, of which the second linear one has the weight of the first."""

    def __init__(self) -> None:
        first, second = nn.Linear(6, 6), nn.Linear(6, 6)
        second.weight = first.weight
        super().__init__(
            nn.BatchNorm1d(6),
            first,
            nn.BatchNorm1d(6, momentum=None),
            nn.Tanh(),
            nn.Dropout(0.2),
            second,
            nn.BatchNorm1d(6),
            nn.Linear(6, 3),
        )
        self.double()


def draw(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples whose mean wanders with their number, so that the parts of a batch have other statistics."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    x += torch.arange(samples)[:, None] % 7
    return x, torch.randint(3, (samples,), generator=generator)


EVALUATION = draw(29, 2)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def hits_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).double().mean()


def make_task(**changes: Any) -> mh.Task:
    facts: dict[str, Any] = {
        "model": Network,
        "loss": loss_of,
        "data": draw(48, 1),
        "evaluation": EVALUATION,
        "metrics": {"hits": hits_of},
        "optimizer": OPTIMIZERS["momentum"],
        "batch_size": 16,
    }
    return mh.Task(**{**facts, **changes})


def computed_again(model: nn.Module) -> dict[str, float]:
    """Of a model as it is, without anything of the library: dropout off, statistics as they are kept."""
    model.eval()
    with torch.no_grad():
        return {
            "evaluation_loss": float(loss_of(model, EVALUATION)),
            "hits": float(hits_of(model, EVALUATION)),
        }


def last_metrics(run: mh.Run) -> dict[str, float]:
    return [row["metrics"] for row in run.history if "metrics" in row][-1]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One strategy, and its text for a number of workers where that hangs on it."""

    text: str
    by_workers: tuple[str, ...] = ()

    def for_workers(self, workers: int) -> str:
        return self.by_workers[workers - 1] if self.by_workers else self.text

    def length(self, steps: int) -> dict[str, Any]:
        return {"rounds" if Strategy.parse(self.text).counts_rounds else "steps": steps}


PIPELINES = tuple(f"pipeline stages={stages} microbatches=2" for stages in (1, 2, 1, 2))
WAYS = {
    "single": Way(text="single"),
    "mirrored": Way(text="mirrored"),
    "allreduce": Way(text="allreduce algorithm=ring"),
    "central": Way(text="central"),
    "sharded": Way(text="sharded"),
    "ps": Way(text="ps servers=2 consistency=async"),
    "hogwild": Way(text="hogwild"),
    "local": Way(text="local steps=2"),
    "federated": Way(text="federated clients=4 batch=8"),
    "pipeline": Way(text="pipeline", by_workers=PIPELINES),
    "tensor": Way(text="tensor", by_workers=tuple(f"tensor slices={slices}" for slices in (1, 2, 1, 2))),
}
MORE = {
    "elastic": Way(text="allreduce elastic=yes"),
    "by priority": Way(text="allreduce link=tcp order=priority credit=256"),
    "ps in lockstep": Way(text="ps"),
    "local apart": Way(text="local steps=2 outer=easgd"),
}


def test_every_strategy_of_the_registry_has_a_way() -> None:
    assert WAYS.keys() == STRATEGIES.keys()


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("word", [*WAYS, *MORE])
def test_a_metric_is_that_of_the_model(word: str, workers: int, tmp_path: Path) -> None:
    way = {**WAYS, **MORE}[word]
    text = way.for_workers(workers)
    if Strategy.parse(text).most_workers is not None:
        workers = 1
    options = mh.Options(evaluate_every=2, checkpoint_every=2, keep_checkpoints=9)
    task, out = make_task(), tmp_path / "run"
    live = mh.fit(task, text, workers=workers, out=out, options=options, **way.length(STEPS))
    found = computed_again(live.model)
    assert last_metrics(live) == pytest.approx(found, abs=1e-9, rel=0)
    if word not in ("ps", "ps in lockstep"):  # which keeps shards, and one checkpoint at the end
        require_metrics_of_checkpoints(live, out)
    again = mh.fit(task, text, workers=workers, out=out, resume=True, options=options, **way.length(STEPS))
    assert last_metrics(again) == pytest.approx(found, abs=1e-9, rel=0), "no step was taken"
    assert computed_again(again.model) == pytest.approx(found, abs=1e-9, rel=0)
    longer = mh.fit(task, text, workers=workers, out=out, resume=True, options=options, **way.length(STEPS + 3))
    assert longer.summary["resumed_from_step"] == STEPS
    assert last_metrics(longer) == pytest.approx(computed_again(longer.model), abs=1e-9, rel=0)
    assert last_metrics(longer) != last_metrics(again)


def require_metrics_of_checkpoints(run: mh.Run, out: Path) -> None:
    """What early stopping and the best checkpoint are judged by is the metric of what was saved then."""
    rows = {row["step"]: row["metrics"] for row in run.history if "metrics" in row}
    assert rows.keys() == {2, 4, 6}
    for step, metrics in rows.items():
        model = Network()
        model.load_state_dict(CheckpointStore(out / "checkpoints").load(step).model)
        assert metrics == pytest.approx(computed_again(model), abs=1e-9, rel=0)
