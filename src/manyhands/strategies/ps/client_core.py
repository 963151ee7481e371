"""The core of a parameter-server worker: a pure state machine between the shards and the model.

    Hello ─► Welcome (every shard) ─► Read c ─► Parameters (every shard; the lead's says which batch) ─► Compute
                                        ▲                                                                  │
                                        └──────────── Push c, and with it Read c+1 ◄───────────────────────┘

Rows of tables are read in between: the batch, which the lead named, says which. `read_rows` asks for them after
Compute, and `awaits_rows` says when all are here.

A shard holds Read c+1 until push c is settled there, so its answer is all that the worker waits for. What a shard has
not answered is kept, and sent again to the next primary of that shard, after a new Hello.

Where a Read confirms the push before it (`confirms`, see `unconfirmed`), the reads wait until all pushes have left:

    Push c to every shard ─► Flush ─► `flushed` ─► Read c+1 to every shard

`handle`, `view`, `computed`, `flushed` and `again` return what to do, in order. No socket, clock or tensor is in here;
payloads are the driver's: the gradient that shard j was sent must not change until shard j has answered the Read behind
it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from manyhands.errors import ManyhandsError
from manyhands.strategies.ps.actions import SendMessage
from manyhands.strategies.ps.ps_messages import (
    LEAD,
    Fenced,
    Hello,
    Message,
    NotPrimary,
    Parameters,
    Push,
    Read,
    ReadRows,
    Refused,
    RowsUnknown,
    RowValues,
    ShardView,
    View,
    Welcome,
    Work,
    WorkKind,
)

__all__ = ["ClientAction", "ClientCore", "Compute", "Flush", "Leave", "Reason", "Wait", "round_of_shards"]

_UNKNOWN = Work(kind=WorkKind.UNKNOWN)
_OF_A_SHARD = (Parameters, Welcome, RowValues, RowsUnknown, Refused, NotPrimary)  # sent to workers


class Reason(Enum):
    """Why a worker leaves its slot."""

    FINISHED = auto()
    """Every batch is done or assigned, and every push of this worker is settled."""
    RETIRED = auto()
    """The slot was removed from the run, and every push of this worker is settled."""
    FENCED = auto()
    """A later member holds the slot: request another slot from the launcher."""
    REFUSED = auto()
    """A shard refused a non-finite gradient, and the run is configured to stop at one."""


class Compute(NamedTuple):
    """The parameters have arrived: compute this work, then call `ClientCore.computed`."""

    work: Work
    versions: tuple[int, ...]
    """The version that was read, by shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Call `ClientCore.flushed` once all messages sent so far will arrive even if this process dies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The designated primary of this shard has not taken over yet: call `ClientCore.again` after a short delay."""

    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """This worker is done in its slot; every later call returns no actions."""

    reason: Reason
    sentence: str


ClientAction = SendMessage | Compute | Flush | Wait | Leave


@dataclass(slots=True)
class _Shard:
    """A worker's state for one shard."""

    index: int
    primary: int = 0
    greeted: bool = False  # this primary was sent a Hello and has not refused it
    welcome: bool = False  # and has answered it
    next_clock: int = 0  # the lowest clock of ours that it lacked when it answered
    arrived: int = 0  # the lowest clock that had not even arrived there
    settled: int = 0  # everything of ours below this clock was settled here
    version: int = 0
    term: int = 0
    work: Work = field(default=_UNKNOWN)
    push: Push | None = None  # sent or to be sent, and not known to be settled
    pushed: bool = False  # it was sent, to this primary or to one before it
    read: Read | None = None  # sent or to be sent, and not answered
    asked_again: int = -1  # the last clock that we read for twice
    rows: ReadRows | None = None  # the same
    rows_version: int = -1  # of the rows that were read for the update under way


def round_of_shards(slot: int, num_shards: int) -> tuple[int, ...]:
    """Every shard once, starting at number `slot`, in the order of a worker's pushes.

    Workers that push at the same time start at different shards: bursts do not meet at one server.
    """
    return tuple((slot + number) % num_shards for number in range(num_shards))


