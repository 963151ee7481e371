"""Hubs in one process that take turns, and bare sockets that speak to them: what the tests of hubs share."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from certificates import HOSTS, run_security
from manyhands.native.version import __version__
from manyhands.transport.frames import HEADER_BYTES, encode_header
from manyhands.transport.hub.handshake import CONTROL, Claim, Credentials, Handshake
from manyhands.transport.hub.hub import Hub
from manyhands.transport.hub.hub_events import HubEvent, Joined, Settings
from manyhands.transport.liveness import LivenessTimes
from manyhands.transport.messages import MessageCoder

PATIENCE_S = 60.0
TOKEN = b"the secret of this run, 32 bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    text: str


CODEC = MessageCoder({1: Number, 2: Text})
FAST = Settings(liveness=LivenessTimes(heartbeat_s=0.02, silence_s=0.5, handshake_s=0.5))


class Clock:
    """Stands still unless told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Party:
    """Hubs that take turns; `events` has what each was told."""

    def __init__(self) -> None:
        self.hubs: dict[int, Hub] = {}
        self.events: dict[int, list[HubEvent]] = {}
        self._stack = ExitStack()

    def add(self, member: int, *, token: bytes = TOKEN, fingerprint: str = "task", **options: Any) -> Hub:
        mine = Credentials(member=member, role=f"role {member}", token=token, fingerprint=fingerprint)
        self.hubs[member] = hub = self._stack.enter_context(Hub(mine, CODEC, **options))
        self.events[member] = []
        return hub

    def until(self, done: Callable[[], bool]) -> None:
        """Poll everyone until `done`."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, self.events
            for member, hub in self.hubs.items():
                self.events[member] += hub.poll(0.001)

    def of(self, member: int, kind: type) -> list[Any]:
        return [event for event in self.events[member] if isinstance(event, kind)]

    def one(self, member: int, kind: type) -> Any:
        """Wait for one more event of a kind, and take it."""
        self.until(lambda: bool(self.of(member, kind)))
        event = self.of(member, kind)[0]
        self.events[member].remove(event)
        return event

    def pair(
        self, how: str, first: dict[str, Any] | None = None, second: dict[str, Any] | None = None
    ) -> tuple[Hub, Hub]:
        """Members 1 and 2, of which 2 connected; over `tls` as two hosts of a run."""
        ours, theirs = first or {}, second or {}
        if how == "tls":
            ours, theirs = _secured(ours, HOSTS[0]), _secured(theirs, HOSTS[1])
        one, two = self.add(1, **ours), self.add(2, **theirs)
        two.connect(1, one.listen("tcp" if how == "tls" else how))
        assert self.one(1, Joined) == Joined(2, "role 2")
        assert self.one(2, Joined) == Joined(1, "role 1")
        return one, two

    def close(self) -> None:
        self._stack.close()
        self.events.clear()


def _secured(options: dict[str, Any], host: str) -> dict[str, Any]:
    settings = options.get("settings", Settings())
    return {**options, "settings": replace(settings, security=run_security(host))}


def dial(address: str) -> socket.socket:
    how, _, place = address.partition(":")
    if how == "unix":
        end = socket.socket(socket.AF_UNIX)
        end.connect(f"\0{place}")
    else:
        host, port = place.split(":")
        end = socket.create_connection((host, int(port)))
    return end


def control(message: object) -> bytes:
    kind, body = CONTROL.encode(message)
    return encode_header(kind, 1, len(body), 0) + body


def read_all(party: Party, end: socket.socket) -> bytes:
    """What comes until something has come and nothing more is there."""
    data = bytearray()

    def some() -> bool:
        try:
            data.extend(end.recv(1 << 16, socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass
        return len(data) > HEADER_BYTES

    party.until(some)
    return bytes(data)


def read_end(end: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    end.settimeout(PATIENCE_S)
    data = bytearray()
    try:
        while more := end.recv(1 << 16):
            data += more
    except ConnectionResetError:
        pass  # what we sent was not read to the end
    return bytes(data)


def impostor(party: Party, address: str) -> socket.socket:
    """A member 9 made of a bare socket, let in by hub 1, that beats no heart."""
    shake = Handshake(Credentials(member=9, role="impostor", token=TOKEN, fingerprint="task"), expected=1)
    end = dial(address)
    end.sendall(control(shake.hello()))
    challenge = CONTROL.decode(10, read_all(party, end)[HEADER_BYTES:])
    end.sendall(control(shake.handle(challenge)))
    assert party.one(1, Joined).member == 9
    return end


GOOD = encode_header(1, 0, 8, 0) + bytes(8)
CLAIM = Claim(member=2, role="", package=__version__, fingerprint="task")


def raw(kind: int, body: bytes) -> bytes:
    """A frame of the transport with any body."""
    return encode_header(kind, 1, len(body), 0) + body
