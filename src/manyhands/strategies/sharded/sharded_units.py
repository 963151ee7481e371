"""One worker's pieces of each unit, and the exchanges that gather units and sum their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum, unique
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyhands.native.dtypes import HALVES
from manyhands.strategies.common.grid.grid_group import LinkGroup
from manyhands.strategies.common.grid.held import Cut, Held
from manyhands.strategies.common.sharding.layer_units import Unit, UnitMemory, piece_ranges, pieces_in

__all__ = ["Grant", "KeptPieces", "UnitRequest", "UnitRounds", "Want", "grant"]


class KeptPieces:
    """A worker's pieces of one unit: items of each row of its values, and of its gradient between backward and step.

    With `whole`, as some optimizers need it, every parameter has one owner, and pieces are whole tensors.
    """

    def __init__(self, memory: UnitMemory, group: LinkGroup, *, whole: bool) -> None:
        self.memory, self._group = memory, group
        self.unit: Unit = memory.unit
        self._ranges = [piece_ranges(layout, group.world, whole=whole) for layout in self.unit.layouts]
        self.values = [
            flat.new_empty(len(ranges[group.index]))
            for flat, ranges in zip(memory.flats, self._ranges, strict=True)
        ]
        self._sums: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._outgoing: list[Tensor] = []
        self._views: dict[int, Tensor] = {}
        self.reached: set[int] = set()
        """The parameters that had a gradient here in this step."""
        self._missing = set(self.unit.trained)

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
            for piece, begin in pieces_in(layout, ranges[self._group.index]):
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
            for piece, begin in pieces_in(layout, ranges[self._group.index]):
                end = begin + piece.end - piece.begin
                yield piece.parameter, self._sums[row][begin:end] if self._sums else None

    def add_gradient(self, number: int, gradient: Tensor) -> bool:
        if not self._gradients:
            self._gradients = [
                torch.zeros(layout.count, dtype=layout.dtype, device=values.device)
                for layout, values in zip(self.unit.layouts, self.values, strict=True)
            ]
            for layout, flat in zip(self.unit.layouts, self._gradients, strict=True):
                self._views.update(layout.views(flat))
        self._views[number].add_(gradient.reshape(-1))
        self.reached.add(number)
        self._missing.discard(number)
        return not self._missing

    @property
    def is_pending(self) -> bool:
        return bool(self._gradients)

    def hand_on(self) -> None:
        """Queue the gradients that have come for the next sum; later gradients belong to another sum."""
        assert not self._outgoing, "the last sum comes first"
        self._outgoing, self._gradients, self._views = self._gradients, [], {}
        self._missing = set(self.unit.trained)

    def act(self, granted: Grant) -> None:
        if granted.request.want is Want.VALUES:
            self._give_values(granted.members)
        else:
            self._add_sums(granted.members)

    def forget_gradients(self) -> None:
        self._sums = []
        self.reached.clear()

    def _give_values(self, members: Sequence[int]) -> None:
        """All members send their pieces to the members that requested the unit."""
        me = self._group.index
        wanted = me in members
        for flat, ranges, mine in zip(self.memory.flats, self._ranges, self.values, strict=True):
            on_host = mine.cpu()
            sends = {index: on_host for index in members if index != me and on_host.numel()}
            rooms = {
                index: room if flat.device.type == "cpu" else torch.empty_like(room, device="cpu")
                for index, part in enumerate(ranges if wanted else ())
                if index != me and len(part)
                for room in (flat[part.start : part.stop],)
            }
            self._group.exchange(sends, rooms)
            if not wanted:
                continue
            flat[ranges[me].start : ranges[me].stop].copy_(mine)
            if flat.device.type != "cpu":
                for index, room in rooms.items():
                    flat[ranges[index].start : ranges[index].stop].copy_(room)

    def _add_sums(self, members: Sequence[int]) -> None:
        """Sum the members' gradients in their order, each piece on its owner."""
        me = self._group.index
        if not self._sums:
            self._sums = [torch.zeros_like(values) for values in self.values]
        for row, (ranges, total) in enumerate(zip(self._ranges, self._sums, strict=True)):
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
            granted = grant(
                [UnitRequest(Want(want), unit) for want, unit in (one.tolist() for one in requests)]
            )
            if granted.request.want is not Want.RENDEZVOUS:
                self._act(granted)
            if self._group.index in granted.members:
                return
