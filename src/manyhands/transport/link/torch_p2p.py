"""A link over torch.distributed: point-to-point sends of a process group, as Gloo carries them between hosts.

A message is its header as 64 bytes and then its payload as bytes, both on one tag, so Gloo's own order keeps them
together. Gloo has two habits that shape this file. Work is never seen to be complete until someone waits for it, and a
wait that times out closes every connection of the process. So no wait here has a deadline: two threads wait, one for
what was sent and one for what is to come, and the caller waits for them, with a deadline.

Hence a goodbye is needed to end the threads: an end that closes sends one, and the other end's thread answers with its
own. Where the peer is there but does not read on, `close` gives up after `_CLOSE_S`; the threads end when it reads on
or goes, and when this process leaves, at the latest: one that Gloo let go while the interpreter is being taken apart
would abort the process.

Neither Gloo nor this link authenticates anybody: use it on loopback or inside a trusted network.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from manyhands.errors import UserError
from manyhands.transport.link.interface import (
    DEFAULT_MAX_PAYLOAD_BYTES,
    DEFAULT_QUEUE_BYTES,
    HEADER_BYTES,
    Closed,
    Flushed,
    FlushOutcome,
    FrameKind,
    Full,
    Header,
    Link,
    LinkCounters,
    Message,
    PeerDied,
    Queued,
    ReceiveOutcome,
    SendOutcome,
    TimedOut,
    check_size,
    hand_out,
    room_for,
)
from manyhands.transport.link.wire import Wire
from manyhands.transport.messages import ProtocolError

_CALM = {  # where the user has not set them, while a backend is made that reads them
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # what takes too long is ended, and this process is not
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # of threads that would end this process
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class SumGroup:
    """Torch's NCCL where `device` is a GPU, elsewhere Gloo: made on `store`, which lives as long as this does.

    Calls begin something and return torch's work that is under way. On a GPU the first one connects all ranks; with
    Gloo, the constructor is collective.
    """

    def __init__(
        self, device: torch.device, store: c10d.Store, rank: int, world: int, timeout_s: float
    ) -> None:
        self._store = store  # which torch would not keep alive, if it is one of Python's
        self._on_gpu = device.type == "cuda"
        timeout = timedelta(seconds=timeout_s)
        make = nccl_backend if self._on_gpu else gloo_backend
        added = {name: value for name, value in _CALM.items() if name not in os.environ}
        os.environ.update(added)
        try:
            self._backend = make(store, rank, world, timeout)
        finally:
            for name in added:
                os.environ.pop(name, None)

    def allreduce(self, tensor: torch.Tensor) -> Any:
        """Sum it over ranks, in place, after what is queued on this thread's stream."""
        return self._backend.allreduce([tensor])

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        return self._backend.broadcast(tensor, root)

    def abort(self) -> None:
        """From any thread: end what is under way, whatever the others do. Gloo's connections end with the group."""
        if self._on_gpu:
            self._backend.abort()


