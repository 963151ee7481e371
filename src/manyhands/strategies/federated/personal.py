"""Personal models of clients: the fine-tuned common model, and those of Ditto and `keep=` from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.errors import UserError
from manyhands.strategies.federated.algorithms.algorithm import FederatedAlgorithm
from manyhands.strategies.federated.client_updates import ClientAssignment
from manyhands.strategies.federated.clients import LocalWork, held, held_names, work_of
from manyhands.strategies.federated.partition import Partition, held_back
from manyhands.strategies.federated.simulation import Cohort, client_runner_for
from manyhands.strategies.federated.states import ClientStates, LocalLayers, restored
from manyhands.strategies.federated.strategy import AUTO, FINE_TUNE, Federated, Tuning
from manyhands.task import Task

__all__ = ["AFTER_ALL", "Tuned", "tuned"]

AFTER_ALL: Final = 2**31 - 1
"""The number of a round that no run has: what is random in fine-tuning is drawn apart."""

Tuned = Iterator[tuple[int, Sequence[Tensor]]]
"""Clients, and what their models have become: parameters, then floating-point buffers."""


class TuningSteps(FederatedAlgorithm):
    """Plain training steps after which a client reports its tensors as they are: they are not averaged."""

    word: ClassVar[str] = FINE_TUNE
    about: ClassVar[str] = "steps on a client's own samples after the last round"

    def report(
        self, client: int, start: Sequence[Tensor], trained: Sequence[Tensor], steps: int
    ) -> Sequence[Tensor]:
        del client, start, steps
        return [one.clone() for one in trained]


def fine_tuned(
    task: Task,
    strategy: Federated,
    model: nn.Module,
    *,
    epochs: int | None = None,
    seed: int = 0,
    kept: Mapping[int, Sequence[Tensor]] | None = None,
) -> Iterator[tuple[int, list[Tensor]]]:
    """Each client, and what the model becomes after so many epochs on its own samples alone, with the task's optimizer.

    Tensors are the model's parameters, then its floating-point buffers. The split is that of a run of this strategy
    with this seed, and so are the epochs, unless they are given; the model is not changed. With `keep=` a client begins
    with its own layers, which `models_kept(…, "layers")` reads.
    """
    setting = Tuning.parse(strategy.personal) or Tuning(1)
    if epochs is not None and epochs < 1:
        raise UserError(f"epochs={epochs}: fine-tuning takes at least one")
    parts = Partition.parse(strategy.partition).split(task.data, task.samples, strategy.clients, seed)
    samples_of, _ = held_back(parts, strategy.held_out, seed)
    layers = LocalLayers(held_names(model), strategy.keep)
    layers.states.update({client: list(own) for client, own in (kept or {}).items()})
    assigned = [
        ClientAssignment(
            client=client, samples=samples, weights=layers.put(client, held(model)), number=AFTER_ALL
        )
        for client, samples in enumerate(samples_of)
    ]
    work = replace(work_of(strategy), epochs=epochs or setting.epochs)
    like = task.optimizer(model.parameters())
    for client, tensors in tuned(task, model, assigned, work, like, seed, together=strategy.together):
        yield client, list(tensors)


def tuned(
    task: Task,
    model: nn.Module,
    assigned: Sequence[ClientAssignment],
    work: LocalWork,
    like: Optimizer,
    seed: int,
    *,
    together: int = AUTO,
) -> Tuned:
    """What each of these clients makes of the weights that it is given, by an optimizer that is set as `like` is."""
    if not assigned:
        return
    sizes = [len(one.samples) for one in assigned]
    wanted = 1 if together == 1 else AUTO  # too little capacity must not end the run without any
    cohort = Cohort(sizes=sizes, each_round=len(sizes), wanted=wanted)
    client_runner, _ = client_runner_for(task, model, TuningSteps(), work, seed, cohort)
    for update in client_runner.play(assigned, like):
        yield update.client, update.change


def models_kept(memory: Mapping[str, Any], name: str = "algorithm") -> ClientStates:
    """What each client had kept when a checkpoint was written, by what its `extra["exchange"]` has.

    `algorithm`: Ditto's models, or SCAFFOLD's control variates; `layers`: those of `keep=`.
    """
    return restored(memory.get("clients", {}).get(name, {}), 0, 1, torch.device("cpu"))
