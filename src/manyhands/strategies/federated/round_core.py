"""The course of federated rounds as a pure function: (terms, state, event) to (state, decisions).

    SELECTING ── enough clients are there ──► REPORTING ── enough reports, or the deadline ──► SELECTING … FINISHED
        ▲                                        │
        └──────────── too few: abandoned ────────┘

More clients are asked than are needed (`over`), since some will not answer; the first reports count, later ones are
refused. What begins is an *attempt*, which has a number of its own for ever; only one that closes makes the round's
number grow, so that no round counts twice, whatever is sent again and however often the server is started anew.

The state is a plain value. It continues the same from `state_of(as_json(state))` as from itself, at every point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeAlias

from manyhands.errors import DataError, UserError, check_count
from manyhands.strategies.federated.client_data import selected
from manyhands.strategies.federated.client_updates import check_norm_ratio, described_norms, rejected_by_norm


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientsSeen:
    """Clients asked for work; in a simulation several at once."""

    clients: tuple[int, ...]
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientGone:
    """A client will not report in this round: it said so, or its message was rejected."""

    client: int
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportCame:
    """A client's report has arrived, and the driver has validated its content."""

    client: int
    attempt: int  # the attempt for which it was made
    digest: str  # digest of its content, by which a repeated report is recognised
    at_s: float
    norm: float = 0.0  # norm of its update; 0 where it was not computed


@dataclass(frozen=True, kw_only=True, slots=True)
class SumCame:
    """The sum of several clients' updates has arrived, in a round in which no single update is seen."""

    attempt: int
    clients: tuple[int, ...]
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundFailed:
    """The current round can no longer produce a sum."""

    attempt: int
    why: str
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePassed:
    """Nothing happened, but the clock has advanced to this time."""

    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerResumed:
    """The server was restarted: sums of an open round, and which clients were present, are lost."""

    at_s: float


