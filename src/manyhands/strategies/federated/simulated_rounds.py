"""The simulation's driver of the core: every client is there, some say nothing, and time is drawn instead of measured.

    begin(number) ─► who is asked, and whose reports would count ── they are trained ──► close(refused) ─► does it?

How long a client takes, and whether it drops out, follows from (seed, attempt, client): all workers of a run find the
same without a word, and so does a run that continues from a checkpoint. The core is pure, so that it can be asked what
would come of a round before anybody is trained; attempts that fail cost nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from manyhands.data.randomness import mix
from manyhands.errors import DataError, ManyhandsError, UserError
from manyhands.strategies.federated import round_core as core
from manyhands.strategies.federated.algorithms.buff import duration_s
from manyhands.strategies.federated.secure.secure_messages import fewest_clients
from manyhands.strategies.federated.strategy import Federated

__all__ = ["SimulatedCourse", "SimulatedRounds", "simulated_rounds"]

_DROPPING: Final = 21
_ENDLESS: Final = 1 << 53  # rounds: how many there are, the training loop says
_LONG_S: Final = 1e6  # a deadline that no client misses; a typical one takes a second
_ATTEMPTS: Final = 100
_USUAL_S: Final = 10.0  # an attempt without a deadline; after as long as so many take a round is given up


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedCourse:
    """The course of one attempt, unless updates are rejected."""

    attempt: int  # the attempt's number, from 1
    asked: tuple[int, ...]
    begun: core.RoundState = field(compare=False)
    events: Sequence[core.RoundEvent] = field(compare=False)
    dropped: int = 0  # clients that stop responding
    counted: tuple[int, ...] = ()
    """Where it counts, clients whose reports come first, and in time; no other client needs to be trained."""


class SimulatedRounds:
    """The rounds of a simulation, the same on every worker."""

    def __init__(self, terms: core.RoundTerms, dropout: float = 0.0, *, as_one_sum: bool = False) -> None:
        """With `as_one_sum` no single report is seen, and all clients that stay are in the sum (secure sums)."""
        self._terms, self._dropout, self._as_one_sum = terms, dropout, as_one_sum
        self._has_deadline = terms.deadline_s < _LONG_S
        self._everybody = tuple(range(terms.clients))
        self.all_report: Final = not dropout and not self._has_deadline and terms.asks == terms.goal
        """Whether only a rejected update can keep an attempt from counting in full."""
        self.state = core.RoundState()  # the core's state between rounds
        # Clients that were asked over all rounds so far, that stopped responding, and whose report came after the end
        # of the round; and how long that would have taken, where a typical client takes a second.
        self.participation: dict[str, float] = {"asked": 0, "dropped": 0, "late": 0, "simulated_s": 0.0}
        self._open: SimulatedCourse | None = None

    def begin(self, number: int) -> SimulatedCourse:
        """Try round `number`, from 0, until an attempt has enough reports; ManyhandsError where none has.

        Called again before `close`, it finds the same.
        """
        if self.state.done != number:  # of a checkpoint that had nothing to say of it
            self.state = core.RoundState(done=number, attempt=number)
        # Each round starts as after a restart, with its own clock: a run resumed from a checkpoint continues the same.
        state, _ = core.handle(self._terms, self.state, core.ServerResumed(at_s=0.0))
        while True:
            everybody = core.ClientsSeen(clients=self._everybody, at_s=state.now_s)
            state, decisions = core.handle(self._terms, state, everybody)
            if any(isinstance(decision, core.EndRounds) for decision in decisions):
                raise ManyhandsError(
                    f"round {number + 1}: too few of its clients have reported in time, up to attempt {state.attempt} "
                    f"(it takes {self._terms.minimum}); use a smaller min_reports or dropout, or a larger over or "
                    "deadline"
                )
            attempt = self._attempt(state)
            after, ended = self._outcome(state, attempt.events)
            if isinstance(ended, core.CloseRound):
                self._open = replace(attempt, counted=ended.counted)
                return self._open
            reports = [event for event in attempt.events if isinstance(event, core.ReportCame | core.SumCame)]
            in_time = sum(len(one.clients) if isinstance(one, core.SumCame) else 1 for one in reports)
            self._count(attempt, in_time, after)
            state = after

    def close(self, refused: Collection[int] = ()) -> bool:
        """Close the round after its clients were trained; return whether it counts without the rejected updates."""
        assert self._open is not None, "begin comes before close"
        opened, self._open = self._open, None
        # The same attempt, without the clients whose updates were rejected or never made.
        out = ({*opened.asked} - {*opened.counted}) | {*refused} if refused else set()
        events: list[core.RoundEvent] = []
        for event in opened.events:
            if isinstance(event, core.ReportCame) and event.client in out:
                event = core.ClientGone(client=event.client, at_s=event.at_s)
            elif isinstance(event, core.SumCame):
                event = replace(event, clients=tuple(one for one in event.clients if one not in out))
            events.append(event)
        state, ended = self._outcome(opened.begun, events)
        self._count(opened, len(opened.counted), state)
        return isinstance(ended, core.CloseRound)

    def memory(self) -> dict[str, Any]:
        if self.all_report and self.state.attempt == self.state.done:
            return {}
        return {"state": core.as_json(self.state), "participation": dict(self.participation)}

    def load_state(self, memory: Mapping[str, Any]) -> None:
        if not memory:
            return
        self.state = core.state_of(memory.get("state"))
        found = memory.get("participation")
        if not isinstance(found, dict) or found.keys() != self.participation.keys():
            raise DataError(f"the participation of clients is damaged: {found!r}")
        self.participation = dict(found)

    def summary(self) -> dict[str, Any]:
        state = self.state
        return {"attempts": state.attempt, "abandoned": state.abandoned, **self.participation}

    def _attempt(self, begun: core.RoundState) -> SimulatedCourse:
        attempt, asked, since_s = begun.attempt, begun.asked, begun.since_s
        if self.all_report:
            whole = core.SumCame(attempt=attempt, clients=asked, at_s=since_s)
            return SimulatedCourse(attempt=attempt, asked=asked, begun=begun, events=[whole])
        seed, clients = self._terms.seed, self._terms.clients
        gone: set[int] = set()
        if self._dropout:
            draws = {one: np.random.default_rng(mix(seed, attempt, one, _DROPPING)).random() for one in asked}
            gone = {client for client, drawn in draws.items() if drawn < self._dropout}
        trips = sorted(
            (since_s + duration_s(seed, client, attempt * clients + client), client) for client in asked
        )
        until_s = since_s + self._terms.deadline_s if self._has_deadline else trips[-1][0]
        in_time = [(at_s, client) for at_s, client in trips if at_s < until_s or not self._has_deadline]
        events: list[core.RoundEvent]
        if self._as_one_sum:
            stay = tuple(sorted(client for _, client in in_time if client not in gone))
            ends_s = until_s if len(stay) < len(asked) else trips[-1][0]
            events = [core.SumCame(attempt=attempt, clients=stay, at_s=ends_s)]
        else:
            events = []
            for at_s, client in in_time:
                if client not in gone:
                    events.append(core.ReportCame(client=client, attempt=attempt, digest="", at_s=at_s))
                elif not self._has_deadline:  # which would show it; without one the server is taken to know
                    events.append(core.ClientGone(client=client, at_s=at_s))
            events.append(core.TimePassed(at_s=until_s))
        return SimulatedCourse(attempt=attempt, asked=asked, begun=begun, events=events, dropped=len(gone))

    def _outcome(
        self, state: core.RoundState, events: Sequence[core.RoundEvent]
    ) -> tuple[core.RoundState, core.RoundDecision]:
        """Up to the end of the attempt; who comes after that is too late."""
        for event in events:
            state, decisions = core.handle(self._terms, state, event)
            for decision in decisions:
                if isinstance(decision, core.CloseRound | core.AbandonRound):
                    return state, decision
        raise AssertionError("an attempt ends with its last client, or at its deadline")

    def _count(self, attempt: SimulatedCourse, in_time: int, after: core.RoundState) -> None:
        self.state = replace(after, present={}, now_s=0.0, since_s=0.0, counted_s=0.0)
        self.participation["simulated_s"] += after.now_s - attempt.begun.since_s
        self.participation["asked"] += len(attempt.asked)
        self.participation["dropped"] += attempt.dropped
        self.participation["late"] += len(attempt.asked) - attempt.dropped - in_time


def simulated_rounds(strategy: Federated, clients: int, seed: int) -> SimulatedRounds:
    """Those of a strategy with so many clients; UserError where they cannot be held."""
    goal = strategy.per_round(clients)
    if strategy.min_reports > goal:
        raise UserError(
            f"federated min_reports={strategy.min_reports}: a round takes {goal} reports of {clients} clients; use "
            "fewer, or a larger fraction"
        )
    deadline_s = strategy.deadline or _LONG_S
    terms = core.RoundTerms(
        rounds=_ENDLESS,
        clients=clients,
        goal=goal,
        minimum=strategy.min_reports,
        over=strategy.over,
        deadline_s=deadline_s,
        select_s=1.0,
        present_s=1.0,
        patience_s=_ATTEMPTS * min(deadline_s, _USUAL_S),
        seed=seed,
    )
    if strategy.secure:  # no client can be left out of a sum, and enough must be in it
        strategy.fixed_point.check_capacity(terms.asks)
        least = max(strategy.min_reports, fewest_clients(terms.asks))
        terms = replace(terms, goal=terms.asks, over=1.0, minimum=least)
    return SimulatedRounds(terms, strategy.dropout, as_one_sum=strategy.secure)
