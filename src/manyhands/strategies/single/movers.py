"""Background copies between a device and host memory: on streams of a GPU, or in a thread."""

from __future__ import annotations

import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from manyhands.native.segment import ask_for_large_pages

HOST = "host"
Pair: TypeAlias = tuple[Tensor, Tensor]  # source and target of a copy


class Move(NamedTuple):
    """Copies that were begun."""

    before_next: Callable[[], object]  # order whatever is computed from now on after these copies
    finish: Callable[[], object]
    """Wait until the copies are done: the host may then read and write the tensors."""
    event: torch.cuda.Event | None = None


class Mover(ABC):
    """Copies between the host and a device; copies in one direction are done in order."""

    pins: ClassVar[bool]  # whether host memory is pinned
    frees_late: ClassVar[bool]
    """Whether a source may be freed during its copy, because its memory is not reused before that is done."""

    @abstractmethod
    def bring(self, pairs: Sequence[Pair], after: Move | None = None) -> Move:
        """Begin to copy from host to device, after another move, and after what was computed in that memory."""

    @abstractmethod
    def take(self, pairs: Sequence[Pair]) -> Move:
        """Begin to copy from device to host, after everything computed so far."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all copies are done: the host may then read the tensors."""

    def room(self, like: Tensor) -> Tensor:
        """Host memory for the contents of a device tensor for a while; pinned, copies from it to a GPU are fast."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self.pins)

    def lasting_room(self, like: Tensor) -> Tensor:
        """The same until `close`, of exactly its size."""
        return self.room(like)

    def close(self) -> None:
        self.finish()


class ThreadMover(Mover):
    """Copies in a thread, if the device is the host itself."""

    pins = frees_late = False

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manyhands mover")
        self._last: Move | None = None

    def bring(self, pairs: Sequence[Pair], _after: Move | None = None) -> Move:
        return self.take(pairs)

    def take(self, pairs: Sequence[Pair]) -> Move:
        done = self._thread.submit(_copy, pairs).result  # the computing thread waits for it
        self._last = Move(done, done)
        return self._last

    def finish(self) -> None:
        if self._last is not None:
            self._last.finish()

    def close(self) -> None:
        self._thread.shutdown()


class StreamMover(Mover):
    """Copies on one GPU stream per direction, to and from pinned host memory."""

    pins = frees_late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned: list[int] = []  # addresses of lasting rooms

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

    def finish(self) -> None:
        self._in.synchronize()
        self._out.synchronize()

    def lasting_room(self, like: Tensor) -> Tensor:
        if not like.numel():
            return self.room(like)
        # Torch's own pinned memory comes in powers of two: half of it could be for nothing.
        memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        ask_for_large_pages(memory)
        flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel())
        flat.zero_()  # by all threads: pinning takes pages one after another
        cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(cuda.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0))
        self._pinned.append(flat.data_ptr())
        return flat.view(like.shape)

    def close(self) -> None:
        """The lasting rooms stay as usual memory: the model that was trained lies there."""
        super().close()
        while self._pinned:
            cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(cuda.cudaHostUnregister(self._pinned.pop()))

    def _begin(self, stream: torch.cuda.Stream, pairs: Sequence[Pair]) -> Move:
        with torch.cuda.stream(stream):
            _copy(pairs)
            done = stream.record_event()
        # The computing stream waits for it, not the host.
        return Move(lambda: torch.cuda.current_stream(self._device).wait_event(done), done.synchronize, done)


@torch.no_grad()
def _copy(pairs: Sequence[Pair]) -> None:
    for source, target in pairs:
        target.copy_(source, non_blocking=True)


def mapped_file(like: Tensor, folder: str) -> Tensor:
    """Room for the contents of a tensor in a file without a name, of `folder`."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    descriptor, path = tempfile.mkstemp(prefix="manyhands-", dir=folder)
    try:
        os.ftruncate(descriptor, like.nbytes)
        flat = torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype)
    finally:
        os.close(descriptor)
        with suppress(OSError):
            Path(path).unlink()  # the mapping keeps the memory
    return flat.view(like.shape)
