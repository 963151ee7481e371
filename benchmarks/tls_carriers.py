"""What a tensor is sent by in `tls.py`: links, hubs, and bare sockets, each plain and with TLS.

Bare sockets are the floor: what Python's ssl can do at all, with one connection and with several at once, each with a
thread at both ends. OpenSSL works outside the interpreter lock.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from cables import pace, pace_every_connection
from manyhands.transport.hub.handshake import Credentials
from manyhands.transport.hub.hub import Hub
from manyhands.transport.hub.hub_events import Arrived, Joined, Settings
from manyhands.transport.link.interface import Full, Link, Message, Queued, Received
from manyhands.transport.link.tcp import TcpLink
from manyhands.transport.messages import MessageCoder
from manyhands.transport.security import Security

TIMEOUT_S = 120.0
TOKEN = b"the secret of this benchmark, no other"
SOCKETS = (1, 4)
CHUNK_BYTES = 128 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    cpu_ns: int


class Carrier(ABC):
    """One way to send a tensor to the other process."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def send(self, tensor: torch.Tensor, times: int) -> int:
        """Send it so often, wait until all of it is there; what the other process's processor spent, in ns."""

    @abstractmethod
    def receive(self, target: torch.Tensor, times: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class OverLink(Carrier):
    def __init__(self, name: str, link: Link) -> None:
        super().__init__(name)
        self.link = link

    def send(self, tensor: torch.Tensor, times: int) -> int:
        for number in range(times):
            self._say(Message(kind=1, step=number, payload=tensor))
        outcome = self.link.receive(TIMEOUT_S)
        assert isinstance(outcome, Received), outcome
        return outcome.message.step

    def receive(self, target: torch.Tensor, times: int) -> None:
        begin = time.process_time_ns()
        for _ in range(times):
            outcome = self.link.receive(TIMEOUT_S, target)
            assert isinstance(outcome, Received), outcome
        self._say(Message(kind=2, step=time.process_time_ns() - begin))

    def _say(self, message: Message) -> None:
        while isinstance(outcome := self.link.send(message), Full):
            self.link.flush(TIMEOUT_S)
        assert isinstance(outcome, Queued), outcome

    def close(self) -> None:
        self.link.close()


class OverHub(Carrier):
    def __init__(self, name: str, member: int, security: Security) -> None:
        super().__init__(name)
        self.peer = 1 - member
        self.target: memoryview | None = None
        self.hub = Hub(
            Credentials(member=member, role="benchmark", token=TOKEN, fingerprint="tls"),
            MessageCoder({1: Chunk, 2: Done}),
            destination=lambda _member, _message, _num_bytes: self.target,
            settings=Settings(security=security, queue_bytes=256 << 20),
        )

    def send(self, tensor: torch.Tensor, times: int) -> int:
        payload = [tensor.numpy()]
        for number in range(times):
            while not self.hub.send(self.peer, Chunk(number=number), payload):
                assert self.hub.flush(TIMEOUT_S)
        [done] = self._take(1)
        assert isinstance(done.message, Done)
        return done.message.cpu_ns

    def receive(self, target: torch.Tensor, times: int) -> None:
        begin = time.process_time_ns()
        self.target = memoryview(target.numpy()).cast("B")
        self._take(times)
        self.hub.send(self.peer, Done(cpu_ns=time.process_time_ns() - begin))

    def _take(self, count: int) -> list[Arrived]:
        taken: list[Arrived] = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(taken) < count:
            assert time.monotonic() < deadline, self.name
            for event in self.hub.poll(1.0):
                assert isinstance(event, Arrived | Joined), event
                if isinstance(event, Arrived):
                    taken.append(event)
        return taken

    def close(self) -> None:
        self.hub.flush(TIMEOUT_S)
        self.hub.close()


class OverSockets(Carrier):
    """Blocking sockets and nothing else: each takes its share of the tensor, in a thread of its own."""

    def __init__(self, name: str, ends: list[socket.socket]) -> None:
        super().__init__(name)
        self.ends = ends
        self.pool = ThreadPoolExecutor(len(ends))

    def send(self, tensor: torch.Tensor, times: int) -> int:
        def send(end: socket.socket, share: memoryview) -> None:
            for _ in range(times):
                for begin in range(0, len(share), CHUNK_BYTES):
                    end.sendall(share[begin : begin + CHUNK_BYTES])

        self._in_threads(send, tensor)
        return int.from_bytes(self.ends[0].recv(8), "big")

    def receive(self, target: torch.Tensor, times: int) -> None:
        def receive(end: socket.socket, share: memoryview) -> None:
            for _ in range(times):
                filled = 0
                while filled < len(share):
                    came = end.recv_into(share[filled:])
                    assert came, self.name
                    filled += came

        begin = time.process_time_ns()
        self._in_threads(receive, target)
        self.ends[0].sendall((time.process_time_ns() - begin).to_bytes(8, "big"))

    def _in_threads(self, work: Callable[[socket.socket, memoryview], None], tensor: torch.Tensor) -> None:
        whole = memoryview(tensor.numpy()).cast("B")
        size = len(whole) // len(self.ends)
        shares = [whole[number * size : (number + 1) * size] for number in range(len(self.ends))]
        list(self.pool.map(work, self.ends, shares))

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self.pool.shutdown()


class Rendezvous:
    """Two processes connect to each other in one order: the one that listens, and prints where, or the other."""

    def __init__(self, folder: Path, host: str, addresses: dict[str, str] | None) -> None:
        self.ways = {"plain": Security.insecure(), "TLS": Security.from_directory(folder)}
        self.listens = addresses is None
        self._bare = _bare_context(folder, server_side=self.listens)
        self._hubs = {
            name: OverHub(f"hub, {name}", int(self.listens), way) for name, way in self.ways.items()
        }
        if addresses is None:
            self._server = socket.create_server((host, 0), backlog=64)
            self._server.settimeout(TIMEOUT_S)
            report = {name: over.hub.listen(f"tcp:{host}:0") for name, over in self._hubs.items()}
            print(json.dumps({**report, "others": f"{host}:{self._server.getsockname()[1]}"}), flush=True)
        else:
            where, _, port = addresses["others"].rpartition(":")
            self._address = (where, int(port))
            for name, over in self._hubs.items():
                over.hub.connect(1, addresses[name])

    def carriers(self) -> list[Carrier]:
        """Every carrier of this process, connected."""
        made: list[Carrier] = [self._link(name) for name in self.ways]
        made += self._hubs.values()
        for over in self._hubs.values():
            deadline = time.monotonic() + TIMEOUT_S
            while not over.hub.members():
                assert time.monotonic() < deadline, over.name
                for event in over.hub.poll(0.1):
                    assert isinstance(event, Joined), event
        made += [self._sockets(number, name) for number in SOCKETS for name in self.ways]
        return made

    def _connected(self) -> socket.socket:
        if self.listens:
            end, _ = self._server.accept()
        else:
            end = socket.create_connection(self._address, TIMEOUT_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return end

    def _link(self, name: str) -> OverLink:
        way = self.ways[name]
        end = way.wrap(self._connected(), "the peer", server_side=self.listens)
        return OverLink(f"link, {name}", TcpLink(end, peer="the peer"))

    def _sockets(self, number: int, name: str) -> OverSockets:
        ends = []
        for _ in range(number):
            end = self._connected()
            end.settimeout(None)
            ends.append(self._bare.wrap_socket(end, server_side=self.listens) if name == "TLS" else end)
        return OverSockets(f"{'socket' if number == 1 else f'{number} sockets'}, {name}", ends)


def hold_to(bytes_per_s: int, carriers: list[Carrier]) -> None:
    """Have everything that this process sends through a carrier leave at a network's rate, on whatever network."""
    assert pace_every_connection(bytes_per_s) >= len(carriers)
    for carrier in carriers:
        if isinstance(carrier, OverSockets):
            for end in carrier.ends:
                pace(end, bytes_per_s // len(carrier.ends))


def _bare_context(folder: Path, *, server_side: bool) -> ssl.SSLContext:
    """As `Security` makes it, by hand: the floor shares nothing with what stands on it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / "ca.pem")
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context
