"""What a run leaves on disk, and how it goes on from there: run directory, metrics, checkpoints."""

from manyhands.store.atomic import WriteFailed, write_json
from manyhands.store.checkpoint import CheckpointStore, Loaded, NoCheckpoint, NonFiniteSnapshot, Snapshot
from manyhands.store.fingerprint import Fingerprint, fingerprint, parameter_shapes
from manyhands.store.manifest import Damage
from manyhands.store.metrics import MetricsLog
from manyhands.store.optimizer_state import restore_optimizer
from manyhands.store.rundir import RunDirectory

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
