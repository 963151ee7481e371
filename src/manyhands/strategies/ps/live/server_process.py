"""A server process: the driver of `ServerCore`, with the stores of its shards.

A single thread waits for all events and holds no lock while it waits. It executes the core's actions: it applies
gradients in place, copies parameters into the memory of the worker that asked, sends forwards and installs with
their payloads, writes rows to the log and snapshots to the disk.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from torch import Tensor

from manyhands.errors import Aborted, ManyhandsError, num_of
from manyhands.native.threads import use_threads
from manyhands.native.wait_sign import LongWait
from manyhands.observe.record.events import EventKind
from manyhands.places.local.control import RoleContext
from manyhands.places.local.status import State
from manyhands.strategies.ps.actions import (
    Ack,
    Action,
    Adopt,
    Apply,
    Discard,
    Drop,
    Keep,
    Load,
    Log,
    SendMessage,
)
from manyhands.strategies.ps.live import reports
from manyhands.strategies.ps.live.answers_ahead import AnswersAhead
from manyhands.strategies.ps.live.message_events import ServerRecords
from manyhands.strategies.ps.live.payloads import Gradients
from manyhands.strategies.ps.live.ps_job import Job, MemberContext, MemberResources
from manyhands.strategies.ps.live.row_payloads import UnknownSets
from manyhands.strategies.ps.live.shard_encoding import RangeCoding
from manyhands.strategies.ps.live.snapshots import pack_install
from manyhands.strategies.ps.live.stores import ShardKeeping, Stores
from manyhands.strategies.ps.live.worker_mail import require_shard
from manyhands.strategies.ps.log_rows import LostRow, Row, StepRow
from manyhands.strategies.ps.ps_messages import (
    Chosen,
    ChosenKept,
    Concluded,
    CopyShard,
    Forward,
    Forwarded,
    Hello,
    HostPush,
    Install,
    Installed,
    Parameters,
    Push,
    Read,
    ReadRows,
    Refused,
    RowsUnknown,
    RowValues,
    SendAlone,
    View,
    Yield,
)
from manyhands.strategies.ps.shard_replica import ReplicaRole, ServerCore
from manyhands.strategies.ps.shard_store import Contribution
from manyhands.strategies.ps.update_files import ShardRecorder
from manyhands.transport.hub.hub_events import Arrived, Arriving, Joined, Lost, Ready, Rejected, Shared
from manyhands.transport.messages import ProtocolError

_LOOK_S = 0.2
_FROM_WORKERS = (Push, HostPush, Read, Hello, ReadRows, CopyShard)
_FROM_SERVERS = (Forward, Forwarded, Install, Yield, Chosen, ChosenKept)
_NAMING_ROWS = (Push, ReadRows)
_THREADS_FROM_BYTES = 1 << 20  # below this a second thread does not pay


def serve(context: RoleContext) -> Mapping[str, Any]:
    """Run a server that is a child of the launcher, from start to end."""
    return serve_with(context, MemberResources.inherited(context))


def serve_with(context: MemberContext, resources: MemberResources) -> Mapping[str, Any]:
    begin_ns = time.monotonic_ns()
    job = resources.job()
    with resources.events() as ring:
        records = ServerRecords(ring, job.strategy)
        with ExitStack() as stack:
            server = _Server(context, resources, job, records, stack)
            ring.record(EventKind.JOIN, begin_ns, time.monotonic_ns() - begin_ns)
            left = server.run()
        ring.record(EventKind.LEAVE, time.monotonic_ns())
    return left


def require_sense(message: Any, role: str, num_shards: int) -> None:
    """ProtocolError for a message that a server does not accept from `role`, or of an unknown shard."""
    if not isinstance(message, _FROM_WORKERS) and not (
        isinstance(message, _FROM_SERVERS) and role == "server"
    ):
        raise ProtocolError("message", f"a server does not accept a {type(message).__name__} from a {role}")
    require_shard(message.shard, num_shards)
    entry = message.entry if isinstance(message, Forward) else message
    if isinstance(entry, HostPush):
        _require_parts(entry)


def _require_parts(group: HostPush) -> None:
    """ProtocolError unless the parts are updates of several slots at one clock, and the first carries the others."""
    [first, *others] = group.parts or (None,)
    if first is None or not others or len({part.slot for part in group.parts}) < len(group.parts):
        raise ProtocolError("parts", f"{len(group.parts)} parts; two or more of different slots are allowed")
    for part in group.parts:
        wanted = (group.shard, first.clock, False, -1 if part is first else first.slot)
        if (part.shard, part.clock, part.skip, part.carrier) != wanted:
            raise ProtocolError("parts", f"{part} does not belong into a sum that slot {first.slot} carries")


def _carried(message: Any) -> Any:
    """The push whose gradient comes with a message, if it is one."""
    entry = message.entry if isinstance(message, Forward) else message
    return entry.parts[0] if isinstance(entry, HostPush) else entry


class _Server:
    """One server process; `stack` closes what it opens."""

    def __init__(
        self,
        context: MemberContext,
        resources: MemberResources,
        job: Job,
        records: ServerRecords,
        stack: ExitStack,
    ) -> None:
        self._leave_shard = resources.leave_shard
        self._context, self._job, self._records = context, job, records
        self._member = context.rank
        _, _, self._layout = job.build()
        largest = max(map(self._layout.range_bytes, range(self._layout.shards)))
        use_threads(job.threads if largest >= _THREADS_FROM_BYTES else 1)
        self._core = ServerCore(job.shard_config(), self._member)
        shared = job.shared_parameters(resources.shared, self._layout)
        coding = RangeCoding(self._layout, job.strategy.codec)
        inline = job.strategy.link == "tcp"
        rests = job.strategy.filter.kkt is not None
        self._gradients = Gradients(self._layout, inline=inline, shared=shared, coding=coding, rests=rests)
        self._stores = Stores(
            job, self._core, self._layout, self._gradients, coding, shared=shared, is_primary=self._is_primary
        )
        self._asked: list[Tensor | None] = []  # the rows that the message in hand reads
        self._logs = ShardRecorder(job.run_path, self._member)
        self._keeping = ShardKeeping(
            context,
            resources.snapshots(job),
            self._core,
            self._stores,
            self._gradients,
            self._logs,
            records,
            self._note,
        )
        if shared is not None:
            stack.callback(shared.close)
        self._hub = stack.enter_context(job.hub(self._member, "server", destination=self._destination))
        self._hub.register(context.control_fileno())
        stack.callback(self._gradients.close)
        stack.callback(self._logs.close)
        self._ahead = AnswersAhead(
            self._core, self._layout, self._gradients, self._stores.get, self._hub.send
        )
        self._unsent: defaultdict[int, list[tuple[Any, list[Any]]]] = defaultdict(list)
        self._shared_with: set[tuple[int, int]] = set()
        self._dialled: set[int] = set()
        self._met: set[int] = set()  # that are connected
        self._peers: dict[int, str] = {}  # what each member that ever connected is
        self._view: View | None = None
        self._servers: set[int] = set()  # of that view
        self._to_self: deque[Any] = deque()
        self._due: set[int] = set()  # shards to snapshot when this message is dealt with
        self._staleness: dict[int, Counter[int]] = defaultdict(Counter)
        self._finished = False
        self._quiet = LongWait()

    def run(self) -> Mapping[str, Any]:
        anywhere = "unix" if self._job.strategy.link == "shared" else "tcp"
        address = self._hub.listen(self._job.listens_at or anywhere)
        reports.REPORTS.send(self._context, reports.ServerListens(address=self._job.reached_at or address))
        self._context.mark(0, State.SERVING)
        self._attend()
        while not self._finished:
            self._listen()
        if self._hub.rejected > 1:
            self._note(f"{self._context.name} rejected {self._hub.rejected} connections in all")
        self._context.mark(self._context.step, State.FINISHED)
        return {"recorded": self._logs.kept}

    def _listen(self) -> None:
        events = self._hub.poll(_LOOK_S)
        if events:
            self._quiet.begin_again()
        elif self._quiet.is_long:
            awaited = self._core.awaited_member
            if awaited is not None:
                self._quiet.goes_on(awaited)
        for event, following in zip_longest(events, events[1:]):
            match event:
                case Arrived(member=member):
                    more = isinstance(following, Arrived) and following.member == member
                    if more:
                        self._hub.hold_back()  # a push and the read behind it have one answer
                    begin_ns = self._records.began(event.message)
                    try:
                        self._handle(member, event.message, event.payload)
                        self._records.handled(event.message, begin_ns, event.payload.nbytes)
                    except ProtocolError as error:
                        self._cut(member, error)
                    event.release()
                    if not more:
                        self._hub.send_off()
                case Arriving(message=message, num_bytes=num_bytes):
                    if isinstance(message, Push | HostPush):
                        self._ahead.arriving(message, num_bytes)
                case Shared(tag=tag, segment=segment, member=member):
                    try:
                        if self._peers[member] != "server" and tag != member:
                            segment.close()
                            raise ProtocolError("tag", f"member {member} shares memory as member {tag}")
                        self._gradients.add_area(tag, segment)
                    except (ProtocolError, ValueError) as error:
                        wrong = (
                            error
                            if isinstance(error, ProtocolError)
                            else ProtocolError("segment", str(error))
                        )
                        self._cut(member, wrong)
                case Joined(member=member, role=role):
                    self._met.add(member)
                    self._peers[member] = role
                    for unsent in self._unsent.pop(member, []):
                        self._deliver(member, *unsent)
                case Lost(member=member, reason=reason):
                    if member in self._dialled and member not in self._met:
                        self._note(f"{self._context.name}: member {member} {reason}")
                    self._forget(member)
                case Ready():
                    self._attend()
                case Rejected(reason=reason, count=count):
                    whom = "a connection:" if count == 1 else f"{count} connections, most recently:"
                    self._note(f"{self._context.name} rejected {whom} {reason}")

    def _attend(self) -> None:
        """Execute the launcher's orders; called only when there are some, as it costs as much as a small message."""
        for order in self._context.received():
            match reports.ORDERS.read(order):
                case reports.ViewPublished(view=view, addresses=addresses):
                    self._follow(view, addresses)
                case reports.RestoreShard(shard=shard):
                    self._keeping.restore(shard)
                case reports.LeaveShards(shards=shards):
                    self._leave(shards)
                case reports.Finish():
                    self._finished = True
        if self._context.stopping and not self._finished:
            raise Aborted("the launcher asked to stop")

    def _cut(self, member: int, error: ProtocolError) -> None:
        """Disconnect a member that violated the protocol; the server continues."""
        self._hub.disconnect(member, str(error))
        self._forget(member)
        self._note(f"{self._context.name} ended its connection to member {member}: {error}")

    def _forget(self, member: int) -> None:
        self._dialled.discard(member)
        self._met.discard(member)
        self._gradients.lost(member)
        self._shared_with = {pair for pair in self._shared_with if pair[0] != member}
        self._stores.forget(member)
        self._ahead.gone(member)

    # ── what arrives ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _follow(self, view: View, addresses: Mapping[int, str]) -> None:
        is_first, self._view = self._view is None, view
        if is_first and self._job.resume_version is not None:
            for place in view.shards:
                if place.primary == self._member:
                    self._keeping.restore(place.shard, self._job.resume_version)
        for member in self._dialled - addresses.keys():
            self._dialled.discard(member)
            self._hub.hang_up(member)
        for member, address in addresses.items():
            if member < self._member and member not in self._dialled:
                self._dialled.add(member)
                self._hub.connect(member, address)
        self._servers = {member for place in view.shards for member in (place.primary, place.backup)}
        for gone in self._unsent.keys() - self._servers:
            del self._unsent[gone]
        self._do(self._core.view(view), None, None)
        # Gradients of a slot's former holder are no longer taken, except at two kinds of shards. To a backup the
        # primary may still forward what it took before it learned of the new holder. Where a successor decides about
        # earlier arrivals (`confirms`), the shards that this server serves take them, too.
        taking = {ReplicaRole.BACKUP, *([ReplicaRole.PRIMARY] if self._job.confirms else [])}
        taken = {shard for shard, replica in self._core.replicas.items() if replica.role in taking}
        fencing = [shard for shard in range(self._layout.shards) if shard not in taken]
        for slot in (*view.slots, *view.retiring):
            self._gradients.succeed(slot.slot, slot.member, fencing)

    def _handle(self, member: int, message: Any, payload: memoryview) -> None:
        require_sense(message, self._peers[member], self._layout.shards)
        if isinstance(message, CopyShard):
            if self._is_primary(message.shard):
                self._keeping.leave_copy(*message)
            return
        push, is_pushed = _carried(message), isinstance(message, Push | HostPush)
        if is_pushed and self._job.answers_ahead:
            self._ahead.arriving(message, payload.nbytes)
        contribution: Contribution | None = None
        try:
            # Check fencing first: a member that lost its slot may have no memory here any more.
            if isinstance(push, Push):
                if not push.skip and self._core.keeps(message):
                    contribution = self._gradients.of(push, payload, by_worker=is_pushed)
                    if contribution is None:  # a worker's protocol error, or the end of this replica
                        sentence = f"the gradient of slot {push.slot}, clock {push.clock} is missing"
                        raise ProtocolError("push", sentence) if is_pushed else ManyhandsError(sentence)
                    if is_pushed and self._refuse(member, message, contribution):
                        return
            elif isinstance(message, ReadRows):
                self._asked = self._gradients.tables.asked(message.shard, payload, message.whole)
        except UnknownSets as unknown:
            if not isinstance(message, _NAMING_ROWS):
                raise ProtocolError("rows", "a forward must list its rows, not name a set") from unknown
            again = RowsUnknown(message.shard, message.slot, message.clock, unknown.names)
            self._hub.send(member, again)
            return
        self._do(self._core.handle(message, member), contribution, payload)
        if contribution is not None and isinstance(push, Push):
            self._gradients.taken(push)

    def _refuse(self, member: int, push: Push | HostPush, contribution: Contribution) -> bool:
        """Refuse a non-finite gradient; the reason names the parameter. Of a sum, the parts are to come alone."""
        store = self._stores.by_shard.get(push.shard)
        try:
            bad = store.first_bad(contribution) if store is not None else None
        except (IndexError, ValueError) as error:
            raise ProtocolError("rows", str(error)) from error
        if bad is None:
            return False
        if isinstance(push, HostPush):
            for part in push.parts:
                self._send(part.member, SendAlone(part.shard, part.slot, part.clock))
            return True
        reason = f"the gradient of {bad!r} is not finite"
        self._hub.send(member, Refused(shard=push.shard, slot=push.slot, clock=push.clock, reason=reason))
        return True

    def _destination(self, member: int, message: Any, num_bytes: int) -> memoryview | None:
        del member
        entry = message.entry if isinstance(message, Forward) else message
        if isinstance(entry, HostPush):
            _require_parts(entry)
        push = _carried(message)
        if not isinstance(push, _NAMING_ROWS):
            return None
        require_shard(push.shard, self._layout.shards)
        if isinstance(push, Push):
            return self._gradients.room_for(push, num_bytes, by_worker=not isinstance(message, Forward))
        self._gradients.tables.check_capacity(push.shard, num_bytes)
        return None

    # ── what to do ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _do(self, actions: list[Action], gradient: Contribution | None, payload: memoryview | None) -> None:
        for action in actions:
            match action:
                case Apply(row=row, settings=settings):
                    self._apply(row, settings)
                case Adopt(shard=shard, settings=settings):
                    self._stores.load_checkpoint(shard, **json.loads(settings))
                    if self._is_primary(shard) and self._job.plan.checkpoint_every:
                        self._due.add(shard)  # or a successor would begin without it
                case SendMessage(to=to, message=message):
                    self._send(to, message)
                case Keep():
                    self._gradients.keep(action, gradient)
                case Ack():
                    pass  # the answer to the Read behind the push implies it
                case Drop(shard=shard, slot=slot, clock=clock):
                    self._gradients.drop(shard, slot, clock)
                case Log(row=row):
                    self._log(row)
                case Load(shard=shard):
                    assert payload is not None, "an Install has a payload"
                    self._keeping.install(shard, payload)
                case Discard(shard=shard):
                    self._stores.by_shard.pop(shard, None)
                    self._gradients.replace(shard, {})
        self._gradients.secure()
        while self._due:
            self._keeping.save(self._due.pop())
        if self._to_self:
            message = self._to_self.popleft()
            self._do(self._core.handle(message, self._member), None, None)

    def _apply(self, row: StepRow, settings: str) -> None:
        begin_ns, updates, shard = time.monotonic_ns(), row.updates, row.shard
        contributions, staleness = [], self._staleness[shard]
        for update in updates:
            held = self._gradients.take(shard, update.slot, update.clock)
            if held is not None:  # else its carrier's gradient has it
                contributions.append(held if update.factor == 1 else replace(held, factor=update.factor))
            staleness[update.staleness] += 1
        batches = 1 if len(updates) == 1 else len({update.batch for update in updates})
        self._stores.get(shard).apply(contributions, row.rate, batches, settings)
        took_ns = time.monotonic_ns() - begin_ns
        self._log(row)
        if self._is_primary(shard):  # a backup repeats every step
            self._records.applied(row, begin_ns, took_ns)
            every = self._job.plan.checkpoint_every
            if every and row.version % every == 0:
                self._due.add(shard)

    def _send(self, to: int, message: Any) -> None:
        payload: list[Any] = []
        match message:
            case Installed() | Concluded():
                reports.REPORTS.send(self._context, message)
                return
            case Parameters(bare=True):
                self._records.answered(message, 0)
            case Parameters(shard=shard):
                message = message._replace(ahead=self._ahead.sent(to, message))
                payload, num_bytes = self._stores.deliver(self._hub, to, shard, message.ahead)
                self._records.answered(message, num_bytes)
            case RowValues(shard=shard):
                payload = self._gradients.tables.values(
                    self._stores.get(shard), self._asked, to, has_all=self._hub.sent(to)
                )
                self._records.answered(message, sum(memoryview(one).nbytes for one in payload))
            case Forward(entry=Push(skip=False) | HostPush()):
                payload = self._gradients.forwarded(_carried(message))
            case Install(shard=shard):
                payload = pack_install(self._stores.get(shard).state(), self._keeping.waiting(shard))
        if to == self._member:  # after deaths, one server may serve several shards
            self._to_self.append(message)
        elif to in self._hub.members() and to not in self._unsent:  # queued messages go first
            self._deliver(to, message, payload)
        elif to in self._servers:
            self._unsent[to].append((message, payload))

    def _deliver(self, to: int, message: Any, payload: list[Any]) -> None:
        if isinstance(message, Forward) and isinstance(message.entry, Push):
            # Share the worker's memory with the backup before the forwards that refer to it.
            worker = message.entry.member
            area = self._gradients.areas.get(worker)
            if area is not None and (to, worker) not in self._shared_with:
                self._shared_with.add((to, worker))
                self._hub.share(to, area.segment, worker)
        self._hub.send(to, message, payload)
        if payload:
            self._hub.send_off()

    def _is_primary(self, shard: int) -> bool:
        return self._view is not None and self._view.shards[shard].primary == self._member

    def _log(self, row: Row) -> None:
        failure = self._logs.write(row)
        if failure is not None:
            self._note(failure, ends_recording=True)
        if isinstance(row, LostRow):
            lost = f"{num_of(row.until - row.first, 'update')} of worker {row.slot}"
            self._note(f"shard {row.shard} lost {lost} with a server that had no replica")

    def _note(self, sentence: str | None, *, ends_recording: bool = False) -> None:
        """Have the launcher show the user a notice, if there is one."""
        if sentence is not None:
            reports.REPORTS.send(
                self._context, reports.Notice(sentence=sentence, ends_recording=ends_recording)
            )

    def _leave(self, wanted: Collection[int]) -> None:
        """Hand over the parameters of those shards that this server serves to the launcher, and report it."""
        for shard in wanted:
            if self._is_primary(shard):
                self._keeping.save(shard)
        shards = self._stores.leave(self._leave_shard, wanted, self._staleness)
        reports.REPORTS.send(self._context, reports.ShardsLeft(shards=tuple(shards)))
