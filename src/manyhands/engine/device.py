"""Where a worker computes: `cpu`, `cuda` (one GPU per worker by local rank), or one GPU named, `cuda:1`.

A batch goes to a GPU by `BatchCopies`: out of page-locked memory and on a stream of its own, so that neither the host
nor the copy waits for the kernels of earlier batches that are still queued.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from manyhands.errors import UserError


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


class BatchCopies:
    """Copies batches to one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Made for the first batch: a GPU is not woken up before.
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, batch: Any) -> Any:
        if self._device.type != "cuda":
            return moved(batch, self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            found = mapped(batch, self._copied)
        computing.wait_stream(self._stream)
        mapped(found, lambda tensor: _used_on(tensor, computing))
        return found

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def _used_on(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    """Its memory is not given to another batch before what `stream` has queued by then."""
    if tensor.layout == torch.strided:
        tensor.record_stream(stream)
    return tensor


def moved(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`; descends into tuples, lists and dicts."""
    # To the host not asynchronously: it would read before the copy has arrived.
    return mapped(batch, lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`batch` with every tensor in it changed; descends into tuples, lists and dicts."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(part, change) for part in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(mapped(part, change) for part in batch)
    if isinstance(batch, Mapping):
        return {name: mapped(part, change) for name, part in batch.items()}
    return batch