RoundEvent: TypeAlias = (
    ClientsSeen | ClientGone | ReportCame | SumCame | RoundFailed | TimePassed | ServerResumed
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginRound:
    """Save the state, and then ask these clients."""

    attempt: int
    number: int  # number of the round, from 0; there may be several attempts at one
    asked: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeReport:
    """Add this client's update to the sum."""

    client: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RefuseReport:
    """Do not add this client's report; it is rejected."""

    client: int
    attempt: int
    why: str
    repeated: bool = False  # whether it is in the sum already: its sender did not get the answer


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseRound:
    """Move the model by the mean of what was added, and save it together with the state: the round counts."""

    attempt: int
    number: int
    counted: tuple[int, ...]  # whose updates are in it
    rejected: tuple[
        int, ...
    ] = ()  # whose are to be left out, since their norms are too large beside the others'


@dataclass(frozen=True, kw_only=True, slots=True)
class AbandonRound:
    """Forget the sum; the round does not count, and is tried again."""

    attempt: int
    number: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRounds:
    """The rounds are over: all of them count, or no client has come for too long."""

    complete: bool
    why: str


RoundDecision: TypeAlias = BeginRound | TakeReport | RefuseReport | CloseRound | AbandonRound | EndRounds
_Outcome = tuple["RoundState", tuple[RoundDecision, ...]]


class RoundPhase(StrEnum):
    """What the server is waiting for."""

    SELECTING = "selecting"  # enough clients to be there
    REPORTING = "reporting"  # those who were asked to report
    FINISHED = "finished"  # nothing: all rounds count
    GIVEN_UP = "given up"  # nothing: no round has counted for too long


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTerms:
    """How rounds are held; UserError where the numbers cannot all be meant."""

    rounds: int  # how many rounds must count
    clients: int  # how many there are at most
    goal: int  # reports after which a round closes
    minimum: int = 1  # reports without which it is abandoned at its deadline
    over: float = 1.3  # how many times as many clients are asked as are needed
    deadline_s: float = 600.0  # how long a round waits for reports
    select_s: float = 30.0  # how long for all it would ask, before it begins with those there, if enough
    present_s: float = 60.0  # how long a client counts as present after its last request
    patience_s: float = math.inf  # after how long without a round that counts the server gives up
    norm_ratio: float = 0.0  # how many times the median of a round's norms an update may have; 0: any
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("rounds", self.rounds)
        if not 1 <= self.goal <= self.clients:
            raise UserError(f"goal={self.goal}: must be between 1 and the {self.clients} clients")
        if not 1 <= self.minimum <= self.goal:
            raise UserError(f"minimum={self.minimum}: must be from 1 to the {self.goal} reports of a round")
        if not 1 <= self.over < math.inf:
            raise UserError(f"over={self.over:g}: must be a number of at least 1")
        for name in ("deadline_s", "select_s", "present_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name}={getattr(self, name):g}: must be a number above 0")
        if not self.patience_s > 0:
            raise UserError(f"patience_s={self.patience_s:g}: must be above 0")
        check_norm_ratio(self.norm_ratio)

    @property
    def asks(self) -> int:
        return min(self.clients, math.ceil(self.goal * self.over - 1e-9))


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundState:
    """Everything the core knows between two events."""

    phase: RoundPhase = RoundPhase.SELECTING
    done: int = 0  # number of rounds that count
    attempt: int = 0  # rounds that were begun; the number of the newest, from 1
    abandoned: int = 0  # how many of them were given up
    now_s: float = 0.0  # the latest time of any event since the server's last start
    since_s: float = 0.0  # when the phase began; in selection, when enough for a round were there
    counted_s: float = 0.0  # when the last round counted, or the server was started
    present: Mapping[int, float] = field(default_factory=dict)  # when each client was last seen
    asked: tuple[int, ...] = ()  # the clients asked in the current attempt, ascending
    gone: tuple[int, ...] = ()  # those of them who will not report
    reported: Mapping[int, str] = field(default_factory=dict)  # those who have, and their digests
    norms: Mapping[int, float] = field(default_factory=dict)  # of single updates, where they are seen
    rejected: int = 0  # updates of all rounds so far that did not count because of their norms

    @property
    def is_over(self) -> bool:
        return self.phase in (RoundPhase.FINISHED, RoundPhase.GIVEN_UP)

    @property
    def waits_for(self) -> tuple[int, ...]:
        out = frozenset(self.gone)
        return tuple(one for one in self.asked if one not in self.reported and one not in out)


def handle(terms: RoundTerms, state: RoundState, event: RoundEvent) -> _Outcome:
    if isinstance(event, ServerResumed):
        # The clock is new, no client is known to be present, and open sums are lost.
        now_s = event.at_s
        state = replace(state, present={}, now_s=now_s, since_s=now_s, counted_s=now_s)
        # An ended run continues only after a restart: it had given up, or more rounds are wanted now.
        if state.is_over and state.done < terms.rounds:
            return replace(state, phase=RoundPhase.SELECTING), ()
        if state.phase is RoundPhase.REPORTING:
            return _abandon(state, "the server was restarted")
        return state, ()
    state = replace(state, now_s=max(state.now_s, event.at_s))
    if state.is_over:
        if not isinstance(event, ReportCame):
            return state, ()
        return state, (RefuseReport(client=event.client, attempt=event.attempt, why="the run has ended"),)
    match event:
        case ClientsSeen():
            return _look(terms, _with_seen(state, event.clients))
        case ClientGone():
            gone = (*state.gone, event.client) if event.client in state.waits_for else state.gone
            present = {one: at_s for one, at_s in state.present.items() if one != event.client}
            return _look(terms, replace(state, gone=gone, present=present))
        case ReportCame():
            state = _with_seen(state, (event.client,))
            decision: RoundDecision | None = _refusal(terms, state, event)
            if decision is None:
                decision = TakeReport(client=event.client, attempt=event.attempt)
                reported = {**state.reported, event.client: event.digest}
                norms = {**state.norms, event.client: event.norm}
                state = replace(state, reported=reported, norms=norms)
            looked, more = _look(terms, state)
            return looked, (decision, *more)
        case SumCame() | RoundFailed():
            if state.phase is not RoundPhase.REPORTING or event.attempt != state.attempt:
                return state, ()
            if isinstance(event, RoundFailed):
                return _abandon(state, event.why)
            # A sum counts as a whole, whatever the goal is: nothing can be taken out of it.
            if not set(event.clients) <= set(state.asked) or len(event.clients) < terms.minimum:
                why = f"its sum has {len(event.clients)} clients, but {terms.minimum} are needed"
                return _abandon(state, why)
            return _close(terms, replace(state, reported=dict.fromkeys(event.clients, "")))
        case TimePassed():
            return _look(terms, state)


def _with_seen(state: RoundState, clients: Sequence[int]) -> RoundState:
    return replace(state, present={**state.present, **dict.fromkeys(clients, state.now_s)})


def _refusal(terms: RoundTerms, state: RoundState, event: ReportCame) -> RefuseReport | None:
    why, repeated = "", False
    # The attempt number never repeats, so a report of an earlier attempt cannot count in a later one.
    if event.attempt != state.attempt or state.phase is not RoundPhase.REPORTING:
        ended = f"the report is of attempt {event.attempt}, which has ended"
        why = ended if event.attempt <= state.attempt else f"attempt {event.attempt} has not started"
    elif event.client in state.reported:
        repeated = state.reported[event.client] == event.digest
        why = f"client {event.client} has already reported in attempt {event.attempt}"
    elif event.client not in state.asked or event.client in state.gone:
        why = f"client {event.client} was not asked in attempt {event.attempt}"
    elif _is_late(terms, state):
        why = f"the deadline of attempt {event.attempt} has passed"
    refusal = RefuseReport(client=event.client, attempt=event.attempt, why=why, repeated=repeated)
    return refusal if why else None


def _look(terms: RoundTerms, state: RoundState) -> _Outcome:
    """Make the transition that is due, if any: close, abandon, give up or begin an attempt."""
    if state.phase is RoundPhase.REPORTING:
        count = len(state.reported)
        if count >= terms.goal:
            return _close(terms, state)
        if not state.waits_for or _is_late(terms, state):
            # A client that was asked and did not report is asked again only after it was seen again.
            present = {one: at_s for one, at_s in state.present.items() if one not in state.waits_for}
            state = replace(state, present=present)
            if count >= terms.minimum:
                return _close(terms, state)
            came = f"{count} of {len(state.asked)} clients have reported"
            return _abandon(state, f"{came}, but {terms.minimum} are needed")
        return state, ()
    if state.now_s - state.counted_s >= terms.patience_s:
        why = f"no round has succeeded for {terms.patience_s:g} s"
        return replace(state, phase=RoundPhase.GIVEN_UP), (EndRounds(complete=False, why=why),)
    there = sorted(client for client, at_s in state.present.items() if state.now_s - at_s < terms.present_s)
    if len(there) < terms.minimum:
        return replace(state, since_s=state.now_s), ()
    if len(there) < terms.asks and state.now_s - state.since_s < terms.select_s:
        return state, ()
    drawn = selected(terms.seed, state.attempt, len(there), min(terms.asks, len(there)))
    asked = tuple(there[place] for place in drawn)
    # A new attempt number, also when the round is the same: reports of the abandoned attempt stay invalid.
    attempt = state.attempt + 1
    begun = replace(_between(state), phase=RoundPhase.REPORTING, attempt=attempt, asked=asked)
    return begun, (BeginRound(attempt=attempt, number=begun.done, asked=asked),)


def _is_late(terms: RoundTerms, state: RoundState) -> bool:
    # as a driver that waits for the deadline computes it, to the last bit
    return state.now_s >= state.since_s + terms.deadline_s


def _close(terms: RoundTerms, state: RoundState) -> _Outcome:
    rejected = rejected_by_norm(state.norms, terms.norm_ratio)
    counted = tuple(sorted(set(state.reported) - set(rejected)))
    state = replace(state, rejected=state.rejected + len(rejected))
    if len(counted) < terms.minimum:
        whose = described_norms({client: state.norms[client] for client in rejected})
        why = (
            f"{len(counted)} updates count, but {terms.minimum} are needed; rejected as larger than "
            f"norm_ratio={terms.norm_ratio:g} times the median of the round: {whose}"
        )
        return _abandon(state, why)
    # `done` grows here alone, together with the decision that saves the model: no round counts twice.
    closed = CloseRound(attempt=state.attempt, number=state.done, counted=counted, rejected=rejected)
    after = replace(_between(state), done=state.done + 1, counted_s=state.now_s)
    if after.done < terms.rounds:
        return after, (closed,)
    end = EndRounds(complete=True, why=f"{after.done} rounds have counted")
    return replace(after, phase=RoundPhase.FINISHED), (closed, end)


def _abandon(state: RoundState, why: str) -> _Outcome:
    after = replace(_between(state), abandoned=state.abandoned + 1)
    return after, (AbandonRound(attempt=state.attempt, number=state.done, why=why),)


def _between(state: RoundState) -> RoundState:
    return replace(
        state, phase=RoundPhase.SELECTING, since_s=state.now_s, asked=(), gone=(), reported={}, norms={}
    )


def as_json(state: RoundState) -> dict[str, Any]:
    """What JSON can hold: tuples as lists, mappings as sorted pairs."""
    found = {name: getattr(state, name) for name in RoundState.__dataclass_fields__}
    for name, value in found.items():
        if isinstance(value, Mapping):
            found[name] = [[client, one] for client, one in sorted(value.items())]
        elif isinstance(value, tuple):
            found[name] = list(value)
    return {**found, "phase": str(state.phase)}


def state_of(value: Any) -> RoundState:
    """What `as_json` gave; DataError where it is not that."""
    try:
        return RoundState(
            phase=RoundPhase(value["phase"]),
            done=int(value["done"]),
            attempt=int(value["attempt"]),
            abandoned=int(value["abandoned"]),
            now_s=float(value["now_s"]),
            since_s=float(value["since_s"]),
            counted_s=float(value["counted_s"]),
            present={int(client): float(at_s) for client, at_s in value["present"]},
            asked=tuple(int(client) for client in value["asked"]),
            gone=tuple(int(client) for client in value["gone"]),
            reported={int(client): str(digest) for client, digest in value["reported"]},
            norms={int(client): float(norm) for client, norm in value.get("norms", ())},
            rejected=int(value.get("rejected", 0)),  # a state of an earlier version has neither
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the state of federated rounds is damaged: {error!r}") from error
