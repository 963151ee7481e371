"""The profile of a task on a device that is not here: the operations of its layers, and the device's two limits.

One forward and backward of the task on tensors without memory lists every operation with its FLOPs and the bytes that
it reads and writes. On a device it takes the longer of FLOPs / (peak x efficiency) and bytes / bandwidth, the roofline
of Williams, Waterman and Patterson (2009), and at least what the device needs for any. Data loading is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from manyhands.data.randomness import preserved
from manyhands.errors import UserError
from manyhands.facts import ComputeTime, LayerTimes, ModelFootprint, TaskProfile, TracedModel
from manyhands.foresight.plan.described_cluster import DescribedDevice
from manyhands.strategies.common.sharding.layer_units import Unit, units_of

__all__ = ["CountedBatch", "Operation", "count_batch", "device_profile"]

_FEW = 8  # samples between which and the whole batch times are straight


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a step, whoever computes it."""

    flops: float
    num_bytes: float  # that it reads and writes

    def seconds(self, device: DescribedDevice) -> float:
        computing_s = self.flops / (device.flops_per_s * device.efficiency)
        return max(computing_s, self.num_bytes / device.bytes_per_s, device.launch_s)


Operations = list[Operation]


@dataclass(slots=True)
class CountedBatch:
    """The operations of a forward and a backward, by the number of the unit; what is of no unit is the rest."""

    forward: dict[int, Operations] = field(default_factory=dict)
    backward: dict[int, Operations] = field(default_factory=dict)
    rest: Operations = field(default_factory=list)
    output: dict[int, int] = field(default_factory=dict)  # bytes

    @property
    def flops(self) -> float:
        every = [self.rest, *self.forward.values(), *self.backward.values()]
        return sum(one.flops for operations in every for one in operations)


def device_profile(device: DescribedDevice, footprint: ModelFootprint) -> TaskProfile:
    """How long each part of a step of the model's task takes on one such device."""
    traced = footprint.traced
    assert traced is not None, "a task's own estimate has it"
    if traced.task.streams:
        raise UserError(f"plan: data is {traced.task.stream_name}, whose samples cannot be drawn beforehand")
    most = min(footprint.batch_size, traced.task.samples)
    sizes = sorted({1, min(_FEW, most), most})
    counted = {samples: count_batch(traced, samples) for samples in sizes}

    def through(operations: Callable[[CountedBatch], Iterable[Operation]]) -> ComputeTime:
        return ComputeTime.through(
            {
                samples: sum(one.seconds(device) for one in operations(found))
                for samples, found in counted.items()
            }
        )

    def layer(unit: Unit) -> LayerTimes:
        return LayerTimes(
            name=unit.name,
            forward=through(lambda found: found.forward.get(unit.number, ())),
            backward=through(lambda found: found.backward.get(unit.number, ())),
            gradient_bytes=sum(unit.parameters[number].nbytes for number in unit.trained),
            output_bytes=counted[most].output.get(unit.number, 0) / most,
        )

    # A step reads parameters, gradients and state, and writes parameters and state.
    stepped = 3 * footprint.gradients + 2 * footprint.state
    return TaskProfile(
        layers=tuple(map(layer, units_of(traced.model))),
        model=footprint,
        rest=through(lambda found: found.rest),
        optimizer_s=stepped / device.bytes_per_s,
    )


def count_batch(traced: TracedModel, samples: int) -> CountedBatch:
    """The operations of so many samples of a task's data, found without memory for tensors."""
    with preserved():
        model, batch = traced.copy(), traced.batch(samples)
        counter = _Counter(units_of(model))
        with counter.watching():
            with counter:
                loss = traced.task.loss(model, batch)
            counter.end_forward()
            with counter:
                loss.backward()
            counter.end_backward()
    return counter.found


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists operations as they are dispatched, for the unit whose forward or backward they are of."""

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = CountedBatch()
        self._units = units
        self._inside: list[int] = []
        self._operations: list[tuple[int | None, Operation]] = []
        self._arrived: dict[int, int] = {}  # by unit, how many operations there were at its last gradient

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not func.is_view and func.namespace == "aten":
            operation = Operation(_flops(func, args, kwargs, out), _bytes_of((args, kwargs, out)))
            self._operations.append((self._inside[-1] if self._inside else None, operation))
        return out

    def end_forward(self) -> None:
        for unit, operation in self._operations:
            mine = self.found.rest if unit is None else self.found.forward.setdefault(unit, [])
            mine.append(operation)
        self._operations.clear()

    def end_backward(self) -> None:
        """What came after the last gradient of the unit before, up to its own last, is of a unit."""
        begin, operations = 0, [one for _, one in self._operations]
        for unit, end in sorted(self._arrived.items(), key=lambda one: one[1]):
            self.found.backward[unit] = operations[begin:end]
            begin = end
        self.found.rest += operations[begin:]

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles: list[Any] = []
        for unit in self._units:
            trained: list[Any] = [unit.parameters[number] for number in unit.trained]
            handles += [
                one.register_post_accumulate_grad_hook(self._arriving(unit.number)) for one in trained
            ]
            if unit.module is not None:
                enter, leave = self._passing(unit.number)
                handles.append(unit.module.register_forward_pre_hook(enter))
                handles.append(unit.module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _arriving(self, number: int) -> Callable[[Tensor], None]:
        def arrived(_parameter: Tensor) -> None:
            self._arrived[number] = len(self._operations)

        return arrived

    def _passing(self, number: int) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(*_: Any) -> None:
            self._inside.append(number)

        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            self._inside.pop()
            self.found.output[number] = int(_bytes_of(output))

        return enter, leave


def _bytes_of(tensors: Any) -> float:
    """What the tensors hold, each once: one that is changed in place is read and written."""
    return float(sum(one.nbytes for one in tree_leaves(tensors) if isinstance(one, Tensor)))


_ATEN = torch.ops.aten
_ALIKE = {  # operations of the CPU, and those that compute the same on a GPU, which torch can count
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_efficient_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        _ATEN._scaled_dot_product_efficient_attention_backward
    ),
}


def _flops(func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> float:
    """Of products of matrices, convolutions and attention; anything else is bound by its bytes."""
    packet = func.overloadpacket
    count = flop_registry.get(_ALIKE.get(packet, packet))
    return float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0
