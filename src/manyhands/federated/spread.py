"""How unlike the parties of a run are: which labels each has, and how well the model does for each of them.

Measures are means over some samples of a party's own, which it has trained on: they tell whether the model serves some
parties worse than others, not how well it does on new data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from manyhands.data.parties import Parties
from manyhands.errors import UserError
from manyhands.federated.clients import held
from manyhands.federated.partition import labels_of
from manyhands.federated.samples import Samples, columns_of
from manyhands.task import Metric, Task

__all__ = ["measured", "shown_clients", "skew_of", "spread_of"]

Indices = NDArray[np.int64]
_MOST_CLIENTS: Final = 300  # of which something is told
_MOST_LABELS: Final = 60
_SAMPLES: Final = 6000  # of all clients together that are measured
_FEWEST: Final = 10  # of one client, as far as it has them
_MOST: Final = 200


def shown_clients(count: int) -> list[int]:
    """Of so many clients those that are told of: all, or some in even distances."""
    return sorted(set(np.linspace(0, count - 1, min(count, _MOST_CLIENTS)).round().astype(int).tolist()))


def skew_of(task: Task, samples_of: Sequence[Indices]) -> dict[str, Any]:
    """How many samples of each label each client has, for a summary; without labels, how many samples."""
    shown = shown_clients(len(samples_of))
    names = task.data.names if isinstance(task.data, Parties) else ()
    named = len(names) == len(samples_of)
    told: dict[str, Any] = {
        "clients": len(samples_of),
        "numbers": shown,
        "names": [names[client] if named else f"client {client}" for client in shown],
        "samples": [len(samples_of[client]) for client in shown],
    }
    labels = _labels(task)
    if labels is None:
        return told
    kinds = np.unique(labels)
    if len(kinds) > _MOST_LABELS:
        return told
    counts = [[int((labels[samples_of[client]] == kind).sum()) for kind in kinds] for client in shown]
    return {**told, "labels": kinds.tolist(), "counts": counts}


def _labels(task: Task) -> Indices | None:
    data = columns_of(task.data) if isinstance(task.data, Parties) else task.data
    try:
        return labels_of(data, task.samples)
    except UserError:  # it has none
        return None


def measured(
    task: Task,
    measures: Mapping[str, Metric],
    model: nn.Module,
    personal: Callable[[int], Sequence[Tensor]],
    samples_of: Sequence[Indices],
    clients: Sequence[int],
) -> dict[int, dict[str, float]]:
    """The means of all measures over some samples of each client, with the weights that it uses itself."""
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    samples = Samples(task, device)
    own = copy.deepcopy(model).eval()
    most = min(_MOST, max(_FEWEST, _SAMPLES // max(1, len(shown_clients(len(samples_of))))))
    found = {}
    with torch.no_grad():
        for client in clients:
            _put(own, personal(client))
            indices = samples_of[client]
            chosen = indices[np.linspace(0, len(indices) - 1, min(len(indices), most)).round().astype(int)]
            batch = samples.fetch(np.unique(chosen))
            found[client] = {name: float(measure(own, batch)) for name, measure in measures.items()}
    return found


def _put(model: nn.Module, tensors: Sequence[Tensor]) -> None:
    for mine, theirs in zip(held(model), tensors, strict=True):
        mine.copy_(theirs)


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Mean, means of the lowest and the highest tenth (at least one party), and standard deviation over parties."""
    ordered = np.sort(np.asarray([value for value in values if np.isfinite(value)], np.float64))
    if not len(ordered):
        return {}
    tenth = max(1, round(len(ordered) / 10))
    return {
        "mean": float(ordered.mean()),
        "lowest_tenth": float(ordered[:tenth].mean()),
        "highest_tenth": float(ordered[-tenth:].mean()),
        "deviation": float(ordered.std()),
    }
