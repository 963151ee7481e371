"""Which rollouts make up the batch of an update, which actor acts for them, and with which version of the weights.

Ticket n stands for one rollout, and belongs to the batch of update n // rollouts_per_update, whoever acts for it. It
may be begun with version v (weights that have seen v updates) only if update - v ≤ lag. So the policy lag is bounded by
construction, and so is the memory: rollouts of at most lag + 1 updates exist at a time, and an actor that is further
ahead waits for the next version. Nothing is dropped for its age; only what a lost actor had begun is, and begun again.

    update                 0        1        2        3      two rollouts each, lag 1, version 1 is the newest
    tickets              0  1     2  3     4  5     6  7
                        consumed  done 1   0  .     .  .     actor 1 acts for 3 and actor 0 for 4; 5 is next; 6 waits

The order is one of three. Without lag, ticket n is always that of actor n mod actors, so that runs are equal however
fast each actor is. With lag, an actor takes the first ticket that nobody has. A replay repeats the order of a log.

Pure: no clock, no process, no tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from manyhands.errors import UserError

__all__ = ["LogRow", "Ticket", "Tickets", "WaitFor", "audit"]


class Ticket(NamedTuple):
    """One rollout of an actor; `incarnation` counts the processes that were this actor before."""

    number: int
    actor: int
    incarnation: int
    rollout: int  # of this incarnation: its environments continue from one to the next
    version: int


class LogRow(NamedTuple):
    """How a ticket ended: acted, or dropped with the actor that had begun it. Rows are in the order of these ends."""

    ticket: Ticket
    dropped: bool


class WaitFor(NamedTuple):
    """There is nothing to begin before this version is published; None: nor will there be."""

    version: int | None


class Tickets:
    """The state of all tickets; `log` has a row for each that was finished or dropped."""

    def __init__(
        self,
        actors: int,
        rollouts_per_update: int,
        lag: int,
        *,
        forced: Sequence[LogRow] | None = None,
    ) -> None:
        self.rollouts_per_update, self.lag = rollouts_per_update, lag
        self.log: list[LogRow] = []
        self._update = 0  # whose batch is consumed next
        self._incarnations = [0] * actors
        self._rollouts = [0] * actors
        self._begun: dict[int, Ticket] = {}
        self._done: dict[int, Ticket] = {}
        # Heaps of tickets to begin: one for all actors, or one each; the largest of a heap is the first of the rest.
        self._step = 1 if lag else actors
        self._free = [[actor] for actor in range(self._step)]
        self._forced = _by_actor(forced, actors) if forced is not None else None
        self._logged = {row.ticket.number for row in forced or () if not row.dropped}

    def begin(self, actor: int, newest_version: int) -> Ticket | WaitFor:
        """What `actor` acts for next, now that `newest_version` is published."""
        if self._forced is not None:
            return self._begin_forced(actor, newest_version)
        free = self._free[actor % self._step]
        number = free[0]
        needed = number // self.rollouts_per_update - self.lag
        if newest_version < needed:
            return WaitFor(needed)
        heappop(free)
        if not free:
            free.append(number + self._step)
        ticket = Ticket(number, actor, self._incarnations[actor], self._rollouts[actor], newest_version)
        self._rollouts[actor] += 1
        self._begun[number] = ticket
        return ticket

    def finished(self, ticket: Ticket) -> None:
        self._done[ticket.number] = self._begun.pop(ticket.number)
        self.log.append(LogRow(ticket, dropped=False))

    def lost(self, actor: int) -> tuple[Ticket, ...]:
        """The process of `actor` is gone, and writes no more: what it had begun is dropped, and can be begun again.

        Its next incarnation begins with environments of its own, since nobody knows the state of the old ones. A replay
        has to repeat that state: UserError if this actor had any and is still needed.
        """
        held = (one for one in self._begun.values() if one.actor == actor)
        dropped = tuple(sorted(held, key=lambda one: one.rollout))
        for ticket in dropped:
            del self._begun[ticket.number]
        if self._forced is not None:
            again = self._forced[actor]
            again.extendleft(reversed(dropped))
            if again and again[0].rollout:
                raise UserError(
                    f"actor {actor} was lost during a replay, and with it the state of its environments; replay again"
                )
            return dropped
        for ticket in dropped:
            self.log.append(LogRow(ticket, dropped=True))
            heappush(self._free[actor % self._step], ticket.number)
        self._incarnations[actor] += 1
        self._rollouts[actor] = 0
        return dropped

    def missing(self, update: int) -> tuple[int, ...]:
        """The tickets that the batch of `update` still waits for."""
        begin = update * self.rollouts_per_update
        return tuple(one for one in range(begin, begin + self.rollouts_per_update) if one not in self._done)

    def ready(self, update: int) -> tuple[Ticket, ...] | None:
        """The batch of `update` in the order of its rows, which is consumed by this; None until it is complete."""
        if update != self._update:
            raise ValueError(f"update {self._update} is next, not {update}")
        missing = self.missing(update)
        if self._forced is not None and not self._logged.issuperset(missing):
            raise UserError(f"the log ends before update {update} is complete; replay with steps={update}")
        if missing:
            return None
        begin = update * self.rollouts_per_update
        self._update += 1
        return tuple(self._done.pop(one) for one in range(begin, begin + self.rollouts_per_update))

    def _begin_forced(self, actor: int, newest_version: int) -> Ticket | WaitFor:
        assert self._forced is not None
        if not self._forced[actor]:
            return WaitFor(None)
        ticket = self._forced[actor][0]
        if newest_version < ticket.version:
            return WaitFor(ticket.version)
        self._forced[actor].popleft()
        self._begun[ticket.number] = ticket
        return ticket


def _by_actor(log: Iterable[LogRow], actors: int) -> list[deque[Ticket]]:
    # What each actor did, in the order in which it did it; what was dropped changed nothing that remained.
    queues = [deque[Ticket]() for _ in range(actors)]
    for ticket in sorted(row.ticket for row in log if not row.dropped):
        if ticket.actor >= actors:
            raise UserError(
                f"the log names actor {ticket.actor}, but there are {actors}; replay with as many actors"
            )
        queues[ticket.actor].append(ticket)
    return [deque(sorted(queue, key=lambda one: (one.incarnation, one.rollout))) for queue in queues]


def audit(log: Sequence[LogRow], rollouts_per_update: int, lag: int, updates: int) -> list[str]:
    """What in the log of a run that made `updates` updates breaks a promise, one sentence each.

    It knows the rules, and nothing of `Tickets`.
    """
    found: list[str] = []
    done: set[int] = set()
    for ticket, dropped in log:
        name, update = f"ticket {ticket.number}", ticket.number // rollouts_per_update
        if ticket.number in done:
            found.append(
                f"{name} was {'dropped' if dropped else 'finished again'} after it had been finished"
            )
        if not 0 <= update - ticket.version <= lag:
            found.append(
                f"{name}, of update {update}, was begun with version {ticket.version}; the lag is {lag}"
            )
        if not dropped:
            done.add(ticket.number)
    due = range(updates * rollouts_per_update)
    found += [f"ticket {number} was never finished" for number in due if number not in done]
    return found + _audit_actors(log)


def _audit_actors(log: Sequence[LogRow]) -> list[str]:
    """Each incarnation acts for one rollout after the other, with versions that never go back, until it is lost."""
    found: list[str] = []
    last: dict[int, LogRow] = {}
    for row in log:
        ticket, before = row.ticket, last.get(row.ticket.actor)
        whose = f"actor {ticket.actor}, incarnation {ticket.incarnation}"
        begins = before is None or ticket.incarnation > before.ticket.incarnation
        if before is not None and not begins:
            if ticket.incarnation < before.ticket.incarnation or (before.dropped and not row.dropped):
                found.append(f"{whose}: finished ticket {ticket.number} after it had been lost")
            if ticket.version < before.ticket.version:
                found.append(f"{whose}: version {ticket.version} was acted after {before.ticket.version}")
        expected = 0 if begins or before is None else before.ticket.rollout + 1
        if ticket.rollout != expected:
            found.append(f"{whose}: rollout {ticket.rollout} ended where {expected} was next")
        last[ticket.actor] = row
    return found
