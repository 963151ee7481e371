"""One worker's end of federated rounds in the common loop: a step of the loop is a round.

`compute` plays this worker's share of the round's clients and adds their updates up, `agree` sums over the workers, and
`apply` moves the model by the mean, as the algorithm says. Sums are in double precision, so that it hardly matters who
played which client.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.allreduce.collective import Collective, broadcast, total
from manyhands.federated.algorithms import ClientUpdate, FederatedAlgorithm, algorithm_named
from manyhands.federated.clients import ClientTrainer, LocalWork, held, selected
from manyhands.federated.partition import Partition
from manyhands.federated.secure.tally import SecureTally
from manyhands.federated.strategy import ALL, Federated
from manyhands.memory.heap import keep_freed_memory
from manyhands.task import Task
from manyhands.training.computing import Computed, Computer
from manyhands.training.exchange import Exchange, LocalStep, SharedStep, Times, Traffic
from manyhands.wire.parcels import Parcel

__all__ = ["FederatedExchange", "split_over"]

_ROOM = 1 << 17  # items that travel at once
_WEIGHT, _LOSS, _SAMPLES, _STOP, _WORDS = range(5)


def split_over(strategy: Federated, task: Task, seed: int) -> list[NDArray[np.int64]]:
    """Which samples each client has; UserError where the data cannot be split so."""
    return Partition.parse(strategy.partition).split(task.data, task.samples, strategy.clients, seed)


class FederatedExchange(Exchange):
    """Plays clients, and is the server; over a collective where several workers share them."""

    steps_itself = True
    when_broken = "no client's update was finite, and the model was not changed"

    def __init__(self, strategy: Federated, seed: int, collective: Collective | None = None) -> None:
        self.rank = collective.rank if collective is not None else 0
        self.world = collective.world if collective is not None else 1
        self._strategy = strategy
        self._seed = seed
        self._collective = collective
        self._algorithm: FederatedAlgorithm = algorithm_named(strategy.algorithm)
        whole = self._algorithm.whole_batches
        self._work = LocalWork(epochs=1 if whole else strategy.epochs, batch=ALL if whole else strategy.batch)
        self._optimizer: Optimizer | None = None
        self._trainer: ClientTrainer | None = None
        self._samples_of: list[NDArray[np.int64]] = []
        self._weights: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._words = torch.zeros(_WORDS, dtype=torch.float64)
        self._sent = Traffic()
        self._refused = 0
        self._fixed = strategy.fixed_point if strategy.secure else None
        self._tally: SecureTally | None = None
        if collective is not None:
            [self._bucket] = collective.allocate([Parcel.whole(0, _ROOM, torch.float64, exact=True)])

    @property
    def copies(self) -> Sequence[Sequence[int]]:
        """Everybody holds the model."""
        return (range(self.world),)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Collective: give every worker worker 0's weights."""
        self._optimizer = optimizer
        self._weights = held(model)
        self._sums = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in self._weights]
        if self._collective is not None:
            broadcast(self._collective, 0, self._bucket, [*model.parameters(), *model.buffers()])
        keep_freed_memory()

    def backward(self, loss: Tensor, share: float) -> None:
        """Never: clients run their own."""
        raise AssertionError(f"a round has no common backward (loss {float(loss)}, share {share})")

    def compute(self, computer: Computer, model: nn.Module, step: int) -> Computed:
        """This worker's share of the clients of round `step`, one after another."""
        assert self._optimizer is not None, "attach comes before compute"
        if self._trainer is None:
            self._trainer = ClientTrainer(computer.task, model, self._algorithm, self._work, self._seed)
            self._samples_of = split_over(self._strategy, computer.task, self._seed)
        for total_of in self._sums:
            total_of.zero_()
        self._words.zero_()
        clients = len(self._samples_of)
        chosen = selected(self._seed, step, clients, self._strategy.per_round(clients))
        begin = time.monotonic()
        samples = 0
        self._tally = SecureTally(self._fixed, chosen, self._weights) if self._fixed is not None else None
        for client in chosen[self.rank :: self.world]:
            update = self._trainer.train(
                self._weights, self._optimizer, client, self._samples_of[client], step
            )
            samples += update.samples * self._work.epochs
            self._add(update)
        self._sum_securely(step)
        computer.slow_down(step, time.monotonic() - begin)
        mine = float(self._words[_WEIGHT])
        share = len(chosen[self.rank :: self.world]) / len(chosen)
        loss = float(self._words[_LOSS]) / mine if mine else math.nan
        return Computed(loss=loss if share else 0.0, share=share, samples=samples)

    def _add(self, update: ClientUpdate) -> None:
        """One more report; what is not finite is not counted."""
        if self._tally is None:
            num_bytes = sum(change.numel() * change.element_size() for change in update.change)
            self._sent += Traffic(messages_sent=1, bytes_sent=num_bytes)
        if not math.isfinite(update.loss) or not all(bool(one.isfinite().all()) for one in update.change):
            self._refused += 1
            return
        weight = self._algorithm.weight(update)
        if self._tally is not None:
            self._tally.add(update, weight)
            return
        for total_of, change in zip(self._sums, update.change, strict=True):
            total_of.add_(change, alpha=weight)
        self._words[_WEIGHT] += weight
        self._words[_LOSS] += weight * update.loss
        self._words[_SAMPLES] += update.samples

    def _sum_securely(self, step: int) -> None:
        """The sums, by the protocol, where it was asked for."""
        if self._tally is None:
            return
        found = self._tally.total(step + 1)  # as rounds are counted for readers
        self._tally = None
        self._fill(found.sums)
        self._words[_WEIGHT], self._words[_LOSS], self._words[_SAMPLES] = (
            found.weight,
            found.loss,
            found.weight,
        )
        self._sent += Traffic(messages_sent=found.messages, bytes_sent=found.num_bytes)

    def _fill(self, flat: Tensor) -> None:
        """The sums from one row of all their items."""
        begin = 0
        for one in self._sums:
            one.copy_(flat[begin : begin + one.numel()].view(one.shape))
            begin += one.numel()

    def agree(self, local: LocalStep) -> SharedStep:
        """Collective: the sum of all updates, what they weigh, and whether somebody wants to stop."""
        self._words[_STOP] = float(local.stop)
        if self._collective is not None:
            flat = torch.cat([*(one.flatten().cpu() for one in self._sums), self._words])
            found = total(self._collective, 0, self._bucket, flat)
            self._fill(found)
            self._words.copy_(found[-_WORDS:])
        weight = float(self._words[_WEIGHT])
        broken = weight == 0
        return SharedStep(
            loss=math.nan if broken else float(self._words[_LOSS]) / weight,
            bad_workers=(0,) if broken else (),
            stop=bool(self._words[_STOP] > 0),
        )

    def clip(self, max_norm: float) -> float:
        """Clients clip their own gradients."""
        return max_norm

    @torch.no_grad()
    def apply(self) -> None:
        """The server's step."""
        weight = float(self._words[_WEIGHT])
        mean = [one.div(weight).to(mine.dtype) for one, mine in zip(self._sums, self._weights, strict=True)]
        self._algorithm.step(self._weights, mean)

    def optimizer_state(self) -> dict[str, Any] | None:
        """That of a client who begins."""
        assert self._optimizer is not None, "attach comes before optimizer_state"
        return self._optimizer.state_dict() if self.rank == 0 else None

    def memory(self) -> Mapping[str, Any]:
        """What the algorithm keeps, the same on every worker."""
        kept = self._algorithm.memory() if self.rank == 0 else {}
        return {"algorithm": kept} if kept else {}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on with it."""
        self._algorithm.recall(memory.get("algorithm", {}))

    def total(self, values: Tensor) -> Tensor:
        """Collective: the sum over workers."""
        return values if self._collective is None else total(self._collective, 0, self._bucket, values)

    def take_times(self) -> Times:
        """What the collective measured."""
        return self._collective.take_times() if self._collective is not None else Times()

    def step_samples(self, computer: Computer, step: int) -> int:
        """What the clients of all workers have trained on in the round, once for each epoch."""
        del computer, step
        return round(float(self._words[_SAMPLES])) * self._work.epochs

    def traffic(self) -> Traffic:
        """What this worker's clients have sent: an update each, of the model's size, or all that a secure sum takes."""
        return self._sent

    def told(self) -> Mapping[str, Any]:
        """How many updates were not finite."""
        return {"updates_refused": self._refused}

    def close(self) -> None:
        """Let go of the memory."""
        if self._collective is not None:
            self._collective.close()
