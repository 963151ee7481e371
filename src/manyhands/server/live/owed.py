"""What workers' codecs owe, kept beside the shards' snapshots, so that a resumed run sends what it would have sent.

    RUN/owed/0/step-00000040/…      what the worker of part 0 owed when it had computed 40 batches

Under `sync` alone: there the parts of a batch are the same in every repetition, and all shards of a version have seen
the same batches. A worker writes before it pushes, so whoever goes on from a snapshot finds what belongs to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from manyhands.server.strategy import Ps
from manyhands.store.checkpoint import CheckpointStore, NoCheckpoint, Snapshot

__all__ = ["OwedMemory"]

_FOLDER = "owed"


class OwedMemory:
    """That of all workers of one run; without a run directory of this host, or under another consistency, none."""

    def __init__(self, run_path: Path | None, strategy: Ps, workers: int, keep: int = 1) -> None:
        in_step = strategy.consistency.lockstep
        self._folder = run_path / _FOLDER if run_path is not None and in_step else None
        self._of = {"strategy": str(strategy), "workers": workers}
        self._keep = keep + 1  # a worker may be one step ahead of what shards have

    def save(self, batches: int, part: int, memory: Mapping[str, Tensor]) -> None:
        """Keep what is owed after so many batches; WriteFailed leaves what is there as it is."""
        if self._folder is not None and memory:
            self._store(part).save(
                Snapshot(step=batches, model=dict(memory), optimizer={}, extra=dict(self._of))
            )

    def load(self, batches: int, part: int) -> Mapping[str, Tensor]:
        """What was owed then; nothing where none was kept, or by other workers or another codec.

        CorruptCheckpoint where it is damaged.
        """
        if self._folder is None or not (self._folder / str(part)).is_dir():
            return {}
        try:
            loaded = self._store(part).load(batches)
        except NoCheckpoint:
            return {}
        return loaded.model if dict(loaded.extra) == self._of else {}

    @staticmethod
    def remove_after(run_path: Path, batches: int) -> None:
        """Remove what was owed after more batches: of a life that did not go on. WriteFailed if something stays."""
        folder = run_path / _FOLDER
        for one in folder.iterdir() if folder.is_dir() else ():
            if one.name.isdigit():
                CheckpointStore(one).remove_after(batches)

    def _store(self, part: int) -> CheckpointStore:
        assert self._folder is not None, "without a directory nothing is kept"
        return CheckpointStore(self._folder / str(part), self._keep)
