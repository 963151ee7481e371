"""How fast a run went through text: tokens a second, and the share of a GPU's peak that the model used (MFU)."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from manyhands.task import TextWork

# Dense products in 16 bits, by NVIDIA's data sheets; a more precise name stands first.
_PEAKS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "V100": 125e12,
}
_LEAST_STEPS = 4  # of a run whose median step says something


def device_use(device: torch.device) -> dict[str, Any]:
    """What this process has computed on, and the most memory that it had there; on a CPU, in all."""
    if device.type == "cuda":
        return {
            "device_name": torch.cuda.get_device_name(device),
            "gpu": str(torch.cuda.get_device_properties(device).uuid),
            "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
        }
    return {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def largest_use(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of workers' uses, entries of a run's summary: the memory is that of the worker with the most."""
    known = [one for one in reports if "peak_memory_bytes" in one]
    if not known:
        return {}
    found: dict[str, Any] = {"peak_memory_bytes": max(one["peak_memory_bytes"] for one in known)}
    on_gpus = [one for one in known if "gpu" in one]
    if on_gpus:
        found |= {"device_name": on_gpus[0]["device_name"], "gpus": len({one["gpu"] for one in on_gpus})}
    return found


def text_speed(
    work: TextWork | None,
    *,
    batch: int,
    ends: Sequence[float],
    used: Mapping[str, Any],
    half: bool,
) -> dict[str, Any]:
    """Entries of a run's summary, by the median time between the `ends` of its steps of `batch` rows each.

    MFU is only told of products in 16 bits, and of GPUs whose peak is known; `used` is what `largest_use` gave.
    """
    if work is None or len(ends) < _LEAST_STEPS:
        return {}
    rows_per_s = batch / max(1e-9, median(after - before for before, after in pairwise(ends)))
    found: dict[str, Any] = {"tokens_per_step": batch * work.tokens, "tokens_per_s": rows_per_s * work.tokens}
    peak = next((flops for known, flops in _PEAKS.items() if known in used.get("device_name", "")), None)
    if half and peak is not None:
        share = rows_per_s * work.flops / (used["gpus"] * peak)
        found["mfu"] = {"share": share, "peak_flops": peak, "formula": work.formula}
    return found
