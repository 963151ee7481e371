"""The key-value store of a run, kept by its leader: the few calls of torch's stores that a rendezvous needs.

torch's own store accepts everyone who reaches its port. This one is reached over control connections, which have
proved the run's token and use TLS between hosts, or through a Ray actor. The size of keys and values is bounded, and so
is their number. With `RunStore`, torch's backends need no port and no server of their own.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import Store

from manyhands.errors import PeerTimeout, UserError
from manyhands.places.external.control_messages import StoreAnswer, StoreCall
from manyhands.transport.liveness import RendezvousStore
from manyhands.transport.messages import ProtocolError

_MOST_KEYS: Final = 1 << 16
_LONGEST: Final = 1 << 16
_LONGEST_ANSWER: Final = 1 << 24
_FIRST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.1
_BYTES: Final = "base64:"


class KeyValueStore:
    """Keys and values, both text, in the leader's memory; every call is atomic, from any thread."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` if its value is `expected`, or absent and `expected` empty; the result, as torch's store has it."""
        with self._lock:
            there = self._values.get(key)
            if there == expected or (there is None and not expected):
                self._put(key, desired)
                return desired.encode()
            return (expected if there is None else there).encode()

    def check(self, keys: Sequence[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values; UserError if a key is absent (torch's store would wait)."""
        with self._lock:
            found = [self._values[key] for key in keys if key in self._values]
        if len(found) < len(keys):
            raise UserError(absent(keys))
        return [value.encode() for value in found]

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._put(key, value)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            number = int(self._values.get(key, "0")) + amount
            self._put(key, str(number))
            return number

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self._values.pop(key, None) is not None

    def answer(self, call: StoreCall) -> StoreAnswer:
        """Execute a call that came over a control connection; ProtocolError if it is malformed."""
        found, result = True, [""]
        try:
            match call.call, call.keys, call.values:
                case "compare_set", (key,), (expected, desired):
                    result = [self.compare_set(key, expected, desired).decode()]
                case "check", keys, ():
                    found = self.check(keys)
                case "get", keys, ():
                    with self._lock:
                        result = [self._values[key] for key in keys if key in self._values]
                    found = len(result) == len(keys)
                    if sum(map(len, result)) > _LONGEST_ANSWER:
                        raise ValueError(f"the values have more than {_LONGEST_ANSWER} characters")
                case "set", (key,), (value,):
                    self.set(key, value)
                case "add", (key,), (amount,):
                    result = [str(self.add(key, int(amount)))]
                case "delete_key", (key,), ():
                    found = self.delete_key(key)
                case _:
                    count = f"{len(call.keys)} keys and {len(call.values)} values"
                    raise ValueError(f"{count} are not valid for this call")
        except (UserError, ValueError) as error:
            raise ProtocolError("call", f"{call.call}: {error}") from error
        return StoreAnswer(number=call.number, found=found, values=tuple(result))

    def _put(self, key: str, value: str) -> None:
        if len(key) > _LONGEST or len(value) > _LONGEST:
            raise UserError(f"a key or value has more than {_LONGEST} characters")
        if key not in self._values and len(self._values) >= _MOST_KEYS:
            raise UserError(f"the store has more than {_MOST_KEYS} keys")
        self._values[key] = value


class RunStore(Store):
    """The keys of one run under `prefix`, as a torch Store, whose values are bytes; waits end after `timeout_s`.

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
        self._store.set(self._named(key), _encoded(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys; waits until all exist, as torch's store does."""
        self.wait(keys)
        return [_decoded(value) for value in self._store.multi_get([self._named(key) for key in keys])]

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
            raise PeerTimeout(f"no process set {late!r} in the run's store within {timeout_s:.0f} s", 0)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return _decoded(self._store.compare_set(self._named(key), _encoded(expected), _encoded(desired)))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._named(key), amount)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._named(key))

    deleteKey = delete_key  # noqa: N815  # what torch's own stores, such as PrefixStore, call it

    def _named(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def absent(keys: Sequence[str]) -> str:
    return f"the run's store has no {' or no '.join(map(repr, keys))}"


def _encoded(value: str | bytes) -> str:
    """In base64; empty stays empty, which `compare_set` takes for a key that is absent."""
    data = value.encode() if isinstance(value, str) else bytes(value)
    return _BYTES + base64.b64encode(data).decode() if data else ""


def _decoded(value: bytes) -> bytes:
    text = value.decode()
    return base64.b64decode(text.removeprefix(_BYTES)) if text.startswith(_BYTES) else value


def comes_true(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until `is_done` holds, or not in time; a wait in the store would lock out all threads of this process."""
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not is_done():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True
