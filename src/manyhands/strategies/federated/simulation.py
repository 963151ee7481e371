"""Chooses how clients are simulated: several at once where that is equivalent and faster, else one by one.

The rule looks at the setting, the optimizer, the model and the batch sizes, and then tries: the vmapped gradient of
two copies must equal the plain one. The outcome is a sentence of the run's summary.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.engine.computing import require_loss
from manyhands.errors import UserError
from manyhands.strategies.federated.algorithms import FederatedAlgorithm
from manyhands.strategies.federated.client_updates import ClientAssignment, ClientUpdate
from manyhands.strategies.federated.clients import ClientTrainer, LocalWork, held, steps_in
from manyhands.strategies.federated.samples import Samples
from manyhands.strategies.federated.stacked import ITEM_BY_ITEM, StackedGradients, StackedTrainer
from manyhands.strategies.federated.strategy import ALL, AUTO
from manyhands.task import Task

__all__ = ["ClientRunner", "ClientSimulation", "Cohort", "client_runner_for"]

_MOST: Final = 100  # clients at once, where the setting names no number
_STACK_BYTES: Final = 256 << 20  # of stacked weights, on a CPU
_PART_OF_MEMORY: Final = (
    0.02  # of a GPU's free memory, for stacked weights: gradients, moments and activations come on top
)
_LARGE_KERNEL: Final = 1 << 14  # items of a convolution's weights
_WITHOUT_RULE: Final = "batching rule"  # in a warning of torch
_OPERATION: Final = re.compile(r"aten::\w+")
_TRIED: Final = 2  # samples in the batch of a trial
_FEW_STEPS: Final = (
    64  # of all clients in a round: loading torch.func takes longer than they do, in every process
)


class ClientRunner(Protocol):
    """Trains clients of a round."""

    samples: Samples
    """The samples of all clients."""

    def play(self, assigned: Sequence[ClientAssignment], like: Optimizer) -> Iterator[ClientUpdate]:
        """The updates of these clients, in their order; the optimizer of each begins anew, set as `like` is."""

    @property
    def notice(self) -> str:
        """A notice for the user about this runner, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class ClientSimulation:
    """How many clients are simulated at once, and why not more."""

    together: int
    why: str

    def __str__(self) -> str:
        if self.together == 1:
            return f"clients were trained one after another: {self.why}"
        return f"up to {self.together} clients were trained at once, as one stacked model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cohort:
    """The clients of a run."""

    sizes: Sequence[int]
    """The number of each one's samples."""
    each_round: int
    """How many of them one worker simulates in a round, at most."""
    wanted: int
    """How many at once the user wants, or AUTO."""


def client_runner_for(
    task: Task,
    model: nn.Module,
    algorithm: FederatedAlgorithm,
    work: LocalWork,
    seed: int,
    cohort: Cohort,
) -> tuple[ClientRunner, ClientSimulation]:
    """The runner for a worker's clients; UserError where the requested number at once is not possible."""
    simulation = _choose(task, model, work, cohort)
    if simulation.together > 1:
        return StackedTrainer(task, model, algorithm, work, seed, simulation.together), simulation
    if cohort.wanted > 1 and cohort.each_round > 1:
        raise UserError(
            f"federated together={cohort.wanted}: {simulation.why}; use together=auto, or together=1"
        )
    return ClientTrainer(task, model, algorithm, work, seed), simulation


def _choose(task: Task, model: nn.Module, work: LocalWork, cohort: Cohort) -> ClientSimulation:
    if cohort.wanted == 1:
        return ClientSimulation(1, "together=1 says so")
    if cohort.each_round == 1:
        return ClientSimulation(1, "a worker has one in a round")
    mean = math.ceil(sum(cohort.sizes) / len(cohort.sizes))
    if cohort.wanted == AUTO and cohort.each_round * steps_in(work, mean) < _FEW_STEPS:
        return ClientSimulation(1, "a round has few steps")
    cannot = _cannot(task, model)
    if cannot:
        return ClientSimulation(1, cannot)
    if cohort.wanted != AUTO:
        return ClientSimulation(min(cohort.wanted, cohort.each_round), "")
    slower = _slower(model, work, cohort.sizes)
    if slower:
        return ClientSimulation(1, slower)
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    device = next(model.parameters()).device
    room = float(_STACK_BYTES)
    if device.type == "cuda":
        room = _PART_OF_MEMORY * torch.cuda.mem_get_info(device)[0]
    fitting = max(1, min(_MOST, int(room / max(1, weights))))
    return ClientSimulation(min(cohort.each_round, fitting), "the model is large")


