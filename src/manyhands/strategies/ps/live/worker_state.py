"""The state of a worker process that survives a change of slot: the model, its memory and its counters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.checkpoint import CheckpointStore, Loaded, NoCheckpoint, NonFiniteSnapshot, Snapshot
from manyhands.engine.computing import Built, Computed, TrainingPlan
from manyhands.engine.worker import Course, diagnose
from manyhands.errors import CorruptCheckpoint
from manyhands.strategies.ps.live.area import WorkerArea
from manyhands.strategies.ps.live.ps_job import Job, MemberContext, MemberResources
from manyhands.strategies.ps.live.reports import ORDERS, PlaceGiven
from manyhands.strategies.ps.live.shard_encoding import RangeCoding
from manyhands.strategies.ps.live.worker_tables import tables_of
from manyhands.strategies.ps.ps_messages import Work
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategies.ps.update_files import Recorder
from manyhands.wire.codec import check_optimizer
from manyhands.wire.tap import GradientTap, put

_LOOK_S = 0.2


class WorkerState:
    """One worker process's state, from start to end."""

    def __init__(self, context: MemberContext, resources: MemberResources, job: Job, slot: int) -> None:
        self.context = context
        self._leave_buffers = resources.leave_buffers
        self.job = job
        self.computer, built, self.layout = job.build(slot)
        built.model.load_state_dict(dict(job.buffers), strict=False)
        self.shared_parameters = job.shared_parameters(resources.shared, self.layout)
        self._use_new_area()
        self.unheard: list[Any] = []  # the launcher's orders that followed a new slot assignment
        check_optimizer(job.strategy.codec, built.optimizer)
        self.coding = RangeCoding(
            self.layout, job.strategy.codec, feedback=job.strategy.feedback, seed=job.plan.seed
        )
        self._residuals = ResidualMemory(job.run_path, job.strategy, job.workers, job.keep_checkpoints)
        self._load_states = job.resume_version is not None
        self.encoded: list[torch.Tensor] = []  # by shard: the last gradient as it is sent, if encoded
        self.model = ReplicaModel(built.model, self.layout, self.area, taps=job.taps)
        self.model.model.train()
        self.own_steps: OwnSteps | None = None
        if job.strategy.averages:
            self.own_steps = OwnSteps(built, self._residuals, job.plan, load_states=self._load_states)
        self.tables = tables_of(job.strategy, built, self.layout, job.plan.task.sparse, job.workers)
        self.recorder = Recorder(job.run_path, context.rank)
        self.course = Course()
        self.messages_sent = self.bytes_sent = self.samples = 0

    def encode(self, batch: int, part: int, share: float = 1.0) -> str | None:
        """Round the gradients of all shards to what servers will decode, filter rows, and save what is kept when due.

        Returns a sentence if the residuals could not be loaded or saved.
        """
        codec, tables, notice = self.coding.codec, self.tables, None
        if self._load_states and (
            codec is not None or tables.held
        ):  # the first gradient of a run that continues
            self._load_states = False
            try:
                kept = self._residuals.load(batch, part)
                if kept is not None:
                    tables.remember(kept.model)
                    own = {name: one for name, one in kept.model.items() if name not in tables.memory()}
                    if codec is not None:
                        codec.remember(own)
            except CorruptCheckpoint as error:
                notice = f"worker {part} continues without what its codec or filter kept: {error}"
        if tables.exist:
            tables.collect(share, batch)
        if codec is not None:
            self.coding.begin(batch, part)
            self.encoded = [self.coding.round(shard, one.gradient) for shard, one in enumerate(self.parts)]
        done = batch + 1
        if is_kept(self.job.plan, done):
            try:
                self._residuals.save(
                    done, part, (codec.memory() if codec is not None else {}) | tables.memory()
                )
            except WriteFailed as error:
                notice = f"the residuals of worker {part} after batch {done} were not saved: {error}"
        return notice

    def await_place(self, member: int) -> tuple[int, int] | None:
        """Wait, as a standby, for a slot under a number after `member`; None if the run ended without one."""
        while not self.context.stop_requested():
            orders = [ORDERS.read(one) for one in self.context.received()]
            for number, one in enumerate(orders):
                if isinstance(one, PlaceGiven) and one.member > member:
                    self.unheard = orders[number + 1 :]  # perhaps the view with this worker in it
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
        self._use_new_area()
        self.model.use(self.area)

    def _use_new_area(self) -> None:
        values = self.shared_parameters.values if self.shared_parameters is not None else None
        self.area = WorkerArea.create(self.layout, values)
        self.parts = [self.area.part(shard) for shard in range(self.layout.shards)]

    def leave_buffers(self) -> None:
        """Hand over the model's buffers to the launcher; the last worker to finish wins.

        A worker that has computed nothing has only the initial buffers, and hands over none.
        """
        buffers = dict(self.model.model.named_buffers())
        if buffers and self.samples:
            state = {name: value for name, value in self.model.model.state_dict().items() if name in buffers}
            self._leave_buffers(state)

    def complaint(self, done: Computed, where: str) -> str | None:
        """What of a loss or its gradient is not finite, after `where`; None if all is, and the loss is recorded."""
        finite = _is_finite(done)
        rows_finite = not self.tables.exist or self.tables.is_finite()
        if finite and self.model.is_finite() and rows_finite:
            if done.samples:
                self.course.add(done.loss)
            return None
        return f"{where}: {'the gradient' if finite else 'the loss'} is not finite; it was not applied"

    def cause(self, done: Computed) -> str:
        """The likely cause of a non-finite value, as far as this worker can tell, and what to try."""
        what = "gradient" if _is_finite(done) else "loss"
        since = "an update before this" if self.course.last is not None else ""
        return diagnose(self.model.model, self.course, what=what, since=since)

    def close(self) -> None:
        self.recorder.close()
        self.model.close()
        self.area.close()
        if self.shared_parameters is not None:
            self.shared_parameters.close()


