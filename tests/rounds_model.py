"""Federated rounds in virtual time: the server's core as it is, devices, network and the server's process modelled.

Faults are those of the simulator's generator. What they mean here: a killed worker is a device that loses what it was
doing and comes back later; a killed server starts again from what it had saved, with another clock; who is paused does
nothing until it wakes; a slow link delays what a device says; devices come, and say that they go.
"""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import dataclass, field, replace

from manyhands.foresight.simulate.faults import (
    Fault,
    FaultRole,
    Kill,
    Pause,
    SlowLink,
    WorkerComes,
    WorkerGoes,
    draw_storm,
)
from manyhands.foresight.simulate.simulated_processes import Agenda
from manyhands.strategies.federated.round_core import (
    AbandonRound,
    BeginRound,
    ClientGone,
    ClientsSeen,
    CloseRound,
    EndRounds,
    RefuseReport,
    ReportCame,
    RoundDecision,
    RoundEvent,
    RoundState,
    RoundTerms,
    ServerResumed,
    TakeReport,
    TimePassed,
    as_json,
    handle,
    state_of,
)

UNTIL_S = 20.0  # faults strike before
LIMIT_S = 5000.0
ASKS_EVERY_S, TICK_S, RESTART_S = 1.0, 0.5, 3.0


@dataclass
class Device:
    """One client; `life` grows whenever what it was doing is lost."""

    number: int
    there: bool = True
    life: int = 0
    asleep_until_s: float = 0.0
    slow: float = 1.0
    trains: int = 0
    """The newest attempt that it has begun to train for."""


