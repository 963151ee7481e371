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

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.engine.computing import Computed, Computer
from manyhands.engine.exchange import Exchange, GradientParts, LocalStep, SharedStep, WorkerPart
from manyhands.errors import UserError
from manyhands.native.heap import give_back_freed_memory
from manyhands.strategies.common.sharding import layer_units
from manyhands.strategies.common.sharding.layer_units import Unit, UnitMemory, move_buffers, units_of
from manyhands.strategies.common.sharding.optimizers import kept_by, stepping_for
from manyhands.strategies.single.movers import HOST, Move, Mover, StreamMover, ThreadMover, mapped_file
from manyhands.strategies.single.strategy import Single, UnitBytes, plan_budget
from manyhands.wire.tap import GradientTap

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
        for unit in units:  # one after another: the device never has all of them
            memory = UnitMemory(unit, self._device)
            self._layers.append(_Layer(memory, self._mover, self._place, optimizer))
        give_back_freed_memory()  # in which the model was built
        move_buffers(model, self._device)
        lasting = [unit.number for unit in units if unit.module is None]
        self._flow = layer_units.UnitFlow(len(units), lasting, ahead=budget.ahead)
        self._visits = layer_units.UnitVisits(
            model, [layer.memory for layer in self._layers], self._flow, self._carry_out
        )
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
        return [layer.gradients[number] for layer in self._layers for number in layer.waiting]

    def apply(self) -> None:
        for layer in self._layers:
            if layer.waiting:
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
                        self._left.append(self._layers[unit])
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
            if move is not None:
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
        self._rows = [self._room(flat) for flat in memory.flats]
        self._on_host: dict[tuple[nn.Parameter, str], Tensor] = {}
        self._here: dict[tuple[nn.Parameter, str], Tensor] = {}
        self._coming: list[Move] = []
        self.leaving: Move | None = None  # the last copy to the host
        self.missing = set(self.unit.trained)  # the parameters without a gradient in this step
        self.has_gradient = False  # whether gradients have come that were not used
        self.gradients: dict[int, Tensor] = {}  # room for gradients in host memory, by parameter number
        self.waiting = set[int]()  # those that are there
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
        pairs = []
        for number in self.unit.trained:
            parameter = self.unit.parameters[number]
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if number in self.waiting:
                self._mover.finish()
                self.gradients[number] += gradient.cpu()
                continue
            if number not in self.gradients:
                self.gradients[number] = self._mover.lasting_room(gradient)
            pairs.append((gradient, self.gradients[number]))
            self.waiting.add(number)
        if pairs:
            self.leaving = self._mover.take(pairs)
        self._begin_gradient()

    def step(self, optimizer: Optimizer) -> None:
        """Step this layer alone with the optimizer, on the device, and begin to copy everything back."""
        if self._on_host and not self._here:
            self._coming.append(self._mover.bring(self._room_for_state(), self.leaving))
        if self.waiting:
            self._coming.append(self._mover.bring(self._room_for_gradients(), self.leaving))
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
                self._on_host[key] = self._room(value)
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

    def _room_for_gradients(self) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for number in self.waiting:
            parameter = self.unit.parameters[number]
            parameter.grad = torch.empty_like(self.gradients[number], device=parameter.device)
            pairs.append((self.gradients[number], parameter.grad))
        self.waiting.clear()
        return pairs

    def _room(self, like: Tensor) -> Tensor:
        return self._mover.lasting_room(like) if self._place == HOST else mapped_file(like, self._place)

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
