"""What a worker of the parameter server decides: a pure state machine between the shards and the model.

    Hello ─► Welcome (every shard) ─► Read c ─► Parameters (every shard; the lead's says which batch) ─► Compute
                                        ▲                                                                  │
                                        └──────────── Push c, and right behind it Read c+1 ◄───────────────┘

Rows of tables are read in between: the batch, which the lead named, says which. `read_rows` asks for them after
Compute, and `awaits_rows` says when all are here.

A shard holds Read c+1 until push c is settled there, so its answer is all that the worker waits for. What a shard has
not answered is kept, and told again to the next primary of that shard, after a Hello of its own.

Where a Read confirms the push before it (`confirms`, see `unconfirmed`), the reads wait until all pushes have left:

    Push c to every shard ─► Flush ─► `flushed` ─► Read c+1 to every shard

`handle`, `view`, `computed`, `flushed` and `again` return what to do, in order. No socket, clock or tensor is in here;
payloads are the driver's: the gradient that shard j was sent must not change until shard j has answered the Read behind
it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from manyhands.errors import ManyhandsError
from manyhands.strategies.ps.actions import SendMessage
from manyhands.strategies.ps.ps_messages import (
    LEAD,
    Ack,
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
from manyhands.strategies.ps.push_pull import PushPull, PushPullAnswer
from manyhands.strategies.ps.staggering import round_of_shards

__all__ = ["ClientAction", "ClientCore", "Compute", "Flush", "Leave", "Reason", "Wait"]

_UNKNOWN = Work(kind=WorkKind.UNKNOWN)
_OF_A_SHARD = (Parameters, Ack, Welcome, RowValues, RowsUnknown, Refused, NotPrimary)  # what a worker is told


class Reason(Enum):
    """Why a worker leaves its slot."""

    FINISHED = auto()
    """Every batch is done or given out, and all that this worker pushed is settled."""
    RETIRED = auto()
    """The slot was removed from the run, and all that this worker pushed is settled."""
    FENCED = auto()
    """A later member holds the slot: ask the launcher for a place."""
    REFUSED = auto()
    """A shard refused a gradient that is not finite, and the run is to stop at that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The parameters are here: compute this work, then call `ClientCore.computed`."""

    work: Work
    versions: tuple[int, ...]
    """The version that was read, by shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Call `ClientCore.flushed` once all that was sent so far will arrive even if this process dies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The server that should serve this shard does not know so yet: call `ClientCore.again` a moment later."""

    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """This worker is done in its slot; every later call returns nothing."""

    reason: Reason
    sentence: str


ClientAction = SendMessage | Compute | Flush | Wait | Leave


@dataclass(slots=True)
class _Shard:
    """What a worker knows of one shard."""

    index: int
    primary: int = 0
    greeted: bool = False  # this primary was sent a Hello that it has not refused
    welcome: bool = False  # and has answered it
    next_clock: int = 0  # the lowest clock of ours that it lacked when it answered
    arrived: int = 0  # the lowest clock that had not even arrived there
    settled: int = 0  # everything of ours below this clock was settled here
    version: int = 0
    term: int = 0
    work: Work = field(default=_UNKNOWN)
    push: Push | PushPull | None = None  # sent or to be sent, and not known to be settled
    pushed: bool = False  # it was sent, to this primary or to one before it
    read: Read | None = None  # sent or to be sent, and not answered
    asked_again: int = -1  # the last clock that we read for twice
    rows: ReadRows | None = None  # the same
    rows_version: int = -1  # of the rows that were read for the update under way


class ClientCore:
    """One worker: member `member` in slot `slot`, before `num_shards` shards.

    With `skip_nonfinite`, a gradient that a shard refuses because it is not finite is replaced by a push that only
    moves the clock on; without it, the worker leaves. With `confirms`, no Read leaves before every push of the update
    before it has: to the shards it says just that.
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
        self._view_epoch = -1
        self._clock: int | None = None  # the update we read for, compute or push; none before the first Read
        self._computing: Work | None = None
        self._confirms = confirms
        self._out = True  # every push has left us for good, and reads may follow
        self._left = False

    @property
    def clock(self) -> int | None:
        """The clock of the update under way; None until every shard has welcomed this worker."""
        return self._clock

    @property
    def welcomed_epoch(self) -> int | None:
        """The epoch of the view whose every primary has welcomed this worker; None while one has not."""
        return self._view_epoch if all(shard.welcome for shard in self._shards) else None

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """The shards whose answer is awaited, for whoever must say why nothing happens."""
        if self._left:
            return ()
        if self._computing is not None:
            return tuple(shard.index for shard in self._shards if shard.rows is not None)
        return tuple(shard.index for shard in self._shards if not shard.welcome or shard.read is not None)

    @property
    def awaits_rows(self) -> bool:
        """Whether rows that were asked for are still to come."""
        return not self._left and any(shard.rows is not None for shard in self._shards)

    @property
    def rows_versions(self) -> tuple[int, ...]:
        """By shard: the version of the rows that were read for the update under way; -1 for none."""
        return tuple(shard.rows_version for shard in self._shards)

    def holds(self, shard: int) -> bool:
        """Whether the gradient last pushed to `shard` may still have to be sent again."""
        return self._shards[shard].push is not None

    def awaits(self, message: Parameters | PushPullAnswer | RowValues, source: int) -> bool:
        """Whether this answer is the one that is awaited: the payload of any other must not replace what was read."""
        shard = self._shards[message.shard]
        asked = shard.rows if isinstance(message, RowValues) else shard.read
        answers = asked is not None and message.clock == asked.clock
        return answers and shard.welcome and source == shard.primary and not self._left

    def view(self, view: View) -> list[ClientAction]:
        """Membership changed: greet every primary that is new to us."""
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
        """A message of member `source` arrived; what a former primary still says counts for nothing."""
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
            case Ack():
                return []  # the answer to the Read behind the push says as much
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
        """Between Compute and `computed`: ask these shards for rows of their tables, of all others for none.

        Which rows, the payload says; with `whole` it is all of them.
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
        """The gradient of the last Compute is there; `weight` is the part of the batch that it is of.

        `skip`: it is not finite, and only the clock moves on.
        """
        work, self._computing = self._computing, None
        if self._left:
            return []
        if work is None:
            raise ManyhandsError(f"worker {self.slot} computed something that it was not asked for")
        self._clock = work.clock + 1
        self._out = not self._confirms
        actions: list[ClientAction] = []
        for index in round_of_shards(self.slot, len(self._shards)):
            shard = self._shards[index]
            shard.push = Push(
                shard=shard.index,
                slot=self.slot,
                member=self.member,
                clock=work.clock,
                read_version=shard.version,
                read_term=shard.term,
                batch=work.batch,
                part=work.part,
                parts=work.parts,
                weight=weight,
                skip=skip,
                rows_version=shard.rows_version,
            )
            shard.rows_version, shard.pushed = -1, False
            actions += self._send_push(shard)
            actions += self._ask(shard, work.clock + 1)
        return [*actions, *self._flush()]

    def _flush(self) -> list[ClientAction]:
        """Ask to be called when the pushes are out, once there is none that could not be sent yet."""
        return [] if self._out or not all(shard.pushed for shard in self._shards) else [Flush()]

    def flushed(self) -> list[ClientAction]:
        """All that was sent before the last Flush will arrive: read on."""
        if self._left or self._out:
            return []
        self._out = True
        return [action for shard in self._shards for action in self._send_read(shard)]

    def again(self, shard: int) -> list[ClientAction]:
        """A moment has passed since Wait: greet the primary of `shard` again, unless a view made us do so already."""
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
            return []  # one of several answers to one mistake
        shard.greeted, shard.welcome = False, False
        return [Wait(shard=shard.index)]

    def _welcomed(self, shard: _Shard, message: Welcome) -> list[ClientAction]:
        if shard.welcome or not shard.greeted or message.next_clock < shard.settled:
            return []  # the answer to a Hello before the last one: we have gone ahead since
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
        """Whether we have read for a clock beyond what arrived at `shard`, which a server took down with it."""
        awaited = shard.read if shard.push is None and self._confirms else None
        return awaited is not None and shard.arrived < awaited.clock

    def _begin_again(self) -> None:
        self._clock = None
        for shard in self._shards:
            shard.read = None

    def _start(self) -> list[ClientAction]:
        """Every shard has welcomed us: begin at the lowest clock that has not arrived at one of them."""
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
        if shard.read is None or not shard.welcome or not self._out:
            return []
        return [SendMessage(to=shard.primary, message=shard.read)]

    def _send_rows(self, shard: _Shard) -> list[ClientAction]:
        if shard.rows is None or not shard.welcome:
            return []
        return [SendMessage(to=shard.primary, message=shard.rows)]

    def _name_again(self, shard: _Shard, message: RowsUnknown) -> list[ClientAction]:
        """The shard does not know a row set by its name: what named it is sent once more."""
        if shard.rows is not None and shard.rows.clock == message.clock:
            return self._send_rows(shard)
        if shard.push is not None and shard.push.clock == message.clock:
            return self._send_push(shard)  # the Read behind it still waits there
        return []

    def _send_push(self, shard: _Shard) -> list[ClientAction]:
        if shard.push is None or not shard.welcome:
            return []
        shard.pushed = True
        return [SendMessage(to=shard.primary, message=_push(shard.push))]

    def _parameters(self, shard: _Shard, message: Parameters) -> list[ClientAction]:
        shard.settled = max(shard.settled, message.clock)
        shard.version, shard.term, shard.work = message.version, message.term, message.work
        shard.push = shard.read = None
        if shard.index == LEAD:
            self._clock = self._next_clock(shard, message.work)
        actions = [action for place in self._shards for action in self._go_ahead(place)]
        return [*actions, *self._go_on()]

    def _go_on(self) -> list[ClientAction]:
        """Do as the lead said, once every shard has answered.

        To leave takes a welcome everywhere besides: who was restored meanwhile must hear from us what it has lost.
        """
        work = self._shards[LEAD].work
        for shard in self._shards:
            if shard.read is not None:
                return []
        if work.kind is not WorkKind.TRAIN:
            return self._begin(work) if all(shard.welcome for shard in self._shards) else []
        return self._ask_again(work.clock) or self._begin(work)

    def _ask_again(self, clock: int) -> list[ClientAction]:
        """Read once more where a shard, by an older table of slots, did not wait for others: we are to train.

        No more than once: the lead answers when all shards know its table. A shard that says the same again knows
        better than a lead that was restored since, and will not count the update.
        """
        actions: list[ClientAction] = []
        for shard in self._shards:
            leaves = shard.work.kind in (WorkKind.FINISHED, WorkKind.RETIRED)
            if shard.index != LEAD and leaves and shard.asked_again < clock:
                shard.asked_again = clock
                actions += self._ask(shard, clock)
        return actions

    def _next_clock(self, lead: _Shard, work: Work) -> int:
        """The clock to go on with, now that the lead has said what to do."""
        if work.kind is WorkKind.AHEAD:
            return work.clock
        lead.settled = max(lead.settled, work.clock)
        if work.kind is WorkKind.TRAIN:
            return lead.settled
        return max(
            lead.settled, *(shard.next_clock for shard in self._shards)
        )  # it will not get what it lacks

    def _go_ahead(self, shard: _Shard) -> list[ClientAction]:
        """Where we are at a later clock than the one that `shard` answered: say so there, and read for that one.

        Nobody will send what lies in between: a step did without it, or a shard was restored from before it. All that
        we pushed is settled there, since it has answered.
        """
        if shard.read is not None or self._clock is None or shard.settled >= self._clock:
            return []
        shard.settled = self._clock
        return [*(self._greet(shard) if shard.greeted else []), *self._ask(shard, self._clock)]

    def _begin(self, work: Work) -> list[ClientAction]:
        match work.kind:
            case WorkKind.TRAIN:
                self._computing = work
                return [Compute(work=work, versions=tuple(shard.version for shard in self._shards))]
            case WorkKind.FINISHED:
                return self._leave(Reason.FINISHED, f"slot {self.slot} has nothing more to do")
            case WorkKind.RETIRED:
                return self._leave(Reason.RETIRED, f"slot {self.slot} was removed from the run")
            case WorkKind.UNKNOWN | WorkKind.AHEAD:
                raise ManyhandsError("the lead shard answered a Read without saying what to do")

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _refused(self, shard: _Shard, message: Refused) -> list[ClientAction]:
        push = None if shard.push is None else _push(shard.push)
        if push is None or message.clock != push.clock or push.skip:
            return []
        if not self._skip_nonfinite:
            where = f"update {message.clock} of worker {self.slot} (batch {push.batch})"
            return self._leave(Reason.REFUSED, f"shard {shard.index} refused {where}: {message.reason}")
        shard.push = replace(push, skip=True)
        return self._send_push(shard)  # the Read behind the refused push still waits there

    def _fenced(self, holder: int) -> list[ClientAction]:
        return self._leave(
            Reason.FENCED, f"slot {self.slot} is held by member {holder}; this one is {self.member}"
        )

    def _leave(self, reason: Reason, sentence: str) -> list[ClientAction]:
        self._left = True
        return [Leave(reason=reason, sentence=sentence)]


def _push(kept: Push | PushPull) -> Push:
    return kept.push if isinstance(kept, PushPull) else kept