def _is_finite(done: Computed) -> bool:
    return done.samples == 0 or done.loss - done.loss == 0


class ReplicaModel:
    """A worker's replica of the model: parameters are views of memory that the shards write, the gradients lie beside.

    Hooks move each gradient there as soon as backward has it. On a GPU the model has separate parameters, which are
    filled from that memory after every pull. Without `taps`, gradients stay with the parameters until `take`.
    """

    def __init__(self, model: nn.Module, layout: FlatLayout, area: WorkerArea, *, taps: bool = True) -> None:
        self.model = model
        self._layout = layout
        named = dict(model.named_parameters())
        self._parameters = {name: named[name] for name in layout.views(area.values)}
        self._on_gpu = any(parameter.device.type == "cuda" for parameter in self._parameters.values())
        self._share = 1.0
        self._reached: set[str] = set()
        self._buffers = list(model.buffers())
        self._buffers_before = [buffer.clone() for buffer in self._buffers]
        self.use(area)
        self._names = list(self._parameters)
        self._tap = GradientTap(list(self._parameters.values()) if taps else [], self._taken)

    def close(self) -> None:
        self._tap.close()

    def use(self, area: WorkerArea) -> None:
        """Use this area from now on; the contents of the previous one stay as they are."""
        values = self._layout.views(area.values)
        self._values = {self._parameters[name]: view for name, view in values.items()}
        self._gradients = self._layout.views(area.gradients)
        self._flags = [area.flags(shard) for shard in range(self._layout.shards)]
        self._flagged: set[str] | None = None  # whom the flags in the area name
        for parameter, view in self._values.items():
            if not area.is_in_place:  # else the shards have long written something better there
                view.copy_(parameter.detach())
            if not self._on_gpu:
                parameter.data = view

    def pulled(self) -> None:
        """Call after every shard has written its range: copies to the GPU, or bumps autograd's versions on the CPU."""
        if not self._on_gpu:
            torch.autograd.graph.increment_version(list(self._values))
            return
        with torch.no_grad():
            for parameter, value in self._values.items():
                parameter.copy_(value, non_blocking=True)

    def backward(self, loss: Tensor, share: float) -> None:
        """Run backward, accumulating `share` times the gradient in the area since `begin`."""
        self._share = share
        loss.backward()  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Clear the set of reached parameters, and save the buffers for `undo`."""
        self._reached.clear()
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers_before, self._buffers)

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the buffers from before the last forward."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._buffers_before)

    def take(self) -> None:
        """Move the gradients of all parameters that have one into the area."""
        for number, parameter in enumerate(self._parameters.values()):
            if parameter.grad is not None:
                self._taken(number, parameter)

    def end(self) -> None:
        """Write to the area's flags what this backward reached."""
        if self._on_gpu:
            torch.cuda.synchronize()
        if self._reached != self._flagged:
            self._flag(set(self._reached))

    def _flag(self, names: set[str]) -> None:
        self._flagged = names
        for shard, flags in enumerate(self._flags):
            flags.copy_(self._layout.flags(shard, names))

    @torch.no_grad()
    def step(self, optimizer: Optimizer, share: float) -> None:
        """After `end`: take the worker's local step, and store `share` times the parameters in place of the gradient.

        The gradient there is scaled by its share of the batch; the step uses the unscaled one. With a share of 0
        there is no step.
        """
        moved = {one for group in optimizer.param_groups for one in group["params"]}
        names = {name for name, parameter in self._parameters.items() if parameter in moved}
        if share:
            for name in self._reached & names:
                parameter = self._parameters[name]
                parameter.grad = self._gradients[name].to(parameter.device) / share
            with torch.enable_grad():
                optimizer.step()
            optimizer.zero_grad()
        for name in names:
            torch.mul(self._parameters[name].detach().cpu(), share, out=self._gradients[name])
        self._flag(names)

    def is_finite(self) -> bool:
        reached = (self._gradients[name] for name in self._reached)
        return all(bool(torch.isfinite(one.sum())) or bool(torch.isfinite(one).all()) for one in reached)

    @torch.no_grad()
    def _taken(self, number: int, parameter: Tensor) -> None:
        gradient, name = parameter.grad, self._names[number]
        assert gradient is not None, "the hook comes after the gradient"
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        put(self._gradients[name], dense, self._share, add=name in self._reached)
        parameter.grad = None
        self._reached.add(name)


