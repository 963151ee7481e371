"""`hogwild` with workers that are threads: the plain loop where it must be, and told apart where it need not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import manyhands as mh
from equality import Silent, distance, make_task, same_bits, train_plainly
from manyhands.data.batches import BatchPlan, BatchSource
from manyhands.data.store.checkpoint import CheckpointStore
from manyhands.engine.computing import Computer, TrainingPlan
from manyhands.engine.exchange import SingleExchange
from manyhands.engine.reporting import WorkerNote
from manyhands.engine.worker import Trainer
from manyhands.errors import NonFinite, PeerTimeout, UserError
from manyhands.native.group.gate import Gate
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles
from manyhands.strategies.hogwild.training import HogwildTrainer
from ways import in_threads, join

STEPS = 30
Make = Callable[[Any], optim.Optimizer]


class Replacing(optim.Optimizer):
    """Puts new tensors into its state in each step, where torch's own change the old ones."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.taken += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["mean"] = 0.9 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                    state["count"] = state.get("count", torch.zeros(())) + 1
                    parameter -= group["lr"] / state["count"].sqrt() * state["mean"]


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, weight_decay=1e-3),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=1e-3),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.01),
    "adam": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=1e-2),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "nadam": lambda p: optim.NAdam(p, lr=1e-2),
    "radam": lambda p: optim.RAdam(p, lr=1e-2),
    "adadelta": lambda p: optim.Adadelta(p, lr=1e-1),
    "rprop": lambda p: optim.Rprop(p, lr=1e-3),
    "asgd": lambda p: optim.ASGD(p, lr=1e-1, t0=3),
    "ftrl": lambda p: mh.optim.FTRL(p, lr=0.1, l1=1e-3),
    "foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "replacing": Replacing,
}


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


