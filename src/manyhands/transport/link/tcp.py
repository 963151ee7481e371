"""The link of two roles over a TCP connection, whose traffic can be shaped, measured and throttled like a network.

A message is its header and then its payload in the stream. A goodbye header precedes a clean close, which distinguishes
it from a death. On one host the process that starts the roles connects them over loopback and passes each its end
(`mesh.TcpMesh`): no port stays open, and no other process can be at the other end. Between hosts it uses TLS.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import select
import socket
import termios
import time
from contextlib import suppress
from typing import Final, Self

import torch

from manyhands.errors import ManyhandsError
from manyhands.transport.link import byte_socket
from manyhands.transport.link.interface import (
    DEFAULT_MAX_PAYLOAD_BYTES,
    DEFAULT_QUEUE_BYTES,
    HEADER_BYTES,
    Closed,
    Header,
    PeerDied,
    Received,
    ReceiveOutcome,
)
from manyhands.transport.link.queued import Incoming, Outgoing, QueuedLink
from manyhands.transport.link.wire import Wire
from manyhands.transport.tls import End, SecureSocket, TlsRefused

_BUFFER_BYTES: Final = 512 << 10  # the kernel's, per direction and end: enough for loopback, and no more
_CONNECT_S: Final = 10.0
_LINGER_S: Final = 1.0
_PER_CALL_BYTES: Final = 4 << 20  # so that a deadline is looked at now and then
_LOOPBACK: Final = "127.0.0.1"
_ANY_MEMORY: Final = ctypes.c_char * (1 << 46)  # one type for all: ctypes keeps each length


class TcpLink(QueuedLink):
    """One end of a connection, which it owns; made by `mesh.TcpMesh`, or by `pair` for two ends in one process.

    `queue_bytes` bounds what waits for the kernel to take it, `max_payload_bytes` what the peer may announce. A peer
    whose process ends is noticed at once, whoever waits.
    """

    wire = Wire.TCP

    def __init__(
        self,
        end: End,
        *,
        peer: str,
        queue_bytes: int = DEFAULT_QUEUE_BYTES,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
    ) -> None:
        super().__init__(peer, max_payload_bytes)
        self._end = end
        self._descriptor = end.fileno()
        end.setblocking(False)
        secure = isinstance(end, SecureSocket)
        self._write, self._read = (self._encrypt, self._decrypt) if secure else (self._send, self._receive)
        self._outgoing = Outgoing(self._write, queue_bytes, self._peer_end, f"manyhands link to {peer}")
        self._incoming = Incoming(self._read, max_payload_bytes, self._peer_end, peer)

    @classmethod
    def pair(
        cls, names: tuple[str, str] = ("end 0", "end 1"), *, queue_bytes: int = DEFAULT_QUEUE_BYTES
    ) -> tuple[Self, Self]:
        """Both ends in one process, for threads; `names[i]` holds the i-th."""
        ends = zip(connected(), reversed(names), strict=True)
        first, second = (cls(end, peer=peer, queue_bytes=queue_bytes) for end, peer in ends)
        return first, second

    def receive(self, timeout_s: float, into: torch.Tensor | None = None) -> ReceiveOutcome:
        outcome = super().receive(timeout_s, into)
        if self._peer_end() == Closed() and not isinstance(outcome, Received):
            return Closed()
        if isinstance(outcome, Closed):
            self._gone = outcome  # it said goodbye
        return outcome

    def _say_goodbye(self, complete: bool) -> None:
        """Let the peer know that this was all, and see that it gets there: what is unread here must not cut it off."""
        if not complete:
            return  # a connection that ends without a goodbye says that something is lost
        goodbye = Header.goodbye(self.counters.messages_sent).encode()
        unsent, until_ns = array.array("i", [0]), time.monotonic_ns() + int(_LINGER_S * 1e9)
        source = (ctypes.c_char * HEADER_BYTES).from_buffer_copy(goodbye)
        if self._write(ctypes.addressof(source), HEADER_BYTES, 0, 0, 0, until_ns, 0) < HEADER_BYTES:
            return
        hung_up = select.poll()
        hung_up.register(self._descriptor, 0)
        while time.monotonic_ns() < until_ns:
            fcntl.ioctl(self._descriptor, termios.TIOCOUTQ, unsent)
            if unsent[0] == 0 or hung_up.poll(0):  # nobody is there any more to take what is still unsent
                return
            time.sleep(0.001)

    def interrupt(self) -> None:
        """From any thread: end every wait here as if the peer were gone; the link is then of no further use."""
        with suppress(OSError):  # the peer went first
            self._end.shutdown(socket.SHUT_RDWR)

    def _let_go(self, *, in_child: bool = False) -> None:
        del in_child
        self._end.close()

    def _send(
        self,
        header: int,
        header_bytes: int,
        payload: int,
        payload_bytes: int,
        done: int,
        until_ns: int,
        _: int,
    ) -> int:
        """See `queued.Write`; where the peer is gone, `_gone` says so."""
        sent = byte_socket.write(
            self._descriptor, header, header_bytes, payload, payload_bytes, done, until_ns
        )
        return sent if sent >= 0 else self._failed(sent, done)

    def _receive(self, address: int, num_bytes: int, done: int, until_ns: int, _spins: int) -> int:
        """See `queued.Read`; at the end of the stream `_gone` says so."""
        came = byte_socket.read(self._descriptor, address, num_bytes, done, until_ns)
        return came if came >= 0 else self._failed(came, done)

    def _failed(self, number: int, done: int) -> int:
        self._gone = self._gone or self._broken("" if number == byte_socket.ENDED else os.strerror(-number))
        return done

    def _encrypt(
        self,
        header: int,
        header_bytes: int,
        payload: int,
        payload_bytes: int,
        done: int,
        until_ns: int,
        _: int,
    ) -> int:
        """As `_send`, by OpenSSL."""
        total = header_bytes + payload_bytes
        while done < total:
            parts = []
            if done < header_bytes:
                parts.append(_memory(header + done, header_bytes - done))
            begin = max(0, done - header_bytes)
            if begin < payload_bytes:
                parts.append(_memory(payload + begin, min(payload_bytes - begin, _PER_CALL_BYTES)))
            try:
                done += self._end.sendmsg(parts)
            except (BlockingIOError, InterruptedError):
                if not _wait(self._descriptor, select.POLLOUT, until_ns):
                    return done
            except OSError as error:
                self._gone = self._gone or self._broken(error.strerror or str(error))
                return done
        return done

    def _decrypt(self, address: int, num_bytes: int, done: int, until_ns: int, _spins: int) -> int:
        """As `_receive`, by OpenSSL."""
        while done < num_bytes:
            try:
                came = self._end.recv_into(_memory(address + done, min(num_bytes - done, _PER_CALL_BYTES)))
            except (BlockingIOError, InterruptedError):
                if not _wait(self._descriptor, select.POLLIN, until_ns):
                    return done
                continue
            except (OSError, TlsRefused) as error:
                self._gone = self._broken(getattr(error, "strerror", None) or str(error))
                return done
            if came == 0:
                self._gone = self._broken("")
                return done
            done += came
            if not until_ns:  # one look, however fast the peer writes
                return done
        return done

    def _broken(self, error: str) -> PeerDied:
        why = f"its connection broke ({error})" if error else "its connection ended without a goodbye"
        return PeerDied(f"{self.peer} is gone: {why}")

    def _peer_end(self) -> Closed | PeerDied | None:
        return Closed() if self._closed else self._gone


def connected() -> tuple[socket.socket, socket.socket]:
    """Two ends of one connection over loopback; any other process that connects to the port meanwhile is rejected."""
    with socket.socket() as listener:
        _prepare(listener)  # whom it lets in inherits the size of its buffers
        listener.bind((_LOOPBACK, 0))
        listener.listen(8)
        listener.settimeout(_CONNECT_S)
        first = socket.socket()
        try:
            _prepare(first)
            first.settimeout(_CONNECT_S)
            first.connect(listener.getsockname())
            deadline = time.monotonic() + _CONNECT_S
            while time.monotonic() < deadline:
                second, address = listener.accept()
                if address == first.getsockname():
                    _prepare(second)
                    return first, second
                second.close()
            raise ManyhandsError(f"two ends could not be connected over loopback within {_CONNECT_S:.0f} s")
        except BaseException:
            first.close()
            raise


def _prepare(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _memory(address: int, num_bytes: int) -> memoryview:
    return memoryview(_ANY_MEMORY.from_address(address)).cast("B")[:num_bytes]


def _wait(descriptor: int, events: int, until_ns: int) -> bool:
    """Whether a descriptor became ready before that moment; 0 is not to wait."""
    left_ns = until_ns - time.monotonic_ns() if until_ns else 0
    if left_ns <= 0:
        return False
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(max(1, left_ns // 1_000_000)))
