"""How much of a shard's next step can be taken while its gradients are still arriving. Pure.

    worker ══ Push c ════════════════▶ primary        bytes of the gradients, in order
           ◀════════════ ValuesAhead ══               what follows from those that have come from all workers
           ◀── Parameters c+1 ────────                once the step is taken: now the values count

What is computed ahead is a guess: that these pushes will make the next step. The shard decides about a step as if there
were none. Where it takes another step, or none, the values are dropped, and those of the answer replace what a worker
was sent. So a wrong guess costs time; it is never seen by a worker that computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from manyhands.strategies.ps.ps_messages import HostPush, Push


class Span(NamedTuple):
    """Bytes of a shard's range that the gradients of all these pushes have, and that were not returned before."""

    pushes: tuple[Push, ...]
    """Those with a gradient, in the order of its sum; of one host, the carrier's."""
    begin: int
    until: int


class StepAhead:
    """The next step of one shard with `num_bytes`; a span has at least `least` bytes, or it is the last one."""

    def __init__(self, num_bytes: int, least: int) -> None:
        self._num_bytes, self._least = num_bytes, least
        self._arriving: dict[int, tuple[tuple[Push, ...], int]] = {}  # by member: all parts, and bytes
        self._begun: tuple[Push, ...] = ()
        self._until = 0

    def arrives(self, message: Push | HostPush, num_bytes: int) -> bool:
        """So many bytes of a gradient are here. False if what was begun does not count: it had an earlier gradient."""
        parts = message.parts if isinstance(message, HostPush) else (message,)
        known = self._arriving.get(parts[0].member)
        self._arriving[parts[0].member] = (parts, num_bytes)
        goes_on = known is None or (known[0] == parts and known[1] < num_bytes)
        if not goes_on and parts[0].member in {push.member for push in self._begun}:
            self._begun = ()
            return False
        return True

    def gone(self, member: int) -> bool:
        """A member is not connected any more: what it sends again begins anew. False as above."""
        self._arriving.pop(member, None)
        if member not in {push.member for push in self._begun}:
            return True
        self._begun = ()
        return False

    def span(self, clock: int, slots: Sequence[int]) -> Span | None:
        """The next bytes of the step `clock`, which is made of an update of each of these slots; None while there are
        too few, or while an update is missing or here in two ways.
        """
        for member, (parts, _) in tuple(self._arriving.items()):
            if parts[0].clock < clock:
                del self._arriving[member]
        here = [(parts, count) for parts, count in self._arriving.values() if parts[0].clock == clock]
        if sorted(part.slot for parts, _ in here for part in parts) != sorted(slots):
            return None
        pushes = tuple(sorted((parts[0] for parts, _ in here), key=lambda push: push.slot))
        if pushes != self._begun:
            self._begun, self._until = pushes, 0
        begin, until = self._until, min(count for _, count in here)
        if until <= begin or (until - begin < self._least and until < self._num_bytes):
            return None
        self._until = until
        return Span(pushes, begin, until)
