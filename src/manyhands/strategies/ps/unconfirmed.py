"""The pushes that have arrived at a shard and do not count there yet, by themselves or as one host's sum.

    worker ──Push c──► every shard          all are out of its hands
           ──Read c+1──► every shard        only now: so the first of them proves that every shard has, or gets, c

Under a lockstep policy no shard may take a step that another will not: a worker that computes from the one before and
the one behind computes what the plain loop never does. So a push is unconfirmed, outside the log, until a Read of its
slot for a later clock has come. Where its worker dies first, the successor decides: each shard's Welcome tells it up to
where updates have arrived there, it begins where all of them have that, and its first Read confirms what lies before
its clock and drops what does not.

A HostPush has several parts and one gradient, so one slot has to decide for all of them: its carrier's, by the same
rule. Its Read of a later clock proves that every shard has the sum, hence every part. Its Read of the same clock drops
the sum; each other part then counts by itself if its worker has sent it alone besides, and is asked for if not. Until
then the successor of another part's worker is not welcomed: what has arrived of its slot is not known.
"""

from __future__ import annotations

from manyhands.strategies.ps.ps_messages import HostPush, Push


class Unconfirmed:
    """The unconfirmed pushes of one shard; without `needed` a push is never held."""

    def __init__(self, *, needed: bool) -> None:
        self._needed = needed
        self._pushes: dict[int, Push] = {}
        self._groups: dict[int, HostPush] = {}  # by the slot of each part
        self._met: dict[int, int] = {}  # by slot: the newest member that has spoken to this shard

    def meet(self, slot: int, member: int) -> None:
        """Record a message of the slot's holder: it decides on what has arrived, and predecessors are ignored."""
        self._met[slot] = max(member, self._met.get(slot, 0))

    def hears(self, push: Push) -> bool:
        """Whether this push may be held, even from a fenced member, while its successor has not sent a message yet."""
        return self._needed and push.member >= self._met.get(push.slot, 0)

    def awaits(self, push: Push, read: int) -> bool:
        """Whether this push has to wait: for a Read, or for what becomes of a sum with the same update.

        `read` is the clock of the held Read of its slot, -1 for none.
        """
        return self._needed and (read <= push.clock or push.slot in self._groups)

    def hold(self, push: Push) -> Push | None:
        """Hold a push; returns the previous one, unless this push replaces its gradient."""
        before = self._pushes.get(push.slot)
        self._pushes[push.slot] = push
        replaced = before is None or (before.clock == push.clock and not push.skip)
        return None if replaced else before

    def resolve(self, slot: int) -> Push | None:
        return self._pushes.pop(slot, None)

    def arrived(self, slot: int) -> int:
        """The clock after the held update of a slot, sent alone or as the carrier of a sum; 0 for none."""
        push, group = self._pushes.get(slot), self._groups.get(slot)
        if push is None and group is not None and group.parts[0].slot == slot:
            push = group.parts[0]
        return 0 if push is None else push.clock + 1

    # ── sums ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def can_hold(self, group: HostPush) -> bool:
        """Whether none of its updates has arrived in another way."""
        slots, known = [part.slot for part in group.parts], self._groups.get(group.parts[0].slot)
        return not any(
            slot in self._pushes or self._groups.get(slot, known) is not known for slot in slots
        ) and (known is None or [part.slot for part in known.parts] == slots)

    def hold_group(self, group: HostPush) -> None:
        self._groups |= dict.fromkeys((part.slot for part in group.parts), group)

    def group_of(self, slot: int) -> HostPush | None:
        """The held sum with an update of this slot."""
        return self._groups.get(slot)

    def let_go(self, group: HostPush) -> None:
        for part in group.parts:
            self._groups.pop(part.slot, None)

    def leaves_open(self, slot: int, member: int) -> bool:
        """Whether it is not known what of this slot arrived, as another slot decides; its own worker knows."""
        group = self._groups.get(slot)
        return group is not None and any(
            part.slot == slot and part.member < member for part in group.parts[1:]
        )
