"""`ps` in a loop of the user's own: every process runs the script, and `prepare` makes it a server or a worker.

A server builds the model and the optimizer as the script does, up to `prepare`, and never returns from there: it serves
until the run is over, and ends. A worker's `optimizer.step()` pushes its gradients and waits for the next parameters;
what a successor needs besides (how far the loop had come) is in the store.

    launch      the launcher leads, as in `fit`; a process that died is started again, and takes its slot
    torchrun    rank 0 leads, and has a child that serves (`loop_launcher`)
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.optim import Optimizer

from manyhands.data.store.checkpoint import Loaded
from manyhands.engine.computing import Built
from manyhands.engine.loop_end import GroupStore, LoopEnd, settings_text
from manyhands.engine.reporting import StepBook, WorkerContext
from manyhands.errors import NonFinite, PeerTimeout, UserError
from manyhands.places.external.control_connection import ControlConnection
from manyhands.places.external.process_place import ProcessPlace
from manyhands.places.local.status import State
from manyhands.strategies.common.consistency import SoftSync
from manyhands.strategies.ps.client_core import Reason
from manyhands.strategies.ps.live import reports
from manyhands.strategies.ps.live.loop_job import LoopJob, begin_record, loop_job, write_orders
from manyhands.strategies.ps.live.loop_launcher import join_scripts, launch_scripts, lead_scripts
from manyhands.strategies.ps.live.ps_job import MemberContext, MemberResources
from manyhands.strategies.ps.live.ps_members import ps_ranks
from manyhands.strategies.ps.live.server_process import serve_with
from manyhands.strategies.ps.live.snapshots import ShardSnapshots
from manyhands.strategies.ps.live.worker_process import SlotSession
from manyhands.strategies.ps.live.worker_state import WorkerState
from manyhands.strategies.ps.shard_layout import merge
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategy import Strategy

_LOOK_S: Final = 0.02
_SAME_VERSION_S: Final = 5.0
_ASK_AGAIN_S: Final = 2.0


class SlotTaken(Exception):
    """A successor has the slot, since this process was suspended."""


class LoopSession(SlotSession):
    """A slot's session whose updates the user's loop computes: `wait_for_work`, then `give`."""

    def wait_for_work(self) -> None:
        """Return when the parameters for the next update are here; raise what ended the slot instead."""
        while self._computing is None:
            if self._left is not None:
                if self._left.reason is Reason.FENCED:
                    raise SlotTaken(self._left.sentence)
                raise NonFinite(self._left.sentence)
            self._advance()
        now_ns = time.monotonic_ns()
        self._record_pull(self._computing.work, now_ns)
        self._began_ns = self._begun_ns = now_ns
        self._context.mark(self._computing.work.batch + 1, State.COMPUTING)
        self._body.model.pulled()

    def attend(self) -> None:
        """Execute what the launcher ordered before this session began."""
        self._attend()

    @property
    def work(self) -> tuple[int, int]:
        """The clock and the batch of the update in hand."""
        assert self._computing is not None, "there is work in hand"
        return self._computing.work.clock, self._computing.work.batch

    @property
    def versions(self) -> tuple[int, ...]:
        assert self._computing is not None, "there is work in hand"
        return self._computing.versions

    def give(self, weight: float, settings: str, *, skip: bool = False) -> None:
        """Push what the parameters' gradients are now, or with `skip` only what `settings` say."""
        compute, self._computing = self._computing, None
        assert compute is not None, "there is work in hand"
        body, work = self._body, compute.work
        if not skip:
            body.model.begin()
            body.model.take()
            body.model.end()
            if body.coding.codes_gradients:
                self._notice(body.encode(work.batch, work.part))
            if not body.model.is_finite():
                raise NonFinite(
                    f"worker {self._core.slot}, step {work.batch + 1}: the gradient is not finite; it was not applied"
                )
        now_ns = time.monotonic_ns()
        if not skip:
            book = StepBook(self._ring.record, work.batch, self._begun_ns)
            book.compute(now_ns)
            book.end(now_ns, 0)
        took_s = (now_ns - self._begun_ns) / 1e9
        reports.REPORTS.send(self._context, reports.StepComputed(*work[1:], 0.0, weight, took_s))
        self._push(compute, weight, skip=skip, settings=settings)

    def read_again(self) -> None:
        self._computing = None
        self._do(self._core.read_again())
        self.wait_for_work()

    def copy_shards(self, folder: str, step: int) -> None:
        self._do(self._core.copy_shards(folder, step))

    def pass_time(self) -> None:
        """Handle what has come, without waiting."""
        self._listen(0.0)

    def try_to_go_on(self) -> None:
        """As far as that is possible without waiting long."""
        if self._computing is None and self._left is None:
            self._advance()

    @property
    def has_work(self) -> bool:
        return self._computing is not None


