"""Models of clients' own after the last round: the common one, trained a little further by each on what it has.

Fine-tuning is the plainest personalisation: the improved model is on the device anyway, and nothing leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.errors import UserError
from manyhands.federated.algorithms import FederatedFacts
from manyhands.federated.algorithms.plain import FedAvg
from manyhands.federated.clients import ClientTrainer, LocalWork, held
from manyhands.federated.partition import Partition
from manyhands.federated.states import ClientStates, restored
from manyhands.federated.strategy import Federated
from manyhands.federated.updates import ClientAssignment
from manyhands.task import Task

__all__ = ["fine_tuned", "models_kept"]

_AFTER_ALL = 2**31 - 1  # the number of a round that no run has: what is random is drawn apart


def fine_tuned(
    task: Task, strategy: Federated, model: nn.Module, *, epochs: int = 1, seed: int = 0
) -> Iterator[tuple[int, list[Tensor]]]:
    """Each client, and what the model becomes after so many epochs on its own samples alone, with the task's optimizer.

    Tensors are the model's parameters, then its floating-point buffers. The split is that of a run of this strategy
    with this seed; the model is not changed.
    """
    if epochs < 1:
        raise UserError(f"epochs={epochs}: fine-tuning takes at least one")
    parts = Partition.parse(strategy.partition).split(task.data, task.samples, strategy.clients, seed)
    algorithm = FedAvg()
    algorithm.attach(FederatedFacts(clients=len(parts), seed=seed))
    trainer = ClientTrainer(task, model, algorithm, LocalWork(epochs=epochs, batch=strategy.batch), seed)
    weights = held(model)
    like = task.optimizer(model.parameters())
    assigned = [
        ClientAssignment(client=client, samples=samples, weights=weights, number=_AFTER_ALL)
        for client, samples in enumerate(parts)
    ]
    for update in trainer.play(assigned, like):
        yield (
            update.client,
            [begun + change for begun, change in zip(weights, update.change, strict=True)],
        )


def models_kept(memory: Mapping[str, Any], name: str = "algorithm") -> ClientStates:
    """What each client had kept when a checkpoint was written, by what its `extra["exchange"]` has.

    `algorithm`: Ditto's models, or SCAFFOLD's control variates; `layers`: those of `keep=`.
    """
    return restored(memory.get("clients", {}).get(name, {}), 0, 1, torch.device("cpu"))