class Reports(Silent):
    """Keeps what a worker tells the launcher, and asks it to stop where a test wants that."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.steps = 0
        self._stop_after = stop_after

    def note(self, note: WorkerNote) -> None:
        self.rows += [dict(row) for row in note.rows]

    def mark(self, step: int, state: Any) -> None:
        self.steps = max(self.steps, step)

    def stop_requested(self) -> bool:
        return self._stop_after is not None and self.steps >= self._stop_after


class Result:
    """What one worker ended with."""

    def __init__(self, trainer: HogwildTrainer, report: Reports, trained: Any) -> None:
        self.weights = {name: value.clone() for name, value in trained.model.state_dict().items()}
        self.trained = trained
        self.overlap = trainer.overlap
        self.rows = report.rows


def plan_of(
    task: mh.Task, steps: int = STEPS, evaluate_every: int = 0, checkpoint_every: int = 0
) -> TrainingPlan:
    return TrainingPlan(
        task=task, steps=steps, seed=0, evaluate_every=evaluate_every, checkpoint_every=checkpoint_every
    )


def batch_of(task: mh.Task, step: int) -> Any:
    """Global batch `step`, whole."""
    source = BatchSource(task.data)
    return source.fetch(BatchPlan(len(source), task.batch_size, seed=0).indices(step))


def train(
    plan: TrainingPlan,
    order: str,
    world: int,
    *,
    folder: Path | None = None,
    resume: bool = False,
    stop_after: int | None = None,
) -> list[Result]:
    def work(files: SharedGroupFiles, rank: int) -> Result:
        report = Reports(stop_after)
        store = CheckpointStore(folder) if folder is not None else None
        trainer = HogwildTrainer(plan, order, join(files, rank), report, store)
        try:
            start = store.load() if store is not None and resume else None
            return Result(trainer, report, trainer.run(start))
        except BaseException:
            files.abort(rank)
            raise
        finally:
            trainer.close()

    with SharedGroupFiles.create(world) as files:
        return in_threads(world, lambda rank: work(files, rank))


@cache
def task_and_reference(name: str, steps: int = STEPS) -> tuple[mh.Task, dict[str, Tensor]]:
    task = make_task(OPTIMIZERS[name])
    return task, train_plainly(task, steps)


# ── where it is the plain loop ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("order", "world"), [("free", 1), ("turns", 3)])
def test_one_worker_and_turns_are_the_plain_loop_to_the_last_bit(name: str, order: str, world: int) -> None:
    task, reference = task_and_reference(name, 14)
    results = train(plan_of(task, 14), order, world)
    for result in results:
        assert same_bits(result.weights, reference)
    assert sum(result.trained.samples for result in results) == 3 * 45 + 13 + 13  # 4 batches make an epoch
    steps = sorted(row["step"] for result in results for row in result.rows)
    assert steps == list(range(1, 15))


def test_buffers_and_schedules_are_those_of_the_plain_loop() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 1))
        draw = torch.Generator().manual_seed(
            2
        )  # of its own: the workers here are threads, which share torch's
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=draw) - 0.3)
        return model

    x = torch.arange(80.0).reshape(20, 4).sin()
    task = mh.Task(
        model=build,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(x, x.sum(1, keepdim=True)),
        optimizer=lambda p: optim.Adam(p, lr=0.05),
        scheduler=lambda optimizer: optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20),
        batch_size=6,
    )
    reference = train_plainly(task, 15)
    assert distance(reference, train_plainly(replace(task, scheduler=None), 15)) > 1e-3
    for result in train(plan_of(task, 15), "turns", 2):
        assert same_bits(result.weights, reference)
    assert reference["1.num_batches_tracked"] == 15


# ── the other orders ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_locked_is_the_plain_loop_over_its_batches_in_the_order_they_came() -> None:
    task, _ = task_and_reference("adamw")
    computer = Computer(plan_of(task), 0)
    firsts = [batch_of(task, step)[0] for step in range(STEPS)]
    taken: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        taken.extend(step for step, tokens in enumerate(firsts) if torch.equal(tokens, batch[0]))
        return task.loss(model, batch)

    results = train(plan_of(replace(task, loss=loss)), "locked", 3)
    assert sorted(taken) == list(range(STEPS))
    built = computer.build()
    for step in taken:
        computer.compute(built.model, step, 0, 1, lambda value, _: value.backward())  # type: ignore[no-untyped-call]
        built.optimizer.step()
        built.optimizer.zero_grad()
    assert same_bits(results[0].weights, dict(built.model.state_dict()))
    assert all(set(result.overlap) <= {0} for result in results)


ROWS, WIDTH = 24, 3


def table_task(
    optimizer: Make, rows_per_sample: Tensor, *, sparse: bool = True, batch_size: int = 2
) -> mh.Task:
    """A table, of which each sample reads some rows, and nothing else."""

    def build() -> nn.Module:
        table = nn.Embedding(ROWS, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            table.weight.copy_(torch.arange(ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).cos())
        return table

    return mh.Task(
        model=build,
        loss=lambda model, batch: (model(batch) - 2).square().sum(dim=(1, 2)).mean(),
        data=rows_per_sample,
        optimizer=optimizer,
        batch_size=batch_size,
        sparse={"weight": lambda batch: batch} if sparse else {},
    )


LAZY: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, lr=0.05),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.3, initial_accumulator_value=0.1),
    "ftrl": lambda p: mh.optim.FTRL(p, lr=0.3, l1=0.01),
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("order", ["free", "locked", "turns"])
def test_rows_that_no_two_batches_share_end_as_in_one_process(name: str, order: str) -> None:
    """In an epoch each row is read by one batch: however the workers overlap, nothing can be lost."""
    task = table_task(LAZY[name], torch.arange(ROWS).view(12, 2))
    reference = train_plainly(replace(task, sparse={}), 6)
    results = train(plan_of(task, 6), order, 3)
    assert distance(results[0].weights, reference) < 1e-12
    assert sum(sum(result.overlap.values()) for result in results) == 6


@pytest.mark.parametrize("name", LAZY)
def test_lazy_rows_are_dense_where_an_absent_row_does_not_move(name: str) -> None:
    draw = torch.Generator().manual_seed(4)
    task = table_task(LAZY[name], torch.randint(0, ROWS, (30, 3), generator=draw), batch_size=4)
    reference = train_plainly(replace(task, sparse={}), 20)
    assert distance(train(plan_of(task, 20), "turns", 2)[0].weights, reference) < 1e-12


def test_lazy_adam_leaves_the_rows_alone_that_a_batch_does_not_name() -> None:
    task = table_task(lambda p: optim.Adam(p, lr=0.1), torch.tensor([[0, 1]] * 4 + [[2, 3]]), batch_size=1)
    start = task.model().state_dict()["weight"]
    ended = train(plan_of(task, 15), "free", 2)[0].weights["weight"]
    assert torch.equal(ended[4:], start[4:])
    assert (ended[:4] != start[:4]).all()


def test_steps_between_reading_and_writing_are_counted() -> None:
    """Both workers have read before either writes: the second to write has the other's step in between."""
    both = threading.Barrier(2, timeout=240)
    task = table_task(LAZY["sgd"], torch.arange(4).view(2, 2), batch_size=1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        both.wait()
        return task.loss(model, batch)

    results = train(plan_of(replace(task, loss=loss), 2), "free", 2)
    assert results[0].overlap + results[1].overlap == {0: 1, 1: 1}
    assert distance(results[0].weights, train_plainly(task, 2)) < 1e-12


# ── evaluation, checkpoints, stopping ─────────────────────────────────────────────────────────────────────────────────


def with_evaluation(task: mh.Task) -> mh.Task:
    return replace(
        task, evaluation=task.data, metrics={"twice": lambda model, batch: 2 * task.loss(model, batch)}
    )


def test_an_evaluation_sees_one_state_of_the_model() -> None:
    task = with_evaluation(task_and_reference("adamw")[0])
    report = Reports()
    Trainer(plan_of(task, evaluate_every=7), SingleExchange(), report).run()
    results = train(plan_of(task, evaluate_every=7), "turns", 3)
    expected = [row for row in report.rows if "metrics" in row]
    found = [row for row in results[0].rows if "metrics" in row]
    assert [row["step"] for row in found] == [7, 14, 21, 28, 30]
    for one, other in zip(found, expected, strict=True):
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-12)
    assert not [row for result in results[1:] for row in result.rows if "metrics" in row]