def _slower(model: nn.Module, work: LocalWork, sizes: Sequence[int]) -> str:
    if next(model.parameters()).device.type == "cpu":
        for name, module in model.named_modules():
            large = isinstance(module, nn.modules.conv._ConvNd) and module.weight.numel() >= _LARGE_KERNEL
            if large:
                return f"a stack of convolutions as large as {name} is slower on a CPU than one after another"
    if work.batch == ALL and len(set(sizes)) > len(sizes) / 2:
        return "with a batch of all that a client has, hardly two clients have batches of one size"
    return ""


def _cannot(task: Task, model: nn.Module) -> str:
    if task.collate is not None:
        return "the task has a collate of its own"
    parameters = list(model.parameters())
    if not any(one.requires_grad for one in parameters):
        return "the model has nothing to train"
    kind = type(task.optimizer(copy.deepcopy(model).parameters()))
    if kind not in ITEM_BY_ITEM:
        return f"{kind.__name__} is not known to work item by item"
    return _trial(task, copy.deepcopy(model).train())


def _trial(task: Task, model: nn.Module) -> str:
    """Compare the vmapped gradient of two clients with the plain ones; `model` is a copy to spoil."""
    device = next(model.parameters()).device
    length = min(_TRIED, task.samples)
    indices = np.stack([np.arange(length), np.arange(task.samples - length, task.samples)])
    try:
        batch = Samples(task, device).fetch_apart(indices)
    except (TypeError, RuntimeError) as error:
        return f"batches cannot be stacked ({_first_line(error)})"
    buffers = [buffer.clone() for buffer in model.buffers()]
    plain = []
    for own in indices:
        loss = task.loss(model, Samples(task, device).fetch(own))
        require_loss(loss)
        wanted = [one for one in model.parameters() if one.requires_grad]
        plain.append(torch.autograd.grad(loss, wanted, allow_unused=True))
    if any(one is None for found in plain for one in found):
        return "some parameter has no gradient"
    if any(not torch.equal(one, before) for one, before in zip(model.buffers(), buffers, strict=True)):
        return "the model changes its buffers in training"
    stacked = [one.expand(len(indices), *one.shape).clone() for one in held(model)]
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found, _ = StackedGradients(task, model)(stacked, batch)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return f"torch.func.vmap cannot follow the loss ({_first_line(error)})"
    for warning in (str(one.message) for one in warned):
        if _WITHOUT_RULE in warning:
            [operation] = _OPERATION.findall(warning)[:1] or ["an operation"]
            return f"torch.func.vmap has no rule for {operation}, and would take one client after another"
    for position, gradients in enumerate(plain):
        for gradient, stack in zip(gradients, found, strict=True):
            if not _close(gradient, stack[position]):
                return "the stacked gradient is not the plain one"
    return ""


def _close(one: Tensor, other: Tensor) -> bool:
    """To rounding, of whichever size the largest item is; what is not finite is alike."""
    size = float(one.abs().nan_to_num(0, 0, 0).max()) if one.numel() else 0.0
    rounding = 1e3 * torch.finfo(one.dtype).eps
    if one.is_cuda and one.dtype == torch.float32:
        rounding = 1e-2  # convolutions may be of ten bits there, in one way or another
    return torch.allclose(one, other, rtol=0, atol=rounding * max(size, 1e-12), equal_nan=True)


def _first_line(error: Exception) -> str:
    line = str(error).strip().split("\n", 1)[0]
    return line if len(line) <= 120 else f"{line[:117]}..."
