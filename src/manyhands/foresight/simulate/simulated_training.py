"""Trains a task in virtual time as a `Training`; the run directory is like that of a live run.

Gradients, optimizer steps and evaluations are real and use the code of live processes; computing, sending and
starting take as long as the conditions say. There is one process, and no worker process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.data.store.checkpoint import Snapshot
from manyhands.data.store.rundir import RunDirectory
from manyhands.engine.device import check_device
from manyhands.engine.exchange import SentFor, Traffic
from manyhands.engine.kernel_task import AnyTask
from manyhands.engine.options import Options
from manyhands.engine.reporting import StepBook
from manyhands.engine.request import Length, Request
from manyhands.engine.run import Run
from manyhands.engine.session import run_session
from manyhands.engine.training import Result, Stage, Training
from manyhands.errors import UserError
from manyhands.foresight.simulate.driver import simulate
from manyhands.foresight.simulate.faults import FaultRole
from manyhands.foresight.simulate.simulated_run import Observer, SimulatedRun
from manyhands.foresight.simulate.simulated_spec import SimulatedConditions, SimulationSpec, Timing
from manyhands.foresight.simulate.task_model import SimulatedTask, TaskStore
from manyhands.native.threads import with_threads
from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import NOBODY, EventKind
from manyhands.strategies.ps.digests import layout_digest
from manyhands.strategies.ps.host_group import GroupMessage
from manyhands.strategies.ps.live.live_training import server_summary
from manyhands.strategies.ps.live.ps_launcher import LaunchOutcome
from manyhands.strategies.ps.live.reports import Evaluated, LossBook, StepComputed
from manyhands.strategies.ps.live.worker_mail import message_number
from manyhands.strategies.ps.log_rows import StepRow
from manyhands.strategies.ps.ps_messages import LEAD, Message, Parameters, Push, Read, Work
from manyhands.strategies.ps.replay_player import ReplayStage
from manyhands.strategies.ps.update_files import ComputedRow, Recorder, RunRecord, ShardRecorder, write_record
from manyhands.strategy import Strategy
from manyhands.task import Task
from manyhands.transport.link.wire import Wire, wire_of

__all__ = ["SimulatedRequest", "SimulatedTraining", "fit_simulated", "require_simulated"]


_RING_EVENTS = 1 << 10


@dataclass(frozen=True, kw_only=True)
class SimulatedRequest(Request):
    """The training request, and the simulated conditions."""

    conditions: SimulatedConditions = field(default_factory=SimulatedConditions)

    def config(self, model: nn.Module) -> dict[str, Any]:
        return {**super().config(model), "simulated": self.conditions.to_dict()}


def require_simulated(strategy: Strategy, task: Any) -> None:
    """Raise UserError where this strategy, or this task under it, cannot be simulated."""
    if not strategy.facts.logs_updates:
        raise UserError(
            f"strategy={strategy}: the simulator runs only parameter servers; use ps, as in 'ps consistency=async'"
        )
    for name, plain in (("codec", "raw"), ("push", "gradients")):
        value = getattr(strategy, name, plain)
        if value != plain:
            raise UserError(f"strategy={strategy}: {name}={value} cannot be simulated; leave it out")
    if not isinstance(task, Task):
        raise UserError(f"task {task.name!r} has compiled steps, which cannot be simulated; use digits")
    if task.sparse or task.streams:
        raise UserError(f"task {task.name!r} has sparse tables or a stream, which cannot be simulated")


class SimulatedTraining(Training):
    """Trains to the end in virtual time; deterministic for a given seed and step duration."""

    def __init__(self, request: Request, model: nn.Module) -> None:
        super().__init__(request, model)
        assert isinstance(request, SimulatedRequest), "made by fit_simulated"
        self._conditions = request.conditions
        self._strategy: Any = request.strategy  # one of servers: require_simulated has looked

    def resume(self, directory: RunDirectory, _config: Mapping[str, Any]) -> int | None:
        """Raise UserError: a simulated run keeps no intermediate checkpoints."""
        raise UserError(f"{directory.path} cannot be resumed: a simulated run has no checkpoints")

    def run(self, stage: Stage) -> Result:
        request = self._request
        with ExitStack() as stack:
            stack.enter_context(with_threads(1))  # as the record states: a replay must use the same
            record = self._record()
            assert isinstance(request.plan.task, Task), "require_simulated has looked"
            parts = ReplayStage(request.plan.task, record, self._strategy)
            model = SimulatedTask(stack.enter_context(parts))
            step_s = model.measure_step_s() if self._conditions.step_s is None else self._conditions.step_s
            record = record._replace(layout=layout_digest(parts.layout))
            files = stack.enter_context(_Files(stage.run_path, record))
            workers, servers = request.workers, self._strategy.num_server_processes
            names = [f"worker-{n}" for n in range(workers)] + [f"server-{n}" for n in range(servers)]
            rings = {
                name: stack.enter_context(EventRing.create(role=role, capacity=_RING_EVENTS))
                for role, name in enumerate(names)
            }
            events = EventBook(list(rings.values()), time.monotonic_ns())
            clock = partial(getattr, events, "newest_ns")
            collector = stack.enter_context(stage.collector(rings, request.workers, clock))
            events.flush = collector.flush
            book = RunBook(
                model,
                events,
                take_rows=stage.take_rows,
                take_computed=files.computed,
                evaluate_every=request.plan.evaluate_every,
                workers=workers,
                servers=servers,
                wire=wire_of(Wire.TCP, "raw"),
            )
            shards = [{"shard": n, "bytes": model.layout.range_bytes(n)} for n in range(model.layout.shards)]
            stage.take_event({"event": "layout", "shards": shards})
            sentence = f"all times are virtual: one worker computes a whole batch in {step_s * 1e3:g}ms"
            if self._conditions.step_s is None:
                sentence += ", as measured here; give it as --compute to reproduce the run"
            stage.take_event({"event": "simulated", "at_s": 0.0, "sentence": sentence})
            with stage.view(collector):
                run = simulate(self._spec(model, step_s), observer=book)
                book.ends(run.seconds)
            files.write(run)
            collector.flush()
            result = self._result(run, model, book, step_s)
            self._leave(stage, parts, result)
            observed = {**collector.summary(), **server_summary(self._outcome(run, files.kept))}
            return replace(result, observed={**observed, **result.observed})

    def _spec(self, model: SimulatedTask, step_s: float) -> SimulationSpec:
        request, strategy, conditions = self._request, self._strategy, self._conditions
        return SimulationSpec(
            workers=request.workers,
            steps=request.plan.steps,
            consistency=strategy.consistency,
            shards=strategy.servers,
            replicas=strategy.replicas,
            seed=request.plan.seed,
            compute=conditions.compute(step_s),
            network=conditions.network,
            timing=Timing(apply_s=conditions.apply_s),
            gradient_bytes=model.layout.num_bytes,
            model=model,
        )

    def _record(self) -> RunRecord:
        request = self._request
        return RunRecord(
            torch=torch.__version__,
            cpu=torch.backends.cpu.get_cpu_capability(),
            threads=1,
            strategy=str(request.strategy),
            workers=request.workers,
            steps=request.plan.steps,
            seed=request.plan.seed,
            device=request.plan.device,
            autocast=False,
            layout="",
        )

    def _result(self, run: SimulatedRun, model: SimulatedTask, book: RunBook, step_s: float) -> Result:
        last = next(row for row in reversed(run.logs[0]) if isinstance(row, StepRow))
        trained, optimizer = model.trained(run.stores, last.updates[-1].slot)
        self._optimizer = optimizer
        return Result(
            model=trained,
            steps_done=self._request.plan.steps,
            seconds=book.training_s(run.seconds),
            samples=model.samples,
            sent=SentFor(gradients=book.sent),
            observed={"simulated": {**self._conditions.to_dict(), "step_s": step_s}},
        )

    def _leave(self, stage: Stage, parts: ReplayStage, result: Result) -> None:
        steps = self._request.plan.steps
        metrics = parts.evaluate(result.model)
        if metrics is not None:
            stage.take_rows([{"step": steps, "metrics": metrics, "at_s": result.seconds}])
        checkpoints = stage.checkpoints()
        if checkpoints is not None:
            snapshot = Snapshot(
                step=steps,
                model=result.model.state_dict(),
                optimizer=self._optimizer,
                extra={"seed": self._request.plan.seed},
                score=(metrics or {}).get("evaluation_loss"),
                may_hold_infinity=frozenset(name for name, _ in result.model.named_buffers()),
            )
            stage.take_checkpoint(steps, checkpoints.save(snapshot))

    def _outcome(self, run: SimulatedRun, kept: dict[str, int]) -> LaunchOutcome:
        outcome = LaunchOutcome(recorded=kept)
        for shard, store in enumerate(run.stores):
            assert isinstance(store, TaskStore), "of a SimulatedTask"
            sums = {"nbytes": store.store.nbytes, "sha256": store.digest, "version": store.version}
            outcome.shards.append({"shard": shard, "staleness": sorted(run.staleness(shard).items()), **sums})
        return outcome


class _Files:
    """The folder RUN/updates of a simulated run; writes nothing where the run is not kept."""

    def __init__(self, run_path: Path | None, record: RunRecord) -> None:
        self._run_path, self._record = run_path, record
        self._workers: dict[int, Recorder] = {}
        self.kept: dict[str, int] = {}  # how many rows each file has

    def __enter__(self) -> _Files:
        if self._run_path is not None:
            write_record(self._run_path, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for recorder in self._workers.values():
            recorder.close()

    def computed(self, row: ComputedRow) -> None:
        if self._run_path is not None:
            if row.process not in self._workers:
                self._workers[row.process] = Recorder(self._run_path, row.process)
            if self._workers[row.process].log is not None:
                self._workers[row.process].write(row)

    def write(self, run: SimulatedRun) -> None:
        for member in range(len(run.written[0])) if self._run_path is not None else ():
            shards = ShardRecorder(self._run_path, member + 1)
            for shard in sorted(run.written):
                for row in run.written[shard][member]:
                    shards.write(row)
            self.kept |= shards.kept
            shards.close()
        for recorder in self._workers.values():
            self.kept |= recorder.kept


def fit_simulated(
    task: AnyTask,
    strategy: str | Strategy = "ps",
    *,
    workers: int,
    length: Length | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    conditions: SimulatedConditions | None = None,
    options: Options | None = None,
) -> Run:
    """Train `task` under parameter servers on `workers` simulated workers, and return what came out, as `fit` does.

    Gradients, steps and metrics are real; times are virtual, and as `conditions` say. The run has the events, the
    history, the records of updates, the summary and the checkpoint of a live one. UserError where it has no servers.
    """
    chosen, conditions = Strategy.parse(strategy), conditions or SimulatedConditions()
    require_simulated(chosen, task)
    options = replace(options or Options(), allow_overload=True)  # no worker takes room
    if options.slow is not None:
        raise UserError("options.slow slows live workers; give conditions=SimulatedConditions(slow=…)")
    made = Request.make(task, chosen, workers, length or Length(), seed, options, check_device("cpu"))
    for slow in conditions.slow:
        if slow.worker >= workers:
            raise UserError(f"slow: there is no worker {slow.worker} among {workers}; they count from 0")
    given = {one.name: getattr(made, one.name) for one in fields(made)}
    request = SimulatedRequest(conditions=conditions, **given)
    return run_session(request, out, False, train=SimulatedTraining)


# The recording: events in virtual time, losses and evaluations, in the form of a live run. Worker s has role s, as
# in a live run, and the servers' roles follow. Evaluating takes no virtual time.

_FLUSH_EVERY = 256  # events of all roles between two flushes; a ring holds more


class EventBook:
    """The event rings of all roles in virtual time from `begin_ns` on; `flush` drains them: no other reader does."""

    def __init__(self, rings: Sequence[EventRing], begin_ns: int) -> None:
        self._rings, self._begin_ns = rings, begin_ns
        self.flush: Callable[[], None] = lambda: None
        self._num_recorded = 0
        self.newest_ns = begin_ns  # when the newest event ended: the clock of those who look on

    def ns(self, at_s: float) -> int:
        return self._begin_ns + round(at_s * 1e9)

    def by(self, role: int) -> Callable[..., bool]:

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
        named = {name: getattr(work, name) for name in ("clock", "batch", "part", "parts")}
        part = StepComputed(**named, loss=made.loss, share=made.share, seconds=now_s - began_s)
        row = self._losses.add(part, self.training_s(now_s))
        self._take_rows([row] if row is not None else [])

    def training_s(self, at_s: float) -> float:
        """The seconds since the first worker began to compute."""
        return at_s - (self._began_s or 0.0)

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def sends(self, source: int, to: int, message: Message | GroupMessage, now_s: float) -> None:
        """Record a push to a server, or parameters to a worker, which may have been held back until now."""
        if isinstance(message, Push):
            if message.shard == LEAD:
                made = self._model.made[message.slot]
                names = ("slot", "member", "clock", "batch", "part", "parts")
                row = ComputedRow(
                    process=source,
                    **{name: getattr(message, name) for name in names},
                    versions=made.versions,
                    rows_versions=(-1,) * self._shards,
                    gradients=made.hashes,
                )
                self._take_computed(row)
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

    def arrives(
        self, source: int, to: int, message: Message | GroupMessage, _num_bytes: int, now_s: float
    ) -> None:
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
