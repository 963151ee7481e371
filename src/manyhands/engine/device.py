"""Where a worker computes: `cpu`, `cuda` (one GPU per worker by local rank), or one GPU named, `cuda:1`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from manyhands.errors import UserError

__all__ = ["check_device", "device_of", "moved", "num_gpus", "sharing_sentence"]


def check_device(name: str) -> str:
    """`name` if this machine has it, else a UserError that says what it has."""
    if name == "cpu":
        return name
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        meant = name.lower().replace("gpu", "cuda")
        known = re.fullmatch(r"cpu|cuda(:\d+)?", meant)
        hint = f"; did you mean {meant!r}?" if known else ""
        raise UserError(f"device={name!r}: allowed: cpu, cuda, cuda:0, cuda:1, ...{hint}")
    found = num_gpus()
    if found == 0:
        raise UserError(
            f"device={name}: this machine has no GPU that torch can use; `manyhands doctor` says why"
        )
    if match[1] is not None and int(match[1]) >= found:
        raise UserError(f"device={name}: there are {found} GPUs, numbered from 0")
    return name


def num_gpus() -> int:
    """How many this process can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_of(name: str, local_rank: int) -> torch.device:
    """The device of one worker; plain `cuda` assigns the GPUs round-robin by local rank."""
    if name == "cuda":
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device(name)


def sharing_sentence(name: str, workers: int) -> str | None:
    """A notice when several workers share a GPU, which works but should be known; else empty."""
    if name == "cpu":
        return None
    gpus = torch.cuda.device_count() if name == "cuda" else 1
    return f"{workers} workers share {gpus} GPU{'s' if gpus > 1 else ''}" if workers > gpus else None


def moved(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`; descends into tuples, lists and dicts."""
    if isinstance(batch, torch.Tensor):
        # To the host not asynchronously: it would read before the copy has arrived.
        return batch.to(device, non_blocking=device.type != "cpu")
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(part, device) for part in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(moved(part, device) for part in batch)
    if isinstance(batch, Mapping):
        return {name: moved(part, device) for name, part in batch.items()}
    return batch
