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
from equality import OPTIMIZERS, distance, train_plainly
from manyhands.data.store.checkpoint import CheckpointStore
from manyhands.errors import UserError
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy

pytestmark = [
    pytest.mark.filterwarnings("ignore:hogwild on a dense model"),
]

STEPS = 6
SOAK = pytest.mark.soak


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
        return {"rounds" if Strategy.parse(self.text).facts.counts_rounds else "steps": steps}


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
    "ps in lockstep": Way(text="ps"),
    "local apart": Way(text="local steps=2 outer=elastic"),
}
"""Other settings that reach another loop or carrier."""
GRID = [
    *(pytest.param(word, one, marks=[] if one in (2, 3) else SOAK) for word in WAYS for one in (1, 2, 3, 4)),
    *(pytest.param(word, one, marks=[] if one == 3 else SOAK) for word in MORE for one in (1, 2, 3, 4)),
]


def test_every_strategy_of_the_registry_has_a_way() -> None:
    assert WAYS.keys() == STRATEGIES.keys()


@pytest.mark.parametrize(("word", "workers"), GRID)
def test_a_metric_is_that_of_the_model(word: str, workers: int, tmp_path: Path) -> None:
    way = {**WAYS, **MORE}[word]
    text = way.for_workers(workers)
    workers = min(workers, Strategy.parse(text).most_workers or workers)
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
    longer = mh.fit(
        task, text, workers=workers, out=out, resume=True, options=options, **way.length(STEPS + 3)
    )
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


class Normalised(nn.Module):
    """Batch norms of every kind that has settings of its own, on images of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.BatchNorm2d(1, affine=False)
        self.convolution = nn.Conv2d(1, 4, 2)
        self.inner = nn.BatchNorm2d(4, momentum=None)
        self.hidden = nn.Linear(8, 5)
        self.untracked = nn.BatchNorm1d(5, track_running_stats=False)
        self.out = nn.Linear(5, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.convolution(self.input(x.view(-1, 1, 2, 3)))).tanh().flatten(1)
        return self.out(self.untracked(self.hidden(hidden)))


@pytest.mark.parametrize("workers", [2, 3, pytest.param(4, marks=SOAK)])
@pytest.mark.parametrize(
    "strategy", ["mirrored", "allreduce algorithm=ring link=tcp", "central", "sharded"], ids=str.split
)
def test_synchronized_batch_norm_trains_as_one_process_does(strategy: str, workers: int) -> None:
    """Parts of other sizes, a last batch that is short, statistics that no worker has alone."""
    task = make_task(model=Normalised, data=draw(45, 1))
    run = mh.fit(task, strategy, workers=workers, steps=9, options=mh.Options(buffers="synchronize"))
    assert distance(run.model.state_dict(), train_plainly(task, 9)) < 1e-9
    apart = mh.fit(task, strategy, workers=workers, steps=9)
    assert distance(apart.model.state_dict(), train_plainly(task, 9)) > 1e-3, (
        "or there is nothing to synchronize"
    )


def test_a_worker_may_bring_a_single_sample_to_synchronized_batch_norm() -> None:
    task = make_task(model=Normalised, data=draw(12, 1), batch_size=3)
    run = mh.fit(task, "mirrored", workers=3, steps=4, options=mh.Options(buffers="synchronize"))
    assert distance(run.model.state_dict(), train_plainly(task, 4)) < 1e-9


def test_a_mean_of_statistics_weighs_workers_by_their_samples() -> None:
    """After one step on one batch of all samples, the mean over workers is that of the batch, in a closed form."""
    x, y = draw(7, 1)
    task = make_task(data=(x, y), batch_size=7)
    run = mh.fit(task, "mirrored", workers=3, steps=1, options=mh.Options(buffers="mean"))
    norm = run.model[0]
    assert torch.allclose(norm.running_mean, 0.1 * x.mean(0), rtol=0, atol=1e-12)
    assert int(norm.num_batches_tracked) == 1
    alone = mh.fit(task, "mirrored", workers=3, steps=1).model[0]
    assert not torch.allclose(alone.running_mean, norm.running_mean, rtol=0, atol=1e-3), "of worker 0 alone"


class Drifting(nn.Module):
    """Puts another tensor in the place of a buffer, counts in one of integers, and computes with both."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("seen", torch.tensor(2**53, dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf], dtype=torch.float64))
        self.out = nn.Linear(6, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.center = 0.9 * self.center + 0.1 * x.detach().mean(0)
            self.seen += int(x[0, 0] > 3)  # as a worker's own samples have it
        return self.out((x - self.center) * (1 + 0.1 * float(self.seen - 2**53)))


@pytest.mark.parametrize("buffers", ["broadcast", "mean"])
@pytest.mark.parametrize(
    "strategy", ["mirrored", "central", "sharded", "local steps=2", "hogwild"], ids=str.split
)
def test_buffers_that_are_replaced_or_of_integers_are_of_one_model(strategy: str, buffers: str) -> None:
    task = make_task(model=Drifting)
    run = mh.fit(task, strategy, workers=2, steps=STEPS, options=mh.Options(buffers=buffers))
    assert last_metrics(run) == pytest.approx(computed_again(run.model), abs=1e-9, rel=0)
    assert run.model.seen.dtype is torch.int64
    assert run.model.seen > 2**53
    assert run.model.mask.tolist() == [0.0, -torch.inf], "what nobody changed keeps its bits"


SYNCHRONIZED = {"single", "mirrored", "allreduce", "central", "sharded"}


@pytest.mark.parametrize("word", sorted(STRATEGIES.keys() - SYNCHRONIZED))
def test_a_strategy_without_synchronized_buffers_says_why(word: str) -> None:
    with pytest.raises(UserError, match=f"buffers=synchronize: strategy {word}.* does not support it: "):
        mh.fit(make_task(), word, workers=2, options=mh.Options(buffers="synchronize"))


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        ({"batch_size": 23}, {}, "some batches have 2 for 3 workers"),
        ({"microbatches": 2}, {}, r"task\.microbatches=2 no layer sees a whole batch"),
        ({}, {"compile": True}, r"torch\.compile does not support layers"),
    ],
)
def test_what_synchronized_buffers_cannot_be_combined_with(
    changes: dict[str, Any], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=f"buffers=synchronize: .*{sentence}"):
        mh.fit(make_task(**changes), workers=3, options=mh.Options(buffers="synchronize", **options))


def test_an_unknown_choice_of_buffers_is_refused() -> None:
    with pytest.raises(
        UserError, match="buffers='averge' is not known; allowed: broadcast, mean, synchronize"
    ):
        mh.Options(buffers="averge")


def test_a_batch_norm_in_two_stages_is_refused() -> None:
    norm = nn.BatchNorm1d(6)
    task = make_task(model=lambda: nn.Sequential(norm, nn.Linear(6, 6), norm, nn.Linear(6, 3)).double())
    with pytest.raises(UserError, match=r"layer '0' \(BatchNorm1d\) is in stages 0 and 1"):
        mh.fit(task, "pipeline stages=2 microbatches=2 cuts=2", workers=2, steps=2)
