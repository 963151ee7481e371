"""Local SGD held against the plain loop, against a loop written out in the test, and against itself after a resume."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
import replicas
from equality import (
    OPTIMIZERS,
    STEPS,
    TWICE,
    Silent,
    distance,
    make_task,
    same_bits,
    train_in_threads,
    train_plainly,
)
from manyhands.data.batches import BatchPlan
from manyhands.data.store.checkpoint import CheckpointStore, Loaded
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import Exchange
from manyhands.engine.reporting import WorkerNote
from manyhands.engine.worker import Trainer
from manyhands.errors import NonFinite, UserError
from manyhands.interop.own_loop.worker_group import WorkerGroup
from manyhands.native.group.shared_group import SharedGroupFiles
from manyhands.strategy import Strategy
from own_loop import mlp, on_workers, regression, shuffled, weights
from ways import connect, in_threads


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


def train(task: mh.Task, text: str, world: int, steps: int) -> list[dict[str, torch.Tensor]]:
    with SharedGroupFiles.create(world) as files:
        return train_in_threads(task, world, lambda rank: connect(text, files, rank), steps)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_an_average_after_every_step_of_sgd_is_the_plain_loop(world: int) -> None:
    task = make_task(OPTIMIZERS["sgd"])
    steps = STEPS if world == 3 else TWICE
    reference = train_plainly(task, steps)
    results = train(task, "local steps=1", world, steps)
    assert all(distance(result, reference) < 1e-9 for result in results)
    assert all(same_bits(result, results[0]) for result in results)


def small_task(optimizer: Any, batch_size: int = 12) -> mh.Task:
    return replace(replicas.small_task(optimizer, batch_size), evaluation=None)


@pytest.mark.parametrize("name", ["momentum", "sgd"])
def test_where_every_worker_reaches_every_parameter_momentum_is_averaged_to_the_same(name: str) -> None:
    task = small_task(OPTIMIZERS[name])
    steps = 11  # the samples twice, and one batch more
    reference = train_plainly(task, steps)
    assert distance(train(task, "local steps=1", 3, steps)[1], reference) < 1e-9


def taken(task: mh.Task, indices: Any) -> list[torch.Tensor]:
    return [part[torch.tensor(indices.tolist())] for part in task.data]


def written_out(task: mh.Task, world: int, every: float, steps: int) -> dict[str, torch.Tensor]:
    """The same in one process: a model and an optimizer a worker, and averages of both by hand."""
    models = [task.model() for _ in range(world)]
    optimizers = [task.optimizer(model.parameters()) for model in models]
    batches = BatchPlan(len(task.data[0]), task.batch_size, 0)
    weights = [0.0] * world
    for step in range(steps):
        for rank in range(world):
            indices = batches.share(step, rank, world)
            weights[rank] += len(indices) / batches.size(step)
            if len(indices):
                optimizers[rank].zero_grad()
                task.loss(models[rank], taken(task, indices)).backward()
                optimizers[rank].step()
        if (step + 1) % every == 0 or step + 1 == steps:
            average([list(model.parameters()) for model in models], weights)
            states = [optimizer.state_dict()["state"] for optimizer in optimizers]
            for number in states[0]:
                for key in states[0][number]:
                    average([[state[number][key]] for state in states], weights)
            weights = [0.0] * world
    return {key: value.clone() for key, value in models[0].state_dict().items()}


@torch.no_grad()
def average(replicas: list[list[torch.Tensor]], weights: list[float]) -> None:
    for tensors in zip(*replicas, strict=True):
        if tensors[0] is not None:
            mean = sum(tensor * weight for tensor, weight in zip(tensors, weights, strict=True)) / sum(
                weights
            )
            for tensor in tensors:
                tensor.copy_(mean)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize(
    ("text", "every"), [("local", 8), ("local steps=3", 3), ("local steps=inf", math.inf)]
)
def test_between_averages_each_worker_trains_alone(text: str, every: float, optimizer: str) -> None:
    task = small_task(OPTIMIZERS[optimizer], batch_size=13)
    results = train(task, text, 3, 20)
    assert all(same_bits(result, results[0]) for result in results)
    assert distance(results[0], written_out(task, 3, every, 20)) < 1e-9


def test_worker_without_samples_takes_no_step_and_gets_the_state_of_the_others() -> None:
    task = small_task(OPTIMIZERS["adamw"], batch_size=2)
    results = train(task, "local steps=2", 3, 12)
    assert all(same_bits(result, results[0]) for result in results)
    reference = written_out(task, 2, 2, 12)  # the third has never anything to do
    assert distance(results[2], reference) < 1e-9


class Kept(Silent):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def note(self, note: WorkerNote) -> None:
        self.rows += [dict(row) for row in note.rows]


def run(
    task: mh.Task,
    exchange: Exchange,
    plan: dict[str, Any],
    store: CheckpointStore | None,
    start: Loaded | None,
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    worker_context = Kept()
    try:
        made = TrainingPlan(task=task, seed=0, evaluate_every=0, check_every=1, **plan)
        trained = Trainer(made, exchange, worker_context, store).run(start)
        return {key: value.clone() for key, value in trained.model.state_dict().items()}, worker_context.rows
    finally:
        exchange.close()


def test_checkpoint_waits_for_the_next_average_and_a_resumed_run_ends_alike(tmp_path: Path) -> None:
    task = small_task(OPTIMIZERS["momentum"])
    plan = {"steps": 20, "checkpoint_every": 5}
    store = CheckpointStore(tmp_path, keep=10)

    def together(start: Loaded | None, steps: int) -> list[Any]:
        with SharedGroupFiles.create(2) as files:
            return in_threads(
                2,
                lambda rank: run(
                    task,
                    connect("local steps=4", files, rank),
                    {**plan, "steps": steps},
                    store,
                    copy.deepcopy(start),
                ),
            )

    whole = together(None, 20)
    assert sorted(int(path.name.rpartition("-")[2]) for path in tmp_path.glob("*-*")) == [8, 12, 16, 20]
    resumed = together(store.load(8), 20)
    assert same_bits(whole[0][0], resumed[0][0])
    rows, later = whole[0][1], resumed[0][1]
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["loss"] for row in rows if row["step"] > 8] == [row["loss"] for row in later]


def test_loss_of_a_step_is_the_mean_over_its_batch_though_nobody_met(tmp_path: Path) -> None:
    task = small_task(lambda p: torch.optim.SGD(p, lr=0.0))  # nobody moves, so that all parts see one model
    with SharedGroupFiles.create(3) as files:
        outcomes = in_threads(
            3,
            lambda rank: run(
                task, connect("local steps=4", files, rank), {"steps": 9, "checkpoint_every": 0}, None, None
            ),
        )
    batches, model = BatchPlan(60, 12, 0), task.model()
    expected = [task.loss(model, taken(task, batches.share(step, 0, 1))).item() for step in range(9)]
    assert [row["loss"] for row in outcomes[0][1]] == pytest.approx(expected, rel=1e-12)


def test_loss_that_is_not_finite_is_reported_at_the_next_average() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = (model(batch[0]) - batch[1]).square().mean()
        return value * math.nan if bool((batch[0] == marked).all(1).any()) else value

    task = small_task(OPTIMIZERS["sgd"])
    marked = task.data[0][BatchPlan(60, 12, 0).share(1, 1, 2)[0]]
    task = mh.Task(model=task.model, loss=loss, data=task.data, optimizer=task.optimizer, batch_size=12)
    with (
        SharedGroupFiles.create(2) as files,
        pytest.raises(NonFinite, match=r"worker 1, step 4: .*next average"),
    ):
        in_threads(
            2,
            lambda rank: run(
                task, connect("local steps=4", files, rank), {"steps": 9, "checkpoint_every": 0}, None, None
            ),
        )


@pytest.mark.parametrize("text", ["local steps=0", "local steps=2.5", "local steps=-1", "local steps=few"])
def test_numbers_of_steps_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="integer of at least 1, or inf"):
        Strategy.parse(text)


def test_text_form() -> None:
    assert str(Strategy.parse("local")) == "local"
    assert str(Strategy.parse("local steps=inf")) == "local steps=inf"
    assert str(Strategy.parse("local steps=4")) == "local steps=4"


def test_optimizer_whose_state_cannot_be_averaged_is_refused() -> None:
    task = small_task(lambda p: torch.optim.LBFGS(p))
    with SharedGroupFiles.create(2) as files, pytest.raises(UserError, match="LBFGS"):
        train_in_threads(task, 2, lambda rank: connect("local", files, rank), 2)


@pytest.mark.parametrize("every", [1, 4, math.inf])
def test_own_loop_that_joins_averages_its_replicas(every: float) -> None:
    """Nine steps on three workers, held against replicas that are trained and averaged here on the same parts."""
    text = f"local steps={every}"
    seen: dict[int, list[list[torch.Tensor]]] = {}
    models: dict[int, nn.Module] = {}

    def loop(group: WorkerGroup) -> None:
        model = mlp()
        model, optimizer, loader = group.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), shuffled(regression(39))
        )
        seen[group.rank] = []
        for _ in range(3):
            for x, y in loader:
                seen[group.rank].append([x.clone(), y.clone()])
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        models[group.rank] = model  # the last average is taken as the group is left

    on_workers(3, loop, strategy=text)
    replicas = [mlp() for _ in range(3)]
    samples = [0.0] * 3
    for step in range(9):
        for rank, replica in enumerate(replicas):
            x, y = seen[rank][step]
            samples[rank] += len(x)
            gradients = torch.autograd.grad(nn.functional.mse_loss(replica(x), y), list(replica.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(replica.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient
        if (step + 1) % every == 0 or step == 8:
            average([list(replica.parameters()) for replica in replicas], samples)
            samples = [0.0] * 3
    ended = [weights(models[rank]) for rank in range(3)]
    assert distance(ended[0], weights(replicas[0])) < 1e-9
    assert all(same_bits(ended[0], other) for other in ended)
