"""Checks that a task's loss is the mean or sum that `Task.reduction` declares, by comparing parts with the whole.

A split batch is combined from the losses of its parts, weighted by size. That is right for a mean. A sum would train
another model without any visible error. So, before the first step, the loss of a few samples is compared with the
mean loss of their halves and thirds: a mean is the same, a sum is a half and a third of it. A loss that is neither,
such as a contrastive one, is accepted.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from manyhands.data.batches import as_dataset
from manyhands.data.randomness import preserved, seed_all
from manyhands.engine.computing import Computer
from manyhands.errors import ManyhandsError, UserError
from manyhands.task import Task

# How many samples are tried, where there are so many, and in how many parts: a loss of another kind may look like a sum
# in one of them (that of two pairs is, for one that is the logarithm of the size)
_TRIALS: Final = ((12, (2, 3)), (6, (2, 3)), (4, (2, 4)), (2, (2,)))
_CLOSE: Final = 0.05  # samples that are drawn again may differ

# Means over the evaluation data of this computer's task, with the model at hand
Evaluate = Callable[[Computer], tuple[dict[str, float], int] | None]


def require_reduction(computer: Computer, worker: int, model: nn.Module, evaluate: Evaluate) -> None:
    """UserError where the loss of a part, against that of the whole, is clearly not what `Task.reduction` says.

    Changes no buffer and no generator of the caller's. Data that each worker reads by itself are not tried: reading
    some of them first would change what is trained on.
    """
    task = computer.task
    with preserved():
        found = _few_samples(task)
    if found is None or task.weights is not None:
        return
    samples, counts = found
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    losses = []

    def tried(model: nn.Module, batch: Any) -> Tensor:
        # NaN without an error where the loss does not work outside of training.
        try:
            found = task.loss(model, batch)
            return found if found.numel() == 1 else torch.tensor(math.nan)
        except ManyhandsError:
            raise
        except Exception:  # the user's own
            return torch.tensor(math.nan)

    with preserved():
        for parts in (1, *counts):
            bare: dict[str, Any] = {
                "microbatches": 1,
                "metrics": {},
                "scheduler": None,
                "scheduler_metric": None,
            }
            size = len(samples) // parts
            trial = replace(task, loss=tried, evaluation=samples, batch_size=size, **bare)
            seed_all(computer.plan.seed)
            means = evaluate(Computer(replace(computer.plan, task=trial, compile=False), worker))
            losses.append(means[0]["evaluation_loss"] if means is not None else math.nan)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    _judge(task, len(samples), losses, counts)


def _judge(task: Task, samples: int, losses: Sequence[float], counts: Sequence[int]) -> None:
    whole, *parts = losses
    if not (math.isfinite(whole) and whole):
        return
    is_sum = all(abs(part * count / whole - 1) < _CLOSE for part, count in zip(parts, counts, strict=True))
    is_mean = all(abs(part / whole - 1) < _CLOSE for part in parts)
    figures = f"for {samples} samples it is {whole:.4g}, for their {counts[0]} equal parts {parts[0]:.4g} on average"
    if is_sum and task.reduction == "mean":
        raise UserError(
            f"task.loss is the sum over a batch, not its mean: {figures}; splitting the batch would change the "
            "result: use reduction='mean' in the loss, or give Task(reduction='sum')"
        )
    if is_mean and task.reduction == "sum":
        raise UserError(
            f"task.reduction is 'sum', but task.loss is the mean over a batch: {figures}; leave reduction out, or use "
            "reduction='sum' in the loss"
        )


def _few_samples(task: Task) -> tuple[Subset[Any], tuple[int, ...]] | None:
    """Some samples of the data, and the numbers of equal parts to compare; None where there are too few."""
    most, smallest = _TRIALS[0][0], _TRIALS[-1][0]
    if task.own is not None:
        return None
    piece = max(smallest, task.batch_size // task.microbatches)  # larger ones may be too much for the memory
    most = min(most, task.batch_size, piece)
    try:
        if task.streams:
            samples = list(islice(copy.deepcopy(task.data), most))  # its own state stays as it is
        else:
            data = as_dataset(task.data, "data")
            samples = [data[number] for number in range(min(most, len(data)))]
    except Exception:  # a stream that cannot be copied; a bad sample is reported when its batch is made
        return None
    if len(samples) < smallest:
        return None
    count, counts = next(trial for trial in _TRIALS if trial[0] <= len(samples))
    return Subset(samples, range(count)), counts  # type: ignore[arg-type] # a list of samples is no data set by itself
