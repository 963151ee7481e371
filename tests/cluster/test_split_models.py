"""Unusual models, optimizers and losses under `pipeline`, `tensor` and `sharded`: as alone, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import manyhands as mh
from equality import distance, replica
from manyhands.engine.chain import ChainFunction
from manyhands.errors import UserError
from manyhands.strategies.common.grid.grid_layout import Grid
from manyhands.workloads.language.recurrent import RecurrentLayer
from pipelines import State, adamw, train_alone, train_in_stages
from shards import train_sharded, weights_of
from sliced import train_sliced

STEPS = 4
_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(23, 6, generator=_GENERATOR, dtype=torch.float64)
Y = torch.randn(23, 3, generator=_GENERATOR, dtype=torch.float64)


def squared(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def task_of(model: Callable[[], nn.Module], **more: Any) -> mh.Task:
    torch.manual_seed(7)
    built = model().double()
    settings = {"loss": squared, "data": (X, Y), "optimizer": adamw, "batch_size": 9, **more}
    return mh.Task(model=partial(replica, built), **settings)


def layers(*between: nn.Module) -> nn.Module:
    """Six layers, with these after each but the last."""
    widths = (6, 7, 7, 7)
    inner = [one for a, b in pairwise(widths) for one in (nn.Linear(a, b), *copy.deepcopy(between))]
    return nn.Sequential(*inner, nn.Linear(7, 3))


class Adding(nn.Module):
    """Changes what it is given in place, though no attribute says so."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        x += self.bias
        return torch.tanh(x)


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Dividing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x /= 3
        return x


class Scored(nn.Module):
    """Ends a model with two things, of which the loss takes both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x.square().mean()


def with_auxiliary_term(model: nn.Module, batch: Any) -> Tensor:
    scores, penalty = model(batch[0])
    return F.mse_loss(scores, batch[1]) + 0.1 * penalty


class Last(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return given[0][:, -1]


class Own(nn.Module):
    """A parameter that no layer has, used by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def end(self, x: Tensor, third: nn.Module) -> Tensor:
        return third(x) * self.scale

    def chain(self) -> list[nn.Module]:
        return [self.first, nn.Tanh(), self.second, nn.Tanh(), ChainFunction(self.end, third=self.third)]

    def forward(self, x: Tensor) -> Tensor:
        return self.end(torch.tanh(self.second(torch.tanh(self.first(x)))), self.third)


class Counting(nn.Linear):
    """Puts another buffer in the place of the one that it had, twice."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.register_buffer("seen", torch.zeros(()))
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.clamp(self.seen + 1, max=2)
        return super().forward(x)


def twice(module: nn.Module) -> nn.Module:
    """One module at two places, so also in two stages."""
    return nn.Sequential(
        nn.Linear(6, 7), nn.Tanh(), module, nn.Tanh(), nn.Linear(7, 7), module, nn.Linear(7, 3)
    )


class Frozen(nn.BatchNorm1d):
    """Statistics of batches would depend on who has which sample."""

    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


def partly_frozen() -> nn.Module:
    model = layers(nn.Tanh())
    model[2].bias.requires_grad_(False)
    model[0].weight.requires_grad_(False)
    return model


def by_parameter(parameters: Any) -> optim.Optimizer:
    groups = [{"params": [one], "lr": 0.01 * number} for number, one in enumerate(parameters, 1)]
    return optim.AdamW([*groups[:-2], {"params": groups[-1]["params"], "betas": (0.5, 0.9)}])


class Empty(nn.Module):
    """A number, and a parameter without items."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.nothing = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.number + self.nothing.sum())