@dataclass
class Promises:
    """What was decided, and what is wrong with it."""

    terms: RoundTerms
    begun: list[int] = field(default_factory=list)
    asked: dict[int, tuple[int, ...]] = field(default_factory=dict)
    taken: dict[int, set[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    counted: int = 0
    broken: list[str] = field(default_factory=list)

    def hold(self, promise: bool, sentence: str) -> None:
        if not promise:
            self.broken.append(sentence)

    def see(self, decision: RoundDecision) -> None:
        attempt = getattr(decision, "attempt", 0)
        match decision:
            case BeginRound():
                self.hold(attempt not in self.begun, f"attempt {attempt} was begun twice")
                self.hold(decision.number == self.counted, f"round {decision.number} was begun out of order")
                self.hold(
                    len(decision.asked) >= self.terms.minimum, f"attempt {attempt} can never have enough"
                )
                self.begun.append(attempt)
                self.asked[attempt], self.taken[attempt] = decision.asked, set()
            case TakeReport():
                self.hold(
                    bool(self.begun) and attempt == self.begun[-1] and attempt not in self.ended,
                    f"a report of attempt {attempt} was taken after its end",
                )
                self.hold(
                    decision.client in self.asked.get(attempt, ()), f"client {decision.client} was not asked"
                )
                self.hold(
                    decision.client not in self.taken.get(attempt, ()),
                    f"client {decision.client} was summed twice",
                )
                self.taken.setdefault(attempt, set()).add(decision.client)
            case CloseRound():
                self.hold(attempt not in self.ended, f"attempt {attempt} ended twice")
                self.hold(
                    set(decision.counted) == self.taken.get(attempt),
                    f"attempt {attempt} counts {decision.counted}",
                )
                self.hold(
                    self.terms.minimum <= len(decision.counted) <= self.terms.goal,
                    f"{len(decision.counted)} reports closed attempt {attempt}",
                )
                self.hold(decision.number == self.counted, f"round {decision.number} counts out of order")
                self.ended.add(attempt)
                self.counted += 1
            case AbandonRound():
                self.hold(attempt not in self.ended, f"attempt {attempt} ended twice")
                self.ended.add(attempt)
            case EndRounds():
                self.hold(
                    decision.complete and self.counted == self.terms.rounds, f"it ended early: {decision.why}"
                )
            case RefuseReport(repeated=True):
                self.hold(
                    decision.client in self.taken.get(attempt, ()),
                    "a report that is not in the sum was confirmed",
                )
            case RefuseReport():
                pass


class Rounds:
    """One run; `play` returns what is wrong with it."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(f"rounds {seed}")
        clients = self.draw.randint(2, 8)
        goal = self.draw.randint(1, clients)
        self.terms = RoundTerms(
            rounds=self.draw.randint(1, 6),
            clients=clients + 3,
            goal=goal,
            minimum=self.draw.randint(1, goal),
            over=self.draw.choice([1.0, 1.3, 2.0]),
            deadline_s=self.draw.choice([4.0, 10.0]),
            select_s=self.draw.choice([2.0, 5.0]),
            present_s=self.draw.choice([3.0, 20.0]),
            seed=seed,
        )
        self.agenda = Agenda()
        self.devices = [Device(number) for number in range(clients)]
        self.state = RoundState()
        self.saved = json.dumps(as_json(self.state))
        self.clock_began_s = 0.0  # of the server's process
        self.server_away_until_s = 0.0
        self.waiting: deque[RoundEvent] = deque()  # for a server that sleeps
        self.promises = Promises(self.terms)
        for device in self.devices:
            self.agenda.at(self.draw.uniform(0, 2), self._ask, device, 0)
        self.agenda.at(TICK_S, self._tick)
        for fault in draw_storm(seed, UNTIL_S):
            self.agenda.at(fault.at_s, self._strike, fault)

    def play(self) -> list[str]:
        while not self.state.is_over and not self.promises.broken:
            if not self.agenda.next() or self.agenda.now_s > LIMIT_S:
                return [f"it does not end: {self.state}"]
        return self.promises.broken

    # ── the server ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def at_s(self) -> float:
        return self.agenda.now_s - self.clock_began_s

    def _tell(self, event: RoundEvent) -> None:
        if self.agenda.now_s < self.server_away_until_s:
            self.waiting.append(event)  # it is not there, or sleeps: the request waits, or is sent again
            return
        self._handle(event)

    def _handle(self, event: RoundEvent) -> None:
        before = self.state
        self.state, decisions = handle(self.terms, self.state, event)
        for decision in decisions:
            self.promises.see(decision)
            if isinstance(decision, BeginRound | CloseRound | AbandonRound):
                self.saved = json.dumps(as_json(self.state))
        counted = self.state.done == before.done + sum(isinstance(one, CloseRound) for one in decisions)
        self.promises.hold(counted, "the number of rounds grew without a decision")
        again = state_of(json.loads(json.dumps(as_json(self.state))))
        self.promises.hold(again == self.state, "the state does not survive being saved")

    def _tick(self) -> None:
        if self.agenda.now_s >= self.server_away_until_s:
            while self.waiting:
                event = self.waiting.popleft()
                if not isinstance(event, TimePassed):
                    self._handle(_at(event, self.at_s))
            self._handle(TimePassed(at_s=self.at_s))
        self.agenda.at(self.agenda.now_s + TICK_S, self._tick)

    def _start_again(self) -> None:
        self.clock_began_s = self.agenda.now_s
        self.state = state_of(json.loads(self.saved))
        self._handle(ServerResumed(at_s=0.0))

    # ── devices ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ask(self, device: Device, life: int) -> None:
        """Ask for work, and do it."""
        now_s = self.agenda.now_s
        if life != device.life or not device.there:
            return
        if now_s < device.asleep_until_s:
            self.agenda.at(device.asleep_until_s, self._ask, device, life)
            return
        self._tell(ClientsSeen(clients=(device.number,), at_s=self.at_s))
        attempt = self.state.attempt
        if device.number in self.state.waits_for and attempt > device.trains and not self.waiting:
            device.trains = attempt
            takes_s = self.draw.choice([0.3, 1.0, 6.0]) * self.draw.random()
            self.agenda.at(now_s + takes_s, self._report, device, life, attempt)
        self.agenda.at(now_s + ASKS_EVERY_S * self.draw.uniform(0.5, 1.5), self._ask, device, life)

    def _report(self, device: Device, life: int, attempt: int) -> None:
        if life != device.life or not device.there:
            return
        if self.agenda.now_s < device.asleep_until_s:
            self.agenda.at(device.asleep_until_s, self._report, device, life, attempt)
            return
        digest = self.draw.choice(["a", "a", f"{device.life}"])
        for _ in range(1 if self.draw.random() < 0.7 else 2):  # the answer was lost, and it is sent again
            delay_s = 0.05 * device.slow * self.draw.random()
            self.agenda.at(self.agenda.now_s + delay_s, self._arrive, device.number, attempt, digest)

    def _arrive(self, client: int, attempt: int, digest: str) -> None:
        self._tell(ReportCame(client=client, attempt=attempt, digest=digest, at_s=self.at_s))

    # ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _strike(self, fault: Fault) -> None:
        now_s = self.agenda.now_s
        there = [device for device in self.devices if device.there]
        match fault:
            case Kill(role=FaultRole.SERVER):
                self.waiting.clear()
                self.server_away_until_s = now_s + RESTART_S
                self.agenda.at(self.server_away_until_s, self._start_again)
            case Pause(role=FaultRole.SERVER, seconds=seconds):
                self.server_away_until_s = max(self.server_away_until_s, now_s + min(seconds, 30.0))
            case Kill(pick=pick):
                device = there[pick % len(there)]
                device.life, device.trains = device.life + 1, 0
                self.agenda.at(now_s + RESTART_S, self._ask, device, device.life)
            case Pause(pick=pick, seconds=seconds):
                there[pick % len(there)].asleep_until_s = now_s + seconds
            case SlowLink(pick=pick, seconds=seconds, factor=factor):
                there[pick % len(there)].slow = factor
                self.agenda.at(now_s + seconds, setattr, there[pick % len(there)], "slow", 1.0)
            case WorkerComes():
                if len(self.devices) < self.terms.clients:
                    self.devices.append(Device(len(self.devices)))
                    self._ask(self.devices[-1], 0)
            case WorkerGoes(pick=pick):
                if len(there) > self.terms.minimum:
                    there[pick % len(there)].there = False
                    self._tell(ClientGone(client=there[pick % len(there)].number, at_s=self.at_s))


def _at(event: RoundEvent, at_s: float) -> RoundEvent:
    match event:
        case ClientsSeen():
            return replace(event, at_s=at_s)
        case ClientGone(client=client):
            return ClientGone(client=client, at_s=at_s)
        case ReportCame(client=client, attempt=attempt, digest=digest):
            return ReportCame(client=client, attempt=attempt, digest=digest, at_s=at_s)
    raise AssertionError(f"no device says {event}")


def rounds_complaints(seed: int) -> list[str]:
    """What is wrong with the run of a seed."""
    return Rounds(seed).play()
