"""The model, data and comparison on which every synchronous strategy is held against the plain loop.

The model has what breaks naive implementations: tied weights, a parameter that backward never reaches, a parameter that
only some samples reach, a buffer. The data do not divide by the batch, nor the batch by the workers.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from torch import nn
from torch.linalg import vector_norm

import manyhands as mh
from manyhands.engine.chain import ChainFunction
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import Exchange, SingleExchange
from manyhands.engine.worker import Trainer

STEPS = 50
"""In which rounding has time to add up."""
TWICE = 9
"""Steps for the samples twice, in another order each time, and for one batch more."""


class Awkward(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embed = nn.Embedding(11, 6, dtype=dtype)
        self.mix = nn.Linear(6, 6, dtype=dtype)
        self.rare = nn.Linear(6, 6, bias=False, dtype=dtype)
        self.out = nn.Linear(6, 11, bias=False, dtype=dtype)
        self.never = nn.Parameter(torch.ones(3, dtype=dtype))
        self.register_buffer("scale", torch.tensor(0.5, dtype=dtype))
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._scores(self._hidden(tokens, self.embed, self.mix, self.rare), self.out)

    def chain(self) -> list[nn.Module]:
        hidden = ChainFunction(self._hidden, embed=self.embed, mix=self.mix, rare=self.rare)
        return [hidden, ChainFunction(self._scores, out=self.out)]

    @staticmethod
    def _hidden(tokens: torch.Tensor, embed: nn.Module, mix: nn.Module, rare: nn.Module) -> torch.Tensor:
        hidden = torch.tanh(mix(embed(tokens).mean(dim=1)))
        rows = (tokens[:, 0] == 0).nonzero()[:, 0]
        if len(rows):  # samples without a leading 0 never reach this weight
            hidden = hidden.index_add(0, rows, rare(hidden[rows]))
        return hidden

    def _scores(self, hidden: torch.Tensor, out: nn.Module) -> torch.Tensor:
        return out(hidden) * self.scale


def replica(model: nn.Module) -> nn.Module:
    """What `copy.deepcopy` gives of modules that have nothing but parameters, buffers, modules and plain values.

    In a fifth of its time, which is that of several steps of a small model.
    """
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):  # which list their parameters
        return copy.deepcopy(model)
    made: dict[int, Any] = {}

    def once(one: Any, make: Callable[[Any], Any]) -> Any:
        if one is not None and id(one) not in made:
            made[id(one)] = make(one)
        return None if one is None else made[id(one)]

    def parameter(one: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(one.detach().clone(), one.requires_grad)

    def module(one: nn.Module) -> nn.Module:
        new = object.__new__(type(one))
        kinds = (dict, list, set)
        new.__dict__.update({k: v.copy() if isinstance(v, kinds) else v for k, v in one.__dict__.items()})
        for held, make in ((new._parameters, parameter), (new._buffers, torch.clone), (new._modules, module)):
            for name, value in held.items():
                held[name] = once(value, make)  # type: ignore[assignment, arg-type]
        return new

    return module(model)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens), targets)


def make_task(
    optimizer: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float64
) -> mh.Task:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 11, (45, 4), generator=generator)
    targets = torch.randint(0, 11, (45,), generator=generator)
    template = Awkward(dtype)
    return mh.Task(
        model=lambda: replica(template),
        loss=loss,
        data=(tokens, targets),
        optimizer=optimizer,
        batch_size=13,  # 13, 13, 13, 6: short last batches, and workers without samples once there are eight
    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}


class Silent:
    """WorkerContext of a worker that nobody watches."""

    def record(self, *args: Any, **kwargs: Any) -> None: ...
    def mark(self, step: int, state: Any) -> None: ...
    def note(self, note: Any) -> None: ...
    def stop_requested(self) -> bool:
        return False


def train(task: mh.Task, exchange: Exchange, steps: int = STEPS) -> dict[str, torch.Tensor]:
    plan = TrainingPlan(task=task, steps=steps, seed=0, evaluate_every=0, checkpoint_every=0, check_every=7)
    with closing(exchange):
        trained = Trainer(plan, exchange, Silent()).run()
        return {name: value.clone() for name, value in trained.model.state_dict().items()}


def train_plainly(task: mh.Task, steps: int = STEPS) -> dict[str, torch.Tensor]:
    return train(task, SingleExchange(), steps)


def train_in_threads(
    task: mh.Task, world: int, connect: Callable[[int], Exchange], steps: int = STEPS
) -> list[dict[str, torch.Tensor]]:
    """Every rank in a thread of its own; `connect(rank)` is called in that thread."""
    results: list[dict[str, torch.Tensor] | BaseException] = [RuntimeError("never ran")] * world

    def work(rank: int) -> None:
        try:
            results[rank] = train(task, connect(rank), steps)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
        assert not thread.is_alive(), f"{thread.name} hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]


def distance(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """The largest ‖ours − reference‖ / ‖reference‖ over all tensors."""
    assert ours.keys() == reference.keys()
    worst = 0.0
    for name, expected in reference.items():
        difference = float(vector_norm(ours[name].double() - expected.double()))
        worst = max(worst, difference / max(float(vector_norm(expected.double())), 1e-300))
        assert math.isfinite(difference), name
    return worst


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name]
        .contiguous()
        .view(-1)
        .view(torch.uint8)
        .equal(other[name].contiguous().view(-1).view(torch.uint8))
        for name in one
    )
