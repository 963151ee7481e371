"""One worker's end of `sharded` (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020, stage 3; Zhao et al., "PyTorch FSDP", VLDB 2023).

Of every layer's parameters, gradients and optimizer state a worker keeps 1/N. A step, for one layer after another:

    forward     the layer is gathered from all workers, the next one meanwhile; it is dropped when it has computed
    backward    gathered again; its gradient goes to the owners of its pieces, who sum; gradient and values are dropped
    agree       all workers have arrived: loss, which parameters were reached, whether any worker wants to stop
    apply       each worker steps its pieces, with its pieces of the optimizer's state

All exchanges are done by one thread, in the order in which the worker asks for them, while it computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum, unique
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.engine.computing import Computed, Computer
from manyhands.engine.exchange import (
    Exchange,
    GradientParts,
    LocalStep,
    Meter,
    Resources,
    SharedStep,
    Times,
    WorkerPart,
)
from manyhands.engine.fusing import take_step
from manyhands.errors import UserError
from manyhands.facts import Stepping
from manyhands.native.dtypes import HALVES
from manyhands.native.threads import use_one_thread
from manyhands.strategies.common.grid.grid_group import LinkGroup
from manyhands.strategies.common.grid.held import Cut, Held, HeldModel, Outline
from manyhands.strategies.common.sharding import layer_units
from manyhands.strategies.common.sharding.optimizers import stepping_for
from manyhands.strategies.sharded.strategy import Sharded
from manyhands.transport.link.wire import Wire
from manyhands.wire.tap import GradientTap, put

_KIND = 0x5A3  # of this strategy's messages
_LOSS, _STOP, _FLAGS = 0, 1, 2

Result = TypeVar("Result")


class ShardedExchange(Exchange):
    """One worker's end; takes ownership of the links of `resources`. Values and gradients are on its device."""

    steps_itself = True
    builds_on_host = True
    _memory: type[layer_units.UnitMemory] = layer_units.UnitMemory
    _optimizer: Optimizer
    _whole: HeldModel
    _visits: layer_units.UnitVisits

    def __init__(self, resources: Resources) -> None:
        self.rank, self.world = resources.rank, resources.world
        self._links = resources.links()
        self.wire = next((link.wire for link in self._links.values()), Wire.NONE)
        self._group = LinkGroup(
            self.rank, range(self.world), self._links, resources.timeout_s, kind=_KIND, name="sharded"
        )
        self.part = WorkerPart(index=self.rank, count=self.world, total_in_step=self._sum)

        def reached_sums() -> list[Tensor]:
            return [gradient for gradient in self._summed() if gradient is not None]

        self.parts = GradientParts(held=reached_sums, counted=reached_sums, total=self.total)
        self.meter = Meter(take_times=self._take_times, traffic=self._group.traffic)
        self._unit_rounds = UnitRounds(self._group, self._act)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manyhands sharded")
        use_one_thread(self._thread)
        self._device = resources.device
        self._held: list[Held] = []
        self._pieces: list[KeptPieces] = []
        self._places: list[tuple[KeptPieces, int]] = []
        self._tap: GradientTap | None = None
        self._flow = layer_units.UnitFlow(0)
        self._pending: dict[int, Future[None]] = {}
        self._handed: list[Future[None]] = []
        self._reached: list[bool] = []
        self._waited_ns = 0
        self.weight = 1.0  # the factor for every gradient; `backward` weighs the loss instead

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Collective: every worker keeps its pieces of worker 0's parameters, and frees the rest.

        A UserError names an optimizer that cannot be sharded.
        """
        whole = stepping_for(optimizer, Sharded().facts.stepping, Sharded.word) is Stepping.APART
        outline = Outline.of(model)
        for unit in layer_units.units_of(model):
            memory = self._memory(unit, self._device)
            pieces = KeptPieces(memory, self._group, whole=whole)
            self._run(pieces.deal_out)
            memory.adopt()
            memory.let_go()
            self._pieces.append(pieces)
        layer_units.move_buffers(model, self._device)
        for buffer in model.buffers():
            self._run(partial(self._group.broadcast, buffer))
        self._held = [held for pieces in self._pieces for held in pieces.held()]
        named = model.named_buffers(remove_duplicate=False) if self.rank == 0 else ()
        reported = {name: buffer for name, buffer in named if name in outline.keys}
        self._whole = HeldModel(outline, optimizer, self._held, reported)
        self._optimizer = optimizer
        lasting = [one.unit.number for one in self._pieces if one.unit.module is None]
        self._flow = layer_units.UnitFlow(len(self._pieces), lasting)
        memories = [pieces.memory for pieces in self._pieces]
        self._visits = layer_units.UnitVisits(model, memories, self._flow, self._carry_out)
        self._places = [(pieces, number) for pieces in self._pieces for number in pieces.unit.trained]
        parameters = [pieces.unit.parameters[number] for pieces, number in self._places]
        self._tap = GradientTap(parameters, self._on_gradient, self._before_gradient)

    def compute(self, computer: Computer, model: nn.Module, step: int) -> Computed:
        self._flow.begin("training")
        with self._visits.watching():
            return super().compute(computer, model, step)

    def evaluate(
        self, computer: Computer, model: nn.Module, *, alike: bool = False
    ) -> tuple[dict[str, float], int] | None:
        self._flow.begin("evaluation")
        with self._visits.watching():
            return super().evaluate(computer, model, alike=alike)

    def backward(self, loss: Tensor, share: float) -> None:
        self._flow.backward()
        (loss * share).backward()  # type: ignore[no-untyped-call]
        self._end_backward()

    def agree(self, local: LocalStep) -> SharedStep:
        """Collective: wait until all gradients are summed, and combine what all workers report."""
        self._meet()
        status = torch.zeros(status_items(self.world, len(self._places)), dtype=torch.float64)
        status[_LOSS] = local.loss * local.share if local.is_finite and local.share else 0.0
        status[_STOP] = float(local.stop)
        status[_FLAGS + self.rank] = float(not local.is_finite)
        reached = [number in pieces.reached for pieces, number in self._places]
        status[_FLAGS + self.world :] = torch.tensor(reached, dtype=torch.float64)
        reduced = self._run(lambda: self._group.all_reduce(status)).tolist()
        self._reached = [flag > 0 for flag in reduced[_FLAGS + self.world :]]
        bad = tuple(rank for rank in range(self.world) if reduced[_FLAGS + rank])
        if bad:
            self._show_pieces()
        loss = float("nan") if bad else reduced[_LOSS]
        return SharedStep(loss=loss, bad_workers=bad, stop=reduced[_STOP] > 0)

    def apply(self) -> None:
        """Step this worker's pieces; no worker reads them before it requests their units again."""
        for held, gradient in zip(self._held, self._summed(), strict=True):
            held.local.grad = None if gradient is None else gradient.view(held.local.shape)
        take_step(self._optimizer)
        self._optimizer.zero_grad()
        self._forget_sums()

    def _forget_sums(self) -> None:
        for pieces in self._pieces:
            pieces.sums = []
            pieces.reached.clear()

    def optimizer_state(self) -> dict[str, Any] | None:
        return self._run(partial(self._whole.optimizer_state, self._group))

    def model_state(self, model: nn.Module) -> Mapping[str, Tensor] | None:
        """Collective: assemble the model in host memory on worker 0, which must have the capacity for all of it."""
        return self._run(partial(self._whole.model_state, self._group, model))

    def total(self, values: Tensor) -> Tensor:
        self._carry_out(self._flow.end())
        return self._sum(values)

    def _sum(self, values: Tensor) -> Tensor:
        self._meet()
        return self._run(lambda: self._group.all_reduce(values))

    def _take_times(self) -> Times:
        waited, self._waited_ns = self._waited_ns, 0
        waits, self._unit_rounds.waits = self._unit_rounds.waits, {}
        return Times(exchange_ns=waited, wait_ns=waits, posts=self._group.take_traffic())

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._tap is not None:
            self._visits.close()
            self._tap.close()
            self._show_pieces()
        self._tap = None

    def _carry_out(self, actions: Iterable[layer_units.Action]) -> None:
        for action in actions:
            match action:
                case layer_units.Fetch(unit):
                    self._pieces[unit].memory.make_room()
                    request = UnitRequest(Want.VALUES, unit)
                    self._pending[unit] = self._thread.submit(self._unit_rounds.take, request)
                case layer_units.Await(unit):
                    if unit in self._pending:
                        self._wait_for(self._pending.pop(unit))
                case layer_units.Hand(unit):
                    self._await_sums()  # one sum may be in flight while the next layer computes
                    self._pieces[unit].hand_on()
                    request = UnitRequest(Want.SUM, unit)
                    self._handed.append(self._thread.submit(self._unit_rounds.take, request))
                case layer_units.Release(unit):
                    self._pieces[unit].memory.let_go()

    def _act(self, granted: Grant) -> None:
        pieces, wants_values = self._pieces[granted.request.unit], granted.request.want is Want.VALUES
        (pieces.give_values if wants_values else pieces.add_sums)(granted.members)

    def _end_backward(self) -> None:
        for pieces in self._pieces:
            if pieces.coming:  # some of its parameters were not reached
                self._carry_out(self._flow.complete(pieces.unit.number))
        self._carry_out(self._flow.end())
        self._flow.begin("training")

    def _before_gradient(self, index: int) -> None:
        """A gradient is about to be added to what the parameter has."""

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        pieces, number = self._places[index]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            raise UserError(
                f"a parameter of {pieces.unit.name!r} has a sparse gradient, but sharded needs dense ones; build it "
                "with sparse=False"
            )
        if pieces.add_gradient(number, gradient, self.weight):
            self._carry_out(self._flow.complete(pieces.unit.number))

    def _wait_for(self, future: Future[Result]) -> Result:
        begin = time.monotonic_ns()
        try:
            return future.result()
        finally:
            self._waited_ns += time.monotonic_ns() - begin

    def _run(self, work: Callable[[], Result]) -> Result:
        return self._wait_for(self._thread.submit(work))

    def _meet(self) -> None:
        """Collective: take part in the others' requests until every worker has arrived here."""
        self._await_sums()
        self._run(partial(self._unit_rounds.take, UnitRequest(Want.RENDEZVOUS)))

    def _await_sums(self) -> None:
        while self._handed:
            self._wait_for(self._handed.pop(0))

    def _summed(self) -> list[Tensor | None]:
        """By piece, in the order of `held`: the sum if any worker reached the parameter, else None."""
        reached = dict(zip(self._places, self._reached, strict=True))
        return [
            gradient if reached.get((pieces, number)) else None
            for pieces in self._pieces
            for number, gradient in pieces.gradients()
        ]

    def _show_pieces(self) -> None:
        """Point the model's parameters to this worker's pieces, so that a reader finds valid memory."""
        of_whole: dict[nn.Parameter, Tensor] = {held.whole: held.local.detach() for held in self._held}
        for pieces in self._pieces:
            for parameter in pieces.unit.parameters:
                parameter.data = of_whole.get(parameter, parameter.new_empty(0))


