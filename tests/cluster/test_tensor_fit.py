"""`tensor` through the common loop, in virtual time: weights and optimizer are those of one process.

Every model is trained for the samples twice and one batch more on one grid at least; two kinds of them for 20 steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from equality import OPTIMIZERS, distance, make_task, replica
from manyhands.engine.exchange import SingleExchange
from manyhands.errors import Desync
from manyhands.strategies.common.grid.grid_layout import Grid
from manyhands.strategies.tensor.exchange import TensorExchange
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.next_token import next_byte_loss
from manyhands.workloads.language.recurrent import RecurrentNetwork
from manyhands.workloads.tasks.digits import ImageClassifier, accuracy, classification_loss
from sliced import train, train_sliced

STEPS = 20
TWICE = 11
ONCE = 6


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def task_of(model: Callable[[], nn.Module], loss: Any, data: Any, **more: Any) -> mh.Task:
    template = model().double()
    return mh.Task(
        model=lambda: replica(template), loss=loss, data=data, optimizer=adamw, batch_size=7, **more
    )


def windows(count: int = 30) -> Tensor:
    return torch.randint(0, 17, (count, 9), generator=torch.Generator().manual_seed(4))


def transformer(*, tied: bool) -> mh.Task:
    torch.manual_seed(0)
    model = lambda: GPT(context=8, layers=2, width=12, heads=3, tied=tied, vocabulary=17)  # noqa: E731
    return task_of(model, next_byte_loss, windows(), evaluation=windows(11))


def images(count: int = 30) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randint(0, 256, (count, 1, 9, 9), generator=generator, dtype=torch.uint8)
    return pixels, torch.randint(0, 10, (count,), generator=generator)


def classifier() -> mh.Task:
    torch.manual_seed(0)
    return task_of(
        lambda: ImageClassifier(side=9, white=255, width=8),
        classification_loss,
        images(),
        evaluation=images(11),
        metrics={"accuracy": accuracy},
    )


def rows_of_images() -> mh.Task:
    """Sliced by rows where that is cheap, by channels where images are small."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(96, 10),
    )  # fmt: skip
    model.tensor_plan = {"[0-3]": "spatial", "4": "channels_out", "7": "row units=6"}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].double() / 255), batch[1])

    return task_of(lambda: model, loss, images())


def batch_norms() -> mh.Task:
    """Their convolutions have no bias: its gradient would be rounding alone, which AdamW makes large."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 7, 3, bias=False), nn.BatchNorm2d(7), nn.ReLU(), nn.Conv2d(7, 4, 3, bias=False),
        nn.BatchNorm2d(4, momentum=None), nn.ReLU(), nn.Conv2d(4, 6, 3, bias=False),
        nn.BatchNorm2d(6, momentum=None, affine=False), nn.Flatten(), nn.Linear(54, 10),
    )  # fmt: skip

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].double() / 255), batch[1])

    return task_of(lambda: model, loss, images(), evaluation=images(11))


def recurrent() -> mh.Task:
    """Its LSTMs are whole on every slice, what is around them is sliced."""
    torch.manual_seed(0)
    model = lambda: RecurrentNetwork(layers=2, width=10, vocabulary=17)  # noqa: E731
    return task_of(model, next_byte_loss, windows(), evaluation=windows(11))


TASKS: dict[str, Callable[[], mh.Task]] = {
    "transformer": lambda: transformer(tied=True),
    "untied transformer": lambda: transformer(tied=False),
    "classifier": classifier,
    "rows": rows_of_images,
    "batch norms": batch_norms,
    "lstm": recurrent,
    "awkward": lambda: make_task(OPTIMIZERS["adamw"]),
}


@cache
def alone(name: str, steps: int = STEPS) -> Any:
    """What one process comes to."""
    return train(TASKS[name](), SingleExchange(), steps)


def largest_difference(one: Any, other: Any) -> float:
    """Between two optimizers' states."""
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    return max(
        float((mine[name].double() - theirs[name].double()).abs().max())
        for mine, theirs in zip(one["state"].values(), other["state"].values(), strict=True)
        for name in theirs
    )


