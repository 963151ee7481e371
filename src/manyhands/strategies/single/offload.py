"""`single device_memory=…`: training on a device that holds a few layers at a time (Cui et al., "GeePS: Scalable deep
learning on distributed GPUs with a GPU-specialized parameter server", EuroSys 2016).

Parameters and optimizer state are kept in host memory, or in a file that is mapped there. A layer is copied to the
device when it is used, while the next one is prefetched. In backward, as soon as all of a layer's gradients are
present, the user's optimizer steps that layer on the device, and the layer is copied back. So the device never holds
all gradients or all optimizer state. Tensors that autograd saves for backward stay on the device as far as the limit
allows; the rest is offloaded to host memory.

A step gives the same bits as stepping all layers at the end, as long as no gradient is needed twice. If gradients are
clipped, or accumulate over several backwards, they are kept in host memory and layers are stepped in a second pass.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.engine.computing import Computed, Computer
from manyhands.engine.exchange import Exchange, GradientParts, LocalStep, SharedStep, WorkerPart
from manyhands.errors import UserError
from manyhands.strategies.common.sharding import layer_units
from manyhands.strategies.common.sharding.layer_units import Unit, UnitMemory, move_buffers, units_of
from manyhands.strategies.common.sharding.optimizers import kept_by, stepping_for
from manyhands.strategies.single.strategy import Single, UnitBytes, plan_budget
from manyhands.wire.tap import GradientTap

__all__ = ["Move", "OffloadExchange", "OffloadedTensors", "StreamMover", "ThreadMover"]

HOST = "host"
_SMALLEST_MOVED = 1 << 12  # bytes of a saved tensor that is worth moving


class OffloadExchange(Exchange):
    """One process that swaps layers; uses at most `limit` bytes of `device`, and `place`: the host, or a folder."""

    rank, world = 0, 1
    part = WorkerPart(index=0, count=1)
    steps_itself = builds_on_host = True
    _optimizer: Optimizer
    _visits: layer_units.UnitVisits

    def __init__(self, limit: int, device: torch.device, place: str = HOST) -> None:
        self.parts = GradientParts(held=self._waiting, counted=self._waiting, total=self.total)
        self._limit, self._device, self._place = limit, device, place
        self._mover: Mover = StreamMover(device) if device.type == "cuda" else ThreadMover()
        self._layers: list[_Layer] = []
        self._places: list[tuple[_Layer, int]] = []
        self._flow = layer_units.UnitFlow(0)
        self._attached = ExitStack()
        self._saved = OffloadedTensors(self._mover, 0)
        self._defers, self._steps, self._backward = False, True, False
        self._left: deque[_Layer] = deque()

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Move the parameters to host memory or file; a UserError states the need if a layer does not fit."""
        strategy = Single(device_memory=self._limit)
        stepping_for(optimizer, strategy.facts.stepping, str(strategy))
        self._optimizer = optimizer
        try:
            state = {one: sum(kept.nbytes for kept in row) for one, row in kept_by(optimizer).items()}
        except UserError:  # not item by item: at most two numbers for each, as far as is known
            state = {one: 2 * one.nbytes for group in optimizer.param_groups for one in group["params"]}
        units = units_of(model)
        sizes = [
            UnitBytes(
                name=unit.name,
                values=unit.num_bytes,
                gradients=sum(one.nbytes for one in unit.parameters if one.requires_grad),
                state=sum(state.get(one, 0) for one in unit.parameters),
                lasts=unit.module is None,
            )
            for unit in units
        ]
        budget = plan_budget(self._limit, sizes, sum(buffer.nbytes for buffer in model.buffers()))
        memories = [UnitMemory(unit, self._device) for unit in units]
        self._layers = [_Layer(memory, self._mover, self._place, optimizer) for memory in memories]
        move_buffers(model, self._device)
        lasting = [unit.number for unit in units if unit.module is None]
        self._flow = layer_units.UnitFlow(len(units), lasting, ahead=budget.ahead)
        self._visits = layer_units.UnitVisits(model, memories, self._flow, self._carry_out)
        self._places = [(layer, number) for layer in self._layers for number in layer.unit.trained]
        parameters = [layer.unit.parameters[number] for layer, number in self._places]
        self._attached.callback(self._show_host_values)
        self._attached.callback(GradientTap(parameters, self._on_gradient).close)
        self._attached.callback(self._visits.close)
        self._saved = OffloadedTensors(self._mover, budget.activations)

    def compute(self, computer: Computer, model: nn.Module, step: int) -> Computed:
        whole = computer.task.clips or "grad_norm" in computer.plan.log
        self._defers = whole or computer.task.microbatches > 1
        self._flow.begin("training")
        with self._visits.watching(self._saved):
            return super().compute(computer, model, step)

    def evaluate(
        self, computer: Computer, model: nn.Module, *, alike: bool = False
    ) -> tuple[dict[str, float], int] | None:
        self._flow.begin("evaluation")
        with self._visits.watching(self._saved):
            found = super().evaluate(computer, model, alike=alike)
        self._carry_out(self._flow.end())
        return found

    def backward(self, loss: Tensor, share: float) -> None:
        """Backward; each layer is stepped once its gradients are complete, unless the loss is not finite."""
        self._steps = not self._defers and bool(torch.isfinite(loss).all())
        self._flow.backward()
        self._backward = True
        weighted = loss if share == 1 else loss * share
        try:
            weighted.backward()  # type: ignore[no-untyped-call]
        finally:
            self._backward = False
        for layer in self._layers:
            if layer.has_gradient:  # some of its parameters were not reached
                self._carry_out(self._flow.complete(layer.unit.number))
        self._carry_out(self._flow.end())
        self._saved.end_step()
        self._flow.begin("training")

    def agree(self, local: LocalStep) -> SharedStep:
        if not local.is_finite:
            self._show_host_values()
        return SharedStep(loss=local.loss, bad_workers=() if local.is_finite else (0,), stop=local.stop)

    def _waiting(self) -> list[Tensor]:
        self._mover.finish()
        return [gradient for layer in self._layers for gradient in layer.waiting.values()]

    def apply(self) -> None:
        for layer in self._layers:
            if layer.waiting:
                for number, gradient in layer.waiting.items():
                    parameter = layer.unit.parameters[number]
                    parameter.grad = gradient.to(parameter.device)
                layer.waiting.clear()
                self._step(layer)

    def optimizer_state(self) -> dict[str, Any] | None:
        self._mover.finish()
        return self._optimizer.state_dict()

    def model_state(self, model: nn.Module) -> Mapping[str, Tensor] | None:
        self._mover.finish()
        on_host = {
            id(parameter): value
            for layer in self._layers
            for parameter, value in zip(layer.unit.parameters, layer.host_values(), strict=True)
        }
        return {
            key: on_host.get(id(value), value.detach())
            for key, value in model.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        }

    def total(self, values: Tensor) -> Tensor:
        return values

    def close(self) -> None:
        self._attached.close()
        self._mover.close()

    def _carry_out(self, actions: Iterable[layer_units.Action]) -> None:
        for action in actions:
            match action:
                case layer_units.Fetch(unit):
                    self._keep_pace()
                    self._layers[unit].fetch(with_state=self._backward and self._steps)
                case layer_units.Await(unit):
                    self._layers[unit].arrive()
                case layer_units.Hand(unit):
                    if self._steps:
                        self._step(self._layers[unit])
                    else:
                        self._layers[unit].keep_gradients()
                case layer_units.Release(unit):
                    self._layers[unit].let_go()

    def _step(self, layer: _Layer) -> None:
        """Step a layer; if its values are not on the device, fetch it for the step alone."""
        is_here = layer.memory.is_here
        if not is_here:
            self._keep_pace()
            layer.fetch(with_state=True)
        layer.step(self._optimizer)
        self._left.append(layer)
        if not is_here:
            layer.let_go()

    def _keep_pace(self) -> None:
        """Wait until the memory of the layer before the last is free: the host runs ahead of a GPU."""
        while len(self._left) > 1:
            move = self._left.popleft().leaving
            assert move is not None, "it was stepped"
            move.finish()

    def _on_gradient(self, index: int, _parameter: Tensor) -> None:
        layer, number = self._places[index]
        layer.has_gradient = True
        layer.missing.discard(number)
        if not layer.missing:
            self._carry_out(self._flow.complete(layer.unit.number))

    def _show_host_values(self) -> None:
        self._mover.finish()
        for layer in self._layers:
            for parameter, value in zip(layer.unit.parameters, layer.host_values(), strict=True):
                parameter.data = value


