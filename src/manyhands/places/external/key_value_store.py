"""The key-value store of a run, kept by its leader: the few calls of torch's stores that a rendezvous needs.

torch's own store accepts everyone who reaches its port. This one is reached over control connections, which have
proved the run's token. Values are text. The size of keys and values is bounded, and so is their number.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from manyhands.errors import UserError
from manyhands.places.external.control_messages import StoreAnswer, StoreCall
from manyhands.transport.messages import ProtocolError

__all__ = ["KeyValueStore", "comes_true"]

_MOST_KEYS: Final = 1 << 16
_LONGEST: Final = 1 << 16
_FIRST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.1


class KeyValueStore:
    """Keys and values in the leader's memory; every call is atomic, from any thread."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` to `desired` if its value is `expected`, or if it is absent and `expected` is empty; return the
        result.

        Same as torch: if the key is absent and `expected` is not empty, `expected` is returned.
        """
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
        """Return the value; UserError if the key is absent (torch's store would wait)."""
        with self._lock:
            value = self._values.get(key)
        if value is None:
            raise UserError(f"the run's store has no {key!r}")
        return value.encode()

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
        try:
            found, value = self._do(call)
        except (UserError, ValueError) as error:
            raise ProtocolError("call", f"{call.call}: {error}") from error
        return StoreAnswer(number=call.number, found=found, value=value)

    def _do(self, call: StoreCall) -> tuple[bool, str]:
        match call.call, call.keys, call.values:
            case "compare_set", (key,), (expected, desired):
                return True, self.compare_set(key, expected, desired).decode()
            case "check", keys, ():
                return self.check(keys), ""
            case "get", (key,), ():
                with self._lock:
                    return key in self._values, self._values.get(key, "")
            case "set", (key,), (value,):
                self.set(key, value)
                return True, ""
            case "add", (key,), (amount,):
                return True, str(self.add(key, int(amount)))
            case "delete_key", (key,), ():
                return self.delete_key(key), ""
        raise ValueError(f"of {len(call.keys)} keys and {len(call.values)} values is no call of a store")

    def _put(self, key: str, value: str) -> None:
        if len(key) > _LONGEST or len(value) > _LONGEST:
            raise UserError(f"a key or value of more than {_LONGEST} characters")
        if key not in self._values and len(self._values) >= _MOST_KEYS:
            raise UserError(f"more than {_MOST_KEYS} keys")
        self._values[key] = value


def comes_true(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until `is_done` holds (True) or the timeout is over (False).

    A blocking wait in the store would lock out all other threads of this process meanwhile.
    """
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not is_done():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True
