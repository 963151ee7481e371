"""The energy that a run takes, by the counters of the processor and of the GPUs, where they can be read.

Counters are those of whole parts of the machine, so what else runs there is counted, too. The processor's are Intel's
and AMD's RAPL zones, as Linux shows them (Documentation/power/powercap/powercap.rst): a package, and the memory where
that is counted beside it. A GPU's is NVML's total of millijoules, read through the driver's own library.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

POWERCAP = Path("/sys/class/powercap")
_NVML = "libnvidia-ml.so.1"
_EVERY_S = 30.0  # at 1 kW the usual range of a zone, 262 kJ, lasts for 4 minutes


@dataclass(frozen=True, slots=True)
class EnergyCounter:
    """One counter of the machine."""

    name: str
    read: Callable[[], int]  # microjoules since some moment
    wraps_at: int = 0  # the greatest value, after which it begins at 0 again; 0: it does not


def counted(before: int, after: int, wraps_at: int) -> int:
    """What a counter counted between two readings, between which it began at 0 again at most once."""
    return after - before if after >= before else after - before + (wraps_at or before)


class EnergyMeter:
    """Counts while it is open; a thread reads the counters often enough that none begins at 0 twice in between."""

    def __init__(self, counters: Sequence[EnergyCounter], every_s: float = _EVERY_S) -> None:
        self._counters, self._every_s = counters, every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="energy", daemon=True)
        self._total_uj, self._failed = 0, False

    def __enter__(self) -> Self:
        self._last = self._readings()
        if self._counters and not self._failed:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_EVERY_S)
        self._add()

    @property
    def joules(self) -> float | None:
        """Of all counters together; None where there is none, or one of them could not be read."""
        return self._total_uj / 1e6 if self._counters and not self._failed else None

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            self._add()

    def _add(self) -> None:
        readings = self._readings()
        for counter, before, after in zip(self._counters, self._last, readings, strict=False):
            self._total_uj += counted(before, after, counter.wraps_at)
        self._last = readings

    def _readings(self) -> list[int]:
        try:
            return [one.read() for one in self._counters]
        except (OSError, ValueError):  # a device that went away
            self._failed = True
            return []


def energy_counters(device: str, root: Path = POWERCAP) -> tuple[list[EnergyCounter], str]:
    """The counters of what computes on `device`, and a sentence where some or all are missing."""
    found, reason = processor_counters(root)
    if device.partition(":")[0] == "cuda":
        of_gpus, no_gpu = _gpu_counters()
        if of_gpus and not found:
            return of_gpus, f"Joules of runs on {device} are those of the GPUs alone: {reason}."
        # The processor's alone would make a GPU look thrifty.
        found, reason = ([*found, *of_gpus], reason) if of_gpus else ([], no_gpu)
    return found, f"Energy is not measurable here: {reason}." if reason else ""


def processor_counters(root: Path = POWERCAP) -> tuple[list[EnergyCounter], str]:
    """The zones of all packages, and of memory beside them; or none, and the reason."""
    found = []
    for zone in sorted(
        root.glob("intel-rapl:*")
    ):  # AMD's have this name, too; the zones of a zone are listed beside it
        try:
            name = (zone / "name").read_text().strip()
            if not name.startswith("package") and name != "dram":
                continue  # a core is a part of its package, and psys has all of them
            counter = EnergyCounter(
                name, _reader(zone / "energy_uj"), int((zone / "max_energy_range_uj").read_text())
            )
            counter.read()
        except PermissionError as error:
            return [], f"{error.filename} may not be read; run as root, or: sudo chmod a+r {error.filename}"
        except (OSError, ValueError) as error:
            return [], f"{zone} cannot be read ({error})"
        found.append(counter)
    if not any(one.name.startswith("package") for one in found):
        return (
            [],
            f"the processor shows no energy counter in {root} (virtual machines and most ARM hosts have none)",
        )
    return found, ""


def _reader(path: Path) -> Callable[[], int]:
    return lambda: int(path.read_text())


def _gpu_counters() -> tuple[list[EnergyCounter], str]:
    """Those of all GPUs that the driver knows."""
    number = ctypes.c_uint()
    try:
        nvml = ctypes.CDLL(_NVML)
        _require(nvml.nvmlInit_v2())
        _require(nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)))
        found = []
        for index in range(number.value):
            handle = ctypes.c_void_p()
            _require(nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)))
            counter = EnergyCounter(f"GPU {index}", _gpu_reader(nvml, handle))
            counter.read()
            found.append(counter)
    except (OSError, AttributeError) as error:
        return [], f"the GPU's energy counter cannot be read ({error})"
    return found, "" if found else "the driver shows no GPU"


def _gpu_reader(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> Callable[[], int]:
    def read() -> int:
        millijoules = ctypes.c_ulonglong()
        _require(nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)))
        return 1000 * millijoules.value

    return read


def _require(status: int) -> None:
    if status:
        raise OSError(f"NVML answered with status {status}")
