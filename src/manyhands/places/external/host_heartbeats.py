"""Heartbeats between all workers of a run, which exchange addresses in its store: a lost worker is named in
seconds.

The control connections have heartbeats too, but Python sends them, and a long call that holds the GIL delays them:
their timeouts are long. The heartbeats here come from compiled code, as those of `mh.join` do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from manyhands.errors import PeerTimeout
from manyhands.places.local.rendezvous import RendezvousStore
from manyhands.transport.heartbeats import Heartbeats, exchange_places

__all__ = ["open_heartbeats"]

_PAUSE_S: Final = 0.02


def open_heartbeats(
    rank: int,
    world: int,
    store: RendezvousStore,
    *,
    address: str,
    timeout_s: float,
    on_lost: Callable[[int, str], None],
) -> Heartbeats:
    """Collective: monitor all other workers, those of this host too; `on_lost(rank, sentence)` runs in another
    thread.
    """
    waiting = _Waiting(store, time.monotonic() + timeout_s)
    own, places, secret = exchange_places(waiting, rank, world, address)
    others = {peer: place for peer, place in places.items() if peer != rank}
    return Heartbeats(rank, own, others, secret, on_lost)


class _Waiting:
    """A part of the run's store in which `get` waits for a key, as torch's does."""

    def __init__(self, store: RendezvousStore, deadline: float) -> None:
        self._store = store
        self._deadline = deadline

    def set(self, key: str, value: str) -> None:
        self._store.set(f"beats/{key}", value)

    def get(self, key: str) -> bytes:
        while not self._store.check([f"beats/{key}"]):
            if time.monotonic() >= self._deadline:
                raise PeerTimeout(
                    f"rank {key.rpartition('/')[2]} did not say where it listens for heartbeats", -1
                )
            time.sleep(_PAUSE_S)
        return self._store.get(f"beats/{key}")

    def add(self, key: str, amount: int) -> int:
        return self._store.add(f"beats/{key}", amount)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(f"beats/{key}")
