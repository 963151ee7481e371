"""The state that workers save beside the shards' snapshots, so that a resumed run sends what it would have sent.

    RUN/owed/0/step-00000040/…      what the worker of part 0 had when it had computed 40 batches

That is its codec's residual, or, where it takes local steps (`push=parameters`), its optimizer's state.

Under `sync` only: there the parts of a batch are the same in every repetition, and all shards of a version have seen
the same batches. A worker writes before it pushes, so a run that resumes from a snapshot finds the matching state.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from manyhands.data.store.checkpoint import CheckpointStore, Loaded, NoCheckpoint, Snapshot
from manyhands.engine.computing import TrainingPlan
from manyhands.strategies.ps.strategy import Ps

__all__ = ["ResidualMemory", "is_kept"]

_FOLDER = "owed"


def is_kept(plan: TrainingPlan, batches: int) -> bool:
    """Whether workers save their state after this many batches: whenever shards do."""
    every = plan.checkpoint_every
    return batches == plan.steps or (every > 0 and batches % every == 0)


class ResidualMemory:
    """The saved state of all workers of one run; disabled without a run directory, or unless steps are in
    lockstep.
    """

    def __init__(self, run_path: Path | None, strategy: Ps, workers: int, keep: int = 1) -> None:
        in_step = strategy.consistency.lockstep
        self._folder = run_path / _FOLDER if run_path is not None and in_step else None
        self._of = {"strategy": str(strategy), "workers": workers}
        self._keep = keep + 1  # a worker may be one step ahead of what shards have

    def save(self, batches: int, part: int, memory: Mapping[str, Tensor]) -> None:
        """Save the codec residuals after this many batches; WriteFailed leaves earlier ones as they are."""
        if self._folder is not None and memory:
            self._store(part).save(
                Snapshot(step=batches, model=dict(memory), optimizer={}, extra=dict(self._of))
            )

    def load(self, batches: int, part: int) -> Mapping[str, Tensor]:
        """The residuals at that point; empty if none were saved, or for another codec or number of workers.

        CorruptCheckpoint if they are damaged.
        """
        loaded = self._load(batches, part)
        return loaded.model if loaded is not None else {}

    def save_optimizer(self, batches: int, part: int, state: Mapping[str, Any]) -> None:
        """Save a worker's local optimizer after this many batches; WriteFailed leaves earlier ones as they are."""
        if self._folder is not None:
            self._store(part).save(Snapshot(step=batches, model={}, optimizer=state, extra=dict(self._of)))

    def optimizer(self, batches: int, part: int) -> Mapping[str, Any] | None:
        """The optimizer's `state_dict()` at that point; None if none was saved. CorruptCheckpoint if it is
        damaged.
        """
        loaded = self._load(batches, part)
        return loaded.optimizer if loaded is not None else None

    def has(self, batches: int, part: int) -> bool:
        """Whether anything was saved at that point."""
        return self._folder is not None and self._store(part).path_of(batches).is_dir()

    def _load(self, batches: int, part: int) -> Loaded | None:
        if self._folder is None or not (self._folder / str(part)).is_dir():
            return None
        try:
            loaded = self._store(part).load(batches)
        except NoCheckpoint:
            return None
        return loaded if dict(loaded.extra) == self._of else None

    @staticmethod
    def remove_after(run_path: Path, batches: int) -> None:
        """Remove the state of later batches, which belongs to a discarded history. WriteFailed if something
        remains.
        """
        folder = run_path / _FOLDER
        for one in folder.iterdir() if folder.is_dir() else ():
            if one.name.isdigit():
                CheckpointStore(one).remove_after(batches)

    def _store(self, part: int) -> CheckpointStore:
        assert self._folder is not None, "without a directory nothing is kept"
        return CheckpointStore(self._folder / str(part), self._keep)
