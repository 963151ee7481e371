"""A group of workers that exchange tensors over their links.

All members make the same calls in the same order. Sums are computed in the order of the members, whatever the size,
so every member has the same bits, in every run; 16-bit types are added in float32 and rounded once.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor, nn

from manyhands.data.batches import split
from manyhands.engine.exchange import LocalStep, PeerTraffic, SharedStep, Traffic
from manyhands.errors import UserError
from manyhands.native.dtypes import HALVES
from manyhands.strategies.common.collectives.mailbox import Mailbox
from manyhands.strategy import MIB
from manyhands.transport.link.interface import Link

# Up to this many bytes every member sends everything to all; above, each sums a part and sends the result to all.
_AT_ONCE_BYTES: Final = 128 << 10
# A message of at most this size takes negligible time: waiting for one is waiting for its sender.
_QUICK_BYTES: Final = 64 << 10
_BUCKET_BYTES: Final = 25 * MIB
_FLAG_TYPE: Final = torch.int32
_VALUE_TYPE: Final = torch.float64
_VALUES: Final = 2  # that workers agree on, before a flag of each: the loss, and whether to stop


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
            raise UserError(f"rank={rank}: must be one of the members {list(members)}")
        self.members = tuple(members)
        self.index = self.members.index(rank)
        self.name, self._kind = name, kind
        self._mailbox = Mailbox(rank, links, timeout_s)
        self._calls = 0
        self._waited = [0] * self.world

    @property
    def world(self) -> int:
        return len(self.members)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Collective: the sum over the members, in place; all bring one shape and type."""
        if self.world == 1 or not tensor.numel():
            return tensor
        flat = _flat(tensor)
        if flat.nbytes <= _AT_ONCE_BYTES:
            rooms = {index: torch.empty_like(flat) for index in self._others()}
            self.exchange(dict.fromkeys(self._others(), flat), rooms)
            flat.copy_(_sum([rooms.get(index, flat) for index in range(self.world)]))
        else:
            spans = [split(flat.numel(), index, self.world) for index in range(self.world)]
            pieces = [flat[span.start : span.stop] for span in spans]
            mine = pieces[self.index]
            rooms = {index: torch.empty_like(mine) for index in self._others()}
            self.exchange({index: pieces[index] for index in self._others()}, rooms)
            mine.copy_(_sum([rooms.get(index, mine) for index in range(self.world)]))
            self._hand_out(pieces)
        return _back(tensor, flat)

    def all_gather(self, mine: Tensor, sizes: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
        """Collective: every member's tensor, in their order; `sizes` are their shapes, where they differ."""
        shapes = [torch.Size(size) for size in sizes] if sizes is not None else [mine.shape] * self.world
        if self.world == 1:
            return [mine]
        flat = _flat(mine)
        pieces = [flat.new_empty(shape.numel()) for shape in shapes]
        pieces[self.index] = flat
        self._hand_out(pieces)
        found = [piece.view(shape).to(mine.device) for piece, shape in zip(pieces, shapes, strict=True)]
        found[self.index] = mine
        return found

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        if self.world == 1 or not tensor.numel():
            return tensor
        flat = _flat(tensor)
        if self.index == root:
            self.exchange(dict.fromkeys(self._others(), flat), {})
        else:
            self.exchange({}, {root: flat})
        return _back(tensor, flat)

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send a flat tensor to each of some members and fill one from each of some; all on the host, none twice.

        Whoever sends to a member is awaited by it in the same call, counted from the group's first.
        """
        self._mailbox.enter(self.name, self._kind, self._calls, 1)
        self._calls += 1
        if any(one.nbytes > _QUICK_BYTES for one in (*sends.values(), *receives.values())):
            out, into = ({self.members[at]: one for at, one in some.items()} for some in (sends, receives))
            if self._mailbox.exchange(out, into):
                return
        refused = self._mailbox.post((self.members[index], payload) for index, payload in sends.items())
        for index, space in receives.items():
            begin = time.monotonic_ns()
            refused, _ = self._mailbox.receive(self.members[index], space, refused)
            if space.nbytes <= _QUICK_BYTES:
                self._waited[index] += time.monotonic_ns() - begin
        self._mailbox.flush(refused, [self.members[index] for index in sends])

    def traffic(self) -> Traffic:
        return self._mailbox.traffic()

    def take_traffic(self) -> Mapping[int, PeerTraffic]:
        return self._mailbox.take_traffic()

    def take_waits(self) -> Mapping[int, int]:
        """How many nanoseconds this member waited for each worker to come since the last call, by their numbers.

        It is what small messages took; the time of a large one may be its own.
        """
        waits, self._waited = self._waited, [0] * self.world
        return {worker: waited for worker, waited in zip(self.members, waits, strict=True) if waited}

    def _others(self) -> list[int]:
        return [index for index in range(self.world) if index != self.index]

    def _hand_out(self, pieces: Sequence[Tensor]) -> None:
        mine = pieces[self.index]
        self.exchange(dict.fromkeys(self._others(), mine), {index: pieces[index] for index in self._others()})


class PlayedGroup(LinkGroup):
    """One member's end of a group that is not there: what members send is counted, and what it receives is zeros.

    It takes as much memory meanwhile as a member's end does.
    """

    def __init__(self, index: int, world: int) -> None:
        super().__init__(index, range(world), {}, 1.0, kind=0, name="played")
        self._sent = [Traffic()] * world

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.world == 1 or not tensor.numel():
            return tensor
        flat, others = _flat(tensor), self.world - 1
        pieces, messages = [flat.nbytes] * self.world, others
        sent = [others * flat.nbytes] * self.world
        if flat.nbytes > _AT_ONCE_BYTES:
            pieces = [
                flat.itemsize * len(split(flat.numel(), index, self.world)) for index in range(self.world)
            ]
            sent = [flat.nbytes - piece + others * piece for piece in pieces]
            messages += others
        self._count(sent, messages)
        # The pieces of the others, and their sum: of 16-bit types in 32 bits, and then rounded.
        of_sum = 3 if flat.dtype in HALVES else 1
        flat.new_empty((others + of_sum) * pieces[self.index], dtype=torch.uint8)
        return tensor

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        num_bytes = sum(payload.nbytes for payload in sends.values())
        self._sent[self.index] += Traffic(messages_sent=len(sends), bytes_sent=num_bytes)
        for space in receives.values():
            space.zero_()

    def traffic(self) -> Traffic:
        return self._sent[self.index]

    def traffic_of(self, index: int) -> Traffic:
        """What a member sends in the sums and gathers; what it sends to single members, only its own end knows."""
        return self._sent[index]

    def _hand_out(self, pieces: Sequence[Tensor]) -> None:
        others = self.world - 1
        self._count([others * piece.nbytes for piece in pieces], others)
        for index in self._others():
            pieces[index].zero_()

    def _count(self, num_bytes: Sequence[int], messages: int) -> None:
        """A collective call, with the bytes of each member."""
        self._sent = [
            before + Traffic(messages_sent=messages, bytes_sent=more)
            for before, more in zip(self._sent, num_bytes, strict=True)
        ]


def _traffic_of_sum(num_bytes: int, index: int, members: int) -> Traffic:
    """What one member sends for an `all_reduce` of so many bytes."""
    others = members - 1
    if not (num_bytes and others):
        return Traffic()
    if num_bytes <= _AT_ONCE_BYTES:
        return Traffic(messages_sent=others, bytes_sent=others * num_bytes)
    mine = len(split(num_bytes, index, members))
    return Traffic(messages_sent=2 * others, bytes_sent=num_bytes - mine + others * mine)


@lru_cache(maxsize=4096)
def traffic_of_sum(num_bytes: int, members: int) -> Traffic:
    """What all members together send for an `all_reduce` of so many bytes."""
    sent = (_traffic_of_sum(num_bytes, index, members) for index in range(members))
    return sum(sent, Traffic())


def traffic_of_gradients(members: int, parameters: Sequence[nn.Parameter]) -> Traffic:
    """What all members together send for a `sum_gradients` of parameters that have the gradients of a step."""
    trained = [one for one in parameters if one.requires_grad]
    if members == 1 or not trained:
        return Traffic()
    total = traffic_of_sum(_FLAG_TYPE.itemsize * len(trained), members)
    for bucket in _buckets([one for one in trained if one.grad is not None]):
        total += traffic_of_sum(sum(one.nbytes for one in bucket), members)
    return total


def traffic_of_sums(num_bytes: int, members: int) -> Traffic:
    """The same of gradients of which only the bytes are known."""
    rest = num_bytes % _BUCKET_BYTES
    whole = traffic_of_sum(_BUCKET_BYTES, members) if num_bytes >= _BUCKET_BYTES else Traffic()
    count = num_bytes // _BUCKET_BYTES
    total = Traffic(messages_sent=count * whole.messages_sent, bytes_sent=count * whole.bytes_sent)
    return total + traffic_of_sum(rest, members)


def memory_of_sums(num_bytes: int, members: int) -> int:
    """What a member takes at most beside its gradients of so many bytes while they are summed."""
    bucket = min(num_bytes, _BUCKET_BYTES)
    if members == 1:
        return 0
    # All of the bucket in one piece; beside it the pieces of the others, and their sum.
    return (members + 1) * bucket if bucket <= _AT_ONCE_BYTES else 2 * bucket


def traffic_of_agreement(workers: int) -> Traffic:
    """What all workers together send for an `agree_on`."""
    return traffic_of_sum(_VALUE_TYPE.itemsize * (_VALUES + workers), workers)


def waits_of(groups: Iterable[LinkGroup]) -> dict[int, int]:
    """What a worker that is in several groups waited for each other one since the last call, in nanoseconds."""
    waits: Counter[int] = Counter()
    for group in groups:
        waits.update(group.take_waits())
    return waits


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1)


def _back(tensor: Tensor, flat: Tensor) -> Tensor:
    if tensor.untyped_storage()._cdata != flat.untyped_storage()._cdata:
        with torch.no_grad():
            tensor.copy_(flat.view(tensor.shape))
    return tensor


def _sum(addends: Sequence[Tensor]) -> Tensor:
    first = addends[0]
    total = first.to(torch.float32) if first.dtype in HALVES else first.clone()
    for addend in addends[1:]:
        total += addend
    return total.to(first.dtype)


def sum_gradients(group: LinkGroup, parameters: Sequence[nn.Parameter]) -> None:
    """Collective: each parameter's gradient becomes the sum over the members, with the same bits on all of them.

    All members give parameters of the same shapes, in the same order. A parameter that no worker reached keeps no
    gradient, as in one process: weight decay and momentum would move it.
    """
    trained = [one for one in parameters if one.requires_grad]
    if group.world == 1 or not trained:
        return
    reached = group.all_reduce(torch.tensor([one.grad is not None for one in trained], dtype=_FLAG_TYPE))
    anyone = [one for one, count in zip(trained, reached.tolist(), strict=True) if count]
    for bucket in _buckets(anyone):
        given = [torch.zeros_like(one) if one.grad is None else one.grad for one in bucket]
        dense = [one.to_dense() if one.is_sparse else one for one in given]
        flat = group.all_reduce(torch.cat([gradient.reshape(-1) for gradient in dense]))
        for one, part in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
            one.grad = part.view(one.shape)


def agree_on(group: LinkGroup, local: LocalStep, *, counts: bool = True) -> SharedStep:
    """Collective over all workers: the mean loss, whose was not finite, and whether any worker wants to stop.

    Of several workers on the same samples, one `counts`.
    """
    values = torch.zeros(_VALUES + group.world, dtype=_VALUE_TYPE)
    values[1] = local.stop
    if not local.is_finite:
        values[_VALUES + group.index] = 1
    elif counts and local.share:
        values[0] = local.loss * local.share
    values = group.all_reduce(values)
    bad = tuple(index for index, flag in enumerate(values[_VALUES:].tolist()) if flag)
    return SharedStep(loss=math.nan if bad else float(values[0]), bad_workers=bad, stop=bool(values[1]))


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for one in parameters:
        alike = not bucket or (one.dtype, one.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not alike or size + one.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(one)
        size += one.nbytes
    if bucket:
        yield bucket
