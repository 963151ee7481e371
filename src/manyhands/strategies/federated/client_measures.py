"""How much the parties of a run differ: which labels each has, and how well the model serves each of them.

Measures are means over some of a party's samples, on which it has trained: they show whether the model serves some
parties worse than others, not how well it does on new data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from manyhands.data.own import Parties
from manyhands.errors import UserError
from manyhands.strategies.federated.client_data import Samples, columns_of, labels_of
from manyhands.strategies.federated.client_updates import Tensors
from manyhands.strategies.federated.clients import held
from manyhands.task import Metric, Task

Indices = NDArray[np.int64]
Models = Iterable[tuple[int, Tensors]]  # clients, and the tensors of their models
# the mean of each measure by client, and why others could not be taken
Measured = tuple[Mapping[int, Mapping[str, float]], Mapping[str, str]]
_MOST_CLIENTS: Final = 300  # the most clients that are reported, and by how many samples of all of them
_SAMPLES: Final = 6000
_MOST_LABELS: Final = 60
_DURING: Final = 50, 1000  # during a run, at each evaluation: the same two
_FEWEST: Final = 10  # of one client, as far as it has them
_MOST: Final = 200
_UNFIT: Final = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a metric raises that cannot read a batch, or finds nothing in it to divide by."""


def shown_clients(count: int, most: int = _MOST_CLIENTS) -> list[int]:
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))


def skew_of(task: Task, samples_of: Sequence[Indices]) -> dict[str, Any]:
    """How many samples of each label each client has, for a summary; without labels, how many samples."""
    shown = shown_clients(len(samples_of))
    names = task.data.names if isinstance(task.data, Parties) else ()
    named = len(names) == len(samples_of)
    summary: dict[str, Any] = {
        "clients": len(samples_of),
        "numbers": shown,
        "names": [names[client] if named else f"client {client}" for client in shown],
        "samples": [len(samples_of[client]) for client in shown],
    }
    data = columns_of(task.data) if isinstance(task.data, Parties) else task.data
    try:
        labels = labels_of(data, task.samples)
    except UserError:  # it has none
        return summary
    kinds = np.unique(labels)
    if len(kinds) > _MOST_LABELS:
        return summary
    counts = [[int((labels[samples_of[client]] == kind).sum()) for kind in kinds] for client in shown]
    return {**summary, "labels": kinds.tolist(), "counts": counts}


def measured(
    samples: Samples,
    measures: Mapping[str, Metric],
    model: nn.Module,
    models: Models,
    samples_of: Sequence[Indices],
    each: int = _MOST,
) -> Measured:
    """All measures over up to `each` samples of each of these clients, with the weights that come with it.

    A metric is written for evaluation data, and may not know samples of training: then it is left out, and why is
    returned. A client without samples to be measured by is left out as well. The model is copied.
    """
    own = copy.deepcopy(model).eval()
    values, failed = dict[int, dict[str, float]](), dict[str, str]()
    for client, tensors in models:
        indices = samples_of[client]
        if not len(indices):
            continue
        chosen = indices[np.linspace(0, len(indices) - 1, min(len(indices), each)).round().astype(int)]
        batch = samples.fetch(np.unique(chosen))
        means = values[client] = {}
        with torch.no_grad():
            for mine, theirs in zip(held(own), tensors, strict=True):
                mine.copy_(theirs)
            for name, measure in measures.items():
                if name in failed:
                    continue
                try:
                    means[name] = float(measure(own, batch))
                except _UNFIT as error:
                    failed[name] = f"{type(error).__name__}: {error}".split("\n", 1)[0]
    return values, failed


@dataclass(kw_only=True)
class ClientEvaluation:
    """Measures the clients that one worker simulates, by samples of their own (`tested`)."""

    task: Task
    model: nn.Module
    measures: Mapping[str, Metric]
    tested: Sequence[Indices]
    rank: int
    world: int
    _samples: Samples | None = None

    def _measure(
        self, models_of: Callable[[list[int]], Models], most: int, in_all: int
    ) -> tuple[list[int], Measured]:
        """Which clients are measured, and what this worker found of its own, by so many samples in all."""
        device = next((one.device for one in self.model.parameters()), torch.device("cpu"))
        self._samples = self._samples or Samples(self.task, device)
        shown = shown_clients(len(self.tested), most)
        models = models_of([one for one in shown if one % self.world == self.rank])
        each = min(_MOST, max(_FEWEST, in_all // max(1, len(shown))))
        return shown, measured(self._samples, self.measures, self.model, models, self.tested, each)

    def spread(
        self, models_of: Callable[[list[int]], Models], total: Callable[[Tensor], Tensor]
    ) -> dict[str, dict[str, float]]:
        """Collective: how the measures spread over some of the clients, for an evaluation during the run."""
        shown, found = self._measure(models_of, *_DURING)
        return spread_over(found, shown, list(self.measures), total)

    def summary(self, kinds: Mapping[str, Callable[[list[int]], Models]]) -> dict[str, Any]:
        """The measures of this worker's clients by each kind of model; which could not be taken, and why."""
        summary: dict[str, Any] = {}
        failed: dict[str, str] = {}
        for kind, models_of in kinds.items():
            _, (values, lost) = self._measure(models_of, _MOST_CLIENTS, _SAMPLES)
            summary[kind] = {str(client): one for client, one in values.items()}
            failed |= lost
        summary["failed"] = sorted(failed)
        summary["unmeasured"] = [
            f"{name} of the parties' own samples was not measured: {why}" for name, why in failed.items()
        ]
        return summary


def spread_over(
    found: Measured, clients: Sequence[int], names: Sequence[str], total: Callable[[Tensor], Tensor]
) -> dict[str, dict[str, float]]:
    """Collective: the spread over these clients, each measured by one worker, of measures that all could take."""
    measured_here, failed_here = found
    rows = [[measured_here.get(client, {}).get(name, 0.0) for name in names] for client in clients]
    there = [float(client in measured_here) for client in clients]
    failed = [float(name in failed_here) for name in names]
    flat = total(torch.tensor([*chain.from_iterable(rows), *there, *failed], dtype=torch.float64))
    values, came, lost = torch.split(flat, [len(clients) * len(names), len(clients), len(names)])
    columns = values.view(len(clients), len(names))[came > 0].T.tolist()
    spreads = {
        name: spread_of(column)
        for name, column, gone in zip(names, columns, lost.tolist(), strict=True)
        if not gone
    }
    return {name: one for name, one in spreads.items() if one}


def spread_of(values: Sequence[float | None]) -> dict[str, float]:
    """Mean, means of the lowest and the highest tenth (at least one party), and standard deviation over parties."""
    finite = [value for value in values if value is not None and np.isfinite(value)]
    ordered = np.sort(np.asarray(finite, np.float64))
    if not len(ordered):
        return {}
    tenth = max(1, round(len(ordered) / 10))
    return {
        "mean": float(ordered.mean()),
        "lowest_tenth": float(ordered[:tenth].mean()),
        "highest_tenth": float(ordered[-tenth:].mean()),
        "deviation": float(ordered.std()),
    }
