"""Models for simulated runs: symbolic updates, or a real small model.

A `Model` makes one `Store` for each copy of each shard, and gradients from what was read. `Ledger` is the symbolic
one: its values are the list of applied updates, so that a test can check what a worker has seen. `SimulatedTrained`
is a torch module with any elementwise torch optimizer: simulated time, real numbers.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from manyhands.errors import UserError
from manyhands.strategies.ps.ps_messages import Work

__all__ = [
    *("Gradient", "Ledger", "LedgerStore", "Model", "SimulatedMark", "SimulatedSeen", "SimulatedTrained"),
    "Store",
]

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Gradient = Any  # what a worker pushes to one shard: whatever its `Model` makes and its `Store` takes


class Store(ABC):
    """One copy of one shard: on its primary, or on its backup."""

    @abstractmethod
    def apply(self, gradients: Sequence[tuple[float, Gradient]], rate: float) -> None:
        """Take one optimizer step with the sum of these gradients, each times its factor, at `rate` times the rate."""

    @abstractmethod
    def read(self) -> Any:
        """Return the current values; later steps must not change what was returned."""

    @abstractmethod
    def state(self) -> Any:
        """Return the whole state, for a copy or a snapshot; later steps must not change what was returned."""

    @abstractmethod
    def load(self, state: Any) -> None:
        """Load `state`."""


class Model(ABC):
    """The model that is trained."""

    @abstractmethod
    def store(self, shard: int, num_shards: int) -> Store:
        """Return a new copy of this shard, in its initial state."""

    @abstractmethod
    def gradient(self, slot: int, work: Work, read: Sequence[Any]) -> tuple[list[Gradient], float]:
        """What a worker pushes to each shard after it has read these values, and its weight: its part of the batch."""


@dataclass(frozen=True, slots=True)
class SimulatedMark:
    """An update that consists of its name only."""

    slot: int
    clock: int
    batch: int
    part: int
    parts: int


@dataclass(frozen=True, slots=True)
class SimulatedSeen:
    """What a worker read: the first `length` groups that this store had applied."""

    store: LedgerStore
    length: int


class LedgerStore(Store):
    """The list of the groups of updates that were applied, in order."""

    def __init__(self) -> None:
        self.groups: list[tuple[SimulatedMark, ...]] = []

    def apply(self, gradients: Sequence[tuple[float, Gradient]], _rate: float) -> None:
        """Append the group; its rate is in the log."""
        self.groups.append(tuple(mark for _, mark in gradients))

    def read(self) -> SimulatedSeen:
        return SimulatedSeen(self, len(self.groups))

    def state(self) -> list[tuple[SimulatedMark, ...]]:
        return list(self.groups)

    def load(self, state: Any) -> None:
        self.groups = list(state)


class Ledger(Model):
    """A symbolic model: gradients are names, values are lists of names."""

    def store(self, _shard: int, _num_shards: int) -> LedgerStore:
        return LedgerStore()

    def gradient(self, slot: int, work: Work, read: Sequence[Any]) -> tuple[list[Gradient], float]:
        mark = SimulatedMark(slot, work.clock, work.batch, work.part, work.parts)
        return [mark] * len(read), 1.0 / work.parts


class _RangeStore(Store):
    """A range of the flat parameters with a separate torch optimizer."""

    def __init__(self, values: torch.Tensor, make_optimizer: MakeOptimizer) -> None:
        self.values = nn.Parameter(values.clone())
        self._optimizer = make_optimizer([self.values])

    def apply(self, gradients: Sequence[tuple[float, Gradient]], rate: float) -> None:
        total = torch.zeros_like(self.values)
        for factor, gradient in gradients:
            total.add_(gradient, alpha=factor)
        self.values.grad = total
        usual = [group["lr"] for group in self._optimizer.param_groups]
        for group, lr in zip(self._optimizer.param_groups, usual, strict=True):
            group["lr"] = lr * rate
        self._optimizer.step()
        for group, lr in zip(self._optimizer.param_groups, usual, strict=True):
            group["lr"] = lr

    def read(self) -> torch.Tensor:
        return self.values.detach().clone()

    def state(self) -> Any:
        return self.read(), copy.deepcopy(self._optimizer.state_dict())

    def load(self, state: Any) -> None:
        values, optimizer = state
        with torch.no_grad():
            self.values.copy_(values)
        self._optimizer.load_state_dict(copy.deepcopy(optimizer))


class SimulatedTrained(Model):
    """A torch module, trained with real numbers in simulated time.

    `loss(module, batch, part, parts)` is the mean loss of that part of that global batch. `optimizer(parameters)` makes
    the optimizer of a shard; shards are ranges of all parameters laid end to end, so it must be elementwise.
    `weight(batch, part, parts)` is the part's share of the batch's samples; without it all parts are alike.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[nn.Module, int, int, int], torch.Tensor],
        optimizer: MakeOptimizer,
        weight: Callable[[int, int, int], float] = lambda _batch, _part, parts: 1.0 / parts,
    ) -> None:
        if next(module.buffers(), None) is not None:
            raise UserError(f"module={type(module).__name__}: a module with buffers cannot be simulated")
        self._module, self._loss, self._make_optimizer, self._weight = module, loss, optimizer, weight
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._initial = nn.utils.parameters_to_vector(self._parameters).detach().clone()

    def store(self, shard: int, num_shards: int) -> Store:
        return _RangeStore(self._initial.tensor_split(num_shards)[shard], self._make_optimizer)

    def gradient(self, _slot: int, work: Work, read: Sequence[Any]) -> tuple[list[Gradient], float]:
        self.show(read)
        weight = self._weight(work.batch, work.part, work.parts)
        loss = self._loss(self._module, work.batch, work.part, work.parts) * weight
        gradients = torch.autograd.grad(loss, self._parameters)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        return list(flat.tensor_split(len(read))), weight

    def show(self, read: Sequence[Any]) -> nn.Module:
        """Return the module with these values of all shards loaded."""
        flat = read[0] if len(read) == 1 else torch.cat(list(read))
        for parameter, values in zip(self._parameters, flat.split(self._sizes), strict=True):
            parameter.data = values.view_as(parameter)
        return self._module
