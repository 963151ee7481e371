"""Which members a hub dials: when to dial, when to retry, and when to give up. Does no I/O; the caller passes the
time.

One failed attempt says little: the other end may be busy, at its capacity, or not yet listening. So a member is
dialled again, after pauses that double from 50 ms to a second, until it answers, the call is cancelled, or its time
is over. The pauses are randomized, so that peers rejected together do not retry together. A member whose connection
was lost soon after it was made is dialled after a pause too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

__all__ = ["Calls"]

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_SETTLED_S: Final = 5.0
_NEVER_S: Final = float("inf")


@dataclass(slots=True)
class _Call:
    address: str
    since_s: float
    due_s: float
    pause_s: float
    tries: int = 0


class Calls:
    """The calls of one hub, by member; each is either due or in progress."""

    def __init__(self, patience_s: float, chance: random.Random) -> None:
        self._patience_s = patience_s
        self._chance = chance
        self._calls: dict[int, _Call] = {}
        self._answered: dict[int, tuple[float, float]] = {}  # by member: when it answered, and the next pause
        self.next_s = _NEVER_S
        """When the first of them is due."""

    def __contains__(self, member: object) -> bool:
        return member in self._calls

    def begin(self, member: int, address: str, now_s: float) -> None:
        """Call a member; at once, unless it answered a moment ago and was lost since."""
        answered_s, pause_s = self._answered.pop(member, (-_NEVER_S, _FIRST_PAUSE_S))
        if now_s - answered_s >= _SETTLED_S:
            self._calls[member] = _Call(address, now_s, now_s, _FIRST_PAUSE_S)
        else:
            self._calls[member] = _Call(address, now_s, now_s + self._cut(pause_s), _longer(pause_s))
        self._look()

    def due(self, now_s: float) -> list[tuple[int, str]]:
        """The members to dial now, with their addresses; each is in progress until `answered` or `failed`."""
        due = [(member, call) for member, call in self._calls.items() if call.due_s <= now_s]
        for _, call in due:
            call.due_s, call.tries = _NEVER_S, call.tries + 1
        self._look()
        return [(member, call.address) for member, call in due]

    def answered(self, member: int, now_s: float) -> None:
        """The member is connected: its call has ended."""
        call = self._calls.pop(member, None)
        if call is not None:
            self._answered[member] = (now_s, call.pause_s)
        self._look()

    def failed(self, member: int, reason: str, now_s: float) -> str | None:
        """An attempt failed; None if there will be another, else the sentence with which the call ends."""
        call = self._calls.get(member)
        if call is None:
            return reason
        waited_s = now_s - call.since_s
        if waited_s >= self._patience_s:
            self.end(member)
            return f"not reached at {call.address} within {waited_s:.1f} s, in {call.tries} tries; the last: {reason}"
        call.due_s = min(now_s + self._cut(call.pause_s), call.since_s + self._patience_s)
        call.pause_s = _longer(call.pause_s)
        self._look()
        return None

    def end(self, member: int) -> None:
        """Cancel the call to a member."""
        self._calls.pop(member, None)
        self._answered.pop(member, None)
        self._look()

    def _cut(self, pause_s: float) -> float:
        return pause_s * (0.5 + 0.5 * self._chance.random())

    def _look(self) -> None:
        self.next_s = min((call.due_s for call in self._calls.values()), default=_NEVER_S)


def _longer(pause_s: float) -> float:
    return min(2 * pause_s, _LONGEST_PAUSE_S)
