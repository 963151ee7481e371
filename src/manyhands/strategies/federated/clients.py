"""A client's work in a round: it takes the model, trains it on its samples, and reports the difference.

All random numbers follow from (seed, round, client), so it does not matter which worker simulates a client, or when.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.data.randomness import mix, seed_all
from manyhands.engine.clipping import clip_own
from manyhands.engine.computing import require_loss
from manyhands.strategies.federated.algorithms import FederatedAlgorithm, algorithm_named
from manyhands.strategies.federated.client_data import Batches, Samples
from manyhands.strategies.federated.client_updates import ClientAssignment, ClientUpdate, Tensors
from manyhands.strategies.federated.strategy import ALL, Federated
from manyhands.task import Task

_SHUFFLING = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalWork:
    """How much a client does in a round."""

    epochs: int
    batch: int


def work_of(strategy: Federated) -> LocalWork:
    whole = algorithm_named(strategy.algorithm).whole_batches
    return LocalWork(epochs=1 if whole else strategy.epochs, batch=ALL if whole else strategy.batch)


def batches(
    work: LocalWork, indices: NDArray[np.int64], seed: int, number: int, client: int
) -> Iterator[NDArray[np.int64]]:
    """The samples of each of a client's steps in round `number`, shuffled for each epoch; the last may be short."""
    size = len(indices) if work.batch == ALL else work.batch
    random = np.random.default_rng(mix(seed, number, client, _SHUFFLING))
    for _ in range(work.epochs):
        order = indices if size >= len(indices) else random.permutation(indices)
        for begin in range(0, len(order), size):
            yield order[begin : begin + size]


def steps_in(work: LocalWork, samples: int) -> int:
    return work.epochs * (1 if work.batch == ALL else -(-samples // work.batch))


def held(model: nn.Module) -> list[Tensor]:
    """What travels of a model: its parameters, then its floating-point buffers."""
    return [
        *(parameter.detach() for parameter in model.parameters()),
        *(buffer for buffer in model.buffers() if buffer.is_floating_point()),
    ]


def held_names(model: nn.Module) -> list[str]:
    return [
        *(name for name, _ in model.named_parameters()),
        *(name for name, buffer in model.named_buffers() if buffer.is_floating_point()),
    ]


class ClientTrainer:
    """Simulates clients one after another, on one copy of the model."""

    def __init__(
        self, task: Task, model: nn.Module, algorithm: FederatedAlgorithm, work: LocalWork, seed: int
    ) -> None:
        self._task, self._algorithm, self._work, self._seed = task, algorithm, work, seed
        self._copy = copy.deepcopy(model)
        self._device = next((one.device for one in model.parameters()), torch.device("cpu"))
        if self._device.type == "cpu" and any(isinstance(one, nn.Conv2d) for one in self._copy.modules()):
            self._copy.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster there
        self.samples = Samples(task, self._device)
        self._after: ClientAssignment | None = None  # the client simulated next
        self._tensors = held(self._copy)
        self._parameters = list(self._copy.parameters())
        counts = (buffer for buffer in self._copy.buffers() if not buffer.is_floating_point())
        self._counts = [(buffer, buffer.clone()) for buffer in counts]  # of batches seen, by BatchNorm
        self._optimizer = task.optimizer(self._copy.parameters())

    def play(self, assigned: Sequence[ClientAssignment], like: Optimizer) -> Iterator[ClientUpdate]:
        for one, after in zip_longest(assigned, assigned[1:]):
            self._after = after
            yield self._train(one, like)

    notice = ""

    def _train(self, one: ClientAssignment, like: Optimizer) -> ClientUpdate:
        algorithm = self._algorithm
        start = algorithm.layers.put(one.client, algorithm.begin(one.client, one.weights))
        seed_all(mix(self._seed, one.number, one.client))
        self._begin(start, like)
        correct = partial(algorithm.correct, one.client, self._parameters, start)
        loss, steps = self._run(one, correct if algorithm.corrects else None)
        with torch.no_grad():
            change = algorithm.reported(one.client, start, self._tensors, steps)
        if algorithm.trains_personal:
            self._begin(algorithm.personal(one.client, one.weights), like)
            self._run(one, lambda: algorithm.correct_personal(one.client, self._parameters, one.weights))
            with torch.no_grad():
                algorithm.keep_personal(one.client, self._tensors)
        return ClientUpdate(
            client=one.client,
            change=[tensor.contiguous() for tensor in change],  # a copy's may lie in another order
            samples=len(one.samples),
            steps=steps,
            loss=loss,
            staleness=one.staleness,
        )

    def _run(self, one: ClientAssignment, correct: Callable[[], None] | None) -> tuple[float, int]:
        losses, steps = torch.zeros((), dtype=torch.float64, device=self._device), 0
        with plain_products(self._copy):
            after = self._batches_of(self._after) if self._after is not None else None
            for batch in self.samples.each(self._batches_of(one), after):
                loss = self._task.loss(self._copy, batch)
                require_loss(loss)
                loss.backward()  # type: ignore[no-untyped-call]
                if correct is not None:
                    correct()
                clip_own(self._task, self._copy)
                self._optimizer.step()
                self._optimizer.zero_grad()
                losses += loss.detach().reshape(())
                steps += 1
        return float(losses) / max(1, steps), steps

    def _batches_of(self, one: ClientAssignment) -> Batches:
        chosen = batches(self._work, one.samples, self._seed, one.number, one.client)
        return Batches(list(chosen), mix(self._seed, one.number, one.client))

    @torch.no_grad()
    def _begin(self, weights: Tensors, like: Optimizer) -> None:
        for mine, begun in zip(self._tensors, weights, strict=True):
            mine.copy_(begun)
        for count, begun in self._counts:
            count.copy_(begun)
        self._optimizer.state.clear()
        for group, set_as in zip(self._optimizer.param_groups, like.param_groups, strict=True):
            group.update({name: value for name, value in set_as.items() if name != "params"})
        self._copy.train()


@contextmanager
def plain_products(model: nn.Module) -> Iterator[None]:
    """A client's steps of a model of linear layers are computed by BLAS, without oneDNN.

    Clients have small batches. On ARM oneDNN takes half a millisecond to set up each product, many times what BLAS
    takes to compute it; elsewhere the two are alike. Convolutions and recurrent layers are oneDNN's.
    """
    of_onednn = (nn.modules.conv._ConvNd, nn.RNNBase)
    backend: Any = torch.backends.mkldnn
    if not backend.enabled or any(isinstance(module, of_onednn) for module in model.modules()):
        yield
        return
    backend.enabled = False
    try:
        yield
    finally:
        backend.enabled = True
