"""Recording of a simulated run: events in virtual time, losses and evaluations, in the form of a live run.

Worker s has role s, as in a live run, and the servers' roles follow. Evaluating takes no virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from manyhands.engine.exchange import Traffic
from manyhands.engine.reporting import StepBook
from manyhands.foresight.simulate.faults import FaultRole
from manyhands.foresight.simulate.simulated_run import Observer
from manyhands.foresight.simulate.task_model import SimulatedTask
from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import NOBODY, EventKind
from manyhands.strategies.ps.live.reports import Evaluated, LossBook, StepComputed
from manyhands.strategies.ps.live.worker_mail import message_number
from manyhands.strategies.ps.log_rows import StepRow
from manyhands.strategies.ps.ps_messages import LEAD, Message, Parameters, Push, Read, Work
from manyhands.strategies.ps.update_files import ComputedRow

__all__ = ["EventBook", "RunBook"]

_FLUSH_EVERY = 256  # events of all roles between two flushes; a ring holds more


class EventBook:
    """The event rings of all roles in virtual time, whose second 0 is `begin_ns`.

    `flush` drains the rings: no background reader does.
    """

    def __init__(
        self, rings: Sequence[EventRing], begin_ns: int, flush: Callable[[], None] = lambda: None
    ) -> None:
        self._rings, self._begin_ns, self.flush = rings, begin_ns, flush
        self._num_recorded = 0
        self.newest_ns = begin_ns  # when the newest event ended: the clock of those who look on

    def ns(self, at_s: float) -> int:
        return self._begin_ns + round(at_s * 1e9)

    def by(self, role: int) -> Callable[..., bool]:
        """Return a recorder for this role, with times on the clock of the events."""

        def record(kind: EventKind, start_ns: int, duration_ns: int = 0, **fields: Any) -> bool:
            self._num_recorded += 1
            self.newest_ns = max(self.newest_ns, start_ns + duration_ns)
            if self._num_recorded % _FLUSH_EVERY == 0:
                self.flush()
            return self._rings[role].record(kind, start_ns, duration_ns, **fields)

        return record

    def at(self, role: int, kind: EventKind, begin_s: float, end_s: float, **fields: Any) -> None:
        begin_ns = self.ns(begin_s)
        self.by(role)(kind, begin_ns, self.ns(end_s) - begin_ns, **fields)

    def everybody(self, kind: EventKind, begin_s: float, end_s: float) -> None:
        for role in range(len(self._rings)):
            self.at(role, kind, begin_s, end_s)


class RunBook(Observer):
    """Records a run of `model` on `workers` workers and `servers` servers as events.

    It evaluates every so many global batches (0: never). `take_rows` gets the history, `take_computed` the records of
    workers.
    """

    def __init__(
        self,
        model: SimulatedTask,
        events: EventBook,
        *,
        take_rows: Callable[[list[dict[str, Any]]], None],
        take_computed: Callable[[ComputedRow], None],
        evaluate_every: int,
        workers: int,
        servers: int,
        wire: int,
    ) -> None:
        self._model, self._events, self._wire = model, events, wire
        self._take_rows, self._take_computed, self._evaluate_every = take_rows, take_computed, evaluate_every
        self._workers, self._servers, self._shards = workers, servers, model.layout.shards
        self._roles: dict[int, int] = {}  # roles of servers, by member
        self._reads_s: dict[tuple[int, int], float] = {}  # by slot and shard: when its Read came
        self._losses = LossBook()
        self._began_s: float | None = None
        self._pushed: dict[int, int] = {}  # by slot: bytes pushed since it computed
        self.sent = Traffic()  # by all workers
        self.evaluated: set[int] = set()  # the steps after which there was an evaluation

    def starts(self, member: int, role: FaultRole) -> None:
        """Give a server its role; a replacement takes over its predecessor's."""
        if role is FaultRole.SERVER:
            self._roles[member] = self._workers + len(self._roles) % self._servers

    # ── what workers do ───────────────────────────────────────────────────────────────────────────────────────────────

    def waited(self, slot: int, work: Work, waited_for: int, since_s: float, now_s: float) -> None:
        """Record the time since the push as a live worker does: as a wait for a worker, or as exchange."""
        if self._began_s is None:
            self._began_s = now_s
            self._events.everybody(EventKind.JOIN, 0.0, since_s)
        book = StepBook(self._events.by(slot), work.batch, self._events.ns(since_s))
        if waited_for != NOBODY:
            book.waits({waited_for: self._events.ns(now_s) - self._events.ns(since_s)})
        pushed = self._pushed.pop(slot, 0)
        messages = 2 * self._shards if pushed else self._shards
        book.exchange(self._events.ns(now_s), Traffic(bytes_sent=pushed, messages_sent=messages), self._wire)

    def computes(self, slot: int, work: Work, read: list[Any], now_s: float) -> None:
        """Evaluate, if due before this batch, by the worker with its first part, on what it has read."""
        due = self._evaluate_every and work.batch and work.batch % self._evaluate_every == 0
        if not due or work.part or work.batch in self.evaluated:
            return
        self.evaluated.add(work.batch)
        found = self._model.evaluate(slot, read)
        if found is not None:
            metrics, samples = found
            self._events.at(slot, EventKind.EVALUATE, now_s, now_s, step=work.batch - 1, count=samples)
            evaluated = Evaluated(step=work.batch, metrics=metrics)
            row = self._losses.add_evaluation(evaluated, self.training_s(now_s))
            self._take_rows([row] if row is not None else [])

    def computed(self, slot: int, work: Work, began_s: float, now_s: float) -> None:
        made = self._model.made[slot]
        book = StepBook(self._events.by(slot), work.batch, self._events.ns(began_s))
        book.compute(self._events.ns(now_s))
        book.end(self._events.ns(now_s), made.samples, made.loss)
        part = StepComputed(
            clock=work.clock,
            batch=work.batch,
            part=work.part,
            parts=work.parts,
            loss=made.loss,
            share=made.share,
            seconds=now_s - began_s,
        )
        row = self._losses.add(part, self.training_s(now_s))
        self._take_rows([row] if row is not None else [])

    def training_s(self, at_s: float) -> float:
        """The seconds since the first worker began to compute."""
        return at_s - (self._began_s or 0.0)

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def sends(self, source: int, to: int, message: Message, now_s: float) -> None:
        """Record a push to a server, or parameters to a worker, which may have been held back until now."""
        if isinstance(message, Push):
            if message.shard == LEAD:
                self._take_computed(self._computed_row(source, message))
            num_bytes = self._model.layout.range_bytes(message.shard)
            self._pushed[message.slot] = self._pushed.get(message.slot, 0) + num_bytes
            self.sent += Traffic(messages_sent=1, bytes_sent=num_bytes)
            self._record_message(EventKind.SEND, message.slot, self._roles[to], message, now_s)
        elif isinstance(message, Parameters):
            role = self._roles[source]
            came_s = self._reads_s.pop((message.slot, message.shard), now_s)
            if message.waited_for != NOBODY:
                fields = {"step": message.work.batch, "peer": message.slot, "count": message.shard}
                self._events.at(role, EventKind.HOLD, came_s, now_s, value=message.waited_for, **fields)
            self._record_message(EventKind.SEND, role, message.slot, message, now_s)
        elif isinstance(message, Read):
            self.sent += Traffic(messages_sent=1)

    def arrives(self, source: int, to: int, message: Message, num_bytes: int, now_s: float) -> None:
        del num_bytes
        if isinstance(message, Read) or (isinstance(message, Push) and message.pulls):
            self._reads_s[message.slot, message.shard] = now_s
        if isinstance(message, Push):
            self._record_message(EventKind.RECEIVE, self._roles[to], message.slot, message, now_s)
        elif isinstance(message, Parameters):
            self._record_message(EventKind.RECEIVE, message.slot, self._roles[source], message, now_s)

    def _record_message(
        self, kind: EventKind, role: int, peer: int, message: Push | Parameters, now_s: float
    ) -> None:
        step = message.batch if isinstance(message, Push) else message.work.batch
        number, size = message_number(message, self._shards), self._model.layout.range_bytes(message.shard)
        fields = {"num_bytes": size, "count": 1, "message": number, "wire": self._wire}
        self._events.at(role, kind, now_s, now_s, step=step, peer=peer, **fields)

    def _computed_row(self, process: int, push: Push) -> ComputedRow:
        made = self._model.made[push.slot]
        return ComputedRow(
            process=process,
            slot=push.slot,
            member=push.member,
            clock=push.clock,
            batch=push.batch,
            part=push.part,
            parts=push.parts,
            versions=made.versions,
            rows_versions=(-1,) * self._shards,
            gradients=made.hashes,
        )

    # ── what servers do ───────────────────────────────────────────────────────────────────────────────────────────────

    def steps(self, server: int, row: StepRow, began_s: float, took_s: float) -> None:
        """Record every update of the step as applied; the last has the step's duration."""
        for number, update in enumerate(row.updates, 1):
            end_s = began_s + took_s if number == len(row.updates) else began_s
            fields = {"step": update.batch, "peer": update.slot, "count": row.shard}
            role, stale = self._roles[server], update.staleness
            self._events.at(role, EventKind.APPLY, began_s, end_s, value=stale, **fields)

    def ends(self, at_s: float) -> None:
        self._events.everybody(EventKind.LEAVE, at_s, at_s)
