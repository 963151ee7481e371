"""The one executor: runs any schedule over any link.

In each round it posts the sends, takes the receives in their order, flushes, and only then applies what arrived for
chunks that were leaving (`plan` says which). Posting before waiting is what the proof of freedom from deadlock assumes.

The result has the same bits on every rank and in every run: the schedule fixes the order of additions, and
the executor puts the lower rank's value on the left. Halves (bfloat16, float16) are rounded after each
addition, except in a fold, which adds in float32 and rounds once. A mean is the sum divided by the world
size, by every rank. With a codec, what leaves is rounded as `_Encoded` says; a `Compressor` goes ways of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, partial
from typing import Final, Literal, get_args

import torch

from manyhands.errors import UserError, nearest
from manyhands.native.dtypes import SUMMED
from manyhands.native.group.reduction_kernels import MAX, SCRATCH_BYTES, SUM, reduce_parts
from manyhands.native.segment import CACHE_LINE, round_up
from manyhands.strategies.common.collectives import schedule
from manyhands.strategies.common.collectives.algorithms import broadcast
from manyhands.strategies.common.collectives.compressed import Compressor
from manyhands.strategies.common.collectives.mailbox import LinkMessage, Mailbox
from manyhands.strategies.common.collectives.row_sums import GradientRows, sum_rows
from manyhands.transport.link.interface import Link
from manyhands.transport.liveness import Alarm
from manyhands.wire.codec import ParcelCodec, encodes, round_trip
from manyhands.wire.parcels import Parcel

Op = Literal["sum", "mean", "max"]

_OPERATIONS: Final = {"sum": SUM, "mean": SUM, "max": MAX}


_Kind = IntEnum("_Kind", ["ALL_REDUCE", "BROADCAST", "BARRIER", "COMPRESSED", "ROWS"])
"""Which collective a message belongs to."""


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
        algorithm: schedule.Algorithm,
        rank: int,
        world: int,
        links: Mapping[int, Link],
        timeout_s: float,
        alarm: Alarm | None = None,
        codec: ParcelCodec | Compressor | None = None,
        roles: Sequence[int] | None = None,
    ) -> None:
        algorithm.table(rank, world)  # refuses a rank outside the world
        self.algorithm, self.rank, self.world = algorithm, rank, world
        self.mailbox = Mailbox(rank, links, timeout_s, alarm, roles)
        self.carry_by(codec)
        self._rooms: dict[str, torch.Tensor] = {}
        self._block = torch.empty(SCRATCH_BYTES, dtype=torch.uint8)
        self._calls = 0

    def carry_by(self, codec: ParcelCodec | Compressor | None) -> None:
        """Switch the codec from the next call on; all ranks switch between the same two calls."""
        self._compressor = codec if isinstance(codec, Compressor) else None
        self._codec = codec if isinstance(codec, ParcelCodec) else None

    def encodes(self, parcel: Parcel) -> bool:
        if self._compressor is not None and not parcel.exact:
            return self._compressor.encodes(parcel)
        return encodes(self._codec, parcel)

    def at(self, step: int) -> None:
        if self._compressor is not None:
            self._compressor.at(step)

    def memory(self) -> dict[str, torch.Tensor]:
        return {} if self._compressor is None else self._compressor.memory()

    def remember(self, memory: Mapping[str, torch.Tensor]) -> None:
        if self._compressor is not None:
            self._compressor.remember(memory)

    def all_reduce(
        self,
        buffer: torch.Tensor,
        op: Op = "sum",
        parcel: Parcel | None = None,
        algorithm: schedule.Algorithm | None = None,
    ) -> None:
        """Collective: every rank's `buffer`, of one length and dtype, becomes their sum, mean or maximum.

        Without a `parcel`, which names all of it, it travels as it is; without an `algorithm`, the executor's own way.
        """
        if op not in _OPERATIONS:
            raise UserError(f"op={op}: unknown reduction; {nearest(op, get_args(Op))}")
        vector = _checked(buffer)
        if self._compressor is not None and parcel is not None and op == "sum" and self.encodes(parcel):
            enter = self._call("compressed all-reduce", _Kind.COMPRESSED)
            self._compressor.all_reduce(vector, parcel, self.mailbox, enter, self.all_reduce)
            return
        way = algorithm or self.algorithm
        plan = _all_reduce_plan(way, self.rank, self.world, vector.numel())
        encoded = None
        if self._codec is not None and parcel is not None and self.encodes(parcel):
            encoded = _Encoded(self._codec, parcel, vector, partial(self._room, dtype=torch.uint8))
        self._run(_Kind.ALL_REDUCE, way.name, plan, vector, op, encoded)
        if op == "mean":
            vector.div_(self.world)

    def sum_rows(self, mine: GradientRows, below: int) -> GradientRows:
        enter = self._call("sum of rows", _Kind.ROWS)
        return sum_rows(mine, below, self.rank, self.world, self.mailbox, enter)

    def broadcast(self, buffer: torch.Tensor, root: int = 0) -> None:
        """Collective: every rank's `buffer` becomes that of rank `root`, down a binomial tree."""
        if not 0 <= root < self.world:
            raise UserError(f"root={root}: must be between 0 and {self.world - 1}")
        vector = _checked(buffer)
        plan = _broadcast_plan(self.rank, self.world, root, vector.numel())
        self._run(_Kind.BROADCAST, "tree", plan, vector)

    def barrier(self) -> None:
        plan = _all_reduce_plan(self.algorithm, self.rank, self.world, 0)
        self._run(_Kind.BARRIER, self.algorithm.name, plan, torch.empty(0))

    def _call(self, name: str, kind: _Kind) -> Callable[[int], None]:
        """Begin a call; what is returned enters its round of a number. Calls that are made inside come after it."""
        call, self._calls = self._calls, self._calls + 1
        return partial(self.mailbox.enter, name, kind, call)

    def _run(
        self,
        kind: _Kind,
        by: str,
        plan: schedule.Plan,
        vector: torch.Tensor,
        op: Op = "sum",
        encoded: _Encoded | None = None,
    ) -> None:
        enter = self._call(f"{kind.name.lower().replace('_', '-')} by {by}", kind)
        scratch = self._room(str(vector.dtype), plan.scratch_count, vector.dtype)
        arithmetic = _Arithmetic(self.rank, vector, scratch, self._block, _OPERATIONS[op])
        for number, work in enumerate(plan.rounds, start=1):
            if work.departures or work.landings or work.folds:  # a rank of a tree has nothing to do in most
                enter(number)
                self._run_round(work, arithmetic, encoded)
        if encoded is not None:
            for begin, end in plan.own_results:  # as if it were sent, so that all ranks hold the same values
                encoded.encode("out", begin, end)

    def _run_round(self, work: schedule.Round, arithmetic: _Arithmetic, encoded: _Encoded | None) -> None:
        if encoded is None:
            refused = self.mailbox.post([(d.to, arithmetic.items(d.begin, d.end)) for d in work.departures])
        else:
            refused = self.mailbox.post(encoded.messages(work.departures))
        deferred: list[tuple[schedule.Landing, torch.Tensor]] = []
        for landing in work.landings:
            space = arithmetic.space(landing)
            if encoded is None:
                refused, _ = self.mailbox.receive(landing.source, space, refused)
            else:
                refused = encoded.receive(self.mailbox, landing, space, refused)
            if landing.deferred:
                deferred.append((landing, space))
            else:
                arithmetic.apply(landing, space)
        self.mailbox.flush(refused, work.peers)
        for landing, space in deferred:
            arithmetic.apply(landing, space)
        for fold in work.folds:
            arithmetic.fold(fold)

    def _room(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        room = self._rooms.get(name)
        if room is None or room.numel() < count:
            room = self._rooms[name] = torch.empty(count, dtype=dtype)
        return room


@dataclass(slots=True)
class _Arithmetic:
    """The arithmetic on items that arrive: all reading and writing of the vector."""

    rank: int
    vector: torch.Tensor
    scratch: torch.Tensor
    block: torch.Tensor  # SCRATCH_BYTES for the compiled reduction
    operation: int

    def items(self, begin: int, end: int) -> torch.Tensor:
        """Return a part of the vector; all of it comes unsliced, as a slice costs more than adding a few items."""
        return self.vector if not begin and end == self.vector.numel() else self.vector[begin:end]

    def space(self, landing: schedule.Landing) -> torch.Tensor:
        if landing.scratch is None:
            return self.items(landing.begin, landing.end)
        return self.scratch[landing.scratch : landing.scratch + landing.end - landing.begin]

    def apply(self, landing: schedule.Landing, got: torch.Tensor) -> None:
        """Apply a message that landed in its space; one that is kept has no effect yet."""
        if landing.scratch is None or landing.how is schedule.How.KEEP:
            return
        mine = self.items(landing.begin, landing.end)
        if landing.how is schedule.How.COPY:
            mine.copy_(got)
        elif landing.source < self.rank:
            self._reduce([got, mine], 1)
        else:
            self._reduce([mine, got], 0)

    def fold(self, fold: schedule.Fold) -> None:
        count = fold.end - fold.begin
        mine = self.items(fold.begin, fold.end)
        parts = [mine if at is None else self.scratch[at : at + count] for at in fold.addends]
        if None in fold.addends:
            self._reduce(parts, fold.addends.index(None))
        else:  # a helper has no value of its own
            self._reduce(parts, 0)
            mine.copy_(parts[0])

    def _reduce(self, parts: Sequence[torch.Tensor], target: int) -> None:
        """Combine parts in this order into one of them."""
        kind, addresses = SUMMED[self.vector.dtype], [part.data_ptr() for part in parts]
        reduce_parts(kind, addresses, parts[0].numel(), self.operation, target, self.block.data_ptr())


def _checked(buffer: torch.Tensor) -> torch.Tensor:
    if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.device.type != "cpu":
        raise UserError(
            f"buffer of shape {tuple(buffer.shape)} on {buffer.device}: must be one-dimensional, contiguous "
            "and on the CPU; pass tensor.view(-1)"
        )
    if buffer.dtype not in SUMMED:
        raise UserError(f"buffer of {buffer.dtype}: allowed are {', '.join(map(str, SUMMED))}")
    return buffer.detach()


@lru_cache(maxsize=256)
def _all_reduce_plan(algorithm: schedule.Algorithm, rank: int, world: int, count: int) -> schedule.Plan:
    gives = algorithm.gives(rank, world)
    return schedule.lay_plan(algorithm.table(rank, world), rank, algorithm.chunks(world), count, gives=gives)


@lru_cache(maxsize=256)
def _broadcast_plan(rank: int, world: int, root: int, count: int) -> schedule.Plan:
    return schedule.lay_plan(broadcast(rank, world, root), rank, 1, count)


@dataclass(slots=True)
class _Encoded:
    """Items of one vector, encoded into separate memory before they are sent, and decoded into place.

    What is sent is also rounded in place at the sender, so every rank that adds or forwards a number has the same one.
    What a rank computed last and did not send is rounded at the end. Sums are computed in the vector's own type.
    `room` allocates memory by name.
    """

    _codec: ParcelCodec
    _parcel: Parcel
    _vector: torch.Tensor
    _room: Callable[[str, int], torch.Tensor]

    def messages(self, departures: Sequence[schedule.Departure]) -> list[LinkMessage]:
        """Return the messages to post, each span encoded once for all receivers; constant until all are sent."""
        spans = list(dict.fromkeys((one.begin, one.end) for one in departures))
        encoded = {span: self.encode(f"out {at}", *span) for at, span in enumerate(spans)}
        return [(one.to, encoded[one.begin, one.end]) for one in departures]

    def encode(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Round these items, and return them as they are sent, in the memory of this name."""
        parcel = self._parcel.part(begin, end)
        room = self._room(name, round_up(self._codec.size(parcel), CACHE_LINE))
        return round_trip(self._codec, parcel, self._vector[begin:end], room)

    def receive(
        self, mailbox: Mailbox, landing: schedule.Landing, space: torch.Tensor, refused: list[LinkMessage]
    ) -> list[LinkMessage]:
        """Fill `space` with the next message, posting refused ones meanwhile; return what is left to post."""
        parcel = self._parcel.part(landing.begin, landing.end)
        size = self._codec.size(parcel)
        room = self._room("in", size)[:size]
        refused, num_bytes = mailbox.receive(landing.source, room, refused, or_less=True)
        self._codec.decode(parcel, room[:num_bytes], space)
        return refused