SEQUENCES = torch.randn(23, 4, 6, generator=_GENERATOR, dtype=torch.float64)
TASKS: dict[str, Callable[[], mh.Task]] = {
    "changes its input": lambda: task_of(lambda: layers(Adding())),
    "changes a view of its input": lambda: task_of(lambda: layers(nn.Identity(), nn.ReLU(inplace=True))),
    "changes the samples": lambda: task_of(lambda: nn.Sequential(Dividing(), *layers(nn.Tanh()))),
    "not reached": lambda: task_of(
        lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), Detached(), *layers(nn.Tanh())[2:])
    ),
    "two outputs": lambda: task_of(
        lambda: nn.Sequential(*layers(nn.Tanh())[:-1], Scored()), loss=with_auxiliary_term
    ),
    "two outputs inside": lambda: task_of(
        lambda: nn.Sequential(
            nn.Linear(6, 5), nn.Tanh(), nn.GRU(5, 7, 2, batch_first=True), Last(), nn.Linear(7, 3)
        ),
        data=(SEQUENCES, Y),
    ),
    "a parameter of its own": lambda: task_of(Own),
    "another buffer": lambda: task_of(
        lambda: nn.Sequential(Counting(6, 7), nn.Tanh(), Counting(7, 7), nn.Tanh(), nn.Linear(7, 3))
    ),
    "one layer twice": lambda: task_of(lambda: twice(nn.Linear(7, 7))),
    "one norm twice": lambda: task_of(lambda: twice(Frozen(7))),
    "partly frozen": lambda: task_of(partly_frozen),
    "an option for each parameter": lambda: task_of(lambda: layers(nn.Tanh()), optimizer=by_parameter),
    "no items": lambda: task_of(lambda: layers(Empty())),
    "one sample": lambda: task_of(lambda: layers(nn.Tanh()), batch_size=1),
    "dicts": lambda: task_of(
        lambda: layers(nn.Tanh()),
        collate=lambda samples: {"x": torch.stack([x for x, _ in samples]), "y": samples},
        loss=lambda model, batch: F.mse_loss(model(batch["x"]), torch.stack([y for _, y in batch["y"]])),
    ),
}
WAYS: dict[str, Callable[[mh.Task], State]] = {
    text: lambda task, text=text, workers=workers: train_in_stages(task, text, workers, STEPS).weights
    for text, workers in (
        ("pipeline", 2),
        ("pipeline stages=3 schedule=zb-h1", 3),
        ("pipeline stages=2 recompute=yes data=2", 4),
        ("pipeline stages=2 tensor=2 microbatches=3", 4),
    )
} | {
    "tensor": lambda task: train_sliced(task, Grid(slices=2, data=2), STEPS)[0][0],
    "sharded": lambda task: weights_of(train_sharded(task, 3, STEPS)),
}


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", TASKS)
def test_a_split_model_ends_with_the_weights_of_one_process(name: str) -> None:
    task = TASKS[name]()
    expected = train_alone(task, STEPS).weights
    assert distance(expected, task.model().state_dict()) > 1e-3, "it learned something"
    for way, train in WAYS.items():
        assert distance(train(task), expected) < 1e-9, way


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_wherever_a_chain_is_cut_its_layers_may_change_what_they_get(cut: int) -> None:
    task = TASKS["changes a view of its input"]()
    ended = train_in_stages(task, f"pipeline cuts={cut} schedule=gpipe", 2, 2)
    assert distance(ended.weights, train_alone(task, 2).weights) < 1e-9


def test_layers_over_time_may_change_what_they_get() -> None:
    model = lambda: nn.Sequential(  # noqa: E731
        RecurrentLayer(6), nn.ReLU(inplace=True), RecurrentLayer(6), nn.Linear(6, 3)
    )
    task = task_of(model, data=(SEQUENCES, SEQUENCES[..., :3]))
    ended = train_in_stages(task, "pipeline microbatches=2 schedule=wavefront cuts=1", 2, 2)
    assert distance(ended.weights, train_alone(task, 2).weights) < 1e-9


