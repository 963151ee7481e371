"""How tensors go between a device and the host's memory in the background: by streams of a GPU, or by a thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

__all__ = ["Move", "Mover", "StreamMover", "ThreadMover", "mover_for"]

Pair: TypeAlias = tuple[Tensor, Tensor]
"""From where, and to where."""


class Move(ABC):
    """Copies that were begun."""

    @abstractmethod
    def before_next(self) -> None:
        """Have whatever is computed from now on come after them."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until they are done: the host may read, and write, what they touched."""


class Mover(ABC):
    """Copies between the host and a device, in each direction in the order in which it is asked to."""

    frees_late: ClassVar[bool]
    """Whether memory that is being taken from may be given back at once: it is not used again before it may be."""

    @abstractmethod
    def bring(self, pairs: Sequence[Pair], after: Move | None = None) -> Move:
        """Begin to copy from the host to the device, after another move, and after what was computed in that memory."""

    @abstractmethod
    def take(self, pairs: Sequence[Pair]) -> Move:
        """Begin to copy from the device, as it is after all that was computed so far, to the host."""

    @abstractmethod
    def room(self, like: Tensor) -> Tensor:
        """Memory of the host for what a tensor of the device holds, from which copies are fast."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until everything is where it belongs: the host may read it."""

    @abstractmethod
    def close(self) -> None:
        """Wait, and let go of what it works with."""


class _Submitted(Move):
    """In a thread: who computes waits for it."""

    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def before_next(self) -> None:
        self._done.result()

    def finish(self) -> None:
        self._done.result()


class ThreadMover(Mover):
    """Where the device is the host itself: a thread copies."""

    frees_late = False

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manyhands mover")
        self._last: Move | None = None

    def bring(self, pairs: Sequence[Pair], after: Move | None = None) -> Move:
        """In the thread, which does one after the other."""
        del after
        return self.take(pairs)

    def take(self, pairs: Sequence[Pair]) -> Move:
        """In the thread."""
        self._last = _Submitted(self._thread.submit(_copy, pairs))
        return self._last

    def room(self, like: Tensor) -> Tensor:
        """Plain memory."""
        return torch.empty(like.shape, dtype=like.dtype)

    def finish(self) -> None:
        """The last one is the last one."""
        if self._last is not None:
            self._last.finish()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


class _Queued(Move):
    """On a stream of a GPU: the stream that computes waits for it, and not the host."""

    def __init__(self, done: torch.cuda.Event, device: torch.device) -> None:
        self.done = done
        self._device = device

    def before_next(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.done)

    def finish(self) -> None:
        self.done.synchronize()


class StreamMover(Mover):
    """A stream of the GPU in each direction, and pinned memory of the host."""

    frees_late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def bring(self, pairs: Sequence[Pair], after: Move | None = None) -> Move:
        """After what was computed in that memory."""
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        if isinstance(after, _Queued):
            self._in.wait_event(after.done)
        return self._begin(self._in, pairs)

    def take(self, pairs: Sequence[Pair]) -> Move:
        """After what was computed; memory that is freed meanwhile is not used again before the copy has ended."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        for source, _ in pairs:
            source.record_stream(self._out)
        return self._begin(self._out, pairs)

    def room(self, like: Tensor) -> Tensor:
        """Pinned, so that copies need not wait."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def finish(self) -> None:
        """Wait for both streams."""
        self._in.synchronize()
        self._out.synchronize()

    def close(self) -> None:
        """Nothing is under way any more."""
        self.finish()

    def _begin(self, stream: torch.cuda.Stream, pairs: Sequence[Pair]) -> Move:
        with torch.cuda.stream(stream):
            _copy(pairs)
            return _Queued(stream.record_event(), self._device)


def mover_for(device: torch.device) -> Mover:
    """What copies to and from `device`."""
    return StreamMover(device) if device.type == "cuda" else ThreadMover()


@torch.no_grad()
def _copy(pairs: Sequence[Pair]) -> None:
    for source, target in pairs:
        target.copy_(source, non_blocking=True)
