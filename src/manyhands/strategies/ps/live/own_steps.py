"""`push=parameters`: a worker's local optimizer, and its saved state, with which a run resumes.

As with codec residuals (`residuals`), a worker writes its optimizer's state before it pushes, so a run that
resumes from the shards' snapshots finds the matching state. Learning rates follow from the batch's number.
"""

from __future__ import annotations

from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.checkpoint import NonFiniteSnapshot
from manyhands.engine.computing import Built, TrainingPlan
from manyhands.errors import CorruptCheckpoint
from manyhands.strategies.ps.live.replica_model import ReplicaModel
from manyhands.strategies.ps.live.residuals import ResidualMemory, is_kept
from manyhands.strategies.ps.ps_messages import Work

__all__ = ["OwnSteps"]


class OwnSteps:
    """One worker's local steps: `begin`, then `step`; with `load_states` the first uses the saved state."""

    def __init__(self, built: Built, owed: ResidualMemory, plan: TrainingPlan, *, load_states: bool) -> None:
        self._built = built
        self._owed = owed
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
        anew = f"the optimizer of worker {slot} begins anew at batch {work.batch + 1}"
        if not self._load_states:
            return f"{anew}: who takes a place over has no state of it" if work.clock else None
        try:
            kept = self._owed.optimizer(work.batch, work.part)
        except CorruptCheckpoint as error:
            return f"{anew}: {error}"
        if kept is None:
            return f"{anew}: its state was not kept"
        optimizer = self._built.optimizer  # its groups as they are: the scheduler brings them to this batch
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": kept["state"], "param_groups": groups})
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
                self._owed.save_optimizer(done, part, optimizer.state_dict())
            except (WriteFailed, NonFiniteSnapshot) as error:
                return f"the optimizer of worker {part} was not kept after {done} batches: {error}"
        return None