def nccl_version() -> str:
    """`2.27.5`; empty where this torch has no NCCL."""
    if not dist.is_available() or not dist.is_nccl_available():
        return ""
    import torch.cuda.nccl

    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def nccl_backend(store: c10d.Store, rank: int, world: int, timeout: timedelta) -> Any:
    """One rank's end of NCCL; it connects with the first collective."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(c10d.PrefixStore("nccl/", store), rank, world, options)


def gloo_backend(store: c10d.Store, rank: int, world: int, timeout: timedelta) -> Any:
    return c10d.ProcessGroupGloo(c10d.PrefixStore("gloo/", store), rank, world, timeout=timeout)


_TAG: Final = 0x4D480000  # far from the small numbers that others' code uses as tags
_UNUSED_TAG: Final = _TAG + 1  # nothing is ever sent on it
_NEVER: Final = timedelta(days=3650)
_AT_ONCE: Final = timedelta(milliseconds=1)
_CLOSE_S: Final = 5.0


@dataclass(slots=True)
class _Sent:
    """What Gloo still reads from: the tensors must live, unchanged, until the work is complete."""

    works: list[dist.Work]
    tensors: list[torch.Tensor]
    num_bytes: int


class TorchLink(Link):
    """One end of the one link between this rank of `group` and `peer_rank`; `group` must outlive it."""

    wire = Wire.TORCH

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer_rank: int,
        *,
        queue_bytes: int = DEFAULT_QUEUE_BYTES,
    ) -> None:
        if peer_rank == group.rank() or not 0 <= peer_rank < group.size():
            raise UserError(f"peer_rank={peer_rank} must be a rank below {group.size()}, not {group.rank()}")
        self.peer = f"rank {peer_rank}"
        self.counters = LinkCounters()
        self._group = group
        self._peer_rank = peer_rank
        self._queue_bytes = queue_bytes
        self._changed = threading.Condition(threading.Lock())
        self._closing = False
        self._said_goodbye = False
        self._end: Closed | PeerDied | None = None
        self._error: ProtocolError | None = None
        self._sent: deque[_Sent] = deque()
        self._pending_bytes = 0
        self._header: Header | None = None  # announced, its payload not yet here
        self._target: torch.Tensor | None = None  # where that payload goes, once someone asked for it
        self._ready: tuple[Header, torch.Tensor | None] | None = None
        self._sequence = 0
        self._threads = [
            threading.Thread(target=work, name=f"manyhands link to {self.peer}: {name}", daemon=True)
            for work, name in ((self._listen, "receiver"), (self._await_sent, "sender"))
        ]
        for thread in self._threads:
            thread.start()
        _links.add(self)

    def send(self, message: Message) -> SendOutcome:
        num_bytes = message.payload_bytes
        check_size(num_bytes, DEFAULT_MAX_PAYLOAD_BYTES, self.peer)
        total = HEADER_BYTES + num_bytes
        with self._changed:
            if self._end is not None or self._closing:
                return self._end or Closed()
            if self._pending_bytes and self._pending_bytes + total > self._queue_bytes:
                self.counters.full_count += 1
                return Full(self._pending_bytes, self._queue_bytes)
            tensors = [_bytes_of(Header.of(message, self.counters.messages_sent))]
            if message.payload is not None and num_bytes:
                tensors.append(message.payload.detach().view(torch.uint8))
            died = self._post(tensors, total)
            if died is not None:
                return died
            self.counters.messages_sent += 1
            self.counters.bytes_sent += num_bytes
            return Queued(self._pending_bytes)

    def receive(self, timeout_s: float, into: torch.Tensor | None = None) -> ReceiveOutcome:
        start = time.monotonic()
        deadline = start + timeout_s
        with self._changed:
            while not self._closing:
                if self._ready is not None:
                    header, payload = self._ready
                    received = hand_out(header, payload, into, self.peer)
                    self._ready = None
                    self._changed.notify_all()
                    self.counters.messages_received += 1
                    self.counters.bytes_received += header.payload_bytes
                    return received
                if self._header is not None and self._target is None:
                    self._target = room_for(self._header, into, self.peer)
                    self._changed.notify_all()
                if self._error is not None:
                    raise self._error
                if self._end is not None:
                    return self._end
                now = time.monotonic()
                if now >= deadline:
                    return TimedOut(now - start)
                self._changed.wait(deadline - now)
            return Closed()

    def flush(self, timeout_s: float) -> FlushOutcome:
        start = time.monotonic()
        with self._changed:
            ended = self._changed.wait_for(
                lambda: not self._pending_bytes or self._end is not None or self._closing, timeout_s
            )
            if not self._pending_bytes:
                return Flushed()
            return (self._end or Closed()) if ended else TimedOut(time.monotonic() - start)

    def give_up(self, reason: str) -> None:
        """The peer is gone as far as anyone can tell: end all waits, from any thread; `close` does not wait then."""
        with self._changed:
            self._end = self._end or PeerDied(reason)
            self._changed.notify_all()

    @property
    def left_in_peace(self) -> bool:
        return isinstance(self._end, Closed)

    def close(self) -> None:
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._say_goodbye()
            self._changed.notify_all()
            patience_s = 0.0 if isinstance(self._end, PeerDied) else _CLOSE_S
        deadline = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def break_off(self) -> None:
        """End the threads, whatever the peer does; for a process that leaves, as it takes the group's links along."""
        self.give_up("this process is leaving")
        if any(thread.is_alive() for thread in self._threads):
            with suppress(RuntimeError):  # that it timed out, which has closed every connection
                self._group.recv([torch.empty(1)], self._peer_rank, _UNUSED_TAG).wait(_AT_ONCE)
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _post(self, tensors: list[torch.Tensor], num_bytes: int) -> PeerDied | None:
        try:
            works = [self._group.send([tensor], self._peer_rank, _TAG) for tensor in tensors]
        except RuntimeError as error:
            return self._died(error)
        self._sent.append(_Sent(works, tensors, num_bytes))
        self._pending_bytes += num_bytes
        self._changed.notify_all()
        return None

    def _say_goodbye(self) -> None:
        if not self._said_goodbye:
            self._said_goodbye = True
            if not isinstance(self._end, PeerDied):
                self._post([_bytes_of(Header.goodbye(self.counters.messages_sent))], 0)

    def _await_sent(self) -> None:
        """The sender's thread: wait for what was sent, oldest first, until the goodbye has left."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._sent or self._said_goodbye or isinstance(self._end, PeerDied)
                )
                if not self._sent:
                    return
                first = self._sent[0]
            try:
                for work in first.works:
                    work.wait(_NEVER)
            except RuntimeError as error:
                with self._changed:
                    self._died(error)
                    self._sent.clear()
                    self._pending_bytes = 0
                return
            with self._changed:
                self._sent.popleft()
                self._pending_bytes -= first.num_bytes
                self._changed.notify_all()

    def _listen(self) -> None:
        """The receiver's thread: header, payload, header, payload, until a goodbye or the peer's end."""
        try:
            while self._take_one():
                pass
        except ProtocolError as error:
            with self._changed:
                self._error = error
        except RuntimeError as error:
            with self._changed:
                self._died(error)
        with self._changed:
            self._end = self._end or Closed()
            self._say_goodbye()
            self._changed.notify_all()

    def _take_one(self) -> bool:
        """Receive one message and put it on the counter; False for a goodbye."""
        first = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._read(first)
        header = Header.decode(first.numpy().tobytes(), DEFAULT_MAX_PAYLOAD_BYTES, self._sequence, self.peer)
        if header.frame is FrameKind.GOODBYE:
            return False
        self._sequence += 1
        payload = None
        if header.payload_bytes:
            with self._changed:  # a receive says where to put it; after `close`, anywhere
                self._header = header
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._target is not None or self._closing)
                payload = self._target
        payload = payload if payload is not None else room_for(header, None, self.peer)
        if payload is not None and header.payload_bytes:
            self._read(payload.view(torch.uint8))
        with self._changed:
            self._changed.wait_for(lambda: self._ready is None or self._closing)
            self._header = self._target = None
            if not self._closing:
                self._ready = header, payload
            self._changed.notify_all()
        return True

    def _read(self, tensor: torch.Tensor) -> None:
        self._group.recv([tensor], self._peer_rank, _TAG).wait(_NEVER)

    def _died(self, error: RuntimeError) -> PeerDied:
        sentence = str(error).split(". ")[0].split("] ", 1)[-1]
        self._end = died = PeerDied(f"{self.peer} is gone: {sentence}")
        self._changed.notify_all()
        return died


_links: weakref.WeakSet[TorchLink] = weakref.WeakSet()


@atexit.register
def _break_off_all() -> None:
    for link in list(_links):
        link.break_off()


def _bytes_of(header: Header) -> torch.Tensor:
    return torch.frombuffer(bytearray(header.encode()), dtype=torch.uint8)
