"""The liveness monitor: which peers have missed their heartbeats, decided from times that the caller passes.

Every peer sends something at least every `heartbeat_s`, so no input for `silence_s` means that its process is gone,
frozen or cut off. A process that did not poll for a while (a long computation) has read nothing either: the input
waits unread. After such a gap each peer has `heartbeat_s` more, once, before it is given up.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from manyhands.errors import UserError

__all__ = ["SILENT_AFTER_S", "LivenessMonitor", "LivenessTimes"]

K = TypeVar("K", bound=Hashable)
_CALLED: Final = 6
SILENT_AFTER_S: Final = 5.0
"""After how long without a heartbeat a process counts as lost, on one host and over a connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessTimes:
    """How often to send heartbeats, when a peer counts as lost, and how long a pending connection may take to
    identify.
    """

    heartbeat_s: float = 0.5
    silence_s: float = SILENT_AFTER_S
    handshake_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "silence_s", "handshake_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise UserError(f"{name}={value}: must be a positive number of seconds")
        if self.silence_s < 2 * self.heartbeat_s:
            raise UserError(
                f"silence_s={self.silence_s}: must be at least twice heartbeat_s={self.heartbeat_s}"
            )


class LivenessMonitor(Generic[K]):
    """The deadline of each peer for its next heartbeat."""

    def __init__(self, silence: LivenessTimes, now_s: float) -> None:
        self._silence = silence
        self._looked_s = now_s
        self.next_look_s = now_s + silence.heartbeat_s / 2
        """When to call `look` again, at the latest."""
        self._until_s: dict[K, float] = {}
        self._newcomers: set[K] = set()
        self._spared: set[K] = set()

    def arrived(self, peer: K, now_s: float, *, waits: bool = False) -> None:
        """Add a pending connection; only `heard` extends its deadline.

        With `waits` it gets more time: a peer that this end dialled may have many other connections pending.
        """
        self._newcomers.add(peer)
        self._until_s[peer] = now_s + self._silence.handshake_s * (_CALLED if waits else 1)

    def heard(self, peer: K, now_s: float) -> None:
        """Note input from a peer, which is known from now on at least."""
        self._until_s[peer] = now_s + self._silence.silence_s
        self._newcomers.discard(peer)
        self._spared.discard(peer)

    def left(self, peer: K) -> None:
        """Stop monitoring a peer that has left."""
        self._until_s.pop(peer, None)
        self._newcomers.discard(peer)
        self._spared.discard(peer)

    def look(self, now_s: float) -> list[tuple[K, str]]:
        """The peers to give up now, and why; all input that has arrived must have been read before."""
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        self.next_look_s = now_s + self._silence.heartbeat_s / 2
        lost: list[tuple[K, str]] = []
        for peer, until_s in self._until_s.items():
            if now_s < until_s:
                continue
            if gap_s >= self._silence.silence_s / 2 and peer not in self._spared:
                self._spared.add(peer)
                self._until_s[peer] = now_s + self._silence.heartbeat_s
            elif peer in self._newcomers:
                lost.append((peer, "did not say who it is in time"))
            else:
                silence_s = self._silence.silence_s
                lost.append((peer, f"nothing heard for {silence_s:g} s, not even a heartbeat"))
        return lost
