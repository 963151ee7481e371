"""The thread that sends a hub's heartbeats while its application computes."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from manyhands.transport.hub.connection import Connection
from manyhands.transport.hub.handshake import Heartbeat

__all__ = ["HeartbeatSender"]


class HeartbeatSender:
    """Keeps idle connections alive and drains their queues; `progress` is piggybacked on every heartbeat."""

    def __init__(self, members: Mapping[int, Connection], heartbeat_s: float) -> None:
        self._members = members
        self._heartbeat_s = heartbeat_s
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.progress = 0

    def begin(self) -> None:
        """Start the thread; idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._send_heartbeats, name="manyhands hub heartbeat", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """Stop the thread; idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _send_heartbeats(self) -> None:
        seen: dict[Connection, int] = {}
        while not self._stop.wait(self._heartbeat_s / 2):
            writes: dict[Connection, int] = {}
            for connection in tuple(self._members.values()):
                if connection.outbox.pending_bytes:
                    connection.outbox.pump()
                elif seen.get(connection) == connection.outbox.writes:
                    connection.send_control(Heartbeat(progress=self.progress))
                writes[connection] = connection.outbox.writes
            seen = writes
