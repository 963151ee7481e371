"""The store that a run's leader keeps, as torch's engines ask for one: so they need no port and no server of their own.

Calls of members go over their lines, which have proved the run's token and are under TLS between hosts. Values of
torch's are bytes, those of the leader's store text: bytes are written down in base64.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import Store

from manyhands.errors import ManyhandsError
from manyhands.places.external.store_waiting import comes_true
from manyhands.places.local.rendezvous import RendezvousStore

__all__ = ["RunStore"]

_BYTES: Final = "base64:"


class RunStore(Store):
    """Keys and values of one run, all beginning with `prefix`; waits end after `timeout_s`.

    `still` is called meanwhile, and raises where waiting makes no sense any more.
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
        """As torch's."""
        self._store.set(self._named(key), _written(value))

    def get(self, key: str) -> bytes:
        """As torch's: waits until there is one."""
        self.wait([key])
        return _read(self._store.get(self._named(key)))

    def check(self, keys: Sequence[str]) -> bool:
        """As torch's."""
        return self._store.check([self._named(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """As torch's; ManyhandsError names what was never said."""
        timeout_s = timeout.total_seconds() if timeout is not None else self._timeout_s

        def are_there() -> bool:
            found = self.check(keys)
            if not found:
                self._still()
            return found

        if not comes_true(are_there, timeout_s):
            late = next((key for key in keys if not self.check([key])), keys[0])
            raise ManyhandsError(f"nobody has said {late!r} in the run's store within {timeout_s:.0f} s")

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """As torch's."""
        before = _written(expected) if expected else ""
        return _read(self._store.compare_set(self._named(key), before, _written(desired)))

    def add(self, key: str, amount: int) -> int:
        """As torch's."""
        return self._store.add(self._named(key), amount)

    def delete_key(self, key: str) -> bool:
        """As torch's."""
        return self._store.delete_key(self._named(key))

    deleteKey = delete_key  # noqa: N815  # what torch's own stores, such as PrefixStore, call it

    def _named(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def _written(value: str | bytes) -> str:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return _BYTES + base64.b64encode(data).decode()


def _read(value: bytes) -> bytes:
    """What was written, or a number that was counted."""
    text = value.decode()
    return base64.b64decode(text.removeprefix(_BYTES)) if text.startswith(_BYTES) else value
