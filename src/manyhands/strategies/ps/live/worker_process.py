"""A worker process of the parameter server: the driver of `ClientCore`.

It connects to the servers of the latest view, executes the core's actions, and computes. Every wait has a
deadline, and the error names the shards and servers that have not answered.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from manyhands.engine.exchange import Traffic
from manyhands.engine.profiler import StepProfiler
from manyhands.engine.reduction import require_reduction
from manyhands.engine.reporting import StepBook
from manyhands.errors import Aborted, NonFinite, PeerTimeout
from manyhands.native.heap import keep_freed_memory
from manyhands.native.threads import use_threads
from manyhands.native.wait_sign import LONG_WAIT_NS, put_up, sign_address, take_down
from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import NOBODY, EventKind
from manyhands.places.local.control import RoleContext
from manyhands.places.local.status import State
from manyhands.strategies.ps.actions import SendMessage
from manyhands.strategies.ps.client_core import ClientCore, Compute, Flush, Leave, Pool, Reason, Wait
from manyhands.strategies.ps.digests import gradient_hash
from manyhands.strategies.ps.host_group import Begin, GroupMessage
from manyhands.strategies.ps.live import reports
from manyhands.strategies.ps.live.host_workers import HostWorkers, WorkerAction
from manyhands.strategies.ps.live.ps_job import Job, MemberContext, MemberResources
from manyhands.strategies.ps.live.worker_mail import WorkerMail, wire_of_link
from manyhands.strategies.ps.live.worker_state import WorkerState
from manyhands.strategies.ps.ps_messages import (
    Parameters,
    RowsUnknown,
    RowValues,
    ValuesAhead,
    View,
    Welcome,
    Work,
)
from manyhands.strategies.ps.update_files import ComputedRow
from manyhands.transport.hub.hub import Hub
from manyhands.transport.hub.hub_events import Arrived, Joined, Lost, Ready, Shared
from manyhands.transport.link.wire import Wire
from manyhands.transport.messages import ProtocolError

_LOOK_S = 0.2
_AGAIN_S = 0.01
_MOMENT_S = 0.001


def work(context: RoleContext, slot: int) -> Mapping[str, Any]:
    """Run a worker that is a child of the launcher, from start to end."""
    return work_with(context, MemberResources.inherited(context), slot)


def work_with(context: MemberContext, resources: MemberResources, slot: int) -> Mapping[str, Any]:
    """Run a worker, local or remote, from start to end; if it is fenced, it continues in another slot."""
    job = resources.job()
    use_threads(job.threads)
    joined = time.monotonic_ns()
    with ExitStack() as stack:
        ring = stack.enter_context(resources.events())
        body = WorkerState(context, resources, job, slot)
        stack.callback(body.close)
        stack.enter_context(body.computer.loading_ahead())
        keep_freed_memory()  # every step frees what the next one takes
        ring.record(EventKind.JOIN, joined, time.monotonic_ns() - joined)
        member = context.rank
        while True:
            with closing(SlotSession(context, job, body, ring, slot, member)) as session:
                ready = session.near.ready if session.near is not None else reports.WorkerReady()
                reports.REPORTS.send(context, ready)
                left = session.run()
            if left.reason is Reason.REFUSED:
                raise NonFinite(left.sentence)
            if left.reason is not Reason.FENCED:
                break
            reports.REPORTS.send(context, reports.PlaceLost(sentence=left.sentence))
            place = body.await_place(member)
            if place is None:
                break
            slot, member = place
            body.begin_anew()
        if left.reason is Reason.FINISHED:
            body.leave_buffers()
        reports.REPORTS.send(context, reports.WorkerLeft(reason=left.reason))
        ring.record(EventKind.LEAVE, time.monotonic_ns())
        context.mark(context.step, State.FINISHED)
        return {
            "messages_sent": body.messages_sent,
            "bytes_sent": body.bytes_sent,
            "samples": body.samples,
            "recorded": body.recorder.kept,
        }


class _SlotLeft(Exception):
    """The slot was lost while its next update was being prepared."""


class SlotSession:
    """One process in one slot under one member number, until it leaves."""

    def __init__(
        self, context: MemberContext, job: Job, body: WorkerState, ring: EventRing, slot: int, member: int
    ) -> None:
        self._context, self._job, self._body, self._ring = context, job, body, ring
        self._core = ClientCore(
            slot=slot,
            member=member,
            num_shards=job.strategy.servers,
            skip_nonfinite=job.skip_nonfinite,
            confirms=job.confirms,
        )
        self._hub: Hub = job.hub(member, "worker", destination=self._destination)
        self._hub.register(context.control_fileno())
        self._mail = WorkerMail(self._hub, body, job, ring)
        self.near: HostWorkers | None = None  # the other workers of this host, where they push as one
        if job.adds_up:
            self.near = HostWorkers(self._core, self._hub, body, self._mail, confirms=job.confirms)
        self._dialled: set[int] = set()
        self._unreached: dict[int, str] = {}  # by member of the view: why it is not connected
        self._again: list[int] = []
        self._computing: Compute | None = None
        self._profiler = StepProfiler(job.plan.profiled, slot)
        self._flushing = False
        self._left: Leave | None = None
        self._pushed_ns = time.monotonic_ns()
        self._heard_ns = time.monotonic_ns()
        self._began_ns: int | None = None
        self._begun_ns = 0  # computing, once all that it needs is here
        self._evaluated = -1
        self._shows_wait = False
        self._waited_for = NOBODY
        self._latest: View | None = None
        self._wire = wire_of_link(job.strategy)
        self._booked_bytes = body.bytes_sent
        self._per_shard = 2 if job.confirms else 1  # messages of an update: else its read goes with its push

    def close(self) -> None:
        self._profiler.close()
        self._mail.close()
        self._hub.unregister(self._context.control_fileno())
        self._hub.flush(_LOOK_S)
        self._hub.close()
        if self.near is not None:
            self.near.close()

    def run(self) -> Leave:
        self._pushed_ns = self._heard_ns = time.monotonic_ns()
        self._attend()  # orders that came before this slot was given are not announced again
        while self._left is None:
            if self._computing is not None:
                self._compute(self._computing)
            else:
                self._advance()
        if self._began_ns is not None:  # the answer to the last push, which no pull follows
            book = StepBook(self._ring.record, self._context.step - 1, self._pushed_ns)
            book.exchange(time.monotonic_ns(), self._take_sent(), self._wire)
        return self._left

    def _advance(self) -> None:
        """Do what comes next towards the next work, waiting a moment where there is nothing to do."""
        if not self._flushing:
            self._listen(_AGAIN_S if self._again else _LOOK_S)
        elif not self._hub.flush(_LOOK_S):
            self._listen(0.0)
        elif not all(map(self._hub.arrives, self._hub.members())):
            self._listen(_MOMENT_S)  # a server reads what fills its end of the connection
        else:
            # Every push will arrive. Handle the launcher's orders before the reads follow: a worker that was
            # suspended between its pushes and has lost its slot since learns it here, and its successor decides.
            self._flushing = False
            self._attend()
            self._do(self._core.flushed() if self.near is None else self.near.flushed())

    def _attend(self) -> None:
        """Execute the launcher's orders; called only when there are some, as it costs as much as a small message."""
        unheard, self._body.unheard = self._body.unheard, []
        for order in (*unheard, *map(reports.ORDERS.read, self._context.received())):
            if not isinstance(order, reports.ViewPublished):
                continue
            self._mail.roles, addresses = dict(order.roles), order.addresses
            self._latest = order.view
            for member in (self._dialled | self._unreached.keys()) - addresses.keys():
                self._dialled.discard(member)
                self._unreached.pop(member, None)
                self._hub.hang_up(member)
            for member, address in addresses.items():
                if member not in self._dialled:
                    self._dialled.add(member)
                    self._hub.connect(member, address)
            if self.near is not None:
                self._do(self.near.view(order.view, order.workers))
            self._do(self._core.view(order.view))
        if self._context.stopping:
            raise Aborted("the launcher asked to stop")

    def _listen(self, wait_s: float) -> None:
        for event in self._hub.poll(wait_s):
            match event:
                case Arrived(member=member):
                    self._begin_wait(time.monotonic_ns())
                    try:
                        self._hear(event)
                    except ProtocolError as error:  # other workers may still use this server
                        self._hub.disconnect(member, str(error))
                        self._dialled.discard(member)
                        self._notice(f"{self._context.name} ended its connection to member {member}: {error}")
                    if event.lender is not None:
                        event.release()
                case Joined(member=member, role="worker") if self.near is not None:
                    self.near.joined(member)
                case Shared(member=member, tag=tag, segment=segment) if self.near is not None:
                    try:
                        self._do(self.near.shared(member, tag, segment))
                    except ProtocolError as error:
                        self._hub.disconnect(member, str(error))
                case Joined(member=member):
                    self._unreached.pop(member, None)
                    if self._job.strategy.link == "shared":
                        self._hub.share(member, self._body.area.segment, self._core.member)
                    self._mail.joined(member)
                case Lost(member=member, reason=reason):
                    self._dialled.discard(member)
                    self._unreached[member] = reason
                    self._body.tables.forget(member)
                    if self.near is not None:
                        self._do(self.near.lost(member))
                case Ready():
                    self._attend()
        self._mail.go_on()
        if self._again:
            again, self._again = self._again, []
            for shard in again:
                self._do(self._core.again(shard))
        if self.near is not None:
            self._do(self.near.expects())
        waited_ns = time.monotonic_ns() - self._heard_ns
        if waited_ns >= LONG_WAIT_NS:
            self._wait_long(waited_ns / 1e9)

    def _begin_wait(self, now_ns: int) -> None:
        """The awaited answer is here; the next ones are awaited from now on."""
        self._heard_ns = now_ns
        if self._shows_wait:
            self._shows_wait = False
            take_down(sign_address())

    def _wait_long(self, waited_s: float) -> None:
        """Show the server of the first shard that has not answered; PeerTimeout after the run's deadline."""
        awaited = self._core.waiting_for
        if self._computing is None and awaited and self._latest is not None:
            primary = next(one.primary for one in self._latest.shards if one.shard == awaited[0])
            put_up(sign_address(), primary, self._heard_ns)
            self._shows_wait = True
        if waited_s > self._job.timeout_s:
            shards = ", ".join(
                [f"shard {shard}" for shard in awaited]
                + [f"member {one}, of this host" for one in (self.near.waits_for if self.near else ())]
            )
            why = "".join(f"; member {member}: {reason}" for member, reason in self._unreached.items())
            raise PeerTimeout(
                f"worker {self._core.slot} has waited {waited_s:.0f} s for {shards or 'its work'}{why}",
                peer=-1,
            )

    def _hear(self, event: Arrived) -> None:
        member, message, payload = event.member, event.message, event.payload
        if self.near is not None and isinstance(message, GroupMessage):
            self._do(self.near.hear(message, member))
            return
        self._mail.require_known(message)
        num_bytes = payload.nbytes + (message.ahead if isinstance(message, Parameters) else 0)
        self._mail.record(EventKind.RECEIVE, time.monotonic_ns(), member, message, num_bytes)
        match message:
            case Parameters():
                self._waited_for = message.waited_for  # of the last shard to answer
                if self._core.awaits(message, member):
                    self._mail.take(member, message, payload)
            case ValuesAhead():
                if self._core.awaits(message, member):
                    self._mail.take_ahead(member, message, payload)
                return
            case RowValues():
                if self._core.awaits(message, member):
                    self._body.tables.take(message.shard, payload)
            case RowsUnknown(names=names):  # sets that a server has evicted
                self._body.tables.forgotten(names)
        self._do(self._core.handle(message, member))
        if isinstance(message, Welcome) and self._core.welcomed_epoch is not None:
            reports.REPORTS.send(self._context, reports.ShardsWelcomed(epoch=self._core.welcomed_epoch))

    def _do(self, actions: Sequence[WorkerAction]) -> None:
        for action in actions:
            match action:
                case SendMessage(to=to, message=message):
                    self._mail.send(to, message)
                case Compute() if self.near is not None:
                    self._do(self.near.computes(action))
                case Compute():
                    self._computing = action
                case Begin(compute=compute):
                    self._computing = compute
                case Pool(pushes=pushes):
                    assert self.near is not None, "nothing is pooled without a group"
                    self._do(self.near.offers(pushes))
                case Flush():
                    self._flushing = True
                case Wait(shard=shard):
                    self._again.append(shard)
                case Leave():
                    self._left = action

    def _destination(self, member: int, message: Any, num_bytes: int) -> memoryview | None:
        if self.near is not None and isinstance(message, GroupMessage):
            return None
        self._mail.require_known(message)
        is_awaited = isinstance(message, Parameters | ValuesAhead) and self._core.awaits(message, member)
        return self._mail.receive_buffer(message, num_bytes, is_awaited=is_awaited)

    # ── one update ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _compute(self, compute: Compute) -> None:
        work, body, ring = compute.work, self._body, self._ring
        self._computing = None
        begin = time.monotonic_ns()
        self._began_ns = self._began_ns or begin
        self._record_pull(work, begin)
        self._context.mark(work.batch + 1, State.COMPUTING)
        if self._job.plan.profiled is not None:
            self._profiler.before(work.batch)
        body.model.pulled()
        try:
            self._evaluate(work)
            ready = self._begun_ns = time.monotonic_ns()
            body.model.begin()
            if body.tables.exist:
                body.tables.begin()
            done = body.computer.compute(
                body.model.model,
                work.batch,
                work.part,
                work.parts,
                body.model.backward,
                self._read_batch if body.tables.exist else None,
            )
        except _SlotLeft:
            return
        body.model.end()
        if body.tables.exist or body.coding.codes_gradients:
            self._notice(body.encode(work.batch, work.part, done.share))
        begun = self._begun_ns
        if not body.tables.exist:  # else what was read before is over already
            begun += done.input_ns
        computed = time.monotonic_ns()
        bad = body.complaint(done, f"worker {self._core.slot}, step {work.batch + 1}")
        if bad is not None and not self._job.skip_nonfinite:
            raise NonFinite(f"{bad}; {body.cause(done)}")
        if body.own_steps is not None:
            self._notice(body.own_steps.begin(work, self._core.slot))
            if bad is None:
                self._notice(body.own_steps.step(body.model, work.batch, work.part, done.share))
            computed = time.monotonic_ns()
        body.samples += done.samples
        for sentence in body.computer.notices():
            self._notice(sentence)
        book = StepBook(ring.record, work.batch, begin)
        book.at_ns = ready
        book.input(done.input_ns, done.samples)
        book.at_ns = begun
        book.compute(computed)
        book.end(computed, done.samples, done.loss)
        took_s, facts = (computed - begin) / 1e9, body.computer.collected() or None
        reports.REPORTS.send(
            self._context,
            reports.StepComputed(*work[1:], done.loss, done.share, took_s, facts)
            if bad is None
            else reports.StepSkipped(clock=work.clock, sentence=bad),
        )
        self._push(compute, done.share, skip=bad is not None)
        if self._job.plan.profiled is not None:
            self._profiler.after()

    def _push(self, compute: Compute, share: float, *, skip: bool, settings: str = "") -> None:
        now_ns = self._pushed_ns = time.monotonic_ns()
        self._context.mark(compute.work.batch + 1, State.EXCHANGING)
        self._begin_wait(now_ns)
        if self._body.recorder.log is not None and not skip:
            self._record(compute)
        if self.near is not None:
            self._listen(0.0)  # what the workers of this host have said meanwhile
        pools = not skip and self.near is not None and not self.near.is_alone
        self._do(self._core.computed(weight=share, skip=skip, settings=settings, pools=pools))
        if self.near is not None:
            self._do(self.near.expects())

    def _notice(self, sentence: str | None) -> None:
        if sentence is not None:
            reports.REPORTS.send(self._context, reports.Notice(sentence=sentence))

    def _record(self, compute: Compute) -> None:
        body, core = self._body, self._core
        hashes = tuple(
            gradient_hash(part.flags, part.gradient, body.tables.gradients(shard))
            for shard, part in enumerate(body.parts)
        )
        name = (self._context.rank, core.slot, core.member, *compute.work[1:])
        failure = body.recorder.write(ComputedRow(*name, compute.versions, core.rows_versions, hashes))
        if failure is not None:
            reports.REPORTS.send(self._context, reports.Notice(sentence=failure, ends_recording=True))

    def _read_batch(self, batch: Any) -> None:
        book = StepBook(self._ring.record, self._context.step - 1, time.monotonic_ns())
        self._read_rows(self._body.tables.choose(batch))
        self._begun_ns = time.monotonic_ns()
        book.exchange(self._begun_ns, Traffic(), Wire.NONE)

    def _read_rows(self, shards: Collection[int], whole: bool = False) -> None:
        self._begin_wait(time.monotonic_ns())
        self._do(self._core.read_rows(shards, whole))
        while self._core.waiting_for:
            self._listen(_AGAIN_S if self._again else _LOOK_S)
        if self._left is not None:
            raise _SlotLeft

    def _record_pull(self, work: Work, now_ns: int) -> None:
        """Attribute the time since the push: to the worker that the shards waited for, or to the exchange."""
        book = StepBook(self._ring.record, work.batch, self._pushed_ns)
        if self._waited_for != NOBODY:
            book.waits({self._waited_for: now_ns - self._pushed_ns})
        book.exchange(now_ns, self._take_sent(), self._wire)

    def _take_sent(self) -> Traffic:
        """The bytes of pushes since the last call, and the number of messages; none before the first push."""
        num_bytes = self._body.bytes_sent - self._booked_bytes
        self._booked_bytes = self._body.bytes_sent
        messages = self._per_shard * len(self._body.parts) if num_bytes else 0
        return Traffic(bytes_sent=num_bytes, messages_sent=messages)

    def _evaluate(self, work: Work) -> None:
        """Evaluate, if due before this batch, with the weights just pulled; only the worker with part 0 does so.

        Before the first batch it checks the loss reduction instead, as far as parts are summed; UserError if it is
        wrong. Not with tables, of which it has no row yet.
        """
        plan, computer, model = self._job.plan, self._body.computer, self._body.model.model
        if work.part:
            return
        if (
            not work.batch
            and (work.parts > 1 or computer.task.microbatches > 1)
            and not self._body.tables.exist
        ):
            require_reduction(computer, work.part, model, lambda trial: trial.evaluate(model))
        due = plan.evaluate_every and work.batch and work.batch % plan.evaluate_every == 0
        if not due or self._evaluated == work.batch:
            return
        self._evaluated = work.batch
        if self._body.tables.exist:
            self._read_rows(self._body.tables.choose_whole(), whole=True)
        self._context.mark(work.batch, State.EVALUATING)
        begin = time.monotonic_ns()
        if plan.task.evaluation is not None:
            self._ring.record(EventKind.EVALUATE, begin, step=work.batch - 1)
        evaluated = computer.evaluate(model)
        if evaluated is not None:
            metrics, samples = evaluated
            self._ring.record(
                EventKind.EVALUATE, begin, time.monotonic_ns() - begin, step=work.batch - 1, count=samples
            )
            reports.REPORTS.send(self._context, reports.Evaluated(step=work.batch, metrics=metrics))
