"""The core of a parameter-server worker: a pure state machine between the shards and the model.

    Hello ─► Welcome (every shard) ─► Read c ─► Parameters (every shard; the lead's says which batch) ─► Compute
                                        ▲                                                                  │
                                        └──────────── Push c, and with it Read c+1 ◄───────────────────────┘

Rows of tables are read in between: the batch, which the lead named, says which. `read_rows` asks for them after
Compute, and `waiting_for` says when all are here.

A shard holds Read c+1 until push c is settled there, so its answer is all that the worker waits for. What a shard has
not answered is kept, and sent again to the next primary of that shard, after a new Hello.

Where a Read confirms the push before it (`confirms`, see `unconfirmed`), the reads wait until all pushes have left:

    Push c to every shard ─► Flush ─► `flushed` ─► Read c+1 to every shard

Where workers of one host add up first (`HostGroup`), `computed` hands out the pushes instead, `Pool`, and nothing is
sent before the group has decided: `carry` for all of them, `carried` by another worker, or `push_alone`.

All calls return what to do, in order. No socket, clock or tensor is in here; payloads are the driver's: the gradient
that shard j was sent must not change until shard j has answered the Read behind it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from manyhands.errors import ManyhandsError
from manyhands.strategies.ps.actions import SendMessage
from manyhands.strategies.ps.ps_messages import (
    LAUNCHER,
    LEAD,
    CopyShard,
    Fenced,
    Hello,
    HostPush,
    Message,
    NotPrimary,
    Parameters,
    Push,
    Read,
    ReadRows,
    Refused,
    RowsUnknown,
    RowValues,
    SendAlone,
    ValuesAhead,
    View,
    Welcome,
    Work,
    WorkKind,
)

_UNKNOWN = Work(kind=WorkKind.UNKNOWN)
_LEAVES = (WorkKind.FINISHED, WorkKind.RETIRED)


class Reason(Enum):
    """Why a worker leaves its slot."""

    FINISHED = auto()  # every batch is done or assigned, and every push of this worker is settled
    RETIRED = auto()  # the slot was removed from the run, and every push of this worker is settled
    FENCED = auto()  # a later member holds the slot: request another slot from the launcher
    REFUSED = auto()  # a shard refused a non-finite gradient, and the run is configured to stop at one


class Compute(NamedTuple):
    """The parameters have arrived: compute this work, then call `ClientCore.computed`."""

    work: Work
    versions: tuple[int, ...]  # the version that was read, by shard
    bare: bool = False  # some of them came without values, which another worker of this host has


class Pool(NamedTuple):
    """Let the group of this host decide how these pushes, in the order of their sending, reach the shards."""

    pushes: tuple[Push, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Call `ClientCore.flushed` once all messages sent so far will arrive even if this process dies."""


class Wait(NamedTuple):
    """The designated primary of this shard has not taken over yet: call `ClientCore.again` after a short delay."""

    shard: int


class Leave(NamedTuple):
    """This worker is done in its slot; every later call returns no actions."""

    reason: Reason
    sentence: str


