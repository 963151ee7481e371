"""Damaged TLS against a hub: the first flight, the certificate, what is sealed, and what was damaged before it was."""

from __future__ import annotations

import random
import socket
import ssl
import struct
from dataclasses import replace

from certificates import HOSTS, careless, folders, run_security
from hubs import TOKEN
from manyhands.transport.frames import OF_TRANSPORT
from manyhands.transport.hub.handshake import CONTROL, Credentials, Handshake
from manyhands.transport.hub.hub_events import Settings
from wire_fuzz import LiveHub, a_frame, damaged, dialled, frame, send

_WHERE = ("hello", "certificate", "sealed", "inside")


class SecureHub(LiveHub):
    """A hub over TLS with one honest member, and strangers who have a good certificate and damage what they send."""

    def __init__(self) -> None:
        super().__init__(replace(Settings(), security=run_security()), "tcp")
        self._context = careless(folders() / HOSTS[1])

    def case(self, rng: random.Random) -> None:
        """One connection, damaged at one place; whatever it is, the hub turns it away and goes on."""
        where, remote = rng.choice(_WHERE), self.hub.rejected
        with dialled(self.addresses[0]) as end:
            self._talk(end, where, rng)
            if rng.random() < 0.2:  # its last word is a reset
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.close()
                self.await_that(lambda: self.hub.rejected > remote)
                return
            try:
                end.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the hub was faster
            if rng.random() < 0.5:  # else it leaves without hearing why
                self.await_that(lambda: self.hub.rejected > remote)
        self.await_that(lambda: self.hub.rejected > remote)

    def _talk(self, end: socket.socket, where: str, rng: random.Random) -> None:
        arrived, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = self._context.wrap_bio(arrived, leaving)
        for flight in ("hello", "certificate"):
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                pass
            data = leaving.read()
            if flight == where:
                send(end, damaged(data, rng, lambda: a_frame(rng)))
                return
            send(end, data)
            if flight == "hello":
                self._hear(end, tls, arrived)
        hello = frame(CONTROL, Handshake(_NINE, expected=1).hello(), OF_TRANSPORT)
        tls.write(damaged(hello, rng, lambda: a_frame(rng)) or b"\0" if where == "inside" else hello)
        sealed = leaving.read()
        send(end, damaged(sealed, rng, lambda: a_frame(rng)) if where == "sealed" else sealed)

    def _hear(self, end: socket.socket, tls: ssl.SSLObject, arrived: ssl.MemoryBIO) -> None:
        """Until the hub has said all of its part of the handshake."""
        end.setblocking(False)

        def heard() -> bool:
            try:
                arrived.write(end.recv(1 << 14))
                tls.do_handshake()
            except (BlockingIOError, ssl.SSLWantReadError):
                return False
            return True

        self.await_that(heard)
        end.setblocking(True)


_NINE = Credentials(member=9, role="", token=TOKEN, fingerprint="task")
