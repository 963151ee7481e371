"""Estimates what a `fit` takes of its host before it starts: the size of a task, and the copies of each part.

The strategy says which parts of a model each process holds (`Strategy.needs`). Processes, events, data, and two rings
for each pair of linked workers are added. Everything is a lower bound: activations, and data that are not arrays, are
not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from manyhands.engine.dynamo import optimizer_of
from manyhands.engine.kernel_task import KernelTask
from manyhands.facts import ModelFootprint, Truth
from manyhands.places.local.host import Amount, MemoryCost, of_processes
from manyhands.strategy import Strategy
from manyhands.task import Task
from manyhands.transport.link.shared_link import DEFAULT_CAPACITY_BYTES

# Of a link between two workers: a ring in each direction; the descriptors are its memory and two lifelines
PER_LINK = Amount(memory_bytes=2 * DEFAULT_CAPACITY_BYTES, descriptors=3)

_RING_BYTES = 1 << 20  # events of one worker, and other small parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes(ModelFootprint):
    """The bytes of a task, each copy of each part counted once."""

    data: int = 0


def sizes_of(task: Task | KernelTask, model: nn.Module, *, on_host: bool = True) -> Sizes:
    """The sizes of a task and its `model`, computing nothing; what is on another device takes nothing of the host."""
    if isinstance(task, KernelTask):
        return Sizes(parameters=_bytes_of(model.parameters()), gradients=0)
    data = _data_bytes(task.data) + _data_bytes(task.evaluation)
    if not on_host:
        return Sizes(parameters=0, gradients=0, data=data)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    copies = 0  # numbers that the optimizer keeps per parameter, as far as its settings tell
    with suppress(Exception):  # the worker that builds it reports the error, with the user's stack
        optimizer = optimizer_of(task, model)
        one = isinstance(optimizer, torch.optim.Adagrad | torch.optim.RMSprop)
        for group in optimizer.param_groups:
            adam = 3 if group.get("amsgrad") else 2
            copies = max(copies, adam if "betas" in group else bool(group.get("momentum")) + one)
    return Sizes(
        parameters=_bytes_of(model.parameters()),
        gradients=_bytes_of(trained),
        buffers=_bytes_of(model.buffers()),
        state=copies * _bytes_of(trained),
        data=data,
    )


def cost_of(strategy: Strategy, sizes: Sizes, *, threads: int, compiled: bool = False) -> MemoryCost:
    """What a `fit` by `strategy` takes, for any number of workers; `single` starts none and costs nothing here."""
    if compiled and strategy.facts.in_threads:
        return MemoryCost(per_worker=Amount(memory_bytes=_RING_BYTES, tasks=1))
    if strategy.truth is Truth.ONE_PROCESS:
        return MemoryCost()
    if strategy.truth is Truth.EVERYONE:
        own, kept = sizes.weights + (sizes.gradients + sizes.state) // strategy.facts.model_parts, 0
    else:
        two, four = (sum(row.count * row.total for row in strategy.needs(sizes, n)) for n in (2, 4))
        own = (four - two) // 2
        kept = two - 2 * own
    if strategy.truth is Truth.SHARES:
        own = max(own, sizes.weights)  # as it is built, before it is cut
    others = sum(strategy.processes(1).values())  # but one worker; and the template of all forks
    once = Amount(memory_bytes=kept + sizes.data)
    cost = of_processes(memory_bytes=own + _RING_BYTES, threads=threads, others=others, once=once)
    return replace(cost, per_pair=PER_LINK) if strategy.facts.uses_links else cost


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.device.type != "meta" and tensor.layout is torch.strided
    }
    return sum(storages.values())


def _data_bytes(data: Any) -> int:
    """The bytes of arrays, and of datasets and containers that hold nothing else."""
    match data:
        case torch.Tensor() | np.ndarray():
            return int(data.nbytes)
        case TensorDataset():
            return sum(map(_data_bytes, data.tensors))
        case Subset():
            return _data_bytes(data.dataset)
        case dict():
            return sum(map(_data_bytes, data.values()))
        case tuple() | list() if all(isinstance(one, torch.Tensor | np.ndarray) for one in data):
            return sum(map(_data_bytes, data))
    return 0
