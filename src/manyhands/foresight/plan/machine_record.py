"""What is known of this machine: what steps cost here, profiles of tasks, and how wrong earlier predictions were.

Files in the user's cache folder, one of each kind for a machine: other processors, another number of cores, another
torch or another release are another machine. A file that cannot be read is one that is not there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from manyhands.data.store.atomic import WriteFailed, write_atomically
from manyhands.facts import StepCosts
from manyhands.foresight.plan.track_record import SeenStep
from manyhands.native.cache_folder import own_folder
from manyhands.native.version import __version__

__all__ = ["MachineRecord", "fingerprint"]

_LARGEST = 1 << 24  # bytes of a file that are read
_SHORTEST_S = 1e-9  # of a step
_KEPT = 500  # pairs of predicted and seen


@cache
def fingerprint() -> str:
    """Of what makes this machine as fast as it is."""
    facts = [platform.machine(), _processor(), len(os.sched_getaffinity(0)), torch.__version__, __version__]
    if torch.cuda.is_available():
        facts += [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    return ""


def _is_time(value: object, least: float = _SHORTEST_S) -> bool:
    return isinstance(value, float | int) and least <= value < math.inf


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """The files of one machine in `folder`; nothing is kept where that is None."""

    folder: Path | None

    @classmethod
    def of_this_machine(cls, device: str = "cpu") -> MachineRecord:
        """What steps on a GPU cost and took is kept apart from what they do on the processor."""
        caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        folder = caches / "manyhands" / "plans"
        name = fingerprint() if device == "cpu" else f"{fingerprint()}-gpu"
        return cls(folder / name if caches.is_absolute() and own_folder(folder) else None)

    def costs(self, workers: int) -> dict[str, StepCosts] | None:
        """What steps cost here with so many workers; None where that was never measured."""
        found = self._read(f"costs-{workers}.json")
        try:
            costs = {kind: StepCosts(**costs) for kind, costs in found["costs"].items()} if found else None
        except (TypeError, LookupError, AttributeError):
            return None
        known = costs is not None and all(
            _is_time(one, 0.0) for cost in costs.values() for one in astuple(cost)
        )
        return costs if known else None

    def keep_costs(self, workers: int, costs: Mapping[str, StepCosts]) -> None:
        self._write(
            f"costs-{workers}.json", {"at": time.time(), "costs": {k: asdict(v) for k, v in costs.items()}}
        )

    def forget_costs(self) -> None:
        """Have what steps cost here be measured again."""
        for path in self.folder.glob("costs-*.json") if self.folder is not None else ():
            path.unlink(missing_ok=True)

    def pairs(self, workers: int) -> tuple[SeenStep, ...]:
        """Predictions for so many workers and what was seen, the oldest first."""
        found = self._read(f"seen-{workers}.json")
        try:
            pairs = tuple(SeenStep(**pair) for pair in found["pairs"]) if found else ()
        except (TypeError, LookupError):
            return ()
        return tuple(one for one in pairs if _is_time(one.predicted_s) and _is_time(one.seen_s))

    def add_pairs(self, workers: int, pairs: Sequence[SeenStep]) -> None:
        kept = [*self.pairs(workers), *pairs][-_KEPT:]
        self._write(f"seen-{workers}.json", {"pairs": [asdict(one) for one in kept]})

    def _read(self, name: str) -> dict[str, Any] | None:
        if self.folder is None:
            return None
        try:
            with (self.folder / name).open("rb") as file:
                found = json.loads(file.read(_LARGEST))
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        if self.folder is not None and own_folder(self.folder):
            with suppress(WriteFailed):  # it will be measured again
                write_atomically(self.folder / name, [json.dumps(value).encode()])
