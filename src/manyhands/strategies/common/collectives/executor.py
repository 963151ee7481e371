"""The one executor: runs any schedule over any link.

In each round it posts the sends, takes the receives in their order, flushes, and only then applies what
arrived for chunks that were leaving (`plan` says which). Posting before waiting is what the proof of
freedom from deadlock assumes.

The result has the same bits on every rank and in every run: the schedule fixes the order of additions, and
the executor puts the lower rank's value on the left. Halves (bfloat16, float16) are rounded after each
addition, except in a fold, which adds in float32 and rounds once. A mean is the sum divided by the world
size, by every rank. With a codec, what leaves is rounded as `carrying` says; a `Compressor` goes ways of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final, Literal, get_args

import torch

from manyhands.engine.exchange import PeerTraffic
from manyhands.errors import UserError, nearest
from manyhands.native.dtypes import HALVES, SUMMED
from manyhands.strategies.common.collectives.algorithms import broadcast
from manyhands.strategies.common.collectives.compressed import Compressor
from manyhands.strategies.common.collectives.mailbox import Mailbox
from manyhands.strategies.common.collectives.message_encoding import Encoded
from manyhands.strategies.common.collectives.row_sums import GradientRows, sum_rows
from manyhands.strategies.common.collectives.schedule import Algorithm, How
from manyhands.strategies.common.collectives.vector_plan import Fold, Landing, Plan, Round, lay_plan
from manyhands.transport.link.interface import Link
from manyhands.transport.liveness import Alarm
from manyhands.wire.codec import ParcelCodec, encodes
from manyhands.wire.parcels import Parcel

__all__ = ["Op", "ScheduleExecutor", "Sent"]

Op = Literal["sum", "mean", "max"]

_OPERATIONS: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What one call sent from this rank: messages, and bytes of payload."""

    messages: int
    num_bytes: int


class _Kind(IntEnum):
    """Which collective a message belongs to."""

    ALL_REDUCE = 1
    BROADCAST = 2
    BARRIER = 3
    COMPRESSED = 4
    ROWS = 5
    WORDS = 6


