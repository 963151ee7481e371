"""Every optimizer of torch and five published ones × every strategy: the weights of one process, or a rejection that
gives the reason. None ends with other weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import manyhands as mh
from equality import distance
from manyhands.errors import UserError
from manyhands.facts import Stepping
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy
from published_optimizers import PUBLISHED

STEPS = 7
SAMPLES, BATCH = 22, 7  # the last batch of a pass is short, and none divides by the workers
Make = Callable[[Any], optim.Optimizer]

WAYS: dict[str, int] = {
    "single device_memory=1MiB": 1,
    "mirrored": 2,
    "allreduce algorithm=ring": 3,
    "central": 3,
    "sharded": 2,
    "ps servers=2": 2,
    "hogwild": 1,
    "local": 1,
    "federated clients=1 batch=all": 1,
    "pipeline stages=2": 2,
    "tensor": 2,
}
"""Every strategy, and its workers: as many as give the weights of one process."""

OTHER_WAYS: dict[str, int] = {
    "ps": 2,
    "ps servers=2 push=parameters consistency=async": 1,
    "pipeline stages=2 tensor=2": 4,
}
"""Settings with which a strategy has optimizers step in another way."""

SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2},
    "Adafactor": {"lr": 0.05},
    "Adadelta": {"lr": 1.0},
    "ASGD": {"lr": 0.1, "t0": 2},
    "Rprop": {"lr": 0.01},
}
OFTEN = ("SGD", "AdamW", "Adafactor", "Muon", *(f"{name} (published)" for name in PUBLISHED))
"""What `make test` tries; `make soak` tries all."""

NOWHERE = {"LBFGS": "evaluates the loss several times", "SparseAdam": "does not support dense gradients"}
"""What trains nothing in a single process, either."""

LOOKS_AT: dict[str, tuple[str, ...]] = {
    "a tensor": ("Adafactor", "Muon", "Muon (published)", "Shampoo (published)"),
    "all parameters": ("Lamb (published)", "Prodigy (published)", "ClippedByAll (published)"),
}
"""As the papers have it; all others look at an item at a time."""

FITS: dict[str, set[Stepping]] = {
    "an item": set(Stepping),
    "a tensor": {Stepping.TOGETHER, Stepping.APART, Stepping.IN_TURN},
    "all parameters": {Stepping.TOGETHER},
}


def torchs() -> Iterator[tuple[str, Make]]:
    for name, kind in inspect.getmembers(optim, inspect.isclass):
        if issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer:
            make = partial(kind, **SETTINGS.get(name, {"lr": 0.02}))
            yield name, partial(matrices_alone, make) if name == "Muon" else make


def matrices_alone(make: Make, parameters: Any) -> optim.Optimizer:
    """What is no matrix stays as it is: torch's Muon takes nothing else."""
    return make([one for one in parameters if one.dim() == 2])


OPTIMIZERS: dict[str, Make] = dict(torchs()) | {
    f"{name} (published)": kind for name, kind in PUBLISHED.items()
}


def model() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    made = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    for parameter in made.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return made


def loss(made: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(made(batch[0]), batch[1])


def train(name: str, way: str, workers: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    data = tuple(torch.randn(SAMPLES, n, generator=generator, dtype=torch.float64) for n in (5, 3))
    in_rounds = way.startswith("federated")  # its one client takes a step on all of its samples, STEPS times
    task = mh.Task(
        model=model,
        loss=loss,
        data=data,
        optimizer=OPTIMIZERS[name],
        batch_size=SAMPLES if "whole" in way else BATCH,
    )
    length = {"rounds": 1} if in_rounds else {"steps": STEPS}
    strategy = f"{way} epochs={STEPS}" if in_rounds else way.partition(" whole")[0]
    run = mh.fit(task, strategy=strategy, workers=workers, **length, options=mh.Options(progress="none"))
    return {key: value.clone() for key, value in run.model.state_dict().items()}


@cache
def expected(name: str, way: str) -> dict[str, Tensor]:
    return train(name, "single whole" if way.startswith("federated") else "single", 1)


def table() -> list[Any]:
    return [
        pytest.param(name, way, workers, marks=() if name in OFTEN and way in WAYS else pytest.mark.soak)
        for name in OPTIMIZERS
        for way, workers in (WAYS | OTHER_WAYS).items()
    ]


def test_the_table_has_every_strategy_and_every_optimizer() -> None:
    assert {way.split()[0] for way in WAYS} == STRATEGIES.keys()
    assert (
        set(OFTEN)
        <= OPTIMIZERS.keys()
        >= {name for name in optim.__all__ if name != "Optimizer" and name[0].isupper()}
    )


@pytest.mark.parametrize(("name", "way", "workers"), table())
def test_an_optimizer_gives_the_weights_of_one_process_or_is_rejected(
    name: str, way: str, workers: int
) -> None:
    if name in NOWHERE:
        for tried, count in (("single", 1), (way, workers)):
            with pytest.raises((mh.ManyhandsError, RuntimeError), match=NOWHERE[name]):
                train(name, tried, count)
        return
    reference = expected(name, way)
    assert distance(reference, model().state_dict()) > 1e-3, "it learned something"
    looks_at = next((what for what, names in LOOKS_AT.items() if name in names), "an item")
    if FITS[looks_at].intersection(Strategy.parse(way).facts.stepping):
        assert distance(train(name, way, workers), reference) < 1e-9
    else:
        reason = r"(it combines|its state does) .*; use strategy=mirrored or allreduce"
        with pytest.raises(
            UserError, match=rf"^optimizer {name.split()[0]} would train a different model .*: {reason}"
        ):
            train(name, way, workers)
