"""What a run leaves on disk, and how it is resumed from there: run directory, metrics, checkpoints."""

from manyhands.data.store.atomic import WriteFailed, write_json
from manyhands.data.store.checkpoint import CheckpointStore, Loaded, NoCheckpoint, NonFiniteSnapshot, Snapshot
from manyhands.data.store.fingerprint import Fingerprint, fingerprint, parameter_shapes
from manyhands.data.store.manifest import Damage
from manyhands.data.store.metrics_file import MetricsLog
from manyhands.data.store.optimizer_state import restore_optimizer
from manyhands.data.store.rundir import RunDirectory

__all__ = [
    "CheckpointStore",
    "Damage",
    "Fingerprint",
    "Loaded",
    "MetricsLog",
    "NoCheckpoint",
    "NonFiniteSnapshot",
    "RunDirectory",
    "Snapshot",
    "WriteFailed",
    "fingerprint",
    "parameter_shapes",
    "restore_optimizer",
    "write_json",
]