class ServedLoop(LoopEnd):
    """This process's end: a worker in a slot, or a server."""

    holds_state: ClassVar[bool] = False
    _session: LoopSession
    _body: WorkerState

    @staticmethod
    def launch(strategy: Ps, workers: int, script: Any, **options: Any) -> tuple[bool, dict[str, Any]]:
        """Run the script in workers and servers, which this process leads."""
        return launch_scripts(strategy, workers, script, **options)

    def __init__(
        self, place: ProcessPlace, name: str, job: LoopJob, slot: int | None, store: GroupStore
    ) -> None:
        super().__init__(job.workers if slot is None else slot, job.workers, store)
        self._place, self._name, self._job, self._slot = place, name, job, slot
        self._policy = job.strategy.consistency
        self.synchronous = self._policy.stepwise
        self._attached, self._loads = False, 0
        self._unused: set[int] = set()  # numbers of batches that went with a load instead
        self._stack = ExitStack()
        self._line: ControlConnection | None = None  # to a leader that has not started this process

    @classmethod
    def open(cls, place: ProcessPlace, name: str, strategy: Strategy, timeout_s: float) -> LoopEnd:
        assert isinstance(strategy, Ps), "the registry leads here from ps alone"
        store = GroupStore(PrefixStore(f"{name}/values", place.open_store(timeout_s)), timeout_s)
        if place.launched is not None:
            if place.launched.joins > 1:
                raise UserError(f"a second group, {name!r}: a script joins one group under ps")
            job = MemberResources.inherited(place.launched.context).job()
            assert isinstance(job, LoopJob), "launch has started this process"
            slot = None if place.role == "ps" else place.rank
            return cls(place, name, replace(job, timeout_s=timeout_s), slot, store)
        placed, workers = strategy.placed(place.world - place.has_chief, place.roles)
        ranks = ps_ranks(placed, place).workers
        job = loop_job(replace(placed, link="tcp"), workers, timeout_s)
        return cls(place, name, job, ranks.index(place.rank) if place.rank in ranks else None, store)

    def begin(self, model: nn.Module, optimizer: Optimizer, worker_context: WorkerContext) -> None:
        built = Built(model=model, optimizer=optimizer)
        job = self._job = replace(self._job, built=built, copies=self._slot is None)
        if self._place.launched is not None:
            self._context: MemberContext = self._place.launched.context
            resources = replace(MemberResources.inherited(self._place.launched.context), job=lambda: job)
            resources = replace(resources, leave_shard=lambda *_: None)
        elif self._place.leads:
            lead_scripts(self._place, self._name, job)
            raise SystemExit(0)
        else:
            self._context, resources, self._line = join_scripts(self._place, self._name, job, self._stack)
            found = resources.job()
            assert isinstance(found, LoopJob), "it was made of this one"
            job = self._job = found
        if self._slot is None:
            self._end_well(serve_with(self._context, resources))
            raise SystemExit(0)
        if self._slot == 0 and job.run_path is not None:
            begin_record(job, job.run_path)
        self._body = WorkerState(self._context, resources, job, self._slot)
        self._attached = True
        ring: Any = worker_context  # all that a session wants of a ring is to record
        self._session = LoopSession(self._context, job, self._body, ring, self._slot, self._context.rank)
        reports.REPORTS.send(self._context, reports.WorkerReady())
        self._session.attend()
        self._wait_for_work()

    def _end_well(self, counts: Mapping[str, Any]) -> None:
        if self._place.launched is not None:
            self._place.launched.counts.update(counts)
        elif self._line is not None:
            self._line.end(counts)
        self._stack.close()

    def push(self, weight: float, settings: Mapping[str, Any]) -> None:
        self._give(weight, settings_text(settings))

    def skip(self) -> None:
        self._give(0.0, "", skip=True)

    def refresh(self) -> None:
        self._read_again()

    def clips(self, model: nn.Module, max_norm: float) -> float | None:
        if not self.synchronous or self.world == 1:
            return super().clips(model, max_norm)
        if self._job.strategy.servers > 1:
            raise UserError(
                f"clip_grad_norm_ under {self._job.strategy}: each server has a part of the gradient, and none its "
                "norm; use servers=1"
            )
        return None

    def save(self, folder: Path, model: nn.Module) -> Mapping[str, Any]:
        self._read_again()
        if self.rank:
            return {}
        parts, shards = folder.resolve() / ".shards", self._body.layout.shards
        shutil.rmtree(parts, ignore_errors=True)
        copies, began = ShardSnapshots(parts, shards), time.monotonic()
        asked, step = began, self.clock
        self._session.copy_shards(str(parts), step)
        while (found := copies.at([step] * shards)) is None:
            if time.monotonic() > asked + _ASK_AGAIN_S:  # a server may have died
                asked = time.monotonic()
                self._session.copy_shards(str(parts), step)
            if time.monotonic() > began + self._job.timeout_s:
                raise PeerTimeout(
                    f"the servers did not write their shards to {parts}; see the notes of the run", peer=-1
                )
            self._session.pass_time()
            time.sleep(_LOOK_S)
        _, optimizer = merge(self._body.layout, [one.state for one in found], model.state_dict())
        shutil.rmtree(parts, ignore_errors=True)
        assert self._job.built is not None, "prepare comes first"
        # The settings are the loop's own: a schedule may have moved them since the last step.
        return {**optimizer, "param_groups": self._job.built.optimizer.state_dict()["param_groups"]}

    def load(self, folder: Path, loaded: Loaded, *, again: bool) -> None:
        assert self._job.built is not None, "prepare comes first"
        self._job.built.optimizer.state.clear()  # the servers have it
        order, unused = {"folder": str(folder.resolve()), "step": loaded.step}, []
        if not again and self.rank == 0:
            for number in range(self._group_size):
                unused.append(self._session.work[1])
                self._give(0.0, "" if number else settings_text(order), skip=True)
        elif not again and self.synchronous:
            self.skip()
        self._loads += 1
        brought = self._all_come(f"loaded {self._loads}", json.dumps(unused).encode())
        self._unused |= set(json.loads(brought[0]))
        self._read_again()
        self._take_work()

    def leave(self) -> None:
        session, lag = self._session, self._policy.lag
        left = self._all_come("left", str(self.clock).encode(), self._go_along)
        self._wait_for_work()
        if lag is not None:
            while self.clock <= max(int(clock) for clock in left):
                self.skip()
        elif self.rank == 0:
            self._fill_group()
        stopped = self._all_come("stopped", str(self.clock).encode())
        self._read_again()
        deadline = time.monotonic() + _SAME_VERSION_S
        while len(set(session.versions)) > 1 and time.monotonic() < deadline:
            time.sleep(_LOOK_S)  # the lead has decided on the last steps, and other shards hear of them
            self._read_again()
        # So that no batch is missing among those that were given out: what nobody computes counts as nothing.
        for _ in range(1 if lag is None else max(map(int, stopped)) - self.clock):
            self.skip()

    def finish(self) -> None:
        reports.REPORTS.send(self._context, reports.WorkerLeft(reason=Reason.FINISHED))
        body = self._body
        counts = {name: getattr(body, name) for name in ("messages_sent", "bytes_sent", "samples")}
        counts["recorded"] = body.recorder.kept
        if self.rank == 0 and self._job.run_path is not None:
            write_orders(self._job.run_path, self.store, self.world, self._loads)
        self._release()
        self._end_well(counts)

    def close(self) -> None:
        self._release()
        self._stack.close()

    def _release(self) -> None:
        """End the session; the model keeps its parameters, in memory of its own."""
        if self._attached:
            self._attached = False
            for parameter in self._body.model.model.parameters():
                parameter.data = parameter.data.clone()
            self._session.close()
            self._body.close()

    def _take_work(self) -> None:
        self.clock, number = self._session.work
        self.batch = number - sum(unused < number for unused in self._unused)

    def _wait_for_work(self) -> None:
        with self._unless_taken():
            self._session.wait_for_work()
        self._take_work()

    def _read_again(self) -> None:
        with self._unless_taken():
            self._session.read_again()

    @contextmanager
    def _unless_taken(self) -> Iterator[None]:
        try:
            yield
        except SlotTaken as taken:
            self._end_well({"samples": 0})
            raise SystemExit(0) from taken

    def _give(self, weight: float, settings: str, *, skip: bool = False) -> None:
        self._session.give(weight, settings, skip=skip)
        self._wait_for_work()

    @property
    def _group_size(self) -> int:
        """How many updates make a step, where they wait until they are so many."""
        policy = self._policy
        return policy.group_size(self.world) if isinstance(policy, SoftSync) else 1

    def _fill_group(self) -> None:
        for _ in range(self._group_size - 1):
            self.skip()

    def _go_along(self) -> None:
        """While others train on: bring nothing to the steps that wait for this worker."""
        session = self._session
        if session.has_work and self._policy.lag is not None:
            session.give(0.0, "", skip=True)
        session.try_to_go_on()
        if session.has_work:
            self._take_work()

    def _all_come(
        self, what: str, value: bytes = b"", meanwhile: Callable[[], None] | None = None
    ) -> list[bytes]:
        """Collective: what every worker brings; wait until all have."""
        self.store.first(f"{what}/{self.rank}", value or b"-")
        pause = meanwhile or self._session.pass_time
        return [self.store.get(f"{what}/{rank}", f"worker {rank}", pause) for rank in range(self.world)]
