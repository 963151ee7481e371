"""A share that is computed in pieces makes the step of the whole share, and is exchanged once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from equality import OPTIMIZERS, Silent, distance, make_task, same_bits, train_in_threads, train_plainly
from manyhands.data.batches import cut
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.worker import Trainer
from manyhands.errors import UserError
from manyhands.native.group.shared_group import SharedGroupFiles
from ways import connect, with_exchanges

STEPS = 12
TASK = make_task(OPTIMIZERS["momentum"])


def in_pieces(microbatches: int, **changes: Any) -> mh.Task:
    return dataclasses.replace(TASK, microbatches=microbatches, **changes)


def plain_loop(task: mh.Task, steps: int = STEPS) -> dict[str, Tensor]:
    """What a user writes without us: whole batches."""
    return train_plainly(dataclasses.replace(task, microbatches=1), steps)


def test_pieces_are_even_and_none_is_empty() -> None:
    assert [list(piece) for piece in cut(5, 3)] == [[0, 1], [2, 3], [4]]
    assert [list(piece) for piece in cut(2, 4)] == [[0], [1]]
    assert cut(0, 4) == []


@pytest.mark.parametrize("microbatches", [2, 5, 100])
@pytest.mark.parametrize(
    ("way", "world"), [("single", 1), ("mirrored", 3), ("central", 3), ("local steps=1", 1)]
)
def test_the_step_is_that_of_the_whole_batch(way: str, world: int, microbatches: int) -> None:
    """Tied weights, a parameter that only some pieces reach, batches that divide by nothing."""
    with SharedGroupFiles.create(world) as files:
        task = in_pieces(microbatches)
        found = train_in_threads(task, world, lambda rank: connect(way, files, rank), STEPS)
    assert max(distance(weights, plain_loop(TASK)) for weights in found) < 1e-9
    assert all(same_bits(weights, found[0]) for weights in found)


def test_it_is_the_loop_that_accumulates_by_hand() -> None:
    model = TASK.model()
    optimizer = TASK.optimizer(model.parameters())
    tokens, targets = TASK.data
    for _ in range(3):
        optimizer.zero_grad()
        for piece in torch.arange(45).split(9):
            (nn.functional.cross_entropy(model(tokens[piece]), targets[piece]) / 5).backward()
        optimizer.step()
    task = in_pieces(4, batch_size=45)
    assert distance(train_plainly(task, 3), model.state_dict()) < 1e-9


def test_clipping_sees_the_whole_gradient() -> None:
    clipped = in_pieces(3, clip_norm=0.05)
    with SharedGroupFiles.create(2) as files:
        found = train_in_threads(clipped, 2, lambda rank: connect("central", files, rank), STEPS)
    assert distance(found[0], plain_loop(clipped)) < 1e-9
    assert distance(plain_loop(clipped), plain_loop(TASK)) > 1e-3


def test_no_piece_is_larger_than_it_must_be_and_the_history_has_the_mean_of_the_batch() -> None:
    sizes: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        sizes.append(len(batch[0]))
        return TASK.loss(model, batch)

    run = mh.fit(in_pieces(4, loss=loss), "single", steps=4)
    compared = [2, 1, 1]  # whether the loss is a mean: two samples, and each of them
    assert sizes == compared + [4, 3, 3, 3] * 3 + [2, 2, 1, 1]
    whole = mh.fit(TASK, "single", steps=4)
    assert run.history.loss == pytest.approx(whole.history.loss, rel=1e-12)
    assert run.summary["samples"] == whole.summary["samples"] == 45


class Saved:
    """A tensor that autograd keeps for backward, counted while it lives."""

    alive = peak = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.size = tensor, tensor.nbytes
        Saved.alive += self.size
        Saved.peak = max(Saved.peak, Saved.alive)

    def __del__(self) -> None:
        Saved.alive -= self.size


def test_what_autograd_keeps_is_that_of_one_piece() -> None:
    def peak(task: mh.Task) -> int:
        Saved.alive = Saved.peak = 0
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            mh.fit(task, "single", steps=2)
        assert Saved.alive == 0
        return Saved.peak

    x = torch.randn(256, 8)
    wide = mh.Task(
        model=lambda: nn.Sequential(
            nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        ),
        loss=lambda model, batch: model(batch).square().mean(),
        data=x,
        optimizer=OPTIMIZERS["sgd"],
        batch_size=256,
    )
    weights = 64 * 64 * 4 * 2  # which are kept for backward, too, however few samples there are
    assert peak(dataclasses.replace(wide, microbatches=8)) - weights < peak(wide) / 6


@pytest.mark.parametrize("way", ["mirrored", "central"])
def test_what_is_sent_is_sent_once_a_step(way: str) -> None:
    def traffic(task: mh.Task) -> list[tuple[int, int]]:
        plan = TrainingPlan(task=task, steps=5, seed=0, evaluate_every=0, checkpoint_every=0)

        def act(exchange: Any) -> tuple[int, int]:
            Trainer(plan, exchange, Silent()).run()
            sent = exchange.meter.traffic()
            return sent.bytes_sent, sent.messages_sent

        return with_exchanges(way, 2, act)

    assert traffic(in_pieces(4)) == traffic(TASK)


@pytest.mark.parametrize("strategy", ["ps servers=2", "allreduce algorithm=ring"])
def test_in_processes_it_is_the_same(strategy: str) -> None:
    run = mh.fit(in_pieces(3), strategy, workers=2, steps=STEPS)
    assert distance(run.model.state_dict(), plain_loop(TASK)) < 1e-9


def test_what_makes_no_sense_is_refused() -> None:
    for bad in (0, True, 1.5):
        with pytest.raises(UserError, match=r"microbatches=.* must be an integer of at least 1"):
            in_pieces(bad)  # type: ignore[arg-type]
    tables = in_pieces(2, sparse={"embed.weight": lambda batch: batch[0]})
    with pytest.raises(
        UserError, match=r"task\.microbatches=2: strategy ps reads the rows of task\.sparse once"
    ):
        mh.fit(tables, "ps", workers=2, steps=1)
