"""The store in which the processes of a run find their leader, kept by a Ray actor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

from torch._C._distributed_c10d import Store

from manyhands.errors import ManyhandsError, PeerTimeout

__all__ = ["ActorStore", "RayStore", "asking"]

_LOOK_S = 0.05

Ask: TypeAlias = Callable[..., Any]
"""Calls a method of the store actor, by its name."""


class ActorStore:
    """The key-value store inside the actor."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._held[key] = value

    def get(self, key: str) -> bytes | None:
        return self._held.get(key)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Put a value in the place of another, or, expected to be empty, where there is none; what is there then."""
        found = self._held.get(key)
        if found == expected or (found is None and not expected):
            self._held[key] = desired
            return desired
        return found if found is not None else expected

    def add(self, key: str, amount: int) -> int:
        total = int(self._held.get(key, b"0")) + amount
        self._held[key] = str(total).encode()
        return total

    def delete_key(self, key: str) -> bool:
        return self._held.pop(key, None) is not None

    def vacate(self, rank: int) -> None:
        """Remove the entry of a rank whose process is gone: a successor may register."""
        for key in [key for key in self._held if key.endswith(f"/here/{rank}")]:
            del self._held[key]


def asking(store: Any, timeout_s: float) -> Ask:
    import ray

    def ask(call: str, *arguments: Any) -> Any:
        return ray.get(getattr(store, call).remote(*arguments), timeout=timeout_s)

    return ask


class RayStore(Store):
    """A process's access to the store of its run, with the interface of torch's stores.

    A wait raises ManyhandsError once `trouble` has a sentence: a process that waits for a role that will not come
    is told why.
    """

    def __init__(self, ask: Ask, timeout_s: float, trouble: Callable[[], str | None] = lambda: None) -> None:
        super().__init__()
        self._ask = ask
        self._timeout_s = timeout_s
        self._trouble = trouble

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key; waits until it exists, as torch's store does."""
        return self._found(key, self._timeout_s, time.monotonic())

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._look(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys, as torch's store does; the timeout is for all of them together."""
        timeout_s = timeout.total_seconds() if timeout is not None else self._timeout_s
        began_s = time.monotonic()
        for key in keys:
            self._found(key, timeout_s, began_s)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Compare and set atomically, as torch's store does."""
        return bytes(self._ask("compare_set", key, _bytes(expected), _bytes(desired)))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    deleteKey = delete_key  # noqa: N815  # what torch's own stores, such as PrefixStore, call it

    def _found(self, key: str, timeout_s: float, began_s: float) -> bytes:
        while (found := self._look(key)) is None:
            if time.monotonic() - began_s >= timeout_s:
                raise PeerTimeout(f"nobody has said {key!r} on Ray within {timeout_s:.0f} s", 0)
            time.sleep(_LOOK_S)
        return bytes(found)

    def _look(self, key: str) -> Any:
        sentence = self._trouble()
        if sentence is not None:
            raise ManyhandsError(sentence)
        return self._ask("get", key)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
