"""The tickets of rollouts: by hand, and simulated in random orders with actors that are slow, or die and come back."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from manyhands.errors import UserError
from manyhands.workloads.rl.tickets import LogRow, Ticket, Tickets, WaitFor, audit


def begun(tickets: Tickets, actor: int, newest_version: int) -> Ticket:
    ticket = tickets.begin(actor, newest_version)
    assert isinstance(ticket, Ticket)
    return ticket


def test_an_actor_runs_ahead_by_the_lag_and_then_waits() -> None:
    tickets = Tickets(2, 2, lag=1)
    numbers = [begun(tickets, actor, 0).number for actor in (0, 1, 0, 1)]
    assert numbers == [0, 1, 2, 3]
    assert tickets.begin(0, 0) == WaitFor(version=1)
    assert begun(tickets, 0, 1) == Ticket(number=4, actor=0, incarnation=0, rollout=2, version=1)


def test_without_lag_every_ticket_has_its_actor() -> None:
    tickets = Tickets(3, 3, lag=0)
    assert [begun(tickets, actor, 0).number for actor in (2, 0, 1)] == [2, 0, 1]
    assert tickets.begin(0, 0) == WaitFor(version=1), "though it is the first to be free"
    assert [begun(tickets, actor, 1).number for actor in (1, 0)] == [4, 3]


def test_a_batch_is_in_the_order_of_its_tickets_and_waits_for_all() -> None:
    tickets = Tickets(2, 2, lag=1)
    first, second = begun(tickets, 1, 0), begun(tickets, 0, 0)
    tickets.finished(second)
    assert tickets.ready(0) is None
    assert tickets.missing(0) == (0,)
    tickets.finished(first)
    assert tickets.ready(0) == (first, second)
    with pytest.raises(ValueError, match="update 1 is next, not 0"):
        tickets.ready(0)


def test_what_a_lost_actor_had_begun_is_dropped_and_begun_again() -> None:
    tickets = Tickets(2, 2, lag=1)
    kept = begun(tickets, 0, 0)
    tickets.finished(kept)
    lost, other = begun(tickets, 0, 0), begun(tickets, 1, 0)
    assert tickets.lost(0) == (lost,)
    tickets.finished(other)
    again = begun(tickets, 1, 0)
    assert again == Ticket(number=lost.number, actor=1, incarnation=0, rollout=1, version=0)
    assert begun(tickets, 0, 0) == Ticket(number=3, actor=0, incarnation=1, rollout=0, version=0)
    tickets.finished(again)
    assert tickets.ready(0) == (kept, again)
    assert tickets.log == [
        LogRow(kept, False), LogRow(lost, True), LogRow(other, False), LogRow(again, False)
    ]  # fmt: skip


def test_without_lag_the_next_incarnation_begins_it_again() -> None:
    tickets = Tickets(2, 2, lag=0)
    lost = begun(tickets, 0, 0)
    assert tickets.lost(0) == (lost,)
    assert begun(tickets, 1, 0).number == 1
    assert begun(tickets, 0, 0) == Ticket(number=0, actor=0, incarnation=1, rollout=0, version=0)


@dataclass
class Machine:
    """Actors and a learner whose next event is drawn; what an actor acts follows from all it has acted before."""

    tickets: Tickets
    actors: int
    draw: random.Random
    deaths: float
    weights: dict[int, str] = field(default_factory=dict)
    lags: Counter[int] = field(default_factory=Counter)

    def run(self, updates: int) -> str:
        version = 0
        self.weights[version] = "initial"
        speeds = [self.draw.choice([1, 1, 1, 30]) for _ in range(self.actors)]
        acting: dict[int, Ticket] = {}
        states: dict[tuple[int, int], str] = {}
        rollouts: dict[int, str] = {}
        for _ in range(100_000):
            if version == updates:
                return self.weights[version]
            actor = self.draw.choices(range(self.actors), speeds)[0]
            ticket = acting.get(actor)
            if self.draw.random() < self.deaths:
                dropped = self.tickets.lost(actor)
                assert dropped == ((ticket,) if ticket else ())
                acting.pop(actor, None)
            elif ticket is None:
                answer = self.tickets.begin(actor, version)
                if isinstance(answer, Ticket):
                    acting[actor] = answer
                    self.bounded(rollouts, acting)
                else:
                    assert answer.version is None or answer.version > version
            else:
                key = ticket.actor, ticket.incarnation
                before = states.get(key, f"environments of {key}")
                states[key] = rollouts[ticket.number] = digest(before, self.weights[ticket.version])
                self.tickets.finished(acting.pop(actor))
            batch = self.tickets.ready(version) if self.draw.random() < 0.5 else None
            if batch is not None:
                self.lags.update(version - one.version for one in batch)
                acted = [rollouts.pop(one.number) for one in batch]
                self.weights[version + 1] = digest(self.weights[version], *acted)
                version += 1
        raise AssertionError(f"nothing more happens at version {version}")

    def bounded(self, rollouts: dict[int, str], acting: dict[int, Ticket]) -> None:
        most = (self.tickets.lag + 1) * self.tickets.rollouts_per_update
        assert len(rollouts) + len(acting) <= most


def digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@pytest.mark.parametrize("seed", range(120))
def test_any_order_with_deaths_keeps_every_promise_and_is_replayed(seed: int) -> None:
    draw = random.Random(seed)
    actors, per_update = draw.randint(1, 5), draw.randint(1, 6)
    lag, updates = draw.choice([0, 0, 1, 2, 7]), 30
    tickets = Tickets(actors, per_update, lag)
    machine = Machine(tickets, actors, draw, draw.choice([0.0, 0.02, 0.2]))
    weights = machine.run(updates)
    assert audit(tickets.log, per_update, lag, updates) == []
    assert max(machine.lags) <= lag

    again = Tickets(actors, per_update, lag, forced=tickets.log)
    other_order = Machine(again, actors, random.Random(seed + 1000), 0.0)
    assert other_order.run(updates) == weights
    assert audit(again.log, per_update, lag, updates) == []


def test_the_simulation_reaches_deaths_and_every_lag() -> None:
    tickets = Tickets(3, 2, lag=4)
    machine = Machine(tickets, 3, random.Random(1), 0.05)
    machine.run(200)
    assert set(machine.lags) == {0, 1, 2, 3, 4}
    assert sum(row.dropped for row in tickets.log) > 20


def test_without_lag_every_order_gives_the_same() -> None:
    results = set()
    for seed in range(5):
        machine = Machine(Tickets(3, 4, lag=0), 3, random.Random(seed), 0.0)
        results.add(machine.run(20))
        assert set(machine.lags) == {0}
    assert len(results) == 1


def logged(*tickets: tuple[int, int, int, int, int], dropped: Sequence[int] = ()) -> list[LogRow]:
    return [LogRow(Ticket(*ticket), place in dropped) for place, ticket in enumerate(tickets)]


# (number, actor, incarnation, rollout, version), one rollout an update, lag 1, two updates
AUDITED = {
    "nothing": (logged((0, 0, 0, 0, 0), (1, 0, 0, 1, 0)), ""),
    "a gap": (logged((1, 0, 0, 0, 0)), "ticket 0 was never finished"),
    "twice": (
        logged((0, 0, 0, 0, 0), (0, 1, 0, 0, 0), (1, 0, 0, 1, 0)),
        "ticket 0 was finished again after it had been finished",
    ),
    "too old": (
        logged((0, 0, 0, 0, 0), (1, 0, 0, 1, 0), (2, 0, 0, 2, 0)),
        "ticket 2, of update 2, was begun with version 0; the lag is 1",
    ),
    "from the future": (
        logged((0, 0, 0, 0, 0), (1, 0, 0, 1, 2)),
        "ticket 1, of update 1, was begun with version 2; the lag is 1",
    ),
    "half a rollout": (
        logged((0, 0, 0, 0, 0), (1, 0, 0, 1, 0), (1, 0, 0, 2, 0), dropped=[1]),
        "actor 0, incarnation 0: finished ticket 1 after it had been lost",
    ),
    "a skipped rollout": (
        logged((0, 0, 0, 0, 0), (1, 0, 0, 2, 0)),
        "actor 0, incarnation 0: rollout 2 ended where 1 was next",
    ),
    "back to old weights": (
        logged((0, 0, 0, 0, 0), (2, 0, 0, 1, 2), (1, 0, 0, 2, 1)),
        "actor 0, incarnation 0: version 1 was acted after 2",
    ),
}


@pytest.mark.parametrize("case", AUDITED)
def test_the_audit_names_what_is_wrong(case: str) -> None:
    log, sentence = AUDITED[case]
    assert audit(log, 1, 1, 2) == [sentence] * bool(sentence)


def test_a_replay_ends_where_the_state_of_environments_is_lost() -> None:
    log = logged((0, 0, 0, 0, 0), (1, 0, 0, 1, 0))
    tickets = Tickets(1, 1, 1, forced=log)
    begun(tickets, 0, 0)
    assert tickets.lost(0), "the first rollout of an incarnation can be acted again"
    tickets.finished(begun(tickets, 0, 0))
    with pytest.raises(UserError, match="actor 0 was lost during a replay"):
        tickets.lost(0)


def test_a_replay_needs_the_actors_of_its_log() -> None:
    with pytest.raises(UserError, match="the log names actor 2, but there are 2"):
        Tickets(2, 1, 1, forced=logged((0, 2, 0, 0, 0)))


def test_a_replay_begins_nothing_beyond_its_log() -> None:
    tickets = Tickets(1, 1, 1, forced=logged((0, 0, 0, 0, 0)))
    tickets.finished(begun(tickets, 0, 0))
    assert tickets.begin(0, 1) == WaitFor(version=None)
