"""The state of a worker process that survives a change of slot: the model, its memory and its counters."""

from __future__ import annotations

import time
from typing import Any

import torch

from manyhands.data.store.atomic import WriteFailed
from manyhands.engine.computing import Computed
from manyhands.engine.worker import Course, diagnose
from manyhands.errors import CorruptCheckpoint
from manyhands.strategies.ps.live.area import WorkerArea
from manyhands.strategies.ps.live.member_resources import MemberContext, MemberResources
from manyhands.strategies.ps.live.own_steps import OwnSteps
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.replica_model import ReplicaModel
from manyhands.strategies.ps.live.reports import ORDERS, PlaceGiven
from manyhands.strategies.ps.live.residuals import ResidualMemory, is_kept
from manyhands.strategies.ps.live.shard_encoding import RangeCoding
from manyhands.strategies.ps.live.worker_tables import WorkerTables
from manyhands.strategies.ps.update_files import Recorder
from manyhands.wire.codec import check_optimizer

__all__ = ["WorkerState"]

_LOOK_S = 0.2


class WorkerState:
    """One worker process's state, from start to end; `close` releases the shared memory."""

    def __init__(self, context: MemberContext, resources: MemberResources, job: Job, slot: int) -> None:
        self.context = context
        self._leave_buffers = resources.leave_buffers
        self.job = job
        self.computer, built, self.layout = job.build(slot)
        built.model.load_state_dict(dict(job.buffers), strict=False)
        self.home = job.home(resources.shared, self.layout)
        self.area = self._new_area()
        self.parts = [self.area.part(shard) for shard in range(self.layout.shards)]
        self.unheard: list[Any] = []
        """The launcher's orders that followed a new slot assignment."""
        check_optimizer(job.strategy.codec, built.optimizer)
        self.coding = RangeCoding(
            self.layout, job.strategy.codec, feedback=job.strategy.feedback, seed=job.plan.seed
        )
        self._owed = ResidualMemory(job.run_path, job.strategy, job.workers, job.keep_checkpoints)
        self._load_states = job.resume_version is not None
        self.encoded: list[torch.Tensor] = []
        """By shard: the last gradient as encoded for sending, if that differs from the area."""
        self.model = ReplicaModel(built.model, self.layout, self.area)
        self.model.model.train()
        self.own_steps = (
            OwnSteps(built, self._owed, job.plan, load_states=self._load_states)
            if job.strategy.averages
            else None
        )
        """The worker's local steps, if parameters are pushed."""
        self.tables = WorkerTables(built.model, self.layout, job.plan.task.sparse)
        self.recorder = Recorder(job.run_path, context.rank)
        self.course = Course()
        self.messages_sent = 0
        self.bytes_sent = 0
        self.samples = 0

    def encode(self, batch: int, part: int) -> str | None:
        """Round the gradients of all shards to what servers will decode, and save the residuals when due.

        Returns a sentence if the residuals could not be loaded or saved.
        """
        said = None
        if self._load_states:  # the first gradient of a run that goes on
            self._load_states = False
            try:
                self.coding.remember(self._owed.load(batch, part))
            except CorruptCheckpoint as error:
                said = f"worker {part} goes on with nothing owed by its codec: {error}"
        self.coding.begin(batch, part)
        self.encoded = [self.coding.round(shard, one.gradient) for shard, one in enumerate(self.parts)]
        done = batch + 1
        if is_kept(self.job.plan, done):
            try:
                self._owed.save(done, part, self.coding.memory())
            except WriteFailed as error:
                said = f"what worker {part} owes after {done} batches was not kept: {error}"
        return said

    def await_place(self, member: int) -> tuple[int, int] | None:
        """Wait, as a standby, for a slot under a number after `member`; None if the run ended without one."""
        while not self.context.stop_requested():
            told = [ORDERS.read(one) for one in self.context.received()]
            for number, one in enumerate(told):
                if isinstance(one, PlaceGiven) and one.member > member:
                    self.unheard = told[number + 1 :]  # perhaps the view with this worker in it
                    return one.slot, one.member
            time.sleep(_LOOK_S)
        return None

    def begin_anew(self) -> None:
        """Switch to new memory: a shard may still hold an update of the old slot, and read it in place.

        The last update of that slot does not count for the buffers: a worker that lost its slot while it computed
        may have read parameters that changed under it. A replay recognises this: the process's next row has
        another member.
        """
        self.model.undo()
        self.area.close()
        self.area = self._new_area()
        self.parts = [self.area.part(shard) for shard in range(self.layout.shards)]
        self.model.tie(self.area)

    def _new_area(self) -> WorkerArea:
        return WorkerArea.create(self.layout, self.home.values if self.home is not None else None)

    def leave_buffers(self) -> None:
        """Hand over the model's buffers to the launcher; the last worker to finish wins.

        A worker that has computed nothing has only the initial buffers, and hands over none.
        """
        buffers = dict(self.model.model.named_buffers())
        if buffers and self.samples:
            state = {name: value for name, value in self.model.model.state_dict().items() if name in buffers}
            self._leave_buffers(state)

    def complaint(self, done: Computed, where: str) -> str | None:
        """What of a loss or its gradient is not finite, prefixed by `where`; None if all is, and the loss is
        recorded.
        """
        finite = _is_finite(done)
        if finite and self.model.is_finite(self.area.gradients) and self.tables.is_finite():
            if done.samples:
                self.course.add(done.loss)
            return None
        return f"{where}: {'the gradient' if finite else 'the loss'} is not finite; nothing of it was applied"

    def cause(self, done: Computed) -> str:
        """The likely cause of a non-finite value, as far as this worker can tell, and what to try."""
        what = "gradient" if _is_finite(done) else "loss"
        since = "an update before this" if self.course.last is not None else ""
        return diagnose(self.model.model, self.course, what=what, since=since)

    def totals(self) -> dict[str, Any]:
        """The counters that the launcher sums up."""
        return {
            "messages_sent": self.messages_sent,
            "bytes_sent": self.bytes_sent,
            "samples": self.samples,
            "recorded": self.recorder.kept,
        }

    def close(self) -> None:
        """Release the shared memory and close the record."""
        self.recorder.close()
        self.model.close()
        self.area.close()
        if self.home is not None:
            self.home.close()


def _is_finite(done: Computed) -> bool:
    return done.samples == 0 or done.loss - done.loss == 0
