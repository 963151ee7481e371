"""A run's key-value store as a torch Store: torch's backends then need no port and no server of their own.

Members call the leader's over their control connections, which have proved the run's token and use TLS between hosts.
torch's values are bytes and the store's are text, so bytes are encoded in base64.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import Store

from manyhands.errors import PeerTimeout
from manyhands.places.external.key_value_store import comes_true
from manyhands.places.local.rendezvous import RendezvousStore

__all__ = ["RunStore"]

_BYTES: Final = "base64:"


class RunStore(Store):
    """The keys of one run under `prefix`, as a torch Store; waits end after `timeout_s`.

    `still` is called during waits, and raises if waiting has become pointless.
    """

    def __init__(
        self, store: RendezvousStore, prefix: str, timeout_s: float, still: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._still = still

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._named(key), _written(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key; waits until it exists, as torch's store does."""
        self.wait([key])
        return _read(self._store.get(self._named(key)))

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([self._named(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys exist; PeerTimeout names the first that never came."""
        timeout_s = timeout.total_seconds() if timeout is not None else self._timeout_s

        def are_there() -> bool:
            found = self.check(keys)
            if not found:
                self._still()
            return found

        if not comes_true(are_there, timeout_s):
            late = next((key for key in keys if not self.check([key])), keys[0])
            raise PeerTimeout(f"nobody has set {late!r} in the run's store within {timeout_s:.0f} s", 0)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return _read(self._store.compare_set(self._named(key), _written(expected), _written(desired)))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._named(key), amount)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._named(key))

    deleteKey = delete_key  # noqa: N815  # what torch's own stores, such as PrefixStore, call it

    def _named(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def _written(value: str | bytes) -> str:
    """In base64; empty stays empty, which `compare_set` takes for a key that is absent."""
    data = value.encode() if isinstance(value, str) else bytes(value)
    return _BYTES + base64.b64encode(data).decode() if data else ""


def _read(value: bytes) -> bytes:
    """Decode a stored value: base64 bytes, or the digits of a counter."""
    text = value.decode()
    return base64.b64decode(text.removeprefix(_BYTES)) if text.startswith(_BYTES) else value