class ClientCore:
    """The state machine of one worker: member `member` in slot `slot`, with `num_shards` shards.

    With `skip_nonfinite`, a gradient that a shard refuses as non-finite is replaced by a push that only advances
    the clock; without it, the worker leaves. With `confirms`, no Read is sent before every push of the previous
    update has left: to the shards the Read is the confirmation.
    """

    def __init__(
        self,
        *,
        slot: int,
        member: int,
        num_shards: int,
        skip_nonfinite: bool = False,
        confirms: bool = False,
    ) -> None:
        self.slot = slot
        self.member = member
        self._skip_nonfinite = skip_nonfinite
        self._shards = [_Shard(index) for index in range(num_shards)]
        self._in_round = [self._shards[index] for index in round_of_shards(slot, num_shards)]
        self._view_epoch = -1
        self._clock: int | None = None  # the update we read for, compute or push; none before the first Read
        self._computing: Work | None = None
        self._confirms = confirms
        self._out = True  # every push has been flushed, so reads may follow
        self._left = False

    @property
    def clock(self) -> int | None:
        """The clock of the update in progress; None until every shard has welcomed this worker."""
        return self._clock

    @property
    def welcomed_epoch(self) -> int | None:
        """The epoch of the view whose primaries have all welcomed this worker; None until they have."""
        return self._view_epoch if all(shard.welcome for shard in self._shards) else None

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """The shards whose answer is awaited, for status and hang reports."""
        if self._left:
            return ()
        if self._computing is not None:
            return tuple(shard.index for shard in self._shards if shard.rows is not None)
        return tuple(shard.index for shard in self._shards if not shard.welcome or shard.read is not None)

    @property
    def awaits_rows(self) -> bool:
        """Whether requested rows are still outstanding."""
        return not self._left and any(shard.rows is not None for shard in self._shards)

    @property
    def rows_versions(self) -> tuple[int, ...]:
        """By shard: the version of the rows that were read for the update in progress; -1 for none."""
        return tuple(shard.rows_version for shard in self._shards)

    def holds(self, shard: int) -> bool:
        """Whether the gradient last pushed to `shard` may have to be sent again."""
        return self._shards[shard].push is not None

    def awaits(self, message: Parameters | RowValues, source: int) -> bool:
        """Whether this is the awaited answer; the payload of any other must not overwrite what was read."""
        shard = self._shards[message.shard]
        asked = shard.rows if isinstance(message, RowValues) else shard.read
        answers = asked is not None and message.clock == asked.clock
        return answers and shard.welcome and source == shard.primary and not self._left

    def view(self, view: View) -> list[ClientAction]:
        """Handle a membership change: greet every new primary, or leave if a later member holds this slot."""
        if self._left or view.epoch <= self._view_epoch:
            return []
        self._view_epoch = view.epoch
        for place in (*view.slots, *view.retiring):
            if place.slot == self.slot and place.member > self.member:
                return self._fenced(place.member)
        actions: list[ClientAction] = []
        for serving in view.shards:
            actions += self._follow(self._shards[serving.shard], serving)
        return actions

    def handle(self, message: Message, source: int) -> list[ClientAction]:
        """Handle a message from member `source`; messages of former primaries are ignored."""
        if self._left:
            return []
        if isinstance(message, Fenced):
            return self._fenced(message.holder) if message.holder > self.member else []
        if not isinstance(message, _OF_A_SHARD):
            raise ManyhandsError(
                f"worker {self.slot} was sent {type(message).__name__}, which no worker is sent"
            )
        shard = self._shards[message.shard]
        if source != shard.primary:
            return []
        match message:
            case Parameters():
                return self._parameters(shard, message) if self.awaits(message, source) else []
            case Welcome():
                return self._welcomed(shard, message)
            case RowValues():
                if self.awaits(message, source):
                    shard.rows, shard.rows_version = None, message.version
                return []
            case RowsUnknown():
                return self._name_again(shard, message)
            case Refused():
                return self._refused(shard, message)
            case NotPrimary():
                return self._not_primary(shard)

    def read_rows(self, shards: Collection[int], whole: bool = False) -> list[ClientAction]:
        """Request table rows from these shards, and none from the others; called between Compute and `computed`.

        The payload names the rows; with `whole` it is all of them.
        """
        work = self._computing
        if self._left:
            return []
        if work is None:
            raise ManyhandsError(f"worker {self.slot} reads rows for nothing that it was asked to compute")
        actions: list[ClientAction] = []
        for shard in self._shards:
            shard.rows, shard.rows_version = None, -1
            if shard.index in shards:
                shard.rows = ReadRows(
                    shard=shard.index, slot=self.slot, member=self.member, clock=work.clock, whole=whole
                )
                actions += self._send_rows(shard)
        return actions

    def computed(self, *, weight: float, skip: bool = False) -> list[ClientAction]:
        """Push the gradient of the last Compute; `weight` is its share of the batch.

        With `skip` the gradient is not finite, and the push only advances the clock.
        """
        work, self._computing = self._computing, None
        if self._left:
            return []
        if work is None:
            raise ManyhandsError(f"worker {self.slot} computed something that it was not asked for")
        clock = work.clock
        self._clock = clock + 1
        self._out = not self._confirms
        actions: list[ClientAction] = []
        for shard in self._in_round:
            shard.push = Push(
                shard.index,
                self.slot,
                self.member,
                clock,
                shard.version,
                work.batch,
                work.part,
                work.parts,
                weight,
                skip,
                shard.term,
                shard.rows_version,
                not self._confirms,
            )
            shard.rows_version, shard.pushed = -1, False
            shard.read = Read(shard.index, self.slot, self.member, clock + 1)
            actions += self._send_push(shard)
        return [*actions, *self._flush()] if self._confirms else actions

    def _flush(self) -> list[ClientAction]:
        """Request the `flushed` call, once every push has been sent."""
        return [] if self._out or not all(shard.pushed for shard in self._shards) else [Flush()]

    def flushed(self) -> list[ClientAction]:
        """Send the next reads: everything sent before the last Flush will arrive."""
        if self._left or self._out:
            return []
        self._out = True
        return [action for shard in self._shards for action in self._send_read(shard)]

    def again(self, shard: int) -> list[ClientAction]:
        """Greet the primary of `shard` again after a Wait, unless a view has already led to that."""
        place = self._shards[shard]
        return [] if self._left or place.greeted or not place.primary else self._greet(place)

    # ── shards come and go ────────────────────────────────────────────────────────────────────────────────────────────

    def _follow(self, shard: _Shard, serving: ShardView) -> list[ClientAction]:
        if serving.primary == shard.primary:
            return []
        shard.primary, shard.greeted, shard.welcome = serving.primary, False, False
        return self._greet(shard) if shard.primary else []

    def _greet(self, shard: _Shard) -> list[ClientAction]:
        shard.greeted = True
        hello = Hello(shard=shard.index, slot=self.slot, member=self.member, settled=shard.settled)
        return [SendMessage(to=shard.primary, message=hello)]

    def _not_primary(self, shard: _Shard) -> list[ClientAction]:
        if not shard.greeted:
            return []  # several messages to a former primary each get this answer; only the first counts
        shard.greeted, shard.welcome = False, False
        return [Wait(shard=shard.index)]

    def _welcomed(self, shard: _Shard, message: Welcome) -> list[ClientAction]:
        if shard.welcome or not shard.greeted or message.next_clock < shard.settled:
            return []  # a stale answer to an earlier Hello: this worker has advanced since
        shard.welcome, shard.next_clock = True, message.next_clock
        shard.arrived = max(message.arrived, message.next_clock)
        if self._relied_on(shard):
            self._begin_again()
        if self._clock is None:
            return self._start() if all(place.welcome for place in self._shards) else []
        actions = [*self._send_push(shard), *self._send_read(shard), *self._send_rows(shard), *self._flush()]
        done = self._shards[LEAD].work.kind in (WorkKind.FINISHED, WorkKind.RETIRED)
        return [*actions, *self._go_on()] if done else actions

    def _relied_on(self, shard: _Shard) -> bool:
        """Whether this worker read for a clock beyond what has arrived at `shard`: a dead server lost the push."""
        awaited = shard.read if shard.push is None and self._confirms else None
        return awaited is not None and shard.arrived < awaited.clock

    def _begin_again(self) -> None:
        self._clock = None
        for shard in self._shards:
            shard.read = None

    def _start(self) -> list[ClientAction]:
        """Begin at the lowest clock that has not arrived at some shard; every shard has welcomed this worker."""
        self._clock = min(shard.arrived for shard in self._shards)
        actions: list[ClientAction] = []
        for shard in self._shards:
            shard.settled = min(self._clock, shard.next_clock)
            actions += self._ask(shard, self._clock)
        return actions

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ask(self, shard: _Shard, clock: int) -> list[ClientAction]:
        shard.read = Read(shard=shard.index, slot=self.slot, member=self.member, clock=clock)
        return self._send_read(shard)

    def _send_read(self, shard: _Shard) -> list[ClientAction]:
        """Send the outstanding Read, unless it goes with an outstanding push."""
        if shard.read is None or not shard.welcome or not self._out:
            return []
        return [] if shard.push is not None and shard.push.pulls else [SendMessage(shard.primary, shard.read)]

    def _send_rows(self, shard: _Shard) -> list[ClientAction]:
        if shard.rows is None or not shard.welcome:
            return []
        return [SendMessage(to=shard.primary, message=shard.rows)]

    def _name_again(self, shard: _Shard, message: RowsUnknown) -> list[ClientAction]:
        """Resend the message that named a row set which the shard does not know."""
        if shard.rows is not None and shard.rows.clock == message.clock:
            return self._send_rows(shard)
        if shard.push is not None and shard.push.clock == message.clock:
            return self._send_push(shard)
        return []

    def _send_push(self, shard: _Shard) -> list[ClientAction]:
        if shard.push is None or not shard.welcome:
            return []
        shard.pushed = True
        return [SendMessage(shard.primary, shard.push)]

    def _parameters(self, shard: _Shard, message: Parameters) -> list[ClientAction]:
        shard.settled = max(shard.settled, message.clock)
        shard.version, shard.term, shard.work = message.version, message.term, message.work
        shard.push = shard.read = None
        if shard.index == LEAD:
            self._clock = self._next_clock(shard, message.work)
        actions: list[ClientAction] = []
        for place in self._shards:
            if place.read is None and self._clock is not None and place.settled < self._clock:
                actions += self._go_ahead(place, self._clock)
        actions += self._go_on()
        return actions

    def _go_on(self) -> list[ClientAction]:
        """Execute the lead's answer once every shard has answered.

        Leaving additionally requires a welcome from every shard: a shard restored meanwhile must learn from this
        worker what it has lost.
        """
        work = self._shards[LEAD].work
        for shard in self._shards:
            if shard.read is not None:
                return []
        if work.kind is not WorkKind.TRAIN:
            return self._begin(work) if all(shard.welcome for shard in self._shards) else []
        return self._ask_again(work.clock) or self._begin(work)

    def _ask_again(self, clock: int) -> list[ClientAction]:
        """Read once more from a shard that, by an older slot table, answered without waiting for the others.

        At most once per clock: the lead answers when all shards know its table. A shard that repeats its answer
        is newer than a lead that was restored since, and will not count the update.
        """
        actions: list[ClientAction] = []
        for shard in self._shards:
            leaves = shard.work.kind in (WorkKind.FINISHED, WorkKind.RETIRED)
            if shard.index != LEAD and leaves and shard.asked_again < clock:
                shard.asked_again = clock
                actions += self._ask(shard, clock)
        return actions

    def _next_clock(self, lead: _Shard, work: Work) -> int:
        """The clock to continue with after the lead's answer."""
        if work.kind is WorkKind.AHEAD:
            return work.clock
        lead.settled = max(lead.settled, work.clock)
        if work.kind is WorkKind.TRAIN:
            return lead.settled
        return max(
            lead.settled, *(shard.next_clock for shard in self._shards)
        )  # no shard will be sent the clocks before this

    def _go_ahead(self, shard: _Shard, clock: int) -> list[ClientAction]:
        """Tell a shard that answered an earlier clock where this worker is, and read for that clock.

        The updates in between will never be sent: a step was taken without them, or a shard was restored from
        before them. Since the shard has answered, everything pushed to it is settled.
        """
        shard.settled = clock
        return [*(self._greet(shard) if shard.greeted else []), *self._ask(shard, clock)]

    def _begin(self, work: Work) -> list[ClientAction]:
        match work.kind:
            case WorkKind.TRAIN:
                self._computing = work
                return [Compute(work, tuple([shard.version for shard in self._shards]))]
            case WorkKind.FINISHED:
                return self._leave(Reason.FINISHED, f"slot {self.slot} has nothing more to do")
            case WorkKind.RETIRED:
                return self._leave(Reason.RETIRED, f"slot {self.slot} was removed from the run")
            case WorkKind.UNKNOWN | WorkKind.AHEAD:
                raise ManyhandsError("the lead shard answered a Read without saying what to do")

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _refused(self, shard: _Shard, message: Refused) -> list[ClientAction]:
        push = shard.push
        if push is None or message.clock != push.clock or push.skip:
            return []
        if not self._skip_nonfinite:
            where = f"update {message.clock} of worker {self.slot} (batch {push.batch})"
            return self._leave(Reason.REFUSED, f"shard {shard.index} refused {where}: {message.reason}")
        shard.push = push._replace(skip=True)
        return self._send_push(shard)

    def _fenced(self, holder: int) -> list[ClientAction]:
        return self._leave(
            Reason.FENCED, f"slot {self.slot} is held by member {holder}; this one is {self.member}"
        )

    def _leave(self, reason: Reason, sentence: str) -> list[ClientAction]:
        self._left = True
        return [Leave(reason=reason, sentence=sentence)]
