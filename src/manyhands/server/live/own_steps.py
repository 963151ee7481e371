"""`push=parameters`: a worker's own optimizer, and what is kept of it so that a run goes on with it.

As with what codecs owe (`owed`): a worker writes its optimizer's state before it pushes, so whoever goes on from the
shards' snapshots finds the state that belongs to them. Learning rates follow from the batch's number.
"""

from __future__ import annotations

from manyhands.errors import CorruptCheckpoint
from manyhands.server.live.owed import OwedMemory, is_kept
from manyhands.server.live.replica_model import ReplicaModel
from manyhands.store.atomic import WriteFailed
from manyhands.store.checkpoint import NonFiniteSnapshot
from manyhands.training.computing import Built, TrainingPlan

__all__ = ["OwnSteps"]


class OwnSteps:
    """One worker's; where it `recalls`, the first step is taken with the state that was kept."""

    def __init__(self, built: Built, owed: OwedMemory, plan: TrainingPlan, *, recalls: bool) -> None:
        self._built = built
        self._owed = owed
        self._plan = plan
        self._recalls = recalls
        self._scheduled = 0

    def step(self, model: ReplicaModel, batch: int, part: int, share: float) -> str | None:
        """Take the step of this part of a batch, and keep what came of it where that is due.

        A sentence where the disk has lost, or does not take, the optimizer's state.
        """
        optimizer, scheduler, said = self._built.optimizer, self._built.scheduler, None
        if self._recalls:
            self._recalls = False
            said = self._recall(batch, part)
        while scheduler is not None and self._scheduled < batch:
            scheduler.step()
            self._scheduled += 1
        model.step(optimizer, share)
        done = batch + 1
        if is_kept(self._plan, done):
            try:
                self._owed.save_optimizer(done, part, optimizer.state_dict())
            except (WriteFailed, NonFiniteSnapshot) as error:
                said = f"the optimizer of worker {part} was not kept after {done} batches: {error}"
        return said

    def _recall(self, batch: int, part: int) -> str | None:
        optimizer = self._built.optimizer
        try:
            kept = self._owed.optimizer(batch, part)
        except CorruptCheckpoint as error:
            return f"the optimizer of worker {part} begins anew: {error}"
        if kept is not None:  # its groups as they are: the scheduler brings them to this batch
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": kept["state"], "param_groups": groups})
        return None
