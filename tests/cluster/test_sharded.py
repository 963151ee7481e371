"""`sharded` with ranks that are threads: the weights of the plain loop, whatever a model does, and its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from equality import OPTIMIZERS, TWICE, Silent, distance, make_task, replica, same_bits, train_plainly
from manyhands.data.store.checkpoint import CheckpointStore
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import Exchange, SingleExchange
from manyhands.engine.worker import Trainer
from manyhands.errors import NonFinite, UserError
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.next_token import next_byte_loss
from shards import train_sharded, weights_of, with_shards


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


class Convolutions(nn.Module):
    """A small CNN with odd sizes, a statistic that is kept, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 5, 3, dtype=torch.float64)
        self.norm = nn.BatchNorm2d(5, dtype=torch.float64)
        self.rest = nn.Sequential(
            nn.Conv2d(5, 7, 3, stride=2, dtype=torch.float64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(63, 3).double(),
        )
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(torch.relu(self.norm(self.first(x)))) * self.scale


class Recurrent(nn.Module):
    """Layers that are used several times, one by its method and one only through its weight."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 5).double()
        self.memory = nn.LSTM(5, 4, num_layers=2, batch_first=True).double()
        self.table = nn.Linear(4, 3, bias=False).double()
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 5)
        states = []
        for moment in range(x.shape[1]):
            if self.again:
                state = checkpoint(self.cell, x[:, moment], state, use_reentrant=False)
            else:
                state = self.cell(x[:, moment], state)
            states.append(state)
        seen, _ = self.memory(torch.stack(states, 1))
        penalty = 1e-3 * sum(one.square().sum() for one in self.table.parameters())
        return nn.functional.linear(seen[:, -1], self.table.weight) + penalty


def classify(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def task_of(model: nn.Module, data: Any, loss: Any, **more: Any) -> mh.Task:
    more = {"optimizer": OPTIMIZERS["adamw"], "batch_size": 5, **more}
    return mh.Task(model=lambda: replica(model), loss=loss, data=data, **more)


ONCE = 6
"""Steps for the samples once, and for one batch more."""


def transformer_task(*, tied: bool, **more: Any) -> mh.Task:
    torch.manual_seed(3)
    model = GPT(context=6, layers=3, width=9, heads=3, tied=tied, vocabulary=13).double()
    return task_of(model, torch.randint(0, 13, (21, 7)), next_byte_loss, **more)


def task_named(name: str) -> mh.Task:
    torch.manual_seed(4)
    labels = torch.randint(0, 3, (17,))
    match name:
        case "tied" | "untied":
            return transformer_task(tied=name == "tied")
        case "cnn":  # statistics of batches would depend on who has which sample
            model = Convolutions()
            model.norm.eval()
            model.norm.train = lambda mode=True: model.norm  # type: ignore[method-assign]
            return task_of(model, (torch.randn(17, 1, 9, 9, dtype=torch.float64), labels), classify)
        case _:
            data = (torch.randn(17, 4, 3, dtype=torch.float64), labels)
            return task_of(Recurrent(again=name == "again"), data, classify)


@pytest.mark.parametrize("name", ["tied", "untied", "cnn", "recurrent", "again"])
@pytest.mark.parametrize("world", [2, 3])
def test_weights_equal_the_plain_loop(name: str, world: int) -> None:
    task = task_named(name)
    steps = {2: ONCE, 3: 20 if name == "tied" else TWICE}[world]
    assert distance(weights_of(train_sharded(task, world, steps)), train_plainly(task, steps)) < 1e-9


def test_an_optimizer_that_keeps_rows_and_columns_has_whole_tensors() -> None:
    task = make_task(lambda parameters: optim.Adafactor(parameters, lr=1e-2))
    assert distance(weights_of(train_sharded(task, 3, TWICE)), train_plainly(task, TWICE)) < 1e-9


def test_workers_without_samples_and_layers_that_some_leave_out() -> None:
    task = make_task(OPTIMIZERS["momentum"])
    first, second = (weights_of(train_sharded(task, 8, 5)) for _ in range(2))  # an epoch, and one batch more
    assert distance(first, train_plainly(task, 5)) < 1e-9
    assert same_bits(first, second)


class Whole(optim.AdamW):
    """A subclass might look at whole tensors, so it is given whole tensors."""


@pytest.mark.parametrize("kind", ["groups", "whole", "sgd"])
def test_optimizers_step_their_pieces_or_whole_tensors(kind: str) -> None:
    def make(parameters: Any) -> optim.Optimizer:
        rows = list(parameters)
        groups = [{"params": rows[:3], "lr": 0.05}, {"params": rows[3:]}]
        match kind:
            case "groups":
                return optim.AdamW(groups, lr=1e-2)
            case "whole":
                return Whole(groups, lr=1e-2)
            case _:
                return optim.SGD(rows, lr=0.1)

    task = transformer_task(tied=True, optimizer=make)
    assert distance(weights_of(train_sharded(task, 3, ONCE)), train_plainly(task, ONCE)) < 1e-9


@pytest.mark.parametrize(
    "more", [{"clip_norm": 0.1}, {"clip_value": 0.01}, {"microbatches": 3}], ids=lambda one: next(iter(one))
)
def test_clipping_and_microbatches(more: dict[str, Any]) -> None:
    task = transformer_task(tied=True, **more)
    assert distance(weights_of(train_sharded(task, 2, ONCE)), train_plainly(task, ONCE)) < 1e-9


def test_a_run_goes_on_from_a_checkpoint_of_any_strategy(tmp_path: Path) -> None:
    task = transformer_task(tied=False)
    train_sharded(task, 3, 4, tmp_path, checkpoint_every=4)
    store = CheckpointStore(tmp_path)
    plan = TrainingPlan(task=task, steps=8, seed=0, evaluate_every=0, checkpoint_every=4)
    Trainer(plan, SingleExchange(), Silent(), store).run(store.load(4))
    ended = train_sharded(task, 2, 12, tmp_path, start=8, checkpoint_every=4)
    assert distance(weights_of(ended), train_plainly(task, 12)) < 1e-9


def test_evaluation_is_that_of_one_process() -> None:
    task = transformer_task(tied=True)
    evaluated = replace(
        task,
        evaluation=task.data[:16],
        metrics={"twice": lambda model, batch: 2 * task.loss(model, batch)},
    )
    plan = TrainingPlan(task=evaluated, steps=2, seed=0, evaluate_every=1, checkpoint_every=0)

    def act(exchange: Exchange) -> dict[str, float]:
        trainer = Trainer(plan, exchange, Silent())
        trainer.run()
        return trainer.reporter._evaluated

    found = with_shards(3, act)
    alone = act(SingleExchange())
    assert alone["twice"] == pytest.approx(2 * alone["evaluation_loss"])
    for one in found:
        assert one == pytest.approx(alone, rel=1e-9)


def test_what_cannot_be_split_is_refused_by_name() -> None:
    def attach(model: nn.Module, make: Callable[..., optim.Optimizer] = optim.SGD) -> str:
        with pytest.raises(UserError) as caught:
            with_shards(2, lambda exchange: exchange.attach(model, make(model.parameters())))
        return str(caught.value)

    assert "LBFGS" in attach(nn.Linear(2, 2), optim.LBFGS)
    whole = nn.Module()
    whole.number = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    assert "'number' is torch.complex64" in attach(whole)


def test_a_loss_that_is_not_finite_is_reported_with_what_this_worker_holds() -> None:
    task = transformer_task(tied=True)
    broken = replace(task, loss=lambda model, batch: next_byte_loss(model, batch) * float("nan"))
    with pytest.raises(NonFinite, match=r"worker 0, step 1: .*check that batch"):
        train_sharded(broken, 2, 3)
