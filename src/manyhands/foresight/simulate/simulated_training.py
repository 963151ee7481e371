"""Trains a task in virtual time as a `Training`; the run directory is like that of a live run.

Gradients, optimizer steps and evaluations are real and use the code of live processes; computing, sending and
starting take as long as the conditions say. There is one process, and no worker process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
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
from manyhands.engine.exchange import SentFor
from manyhands.engine.kernel_task import AnyTask
from manyhands.engine.options import Options
from manyhands.engine.request import Length, Request
from manyhands.engine.run import Run
from manyhands.engine.session import run_session
from manyhands.engine.training import Result, Stage, Training
from manyhands.errors import UserError
from manyhands.foresight.simulate.driver import simulate
from manyhands.foresight.simulate.simulated_recording import EventBook, RunBook
from manyhands.foresight.simulate.simulated_run import SimulatedRun
from manyhands.foresight.simulate.simulated_spec import SimulatedConditions, SimulationSpec, Timing
from manyhands.foresight.simulate.task_model import SimulatedTask, TaskStore
from manyhands.native.threads import with_threads
from manyhands.observe.record.event_ring import EventRing
from manyhands.strategies.ps.digests import layout_digest
from manyhands.strategies.ps.live.live_training import server_summary
from manyhands.strategies.ps.live.ps_launcher import LaunchOutcome
from manyhands.strategies.ps.log_rows import StepRow
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
        """Return the entries for config.json: that the run was simulated, and how."""
        return {**super().config(model), "simulated": self.conditions.to_dict()}


def require_simulated(strategy: Strategy, task: Any) -> None:
    """Raise UserError where this strategy, or this task under it, cannot be simulated."""
    if not strategy.facts.logs_updates:
        raise UserError(
            f"strategy={strategy}: the simulator runs parameter servers; use ps, as in 'ps consistency=async'"
        )
    for name, plain in (("codec", "raw"), ("push", "gradients")):
        value = getattr(strategy, name, plain)
        if value != plain:
            raise UserError(f"strategy={strategy}: {name}={value} is not simulated; leave it out")
    if not isinstance(task, Task):
        raise UserError(f"task {task.name!r} has compiled steps, which are not simulated; use digits")
    if task.sparse or task.streams:
        raise UserError(f"task {task.name!r} has sparse tables or a stream, which are not simulated")


class SimulatedTraining(Training):
    """Trains to the end in virtual time; deterministic for a given seed and step duration."""

    def __init__(self, request: Request, model: nn.Module) -> None:
        super().__init__(request, model)
        assert isinstance(request, SimulatedRequest), "made by fit_simulated"
        self._conditions = request.conditions
        self._strategy: Any = request.strategy  # one of servers: require_simulated has looked

    def resume(self, directory: RunDirectory, config: Mapping[str, Any]) -> int | None:
        """Raise UserError: a simulated run keeps no intermediate checkpoints."""
        del config
        raise UserError(f"{directory.path} cannot be resumed: a simulated run is made in one go")

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
                sentence += ", as measured here: give it as --compute, and the run is the same again"
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
        """Run the last evaluation, and write a checkpoint of the usual format."""
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