class _Layer:
    """One unit: its copy on the host, with the optimizer's state, what of it is on the device, and its step."""

    def __init__(self, memory: UnitMemory, mover: Mover, place: str, optimizer: Optimizer) -> None:
        self.memory, self._mover, self._place = memory, mover, place
        self.unit: Unit = memory.unit
        self._rows = [_room(flat, mover, place) for flat in memory.flats]
        self._on_host: dict[tuple[nn.Parameter, str], Tensor] = {}
        self._here: dict[tuple[nn.Parameter, str], Tensor] = {}
        self._coming: list[Move] = []
        self.leaving: Move | None = None  # the last copy to the host
        self.missing = set(self.unit.trained)  # the parameters without a gradient in this step
        self.has_gradient = False  # whether gradients have come that were not used
        self.waiting: dict[int, Tensor] = {}  # gradients kept in host memory, by parameter number
        for value, parameter in zip(self.host_values(), self.unit.parameters, strict=True):
            value.copy_(parameter.detach())
        memory.adopt()
        memory.let_go()
        for parameter in self.unit.parameters:
            self._offload(parameter, optimizer.state.get(parameter, {}), copy_now=True)

    def host_values(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for layout, row in zip(self.unit.layouts, self._rows, strict=True):
            for number, items in layout.views(row):
                found[number] = items.view(self.unit.parameters[number].shape)
        return [found[number] for number in range(len(found))]

    def fetch(self, *, with_state: bool) -> None:
        self.memory.make_room()
        pairs = list(zip(self._rows, self.memory.flats, strict=True))
        if with_state:
            pairs += self._room_for_state()
        self._coming.append(self._mover.bring(pairs, self.leaving))

    def arrive(self) -> None:
        for move in self._coming:
            move.before_next()
        self._coming.clear()

    def let_go(self) -> None:
        self.arrive()
        if self.leaving is not None and not self._mover.frees_late:
            self.leaving.finish()
        self.memory.let_go()
        self._here.clear()

    def keep_gradients(self) -> None:
        for number in self.unit.trained:
            parameter = self.unit.parameters[number]
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            on_host = gradient.cpu()
            if number in self.waiting:
                self.waiting[number] += on_host
            else:
                self.waiting[number] = on_host.clone() if on_host is gradient else on_host
        self._begin_gradient()

    def step(self, optimizer: Optimizer) -> None:
        """Step this layer alone with the optimizer, on the device, and begin to copy everything back."""
        if self._on_host and not self._here:
            self._coming.append(self._mover.bring(self._room_for_state(), self.leaving))
        self.arrive()
        own = set(self.unit.parameters)
        shown = [group["params"] for group in optimizer.param_groups]
        for (parameter, name), tensor in self._here.items():
            optimizer.state[parameter][name] = tensor
        try:
            for group, parameters in zip(optimizer.param_groups, shown, strict=True):
                group["params"] = [one for one in parameters if one in own]
            optimizer.step()
        finally:
            for group, parameters in zip(optimizer.param_groups, shown, strict=True):
                group["params"] = parameters
        pairs = list(zip(self.memory.flats, self._rows, strict=True))
        for parameter in self.unit.parameters:
            parameter.grad = None
            pairs += self._offload(parameter, optimizer.state.get(parameter, {}), copy_now=False)
        self.leaving = self._mover.take(pairs)
        self._begin_gradient()

    def _offload(
        self, parameter: nn.Parameter, state: dict[str, Any], *, copy_now: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """Replace the optimizer's device tensors by host tensors; return the copies that are to be made."""
        pairs = []
        for name, value in state.items():
            if not isinstance(value, Tensor) or not value.dim():
                continue  # a count of steps
            key = (parameter, name)
            if key not in self._on_host:
                self._on_host[key] = _room(value, self._mover, self._place)
            if copy_now:
                self._on_host[key].copy_(value)
            else:
                pairs.append((value, self._on_host[key]))
            state[name] = self._on_host[key]
        return pairs

    def _room_for_state(self) -> list[tuple[Tensor, Tensor]]:
        device = self.memory.flats[0].device
        self._here = {key: torch.empty_like(value, device=device) for key, value in self._on_host.items()}
        return [(self._on_host[key], here) for key, here in self._here.items()]

    def _begin_gradient(self) -> None:
        self.missing, self.has_gradient = set(self.unit.trained), False


class OffloadedTensors:
    """Tensors that autograd saves: if not all fit on the device, the first of a forward go to host memory.

    Those that are saved first are needed last. How many bytes do not fit is known from the previous step; in a first
    step, tensors are moved once `room` is full.
    """

    def __init__(self, mover: Mover, room: int) -> None:
        self._mover, self._room = mover, room
        self._too_many = self._bytes = self._kept = self.moved = 0
        """`moved` bytes went to the host in this step."""

    def pack(self, tensor: Tensor) -> Any:
        size = tensor.nbytes
        if size < _SMALLEST_MOVED or tensor.layout is not torch.strided:
            return tensor
        before, self._bytes = self._bytes, self._bytes + size
        if before >= self._too_many and self._kept + size <= self._room:
            self._kept += size
            return tensor
        self.moved += size
        source = tensor.detach().contiguous()
        host = self._mover.room(source)
        move = self._mover.take([(source, host)])
        if not self._mover.frees_late:
            move.finish()  # the caller may write to the tensor from now on
        return _Offloaded(host, move, tensor.device)

    def unpack(self, packed: Any) -> Any:
        if not isinstance(packed, _Offloaded):
            return packed
        packed.move.before_next()
        return packed.host.to(packed.device, non_blocking=True)

    def end_step(self) -> None:
        self._too_many = max(0, self._bytes - self._room)
        self._bytes = self._kept = self.moved = 0


class _Offloaded(NamedTuple):
    """A saved tensor that was moved to host memory."""

    host: Tensor
    move: Move
    device: torch.device


def _room(like: Tensor, mover: Mover, place: str) -> Tensor:
    if place == HOST:
        return mover.room(like)
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    descriptor, path = tempfile.mkstemp(prefix="manyhands-", dir=place)
    try:
        os.ftruncate(descriptor, like.nbytes)
        flat = torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype)
    finally:
        os.close(descriptor)
        with suppress(OSError):
            Path(path).unlink()  # the mapping keeps the memory
    return flat.view(like.shape)


# Background copies between a device and host memory: on streams of a GPU, or in a thread.

Pair: TypeAlias = tuple[Tensor, Tensor]  # source and target of a copy


class Move(NamedTuple):
    """Copies that were begun."""

    before_next: Callable[[], object]  # order whatever is computed from now on after these copies
    finish: Callable[[], object]
    """Wait until the copies are done: the host may then read and write the tensors."""
    event: torch.cuda.Event | None = None


class Mover(ABC):
    """Copies between the host and a device; copies in one direction are done in order."""

    pins: ClassVar[bool]  # whether host memory is pinned
    frees_late: ClassVar[bool]
    """Whether a source may be freed during its copy, because its memory is not reused before that is done."""

    @abstractmethod
    def bring(self, pairs: Sequence[Pair], after: Move | None = None) -> Move:
        """Begin to copy from host to device, after another move, and after what was computed in that memory."""

    @abstractmethod
    def take(self, pairs: Sequence[Pair]) -> Move:
        """Begin to copy from device to host, after everything computed so far."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all copies are done: the host may then read the tensors."""

    def room(self, like: Tensor) -> Tensor:
        """Allocate host memory for the contents of a device tensor; pinned, copies from it to a GPU are fast."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self.pins)

    def close(self) -> None:
        self.finish()


class ThreadMover(Mover):
    """Copies in a thread, if the device is the host itself."""

    pins = frees_late = False

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manyhands mover")
        self._last: Move | None = None

    def bring(self, pairs: Sequence[Pair], _after: Move | None = None) -> Move:
        return self.take(pairs)

    def take(self, pairs: Sequence[Pair]) -> Move:
        done = self._thread.submit(_copy, pairs).result  # the computing thread waits for it
        self._last = Move(done, done)
        return self._last

    def finish(self) -> None:
        if self._last is not None:
            self._last.finish()

    def close(self) -> None:
        self._thread.shutdown()


class StreamMover(Mover):
    """Copies on one GPU stream per direction, to and from pinned host memory."""

    pins = frees_late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def bring(self, pairs: Sequence[Pair], after: Move | None = None) -> Move:
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None and after.event is not None:
            self._in.wait_event(after.event)
        return self._begin(self._in, pairs)

    def take(self, pairs: Sequence[Pair]) -> Move:
        """Copy after what was computed; memory freed meanwhile is not reused before the copy has ended."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        for source, _ in pairs:
            source.record_stream(self._out)
        return self._begin(self._out, pairs)

    def finish(self) -> None:
        self._in.synchronize()
        self._out.synchronize()

    def _begin(self, stream: torch.cuda.Stream, pairs: Sequence[Pair]) -> Move:
        with torch.cuda.stream(stream):
            _copy(pairs)
            done = stream.record_event()
        # The computing stream waits for it, not the host.
        return Move(lambda: torch.cuda.current_stream(self._device).wait_event(done), done.synchronize, done)


@torch.no_grad()
def _copy(pairs: Sequence[Pair]) -> None:
    for source, target in pairs:
        target.copy_(source, non_blocking=True)
