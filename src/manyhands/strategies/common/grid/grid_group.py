"""A group of workers that exchange tensors over their links.

All members make the same calls in the same order. Sums are computed in the order of the members, whatever the size,
so every member has the same bits, in every run; 16-bit types are added in float32 and rounded once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from manyhands.data.batch_plan import split
from manyhands.engine.exchange import PeerTraffic, Traffic
from manyhands.errors import UserError
from manyhands.native.dtypes import HALVES
from manyhands.strategies.common.collectives.mailbox import LinkMessage, Mailbox
from manyhands.transport.link.interface import Link

__all__ = ["LinkGroup", "waits_of"]

_AT_ONCE_BYTES: Final = 128 << 10
"""Up to this many bytes every member sends everything to all; above, each sums a part and sends the result to all."""

_QUICK_BYTES: Final = 64 << 10
"""A message of at most this size takes negligible time: waiting for one is waiting for its sender."""


class LinkGroup:
    """One worker's end; `members` are numbers of workers, and `rank` is this one's among all workers.

    `links` has one to each other member, and stays the caller's. A wait lasts at most `timeout_s` and then raises
    PeerTimeout, a member that died or left raises WorkerFailed; both name it by its number among all workers. `kind`
    tells the messages of groups apart that share links. Tensors on a GPU travel through the host's memory.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        links: Mapping[int, Link],
        timeout_s: float,
        *,
        kind: int,
        name: str = "group",
    ) -> None:
        if rank not in members:
            raise UserError(f"rank={rank}: not one of the members {list(members)}")
        self.members = tuple(members)
        self.index = self.members.index(rank)
        self.name = name
        self._kind = kind
        self._mailbox = Mailbox(rank, links, timeout_s)
        self._calls = 0
        self._waited = [0] * self.world

    @property
    def world(self) -> int:
        """The number of members."""
        return len(self.members)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Collective: the sum over the members, in place; all bring one shape and type."""
        if self.world == 1 or not tensor.numel():
            return tensor
        flat = _flat(tensor)
        if flat.nbytes <= _AT_ONCE_BYTES:
            self._sum_at_once(flat)
        else:
            pieces = [flat[p.start : p.stop] for p in self._pieces(flat.numel())]
            pieces[self.index].copy_(self._scatter_sum(pieces))
            self._hand_out(pieces)
        return _back(tensor, flat)

    def reduce_scatter(self, pieces: Sequence[Tensor]) -> Tensor:
        """Collective: of one piece for each member, this one's summed over all; sizes may differ."""
        if len(pieces) != self.world:
            raise UserError(f"{len(pieces)} pieces for {self.world} members; give one for each")
        if self.world == 1:
            return pieces[0].clone()
        mine = pieces[self.index]
        return self._scatter_sum([_flat(piece) for piece in pieces]).view(mine.shape).to(mine.device)

    def all_gather(self, mine: Tensor, sizes: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
        """Collective: every member's tensor, in their order; `sizes` are their shapes, where they differ."""
        shapes = [torch.Size(size) for size in sizes] if sizes is not None else [mine.shape] * self.world
        if self.world == 1:
            return [mine]
        flat = _flat(mine)
        pieces = [
            flat if index == self.index else flat.new_empty(shape.numel())
            for index, shape in enumerate(shapes)
        ]
        self._hand_out(pieces)
        return [
            mine if index == self.index else piece.view(shape).to(mine.device)
            for index, (piece, shape) in enumerate(zip(pieces, shapes, strict=True))
        ]

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Collective: member `root`'s tensor becomes everyone's, in place."""
        if self.world == 1 or not tensor.numel():
            return tensor
        flat = _flat(tensor)
        others = [index for index in range(self.world) if index != root]
        if self.index == root:
            self.exchange(dict.fromkeys(others, flat), {})
        else:
            self.exchange({}, {root: flat})
        return _back(tensor, flat)

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send a flat tensor to each of some members and fill one from each of some; all on the host, none twice.

        Whoever sends to a member is awaited by it in the same call, counted from the group's first.
        """
        self._mailbox.enter(self.name, self._kind, self._calls, 1)
        self._calls += 1
        letters: list[LinkMessage] = [(self.members[index], payload) for index, payload in sends.items()]
        refused = self._mailbox.post(letters)
        for index, space in receives.items():
            begin = time.monotonic_ns()
            refused, _ = self._mailbox.receive(self.members[index], space, refused)
            if space.nbytes <= _QUICK_BYTES:
                self._waited[index] += time.monotonic_ns() - begin
        self._mailbox.flush(refused, [peer for peer, _ in letters])

    def barrier(self) -> None:
        """Collective: return when every member has arrived."""
        self.all_reduce(torch.zeros(1))

    def traffic(self) -> Traffic:
        """Return what this member has sent so far."""
        return Traffic(messages_sent=self._mailbox.messages_sent, bytes_sent=self._mailbox.bytes_sent)

    def take_traffic(self) -> Mapping[int, PeerTraffic]:
        """What went to and came from each worker since the last call, by their numbers."""
        return self._mailbox.take_traffic()

    def take_waits(self) -> Mapping[int, int]:
        """How many nanoseconds this member waited for each worker to come since the last call, by their numbers.

        It is what small messages took; the time of a large one may be its own.
        """
        waits, self._waited = self._waited, [0] * self.world
        return {worker: waited for worker, waited in zip(self.members, waits, strict=True) if waited}

    def _others(self) -> list[int]:
        return [index for index in range(self.world) if index != self.index]

    def _pieces(self, count: int) -> list[range]:
        return [split(count, index, self.world) for index in range(self.world)]

    def _sum_at_once(self, flat: Tensor) -> None:
        """Send everything to all members; each adds up."""
        rooms = {index: torch.empty_like(flat) for index in self._others()}
        self.exchange(dict.fromkeys(self._others(), flat), rooms)
        flat.copy_(_sum([rooms.get(index, flat) for index in range(self.world)]))

    def _scatter_sum(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return this member's piece, summed."""
        mine = pieces[self.index]
        rooms = {index: torch.empty_like(mine) for index in self._others()}
        self.exchange({index: pieces[index] for index in self._others()}, rooms)
        return _sum([rooms.get(index, mine) for index in range(self.world)])

    def _hand_out(self, pieces: Sequence[Tensor]) -> None:
        """Send this member's piece to all, and receive theirs."""
        mine = pieces[self.index]
        self.exchange(dict.fromkeys(self._others(), mine), {index: pieces[index] for index in self._others()})


def waits_of(groups: Iterable[LinkGroup]) -> dict[int, int]:
    """What a worker that is in several groups waited for each other one since the last call, in nanoseconds."""
    waits: dict[int, int] = {}
    for group in groups:
        for worker, waited_ns in group.take_waits().items():
            waits[worker] = waits.get(worker, 0) + waited_ns
    return waits


def _flat(tensor: Tensor) -> Tensor:
    """Return the items as one row in host memory; without a copy if they already are."""
    return tensor.detach().cpu().contiguous().view(-1)


def _back(tensor: Tensor, flat: Tensor) -> Tensor:
    """Return the tensor with the items of `flat`."""
    if tensor.data_ptr() != flat.data_ptr():
        with torch.no_grad():
            tensor.copy_(flat.view(tensor.shape))
    return tensor


def _sum(addends: Sequence[Tensor]) -> Tensor:
    """Sum the tensors in their order."""
    first = addends[0]
    total = first.to(torch.float32) if first.dtype in HALVES else first.clone()
    for addend in addends[1:]:
        total += addend
    return total.to(first.dtype)