class ScheduleExecutor:
    """One rank's end of collectives over `links`, which stay the caller's; all-reduces go by `algorithm`.

    `links` has one link to each rank that is exchanged with. All ranks make the same calls in the same
    order, one thread each. A wait for a peer lasts at most `timeout_s` and then raises PeerTimeout; a peer
    that died or left raises WorkerFailed. Both name the rank, the peer, the round and the algorithm; the
    executor is then of no further use. An `alarm` ends every wait. Scratch space is kept between calls. Parcels that
    need not be exact travel in the `codec`, if there is one: the same on all ranks; or as the `Compressor` has it.
    Where the ranks are some of many workers, `roles` are their numbers among all, by which errors name them.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        rank: int,
        world: int,
        links: Mapping[int, Link],
        timeout_s: float,
        alarm: Alarm | None = None,
        codec: ParcelCodec | Compressor | None = None,
        roles: Sequence[int] | None = None,
    ) -> None:
        algorithm.table(rank, world)  # refuses a rank outside the world
        self.algorithm = algorithm
        self.rank = rank
        self.world = world
        self._mailbox = Mailbox(rank, links, timeout_s, alarm, roles)
        self.carry_by(codec)
        self._rooms: dict[str, torch.Tensor] = {}
        self._calls = 0

    @property
    def messages_sent(self) -> int:
        """Messages this rank has sent so far."""
        return self._mailbox.messages_sent

    @property
    def bytes_sent(self) -> int:
        """Bytes of payload this rank has sent so far."""
        return self._mailbox.bytes_sent

    def carry_by(self, codec: ParcelCodec | Compressor | None) -> None:
        """Switch the codec from the next call on; all ranks switch between the same two calls."""
        self._compressor = codec if isinstance(codec, Compressor) else None
        self._codec = codec if isinstance(codec, ParcelCodec) else None

    def encodes(self, parcel: Parcel) -> bool:
        """Whether a parcel travels encoded."""
        if self._compressor is not None and not parcel.exact:
            return self._compressor.encodes(parcel)
        return encodes(self._codec, parcel)

    def at(self, step: int) -> None:
        """Begin a step: what is summed from here on belongs to it."""
        if self._compressor is not None:
            self._compressor.at(step)

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the codec residuals."""
        return {} if self._compressor is None else self._compressor.memory()

    def remember(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Restore the residuals that a rank of this number kept."""
        if self._compressor is not None:
            self._compressor.remember(memory)

    def take_traffic(self) -> Mapping[int, PeerTraffic]:
        """Return what went to and came from each peer since the last call."""
        return self._mailbox.take_traffic()

    def all_reduce(
        self,
        buffer: torch.Tensor,
        op: Op = "sum",
        parcel: Parcel | None = None,
        algorithm: Algorithm | None = None,
    ) -> Sent:
        """Collective: every rank's `buffer`, of one length and dtype, becomes their sum, mean or maximum.

        Without a `parcel`, which names all of it, it travels as it is; without an `algorithm`, the executor's own way.
        """
        if op not in _OPERATIONS:
            raise UserError(f"op={op}: no such reduction; {nearest(op, get_args(Op))}")
        vector = _checked(buffer)
        if self._compressor is not None and parcel is not None and op == "sum" and self.encodes(parcel):
            return self._compress(self._compressor, vector, parcel)
        way = algorithm or self.algorithm
        plan = _all_reduce_plan(way, self.rank, self.world, vector.numel())
        encoded = None
        if self._codec is not None and parcel is not None and self.encodes(parcel):
            encoded = Encoded(self._codec, parcel, vector, self._bytes)
        sent = self._run(_Kind.ALL_REDUCE, way.name, plan, vector, op, encoded)
        if op == "mean":
            vector.div_(self.world)
        return sent

    def sum_rows(self, mine: GradientRows, below: int) -> GradientRows:
        """Collective: the sum over ranks of rows of a table that has `below` of them."""
        call = self._calls
        self._calls += 1

        def enter(number: int) -> None:
            self._mailbox.enter("sum of rows", _Kind.ROWS, call, number)

        return sum_rows(mine, below, self.rank, self.world, self._mailbox, enter)

    def gather(self, mine: torch.Tensor) -> tuple[list[torch.Tensor], dict[int, tuple[int, int]]]:
        """Collective: return every rank's few bytes, of one length, and the interval in which each was waited for."""
        self._mailbox.enter("exchange of reports", _Kind.WORDS, self._calls, 1)
        self._calls += 1
        peers = [(self.rank + distance) % self.world for distance in range(1, self.world)]
        refused = self._mailbox.post((peer, mine) for peer in peers)
        found, waits = [mine] * self.world, {}
        for peer in peers:
            begin_ns = time.monotonic_ns()
            found[peer] = torch.empty_like(mine)
            refused, _ = self._mailbox.receive(peer, found[peer], refused)
            waits[peer] = begin_ns, time.monotonic_ns()
        self._mailbox.flush(refused, peers)
        return found, waits

    def broadcast(self, buffer: torch.Tensor, root: int = 0) -> Sent:
        """Collective: every rank's `buffer` becomes that of rank `root`, down a binomial tree."""
        if not 0 <= root < self.world:
            raise UserError(f"root={root}: must be a rank from 0 to {self.world - 1}")
        vector = _checked(buffer)
        plan = _broadcast_plan(self.rank, self.world, root, vector.numel())
        return self._run(_Kind.BROADCAST, "tree", plan, vector)

    def barrier(self) -> Sent:
        """Collective: return when every rank has arrived; an all-reduce of nothing."""
        plan = _all_reduce_plan(self.algorithm, self.rank, self.world, 0)
        return self._run(_Kind.BARRIER, self.algorithm.name, plan, torch.empty(0))

    def _compress(self, compressor: Compressor, vector: torch.Tensor, parcel: Parcel) -> Sent:
        before, call = (self.messages_sent, self.bytes_sent), self._calls
        self._calls += 1  # those of sums inside come after it

        def enter(number: int) -> None:
            self._mailbox.enter("compressed all-reduce", _Kind.COMPRESSED, call, number)

        compressor.all_reduce(vector, parcel, self._mailbox, enter, self.all_reduce)
        return Sent(messages=self.messages_sent - before[0], num_bytes=self.bytes_sent - before[1])

    def _run(
        self,
        kind: _Kind,
        by: str,
        plan: Plan,
        vector: torch.Tensor,
        op: Op = "sum",
        encoded: Encoded | None = None,
    ) -> Sent:
        before = self.messages_sent, self.bytes_sent
        name = f"{kind.name.lower().replace('_', '-')} by {by}"
        scratch = self._room(str(vector.dtype), plan.scratch_count, vector.dtype)
        wide = self._room("wide", plan.fold_count, torch.float32) if vector.dtype in HALVES else None
        arithmetic = _Arithmetic(self.rank, vector, scratch, wide, _OPERATIONS[op])
        for number, work in enumerate(plan.rounds, start=1):
            if work.departures or work.landings or work.folds:  # a rank of a tree has nothing to do in most
                self._mailbox.enter(name, kind, self._calls, number)
                self._run_round(work, arithmetic, encoded)
        if encoded is not None:
            encoded.settle(plan.own_results)
        self._calls += 1
        return Sent(messages=self.messages_sent - before[0], num_bytes=self.bytes_sent - before[1])

    def _run_round(self, work: Round, arithmetic: _Arithmetic, encoded: Encoded | None) -> None:
        if encoded is None:
            refused = self._mailbox.post([(d.to, arithmetic.items(d.begin, d.end)) for d in work.departures])
        else:
            refused = self._mailbox.post(encoded.letters(work.departures))
        deferred: list[tuple[Landing, torch.Tensor]] = []
        for landing in work.landings:
            space = arithmetic.space(landing)
            if encoded is None:
                refused, _ = self._mailbox.receive(landing.source, space, refused)
            else:
                refused = encoded.receive(self._mailbox, landing, space, refused)
            if landing.deferred:
                deferred.append((landing, space))
            else:
                arithmetic.apply(landing, space)
        self._mailbox.flush(refused, work.peers)
        for landing, space in deferred:
            arithmetic.apply(landing, space)
        for fold in work.folds:
            arithmetic.fold(fold)

    def _bytes(self, name: str, num_bytes: int) -> torch.Tensor:
        return self._room(name, num_bytes, torch.uint8)

    def _room(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        room = self._rooms.get(name)
        if room is None or room.numel() < count:
            room = self._rooms[name] = torch.empty(count, dtype=dtype)
        return room


class _Arithmetic:
    """The arithmetic on items that arrive: all reading and writing of the vector.

    `wide` is float32 space for the folds of halves, None for a vector that needs none.
    """

    def __init__(
        self,
        rank: int,
        vector: torch.Tensor,
        scratch: torch.Tensor,
        wide: torch.Tensor | None,
        operation: Callable[..., torch.Tensor],
    ) -> None:
        self.vector = vector
        self._count = vector.numel()
        self._rank = rank
        self._scratch = scratch
        self._wide = wide
        self._operation = operation

    def items(self, begin: int, end: int) -> torch.Tensor:
        """Return a part of the vector; all of it comes unsliced, as a slice costs more than adding a few items."""
        return self.vector if not begin and end == self._count else self.vector[begin:end]

    def space(self, landing: Landing) -> torch.Tensor:
        """Where a message lands."""
        if landing.scratch is None:
            return self.items(landing.begin, landing.end)
        return self._scratch[landing.scratch : landing.scratch + landing.end - landing.begin]

    def apply(self, landing: Landing, got: torch.Tensor) -> None:
        """Apply a message that landed in its space; one that is kept has no effect yet."""
        if landing.scratch is None or landing.how is How.KEEP:
            return
        mine = self.items(landing.begin, landing.end)
        if landing.how is How.COPY:
            mine.copy_(got)
        elif landing.source < self._rank:
            self._operation(got, mine, out=mine)
        else:
            self._operation(mine, got, out=mine)

    def fold(self, fold: Fold) -> None:
        """Sum own and kept items in rank order."""
        count = fold.end - fold.begin
        mine = self.items(fold.begin, fold.end)
        first, *rest = (mine if at is None else self._scratch[at : at + count] for at in fold.addends)
        if not rest:
            return
        if self._wide is not None:
            total = self._wide[:count].copy_(first)
            for addend in rest:
                self._operation(total, addend, out=total)
            mine.copy_(total)
            return
        for addend in rest[:-1]:
            self._operation(first, addend, out=first)
        self._operation(first, rest[-1], out=mine)


def _checked(buffer: torch.Tensor) -> torch.Tensor:
    """The buffer without its autograd history, or a UserError that says what it must be."""
    if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.device.type != "cpu":
        raise UserError(
            f"buffer of shape {tuple(buffer.shape)} on {buffer.device}: must be one-dimensional, contiguous "
            "and on the CPU; pass tensor.view(-1)"
        )
    if buffer.dtype not in SUMMED:
        raise UserError(f"buffer of {buffer.dtype}: allowed are {', '.join(map(str, SUMMED))}")
    return buffer.detach()


@lru_cache(maxsize=256)
def _all_reduce_plan(algorithm: Algorithm, rank: int, world: int, count: int) -> Plan:
    gives = algorithm.gives(rank, world)
    return lay_plan(algorithm.table(rank, world), rank, algorithm.chunks(world), count, gives=gives)


@lru_cache(maxsize=256)
def _broadcast_plan(rank: int, world: int, root: int, count: int) -> Plan:
    return lay_plan(broadcast(rank, world, root), rank, 1, count)