@pytest.mark.parametrize("name", ["adagrad", "adamw", "momentum"])
def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(name: str, tmp_path: Path) -> None:
    task, reference = task_and_reference(name)
    train(plan_of(task, 11, checkpoint_every=4), "turns", 2, folder=tmp_path)
    results = train(plan_of(task, checkpoint_every=4), "turns", 3, folder=tmp_path, resume=True)
    assert same_bits(results[1].weights, reference)
    assert CheckpointStore(tmp_path).load().step == STEPS


def test_the_state_of_tables_is_saved_as_the_dense_optimizer_has_it(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(4)
    task = table_task(LAZY["adagrad"], torch.randint(0, ROWS, (30, 3), generator=draw), batch_size=4)
    train(plan_of(task, 9, checkpoint_every=9), "free", 1, folder=tmp_path)
    plain = replace(task, sparse={})
    loaded = CheckpointStore(tmp_path).load()
    ended = Trainer(plan_of(plain, 20), SingleExchange(), Silent()).run(loaded).model
    assert distance(dict(ended.state_dict()), train_plainly(plain, 20)) < 1e-12


@pytest.mark.parametrize("every", [100, 2])
@pytest.mark.parametrize("order", ["free", "locked", "turns"])
def test_a_run_that_is_stopped_leaves_no_gap(order: str, every: int, tmp_path: Path) -> None:
    """Also where the workers meet more often than an order can stop between two meetings."""
    task, _ = task_and_reference("sgd")
    results = train(plan_of(task, checkpoint_every=every), order, 3, folder=tmp_path, stop_after=8)
    done = {result.trained.steps_done for result in results}
    assert len(done) == 1
    assert all(result.trained.stopped_early for result in results)
    (steps,) = done
    assert 8 <= steps <= 8 + 3
    assert sorted(row["step"] for result in results for row in result.rows) == list(range(1, steps + 1))
    assert CheckpointStore(tmp_path).load().step == steps


# ── what goes wrong ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", ["free", "locked", "turns"])
def test_a_loss_that_is_not_finite_stops_all_and_is_reported_once(order: str, tmp_path: Path) -> None:
    task, _ = task_and_reference("sgd")
    bad = batch_of(task, 9)[0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = task.loss(model, batch)
        return value * float("nan") if torch.equal(batch[0], bad) else value

    with pytest.raises(
        NonFinite, match=r"worker \d, step 10: the loss is not finite; .* changed no parameter"
    ):
        train(plan_of(replace(task, loss=loss), checkpoint_every=4), order, 2, folder=tmp_path)
    kept = CheckpointStore(tmp_path).load()
    assert kept.step == 8
    assert all(bool(torch.isfinite(value).all()) for value in kept.model.values())


class Counting(optim.SGD):
    """Counts its steps in a plain number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["steps"] = 1


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: optim.LBFGS(p), "optimizer LBFGS .* such as AdamW"),
        (lambda p: optim.Adafactor(p), "optimizer Adafactor .* under hogwild .* combines the items"),
        (
            lambda p: optim.SGD([*p, nn.Parameter(torch.ones(5))], lr=0.1),
            r"holds a parameter of shape \(5,\) that is not in the model",
        ),
        (Counting, "optimizer Counting keeps its state 'steps' as a int, .* use a tensor"),
    ],
)
def test_an_optimizer_whose_steps_can_not_be_shared_is_refused_by_name(make: Make, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        train(plan_of(make_task(make), 3), "free", 1)


class Halves(nn.Module):
    """Two parameters that overlap."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.ones(4)
        self.left, self.right = nn.Parameter(both[:3]), nn.Parameter(both[1:])


def test_parameters_in_the_same_memory_are_refused() -> None:
    task = replace(make_task(OPTIMIZERS["sgd"]), model=Halves)
    with pytest.raises(UserError, match="'left' and 'right' share memory but are different parameters"):
        train(plan_of(task, 1), "free", 1)


def test_a_row_that_the_task_did_not_name_is_refused() -> None:
    task = replace(
        table_task(LAZY["sgd"], torch.arange(4).view(2, 2)), sparse={"weight": lambda batch: batch[:, :1]}
    )
    with pytest.raises(UserError, match="did not return row"):
        train(plan_of(task, 1), "free", 1)


def test_waiting_for_a_turn_ends_and_names_the_one_whose_turn_it_is() -> None:
    with SharedGroupFiles.create(2) as files:

        def act(rank: int) -> None:
            group = SharedGroup(
                control=os.dup(files.control), arena=os.dup(files.arena), rank=rank, world=2, timeout_s=0.2
            )
            with group, group.share(Gate.NUM_BYTES, "a gate") as segment:
                gate = Gate(segment, 0, group, "take its step")
                if rank == 0:
                    gate.reset(0, 1)
                    with pytest.raises(
                        PeerTimeout, match=r"waited 0.2 s for worker 1 to take its step"
                    ) as caught:
                        gate.enter(1)
                    assert caught.value.peer == 1
                del gate

        in_threads(2, act)