ClientAction = SendMessage | Compute | Pool | Flush | Wait | Leave


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
    group: HostPush | None = None  # which is sent instead of it, as this worker carries it for others
    pushed: bool = False  # it was sent, to this primary or to one before it
    bare: bool = False  # the last answer came without values
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
        self, *, slot: int, member: int, num_shards: int, skip_nonfinite: bool = False, confirms: bool = False
    ) -> None:
        self.slot = slot
        self.member = member
        self.clock: int | None = None
        """The clock of the update that is read for, computed or pushed; None until every shard has welcomed us."""
        self._skip_nonfinite = skip_nonfinite
        self._shards = [_Shard(index) for index in range(num_shards)]
        self._in_round = [self._shards[index] for index in round_of_shards(slot, num_shards)]
        self._view_epoch = -1
        self._computing: Work | None = None
        self._confirms = confirms
        self._out = True  # every push has been flushed, so reads may follow
        self._pooled = False  # the group of this host has not decided yet how they are sent
        self._left = False
        self._actions: list[ClientAction] = []  # of the call in hand

    @property
    def welcomed_epoch(self) -> int | None:
        """The epoch of the view whose primaries have all welcomed this worker; None until they have."""
        return self._view_epoch if all(shard.welcome for shard in self._shards) else None

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """The shards whose answer is awaited: requested rows during an update, else a welcome or parameters."""
        if self._left:
            return ()
        if self._computing is not None:
            return tuple(shard.index for shard in self._shards if shard.rows is not None)
        return tuple(shard.index for shard in self._shards if not shard.welcome or shard.read is not None)

    @property
    def rows_versions(self) -> tuple[int, ...]:
        """By shard: the version of the rows that were read for the update in progress; -1 for none."""
        return tuple(shard.rows_version for shard in self._shards)

    def awaits(self, message: Parameters | RowValues | ValuesAhead, source: int) -> bool:
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
                return self.handle(Fenced(shard=LEAD, slot=self.slot, holder=place.member), LAUNCHER)
        for serving in view.shards:
            shard = self._shards[serving.shard]
            if serving.primary != shard.primary:
                shard.primary, shard.greeted, shard.welcome = serving.primary, False, False
                if shard.primary:
                    self._greet(shard)
        return self._done()

    def handle(self, message: Message, source: int) -> list[ClientAction]:
        """Handle a message from member `source`; messages of former primaries are ignored."""
        if self._left:
            return []
        match message:
            case Parameters():
                if self.awaits(message, source):
                    self._parameters(self._shards[message.shard], message)
            case Fenced():
                if message.holder > self.member:
                    who = f"member {message.holder}; this one is {self.member}"
                    self._leave(Reason.FENCED, f"slot {self.slot} is held by {who}")
            case RowValues():
                if self.awaits(message, source):
                    shard = self._shards[message.shard]
                    shard.rows, shard.rows_version = None, message.version
            case Welcome() | RowsUnknown() | Refused() | SendAlone() | NotPrimary():
                shard = self._shards[message.shard]
                if source == shard.primary:
                    self._handle_primary(shard, message)
            case _:
                raise ManyhandsError(
                    f"worker {self.slot} received a {type(message).__name__}, which workers do not accept"
                )
        return self._done()

    def read_rows(self, shards: Collection[int], whole: bool = False) -> list[ClientAction]:
        """Request table rows from these shards, and none from the others; called between Compute and `computed`.

        The payload names the rows; with `whole` it is all of them.
        """
        work = self._computing
        if self._left:
            return []
        if work is None:
            raise ManyhandsError(f"worker {self.slot} reads rows but has no work to compute")
        for shard in self._shards:
            shard.rows, shard.rows_version = None, -1
            if shard.index in shards:
                shard.rows = ReadRows(
                    shard=shard.index, slot=self.slot, member=self.member, clock=work.clock, whole=whole
                )
                self._send(shard, shard.rows)
        return self._done()

    def computed(
        self, *, weight: float, skip: bool = False, settings: str = "", pools: bool = False
    ) -> list[ClientAction]:
        """Push the gradient of the last Compute; `weight` is its share of the batch.

        With `skip` there is no finite gradient, and the push only advances the clock. `settings` go with it. With
        `pools` the group of this host decides how it is sent.
        """
        work, self._computing = self._computing, None
        if self._left:
            return []
        if work is None:
            raise ManyhandsError(f"worker {self.slot} computed something it was not asked to compute")
        slot, member, clock, pulls = self.slot, self.member, work.clock, not self._confirms
        part = (work.batch, work.part, work.parts)
        self.clock = clock + 1
        self._out = pulls
        self._pooled = pools
        pushes = []
        for shard in self._in_round:
            name = (shard.index, slot, member, clock, shard.version)
            push = Push(*name, *part, weight, skip, shard.term, shard.rows_version, settings, pulls=pulls)
            shard.push, shard.group = push, None
            shard.rows_version = -1
            shard.read = Read(shard.index, slot, member, clock + 1)
            shard.pushed = pools  # by the group, unless it has to be sent to a new primary
            pushes.append(push)
        if pools:
            self._actions.append(Pool(tuple(pushes)))
        else:
            self._push()
        return self._done()

    def push_alone(self) -> list[ClientAction]:
        """Send what is outstanding of the last Pool by itself, whatever became of it in the group."""
        return self.carry(())

    def carry(self, groups: Collection[HostPush]) -> list[ClientAction]:
        """Send these to the shards, and again where needed, for the last Pool and those of other workers."""
        self._pooled = False
        by_shard = {group.shard: group for group in groups}
        for shard in self._shards:
            shard.group = by_shard.get(shard.index)
        self._push()
        return self._done()

    def carried(self) -> list[ClientAction]:
        """The last Pool has left for all shards, in what another worker sent: read, without values, for the next.

        A shard that has a new primary since is sent our part alone: it may be restored from before the sum.
        """
        self._pooled = False
        for shard in self._shards:
            if shard.push is not None and shard.read is not None:
                shard.read = shard.read._replace(bare=True)
        if all(shard.pushed for shard in self._shards):
            return self.flushed()
        self._push(missing=True)
        return self._done()

    def _push(self, *, missing: bool = False) -> None:
        """Send every outstanding push, or what carries it, to primaries that have welcomed us; or what is `missing`."""
        for shard in self._in_round:
            if shard.push is not None and not (missing and shard.pushed):
                shard.pushed = shard.welcome
                self._send(shard, shard.group or shard.push)
        if not self._out and all(shard.pushed for shard in self._shards):
            self._actions.append(Flush())

    def read_again(self) -> list[ClientAction]:
        """Read for the update of the last Compute once more: the parameters as they are now, and another Compute."""
        work, self._computing = self._computing, None
        if work is not None and not self._left:
            for shard in self._shards:
                self._send_read(shard, work.clock)
        return self._done()

    def copy_shards(self, folder: str, step: int) -> list[ClientAction]:
        """Have the primaries write the state of all shards to `folder`; nothing is answered."""
        for shard in self._shards:
            self._send(shard, CopyShard(shard.index, folder, step))
        return self._done()

    def flushed(self) -> list[ClientAction]:
        """Send the next reads: everything sent before the last Flush will arrive."""
        if not self._left and not self._out and not self._pooled:
            self._out = True
            for shard in self._shards:
                self._send_read(shard)
        return self._done()

    def again(self, shard: int) -> list[ClientAction]:
        """Greet the primary of `shard` again after a Wait, unless a view has already led to that."""
        place = self._shards[shard]
        if not self._left and not place.greeted and place.primary:
            self._greet(place)
        return self._done()

    def _done(self) -> list[ClientAction]:
        actions, self._actions = self._actions, []
        return actions

    # ── what a primary is told ────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, shard: _Shard, message: Message | None) -> None:
        """Send what is outstanding to the primary of a shard, once it has welcomed us; until then it is kept."""
        if shard.welcome and message is not None:
            self._actions.append(SendMessage(shard.primary, message))

    def _greet(self, shard: _Shard) -> None:
        shard.greeted = True
        hello = Hello(shard=shard.index, slot=self.slot, member=self.member, settled=shard.settled)
        self._actions.append(SendMessage(shard.primary, hello))

    def _send_read(self, shard: _Shard, clock: int | None = None) -> None:
        """Send the outstanding Read, or a new one for `clock`, unless it goes with an outstanding push."""
        if clock is not None:
            shard.read = Read(shard.index, self.slot, self.member, clock)
        if self._out and (shard.push is None or not shard.push.pulls):
            self._send(shard, shard.read)

    # ── what a primary says ───────────────────────────────────────────────────────────────────────────────────────────

    def _handle_primary(
        self, shard: _Shard, message: Welcome | RowsUnknown | Refused | SendAlone | NotPrimary
    ) -> None:
        push = shard.push
        match message:
            case Welcome():
                self._welcomed(shard, message)
            case SendAlone(clock=clock):
                if push is not None and push.clock == clock:
                    shard.group, shard.pushed = None, True
                    self._send(shard, push)
            case RowsUnknown(clock=clock):
                # Resend the message that named a row set which the shard does not know.
                if shard.rows is not None and shard.rows.clock == clock:
                    self._send(shard, shard.rows)
                elif push is not None and push.clock == clock:
                    self._send(shard, push)
            case NotPrimary() if shard.greeted:
                # Several messages to a former primary each get this answer; only the first counts.
                shard.greeted, shard.welcome = False, False
                self._actions.append(Wait(shard=shard.index))
            case Refused(clock=clock, reason=reason) if (
                push is not None and push.clock == clock and not push.skip
            ):
                if self._skip_nonfinite:
                    shard.push = push._replace(skip=True)
                    self._send(shard, shard.push)
                else:
                    where = f"update {clock} of worker {self.slot} (batch {push.batch})"
                    self._leave(Reason.REFUSED, f"shard {shard.index} refused {where}: {reason}")

    def _welcomed(self, shard: _Shard, message: Welcome) -> None:
        if shard.welcome or not shard.greeted or message.next_clock < shard.settled:
            return  # a stale answer to an earlier Hello: this worker has advanced since
        shard.welcome, shard.next_clock = True, message.next_clock
        shard.arrived = max(message.arrived, message.next_clock)
        awaited = shard.read if shard.push is None and self._confirms else None
        if awaited is not None and shard.arrived < awaited.clock:
            # We read for a clock beyond what has arrived there: a dead server lost the push. Begin again.
            self.clock = None
            for place in self._shards:
                place.read = None
        if self.clock is None:
            if all(place.welcome for place in self._shards):
                # Begin at the lowest clock that has not arrived at some shard.
                self.clock = min(place.arrived for place in self._shards)
                for place in self._shards:
                    place.settled = min(self.clock, place.next_clock)
                    self._send_read(place, self.clock)
            return
        if shard.push is not None:
            shard.pushed = not self._pooled
            if shard.pushed:
                self._send(shard, shard.group or shard.push)
        self._send_read(shard)
        self._send(shard, shard.rows)
        if not self._out and all(place.pushed for place in self._shards):
            self._actions.append(Flush())
        if self._shards[LEAD].work.kind in _LEAVES:
            self._go_on()

    def _parameters(self, shard: _Shard, message: Parameters) -> None:
        """Take the awaited answer of a shard; the lead's says which clock comes next."""
        work, shards = message.work, self._shards
        shard.settled = max(shard.settled, message.clock)
        shard.version, shard.term, shard.work = message.version, message.term, work
        shard.bare = message.bare
        shard.push = shard.group = shard.read = None
        if shard.index == LEAD:
            self.clock = work.clock
            if work.kind is not WorkKind.AHEAD:
                self.clock = shard.settled = max(shard.settled, work.clock)
                if work.kind is not WorkKind.TRAIN:  # no shard will be sent the clocks before this
                    self.clock = max(self.clock, *(place.next_clock for place in shards))
        for place in shards:
            if place.read is None and self.clock is not None and place.settled < self.clock:
                # Tell a shard that answered an earlier clock where we are, and read for that clock. The updates in
                # between will never be sent: a step was taken without them, or a shard was restored from before them.
                # Since the shard has answered, everything pushed to it is settled.
                place.settled = self.clock
                if place.greeted:
                    self._greet(place)
                self._send_read(place, self.clock)
        self._go_on()

    def _go_on(self) -> None:
        """Execute the lead's answer once every shard has answered.

        Leaving additionally requires a welcome from every shard: a shard restored meanwhile must learn from this
        worker what it has lost.
        """
        shards, work = self._shards, self._shards[LEAD].work
        for shard in shards:
            if shard.read is not None:
                return
        if work.kind is WorkKind.TRAIN:
            # Read once more from a shard that, by an older slot table, answered without waiting for the others. At most
            # once per clock: the lead answers when all shards know its table. A shard that repeats its answer is newer
            # than a lead that was restored since, and will not count the update.
            asked = [
                shard
                for shard in shards
                if shard.work.kind in _LEAVES and shard.index != LEAD and shard.asked_again < work.clock
            ]
            for shard in asked:
                shard.asked_again = work.clock
                self._send_read(shard, work.clock)
            if not asked:
                self._computing = work
                versions, bare = tuple([shard.version for shard in shards]), any(one.bare for one in shards)
                self._actions.append(Compute(work, versions, bare))
        elif not all(shard.welcome for shard in shards):
            pass
        elif work.kind is WorkKind.FINISHED:
            self._leave(Reason.FINISHED, f"slot {self.slot} has no more work")
        elif work.kind is WorkKind.RETIRED:
            self._leave(Reason.RETIRED, f"slot {self.slot} was removed from the run")
        else:
            raise ManyhandsError("the lead shard answered a Read without work")

    def _leave(self, reason: Reason, sentence: str) -> None:
        self._left = True
        self._actions.append(Leave(reason=reason, sentence=sentence))