class OwnSteps:
    """One worker's local steps (`push=parameters`): `begin`, then `step`; with `load_states` the first uses the saved
    state. Learning rates follow from the batch's number.
    """

    def __init__(
        self, built: Built, residuals: ResidualMemory, plan: TrainingPlan, *, load_states: bool
    ) -> None:
        self._built = built
        self._residuals = residuals
        self._plan = plan
        self._load_states = load_states
        self._begun = False
        self._scheduled = 0

    def begin(self, work: Work, slot: int) -> str | None:
        """Prepare the first step of this process in `slot`; later calls do nothing.

        Returns a sentence if the optimizer starts without the state that a predecessor had.
        """
        if self._begun:
            return None
        self._begun = True
        anew = f"the optimizer of worker {slot} starts without state at batch {work.batch + 1}"
        if not self._load_states:
            return f"{anew}: a successor does not receive the state" if work.clock else None
        try:
            kept = self._residuals.load(work.batch, work.part)
        except CorruptCheckpoint as error:
            return f"{anew}: {error}"
        if kept is None:
            return f"{anew}: its state was not saved"
        optimizer = self._built.optimizer  # its groups as they are: the scheduler brings them to this batch
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": kept.optimizer["state"], "param_groups": groups})
        return None

    def step(self, model: ReplicaModel, batch: int, part: int, share: float) -> str | None:
        """Take the step for this part of a batch, and save the optimizer's state when that is due.

        Returns a sentence if the disk does not take the state.
        """
        optimizer, scheduler = self._built.optimizer, self._built.scheduler
        while scheduler is not None and self._scheduled < batch:
            scheduler.step()
            self._scheduled += 1
        model.step(optimizer, share)
        done = batch + 1
        if is_kept(self._plan, done):
            try:
                self._residuals.save(done, part, {}, optimizer.state_dict())
            except (WriteFailed, NonFiniteSnapshot) as error:
                return f"the optimizer of worker {part} was not saved after batch {done}: {error}"
        return None


# ── saved state ────────────────────
# The state that workers save beside the shards' snapshots, so that a resumed run sends what it would have sent.
#
#     RUN/owed/0/step-00000040/…      what the worker of part 0 had when it had computed 40 batches
#
# That is its codec's residual, or, where it takes local steps (`push=parameters`), its optimizer's state.
#
# Under `sync` only: there the parts of a batch are the same in every repetition, and all shards of a version have seen
# the same batches. A worker writes before it pushes, so a run that resumes from a snapshot finds the matching state.

_FOLDER = "owed"


def is_kept(plan: TrainingPlan, batches: int) -> bool:
    """Whether workers save their state after this many batches: whenever shards do."""
    every = plan.checkpoint_every
    return batches == plan.steps or (every > 0 and batches % every == 0)


class ResidualMemory:
    """The saved state of all workers of one run; disabled without a run directory, or unless steps are in lockstep."""

    def __init__(self, run_path: Path | None, strategy: Ps, workers: int, keep: int = 1) -> None:
        in_step = strategy.consistency.lockstep
        self._folder = run_path / _FOLDER if run_path is not None and in_step else None
        self._of = {"strategy": str(strategy), "workers": workers}
        self._keep = keep + 1  # a worker may be one step ahead of what shards have

    def save(
        self,
        batches: int,
        part: int,
        memory: Mapping[str, Tensor],
        optimizer: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Save codec residuals or an optimizer's state, if any, after this many batches.

        WriteFailed leaves earlier ones as they are.
        """
        if self._folder is not None and (memory or optimizer):
            self._store(part).save(
                Snapshot(step=batches, model=dict(memory), optimizer=dict(optimizer), extra=dict(self._of))
            )

    def has(self, batches: int, part: int) -> bool:
        """Whether anything was saved at that point."""
        return self._folder is not None and self._store(part).path_of(batches).is_dir()

    def load(self, batches: int, part: int) -> Loaded | None:
        """What was saved at that point; None if nothing was, or by another codec or number of workers.

        CorruptCheckpoint if it is damaged.
        """
        if self._folder is None or not (self._folder / str(part)).is_dir():
            return None
        try:
            loaded = self._store(part).load(batches)
        except NoCheckpoint:
            return None
        return loaded if dict(loaded.extra) == self._of else None

    @staticmethod
    def remove_after(run_path: Path, batches: int) -> None:
        """Remove the state of later batches, of a discarded history. WriteFailed if something remains."""
        folder = run_path / _FOLDER
        for one in folder.iterdir() if folder.is_dir() else ():
            if one.name.isdigit():
                CheckpointStore(one).remove_after(batches)

    def _store(self, part: int) -> CheckpointStore:
        assert self._folder is not None, "without a directory nothing is kept"
        return CheckpointStore(self._folder / str(part), self._keep)