class Gated(nn.Module):
    """A GRU, whose state torch gives as one tensor; `kept` and `given` say what its `over_time` makes of it."""

    def __init__(self, kept: Callable[[Tensor], Any], given: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.gru, self.kept, self.given = nn.GRU(6, 6, batch_first=True), kept, given

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]

    def over_time(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        output, after = self.gru(x, None if state is None else self.given(state))
        return output, self.kept(after)


@pytest.mark.parametrize(
    ("kept", "given"),
    [
        (lambda one: one, lambda state: state),
        (lambda one: {"h": [one, (3, torch.arange(2))]}, lambda state: state["h"][0]),
    ],
    ids=["a tensor", "a nest"],
)
def test_the_state_over_time_is_a_tensor_or_a_nest_of_them(kept: Any, given: Any) -> None:
    model = lambda: nn.Sequential(Gated(kept, given), Gated(kept, given), nn.Linear(6, 3))  # noqa: E731
    task = task_of(model, data=(SEQUENCES, SEQUENCES[..., :3]))
    expected = mh.fit(task, "single", workers=1, steps=2, seed=0).model.state_dict()
    for text in ("microbatches=2 schedule=wavefront", "microbatches=4 schedule=wavefront", "microbatches=2"):
        assert distance(train_in_stages(task, f"pipeline cuts=1 {text}", 2, 2).weights, expected) < 1e-9, text


def test_a_state_whose_gradient_would_be_lost_is_refused() -> None:
    model = lambda: nn.Sequential(  # noqa: E731
        Gated(lambda one: iter([one]), next), nn.Linear(6, 6), nn.Linear(6, 3)
    )
    task = task_of(model, data=(SEQUENCES, SEQUENCES[..., :3]))
    with pytest.raises(
        UserError, match=r"Gated\.over_time returns holds a list_iterator; allowed are tensors"
    ):
        train_in_stages(task, "pipeline microbatches=2 schedule=wavefront cuts=1", 2, 1)


class Trusting(optim.SGD):
    """Scales each step by the norms of whole tensors."""

    def step(self, closure: Any = None) -> None:
        for one in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            one.grad.mul_(one.detach().norm() / one.grad.norm())
        super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [(lambda p: Trusting(p, lr=0.01), "Trusting"), (lambda p: optim.Adafactor(p, lr=0.01), "Adafactor")],
)
def test_optimizers_that_look_at_whole_tensors_step_no_slices(optimizer: Any, name: str) -> None:
    task = task_of(lambda: layers(nn.Tanh()), optimizer=optimizer)
    sentence = f"optimizer {name} would train a different model under .*: it combines the items of a tensor"
    for way in ("tensor", "pipeline stages=2 tensor=2 microbatches=3"):
        with pytest.raises(UserError, match=sentence):
            WAYS[way](task)
    expected = train_alone(task, STEPS).weights
    for way in ("pipeline", "pipeline stages=2 recompute=yes data=2", "sharded"):
        assert distance(WAYS[way](task), expected) < 1e-9


@pytest.mark.parametrize("way", ["pipeline", "tensor", "sharded"])
def test_an_optimizer_that_searches_is_refused(way: str) -> None:
    task = task_of(lambda: layers(nn.Tanh()), optimizer=lambda parameters: optim.LBFGS(parameters))
    with pytest.raises(UserError, match="optimizer LBFGS evaluates the loss several times"):
        WAYS[way](task)


class Remembering(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"seen": 1}


@pytest.mark.parametrize("way", ["pipeline", "tensor", "sharded"])
def test_state_that_is_no_tensor_is_refused_before_training(way: str) -> None:
    task = task_of(lambda: nn.Sequential(Remembering(6, 7), nn.Tanh(), nn.Linear(7, 3)))
    with pytest.raises(
        UserError, match=r"model\.state_dict\(\) has '0\._extra_state', a dict; a model that is"
    ):
        WAYS[way](task)


def test_losses_that_look_into_a_cut_model_are_refused() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return squared(model, batch) + model[2].weight.square().sum()

    with pytest.raises(UserError, match=r"task\.loss reads '\[2\]' of the model"):
        WAYS["pipeline"](task_of(lambda: layers(nn.Tanh()), loss=loss))


def test_gradients_of_gradients_are_right_or_refused() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        y = model(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return F.mse_loss(y, batch[1]) + 0.1 * gradient.square().sum(1).mean()

    task = task_of(lambda: layers(nn.Tanh()), loss=loss)
    assert distance(WAYS["sharded"](task), train_alone(task, STEPS).weights) < 1e-9
    with pytest.raises(RuntimeError, match="differentiate twice"):
        WAYS["tensor"](task)