def status_items(world: int, trained: int) -> int:
    """How many float64 items workers agree on, where so many parameters are trained."""
    return _FLAGS + world + trained


class KeptPieces:
    """A worker's pieces of one unit: items of each row of its values, and of its gradient between backward and step.

    With `whole`, as some optimizers need it, every parameter has one owner, and pieces are whole tensors.
    """

    def __init__(self, memory: layer_units.UnitMemory, group: LinkGroup, *, whole: bool) -> None:
        self.memory, self._group = memory, group
        self.unit: layer_units.Unit = memory.unit
        self._ranges = [
            layer_units.piece_ranges(layout, group.world, whole=whole) for layout in self.unit.layouts
        ]
        self.values = [
            flat.new_empty(len(ranges[group.index]))
            for flat, ranges in zip(memory.flats, self._ranges, strict=True)
        ]
        self.sums: list[Tensor] = []
        self.reached: set[int] = set()  # the parameters that had a gradient here in this step
        self.coming: list[Tensor] = []  # gradients of the layer's backward, which were not handed on
        self._outgoing: list[Tensor] = []
        self.hand_on()

    def deal_out(self) -> None:
        """Collective, once: member 0 sends every worker its pieces of the parameters."""
        for row, (layout, ranges) in enumerate(zip(self.unit.layouts, self._ranges, strict=True)):
            if self._group.index:
                room = self.values[row].cpu()
                self._group.exchange({}, {0: room} if room.numel() else {})
                self.values[row].copy_(room)
                continue
            flat = torch.zeros(layout.count, dtype=layout.dtype)
            for number, items in layout.views(flat):
                items.copy_(self.unit.parameters[number].detach().reshape(-1))
            pieces = {index: flat[part.start : part.stop] for index, part in enumerate(ranges)}
            self.values[row].copy_(pieces.pop(0))
            self._group.exchange({index: piece for index, piece in pieces.items() if piece.numel()}, {})

    def held(self) -> Iterator[Held]:
        for layout, ranges, values in zip(self.unit.layouts, self._ranges, self.values, strict=True):
            for piece, begin in layer_units.pieces_in(layout, ranges[self._group.index]):
                parameter = self.unit.parameters[piece.parameter]
                count = piece.end - piece.begin
                part = values[begin : begin + count]
                cut: Cut | None = Cut(dim=None, begin=piece.begin, end=piece.end)
                if count == parameter.numel():
                    part, cut = part.view(parameter.shape), None
                local = nn.Parameter(part, requires_grad=parameter.requires_grad)
                yield Held(whole=parameter, local=local, shape=parameter.shape, cut=cut)

    def gradients(self) -> Iterator[tuple[int, Tensor | None]]:
        """Yield, by piece in the order of `held`, the parameter's number and the summed gradient or None."""
        for row, (layout, ranges) in enumerate(zip(self.unit.layouts, self._ranges, strict=True)):
            for piece, begin in layer_units.pieces_in(layout, ranges[self._group.index]):
                end = begin + piece.end - piece.begin
                yield piece.parameter, self.sums[row][begin:end] if self.sums else None

    def add_gradient(self, number: int, gradient: Tensor, weight: float) -> bool:
        if not self.coming:
            self.coming = [
                torch.zeros(layout.count, dtype=layout.dtype, device=values.device)
                for layout, values in zip(self.unit.layouts, self.values, strict=True)
            ]
            for layout, flat in zip(self.unit.layouts, self.coming, strict=True):
                self._views.update(layout.views(flat))
        put(self._views[number], gradient.reshape(-1), weight, add=True)
        self.reached.add(number)
        self._missing.discard(number)
        return not self._missing

    def hand_on(self) -> None:
        """Queue the gradients that have come for the next sum; later gradients belong to another sum."""
        assert not self._outgoing, "the last sum comes first"
        self._outgoing, self.coming = self.coming, []
        self._views: dict[int, Tensor] = {}
        self._missing = set(self.unit.trained)

    def give_values(self, members: Sequence[int]) -> None:
        """All members send their pieces to the members that requested the unit."""
        me = self._group.index
        wanted = me in members
        for flat, ranges, mine in zip(self.memory.flats, self._ranges, self.values, strict=True):
            on_host = mine.cpu()
            sends = {index: on_host for index in members if index != me and on_host.numel()}
            places = {
                index: flat[part.start : part.stop] for index, part in enumerate(ranges if wanted else ())
            }
            mine_here = places.pop(me, None)
            rooms = {
                index: place if flat.device.type == "cpu" else torch.empty_like(place, device="cpu")
                for index, place in places.items()
                if len(place)
            }
            self._group.exchange(sends, rooms)
            if mine_here is not None:
                mine_here.copy_(mine)
            if flat.device.type != "cpu":
                for index, room in rooms.items():
                    places[index].copy_(room)

    def keep_values(self) -> None:
        """The whole that is here has changed, on all workers alike: keep this worker's pieces of it."""
        for flat, ranges, mine in zip(self.memory.flats, self._ranges, self.values, strict=True):
            part = ranges[self._group.index]
            mine.copy_(flat[part.start : part.stop])

    def add_sums(self, members: Sequence[int]) -> None:
        """Sum the members' gradients in their order, each piece on its owner."""
        me = self._group.index
        if not self.sums:
            self.sums = [torch.zeros_like(values) for values in self.values]
        for row, (ranges, total) in enumerate(zip(self._ranges, self.sums, strict=True)):
            own = [self._outgoing[row][part.start : part.stop] for part in ranges] if me in members else []
            sends = {index: part.cpu() for index, part in enumerate(own) if index != me and len(part)}
            others = [index for index in members if index != me and total.numel()]
            rooms = {index: torch.empty(total.shape, dtype=total.dtype) for index in others}
            self._group.exchange(sends, rooms)
            if total.numel():  # 16-bit gradients are added in float32, and rounded once
                wide = total.to(torch.float32) if total.dtype in HALVES else total
                for index in members:
                    wide += rooms[index].to(total.device) if index != me else own[me]
                if wide is not total:
                    total.copy_(wide)
        if me in members:
            self._outgoing = []


