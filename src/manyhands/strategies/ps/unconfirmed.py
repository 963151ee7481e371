"""Pushes that have arrived at a shard and do not count there yet, where an update counts at every shard or at none.

    worker ──Push c──► every shard          all are out of its hands
           ──Read c+1──► every shard        only now: so the first of them proves that every shard has, or will have, c

Under a lockstep policy no shard may take a step that another will not: a worker that computes from the one before and
the one behind computes what the plain loop never does. So a push is unconfirmed, outside the log, until a Read of its
slot for a later clock has come. Where its worker dies first, the successor decides: each shard's Welcome tells it up to
where updates have arrived there, it begins where all of them have that, and its first Read confirms what lies before
its clock and drops what does not.
"""

from __future__ import annotations

from manyhands.strategies.ps.ps_messages import Push

__all__ = ["Unconfirmed"]


class Unconfirmed:
    """The unconfirmed pushes of one shard, at most one per slot; without `needed` a push is never held."""

    def __init__(self, *, needed: bool) -> None:
        self._needed = needed
        self._pushes: dict[int, Push] = {}
        self._met: dict[int, int] = {}  # by slot: the newest member that has spoken to this shard

    def meet(self, slot: int, member: int) -> None:
        """Record a message of the slot's holder: it decides on what has arrived so far, and predecessors are
        ignored.
        """
        self._met[slot] = max(member, self._met.get(slot, 0))

    def hears(self, push: Push) -> bool:
        """Whether this push may be held, even from a fenced member, while its successor has not sent a message yet."""
        return self._needed and push.member >= self._met.get(push.slot, 0)

    def awaits(self, push: Push, read: int) -> bool:
        """Whether this push has to wait for a Read; `read` is the clock of the held Read of its slot, -1 for none."""
        return self._needed and read <= push.clock

    def hold(self, push: Push) -> Push | None:
        """Hold a push; returns the previous one, unless this push replaces its gradient."""
        before = self._pushes.get(push.slot)
        self._pushes[push.slot] = push
        replaced = before is None or (before.clock == push.clock and not push.skip)
        return None if replaced else before

    def resolve(self, slot: int) -> Push | None:
        """Remove and return the held push of a slot."""
        return self._pushes.pop(slot, None)

    def arrived(self, slot: int) -> int:
        """The clock after the held update of a slot; 0 for none."""
        push = self._pushes.get(slot)
        return 0 if push is None else push.clock + 1

    def clear(self) -> None:
        self._pushes.clear()
        self._met.clear()