class Loaded:
    """A checkpoint after some steps, as the loop takes it."""

    def __init__(self, step: int, model: Any, optimizer: Any) -> None:
        self.step, self.model, self.optimizer, self.extra = step, dict(model), dict(optimizer), {}


@pytest.mark.parametrize(
    ("name", "slices", "data", "steps"),
    [
        ("transformer", 1, 2, ONCE),
        ("transformer", 2, 1, ONCE),
        ("transformer", 3, 1, STEPS),
        ("transformer", 2, 2, TWICE),
        ("untied transformer", 2, 2, TWICE),
        ("classifier", 2, 1, ONCE),
        ("classifier", 4, 1, TWICE),
        ("classifier", 3, 2, TWICE),
        ("rows", 3, 1, TWICE),
        ("batch norms", 3, 1, TWICE),
        ("lstm", 3, 1, STEPS),
        ("awkward", 2, 1, ONCE),
        ("awkward", 4, 2, TWICE),
    ],
)
def test_weights_and_state_are_those_of_one_process(name: str, slices: int, data: int, steps: int) -> None:
    task = TASKS[name]()
    expected, state, evaluated = alone(name, steps)
    found = train_sliced(task, Grid(slices=slices, data=data), steps)
    (weights, optimizer, _), *others = found
    assert distance(weights, expected) < 1e-9
    assert largest_difference(optimizer, state) < 1e-9
    assert all(other[1] is None for other in others)
    if evaluated is not None:
        assert all(one[2][1] == evaluated[1] for one in found), "each sample once"
        for metric, value in evaluated[0].items():
            assert all(math.isclose(one[2][0][metric], value, rel_tol=1e-9) for one in found)


def test_each_slice_is_compared_with_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = TensorExchange.apply

    def apply_and_flip(exchange: TensorExchange) -> None:
        apply(exchange)
        if exchange.rank == 3:
            held = dict(exchange.part.parameters(nn.Identity()))["transformer.h.0.mlp.c_fc.weight"]
            assert held is not None
            held.detach().view(-1)[:1].view(torch.int64).bitwise_xor_(1)

    monkeypatch.setattr(TensorExchange, "apply", apply_and_flip)
    with pytest.raises(Desync, match=r"ranks 1 and 3 differ in 'transformer\.h\.0\.mlp\.c_fc\.weight'"):
        train_sliced(TASKS["transformer"](), Grid(slices=2, data=2), 1)


def test_checkpoint_goes_on_under_one_process_and_back() -> None:
    task = TASKS["transformer"]()
    half_way, steps = 4, 8  # the second pass over the samples begins after 5
    expected, state, _ = alone("transformer", steps)
    (half, half_state, _), _ = train_sliced(task, Grid(slices=2), half_way)
    resumed, resumed_state, _ = train(task, SingleExchange(), steps, Loaded(half_way, half, half_state))
    assert distance(resumed, expected) < 1e-9
    assert largest_difference(resumed_state, state) < 1e-9
    first, first_state, _ = alone("transformer", half_way)
    (back, back_state, _), *_ = train_sliced(
        task, Grid(slices=3), steps, Loaded(half_way, first, first_state)
    )
    assert distance(back, expected) < 1e-9
    assert largest_difference(back_state, state) < 1e-9


@pytest.mark.parametrize("clip", [{"clip_norm": 0.05}, {"clip_value": 0.01}], ids=str)
def test_gradients_are_clipped_as_in_one_process(clip: dict[str, float]) -> None:
    task = replace(TASKS["transformer"](), **clip)
    expected, _, _ = train(task, SingleExchange(), 6)
    (weights, _, _), *_ = train_sliced(task, Grid(slices=2, data=2), 6)
    assert distance(weights, expected) < 1e-9
    assert distance(expected, alone("transformer", 6)[0]) > 1e-6