# Rounds in which workers agree on the next exchange, so that they need not visit a model's units in the same order.
# Before each exchange every worker states its request: the values of a unit, the sum of a unit's gradient, or the
# rendezvous of all. The request of the first worker that has one is granted, every worker takes part, and the workers
# with the same request continue; the others state theirs again. So a worker may skip a layer, have no samples, or have
# fewer batches than the others, and no worker waits for an exchange that never comes. What is granted depends on the
# requests alone, so a run is reproducible bit for bit.
@unique
class Want(IntEnum):
    """What a worker waits for."""

    RENDEZVOUS = 0  # of all workers
    VALUES = 1  # of a unit
    SUM = 2  # of a unit's gradient, with this worker's added


class UnitRequest(NamedTuple):
    """One worker's next request."""

    want: Want
    unit: int = 0


WORDS_OF_REQUEST = len(UnitRequest._fields)  # of int64


class Grant(NamedTuple):
    """The exchange of this round, and the members that requested it, by their index in the group."""

    request: UnitRequest
    members: tuple[int, ...]


def grant(requests: Sequence[UnitRequest]) -> Grant:
    """Grant the first request that is not a rendezvous; a rendezvous only if no worker requests anything else."""
    chosen = next((one for one in requests if one.want is not Want.RENDEZVOUS), requests[0])
    return Grant(chosen, tuple(index for index, one in enumerate(requests) if one == chosen))


class UnitRounds:
    """One worker's side; `act` carries out a grant and is called on every member, in the same order."""

    def __init__(self, group: LinkGroup, act: Callable[[Grant], None]) -> None:
        self._group, self._act = group, act
        self.waits: dict[int, int] = {}
        """Nanoseconds in which this worker was idle waiting for others, by the worker waited for."""

    def take(self, request: UnitRequest) -> None:
        while True:
            self._group.take_waits()
            requests = self._group.all_gather(torch.tensor([request.want, request.unit]))
            if request.want is Want.RENDEZVOUS:
                for worker, waited in self._group.take_waits().items():
                    self.waits[worker] = self.waits.get(worker, 0) + waited
            pairs = (one.tolist() for one in requests)
            granted = grant([UnitRequest(Want(want), unit) for want, unit in pairs])
            if granted.request.want is not Want.RENDEZVOUS:
                self._act(granted)
            if self._group.index in granted.members:
                return
