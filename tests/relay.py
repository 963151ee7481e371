"""Somebody in the middle: passes on what two ends of a TCP connection say, and keeps a copy of all of it."""

from __future__ import annotations

import select
import socket
import threading

_PATIENCE_S = 60.0


class Relay:
    """One connection to `port`, through `self.port`; a context manager. `heard` is what passed, in both directions."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(_PATIENCE_S)
        self.port = self._listening.getsockname()[1]
        self.heard = bytearray()
        self.spoil_next = threading.Event()
        """Set: one bit of the next bytes to the target is changed."""
        self._thread = threading.Thread(target=self._pass_on, name="relay", daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        self._thread.join(_PATIENCE_S)
        assert not self._thread.is_alive(), "both ends must be closed before the relay"

    def _pass_on(self) -> None:
        try:
            near, _ = self._listening.accept()
        except OSError:
            return  # nobody came
        with near, socket.create_connection(("127.0.0.1", self._target)) as far:
            other = {near: far, far: near}
            while True:
                for end in select.select([near, far], [], [])[0]:
                    try:
                        data = end.recv(1 << 20)
                    except ConnectionResetError:
                        return
                    if not data:
                        return
                    self.heard += data
                    if end is near and self.spoil_next.is_set():
                        self.spoil_next.clear()
                        data = bytes([*data[:-1], data[-1] ^ 1])
                    try:
                        other[end].sendall(data)
                    except OSError:
                        return
