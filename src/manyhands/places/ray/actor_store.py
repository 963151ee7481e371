"""The store in which the processes of a run find their leader, kept by a Ray actor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from manyhands.errors import ManyhandsError
from manyhands.places.external.key_value_store import KeyValueStore
from manyhands.places.external.torch_store import RunStore

__all__ = ["ActorStore", "asking", "open_actor_store"]

Ask: TypeAlias = Callable[..., Any]
"""Calls a method of the store actor, by its name."""


class ActorStore(KeyValueStore):
    """The key-value store inside the actor."""

    def vacate(self, rank: int) -> None:
        """Remove the entry of a rank whose process is gone: a successor may register."""
        for key in [key for key in self._values if key.endswith(f"/here/{rank}")]:
            self.delete_key(key)


def asking(store: Any, timeout_s: float) -> Ask:
    import ray

    def ask(call: str, *arguments: Any) -> Any:
        return ray.get(getattr(store, call).remote(*arguments), timeout=timeout_s)

    return ask


class _ActorCalls:
    """The calls of a `RendezvousStore`, made by the actor."""

    def __init__(self, ask: Ask, trouble: Callable[[], str | None]) -> None:
        self._ask = ask
        self._trouble = trouble

    def __getattr__(self, call: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            sentence = self._trouble()
            if sentence is not None:
                raise ManyhandsError(sentence)
            return self._ask(call, *arguments)

        return ask


def open_actor_store(
    ask: Ask, timeout_s: float, trouble: Callable[[], str | None] = lambda: None
) -> RunStore:
    """A process's access to the store of its run, with the interface of torch's stores.

    Every call raises ManyhandsError once `trouble` has a sentence: a process that waits for a role that will not come
    is told why.
    """
    calls: Any = _ActorCalls(ask, trouble)
    return RunStore(calls, "", timeout_s)
