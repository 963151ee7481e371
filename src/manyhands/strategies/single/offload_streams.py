"""Background copies between a device and host memory: on streams of a GPU, or in a thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

__all__ = ["Move", "Mover", "StreamMover", "ThreadMover", "mover_for"]

Pair: TypeAlias = tuple[Tensor, Tensor]
"""Source and target of a copy."""


@dataclass(frozen=True, slots=True)
class Move:
    """Copies that were begun."""

    before_next: Callable[[], object]  # order whatever is computed from now on after these copies
    finish: Callable[[], object]
    """Wait until the copies are done: the host may then read and write the tensors."""
    event: torch.cuda.Event | None = None


class Mover(ABC):
    """Copies between the host and a device; copies in one direction are done in order."""

    frees_late: ClassVar[bool]
    """Whether a source may be freed during its copy, because its memory is not reused before that is done."""

    @abstractmethod
    def bring(self, pairs: Sequence[Pair], after: Move | None = None) -> Move:
        """Begin to copy from host to device, after another move, and after what was computed in that memory."""

    @abstractmethod
    def take(self, pairs: Sequence[Pair]) -> Move:
        """Begin to copy from device to host, after everything computed so far."""

    @abstractmethod
    def room(self, like: Tensor) -> Tensor:
        """Allocate host memory for the contents of a device tensor, from which copies are fast."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all copies are done: the host may then read the tensors."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all copies, and release resources."""


class ThreadMover(Mover):
    """Copies in a thread, if the device is the host itself."""

    frees_late = False

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manyhands mover")
        self._last: Move | None = None

    def bring(self, pairs: Sequence[Pair], after: Move | None = None) -> Move:
        del after
        return self.take(pairs)

    def take(self, pairs: Sequence[Pair]) -> Move:
        done = self._thread.submit(_copy, pairs).result  # the computing thread waits for it
        self._last = Move(done, done)
        return self._last

    def room(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    def finish(self) -> None:
        if self._last is not None:
            self._last.finish()

    def close(self) -> None:
        self._thread.shutdown()


class StreamMover(Mover):
    """Copies on one GPU stream per direction, to and from pinned host memory."""

    frees_late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def bring(self, pairs: Sequence[Pair], after: Move | None = None) -> Move:
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None and after.event is not None:
            self._in.wait_event(after.event)
        return self._begin(self._in, pairs)

    def take(self, pairs: Sequence[Pair]) -> Move:
        """Copy after what was computed; memory freed meanwhile is not reused before the copy has ended."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        for source, _ in pairs:
            source.record_stream(self._out)
        return self._begin(self._out, pairs)

    def room(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def finish(self) -> None:
        self._in.synchronize()
        self._out.synchronize()

    def close(self) -> None:
        self.finish()

    def _begin(self, stream: torch.cuda.Stream, pairs: Sequence[Pair]) -> Move:
        with torch.cuda.stream(stream):
            _copy(pairs)
            done = stream.record_event()
        # The computing stream waits for it, not the host.
        return Move(lambda: torch.cuda.current_stream(self._device).wait_event(done), done.synchronize, done)


def mover_for(device: torch.device) -> Mover:
    return StreamMover(device) if device.type == "cuda" else ThreadMover()


@torch.no_grad()
def _copy(pairs: Sequence[Pair]) -> None:
    for source, target in pairs:
        target.copy_(source, non_blocking=True)
