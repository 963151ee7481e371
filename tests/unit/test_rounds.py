"""The course of federated rounds: each rule by itself, then any interleaving of events and crashes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from manyhands.errors import DataError, UserError
from manyhands.strategies.federated.client_data import selected
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
    RoundFailed,
    RoundPhase,
    RoundState,
    RoundTerms,
    ServerResumed,
    SumCame,
    TakeReport,
    TimePassed,
    as_json,
    handle,
    state_of,
)
from rounds_model import rounds_complaints

TERMS = RoundTerms(
    rounds=2, clients=6, goal=3, minimum=2, over=1.3, deadline_s=10, select_s=5, present_s=20, patience_s=100
)


def reported(
    *events: RoundEvent, terms: RoundTerms = TERMS, state: RoundState | None = None
) -> tuple[RoundState, list[RoundDecision]]:
    state = state or RoundState()
    decisions: list[RoundDecision] = []
    for event in events:
        state, more = handle(terms, state, event)
        decisions += more
    return state, decisions


def seen(*clients: int, at_s: float = 0.0) -> list[RoundEvent]:
    return [ClientsSeen(clients=(client,), at_s=at_s) for client in clients]


def report(client: int, attempt: int = 1, digest: str = "a", at_s: float = 1.0) -> ReportCame:
    return ReportCame(client=client, attempt=attempt, digest=digest, at_s=at_s)


def begun(*clients: int) -> RoundState:
    state, [decision] = reported(*seen(*clients))
    assert isinstance(decision, BeginRound)
    return state


def test_more_are_asked_than_needed_and_never_more_than_there_are() -> None:
    assert TERMS.asks == 4  # 3 times 1.3, rounded up
    assert replace(TERMS, over=1.0).asks == 3
    assert replace(TERMS, over=9.0).asks == 6
    assert replace(TERMS, goal=6, minimum=6, clients=6, over=1.3).asks == 6


def test_a_round_begins_when_all_it_would_ask_are_there_and_with_fewer_after_a_while() -> None:
    state, decisions = reported(*seen(0, 1, 2))
    assert decisions == []
    _, [decision] = reported(*seen(5), state=state)
    assert decision == BeginRound(attempt=1, number=0, asked=(0, 1, 2, 5))
    _, [decision] = reported(TimePassed(at_s=5.0), state=state)
    assert decision == BeginRound(attempt=1, number=0, asked=(0, 1, 2))
    alone, decisions = reported(*seen(3), TimePassed(at_s=50.0))
    assert decisions == []
    assert alone.phase is RoundPhase.SELECTING


def test_who_is_asked_is_drawn_as_the_simulation_draws() -> None:
    terms = replace(TERMS, over=1.0, clients=6, seed=7)
    state = RoundState(present=dict.fromkeys(range(6), 0.0))
    _, decisions = reported(*seen(0), terms=terms, state=state)
    assert decisions == [BeginRound(attempt=1, number=0, asked=tuple(selected(7, 0, 6, 3)))]


def test_who_was_not_heard_of_for_long_is_not_asked() -> None:
    _, decisions = reported(*seen(0), *seen(1, 2, 3, at_s=30.0), TimePassed(at_s=35.0))
    assert [decision.asked for decision in decisions if isinstance(decision, BeginRound)] == [(1, 2, 3)]


def test_the_first_reports_close_the_round_and_later_ones_are_refused() -> None:
    state, decisions = reported(report(0), report(1), report(2), report(3), state=begun(0, 1, 2, 3))
    assert decisions[:3] == [TakeReport(client=client, attempt=1) for client in (0, 1, 2)]
    assert decisions[3] == CloseRound(attempt=1, number=0, counted=(0, 1, 2))
    assert isinstance(decisions[4], RefuseReport)
    assert "has ended" in decisions[4].why
    assert state.done == 1


@pytest.mark.parametrize(
    ("event", "why", "repeated"),
    [
        (report(0, digest="a"), "already reported", True),
        (report(0, digest="b"), "already reported", False),
        (report(9), "not asked", False),
        (report(1, attempt=2), "attempt 2 has not started", False),
        (report(1, attempt=0), "has ended", False),
        (report(1, at_s=10.0), "deadline", False),
    ],
)
def test_reports_that_do_not_count(event: ReportCame, why: str, repeated: bool) -> None:
    state, _ = reported(report(0), state=begun(0, 1, 2, 3))
    after, decisions = reported(event, state=state)
    refused = decisions[0]
    assert isinstance(refused, RefuseReport)
    assert why in refused.why
    assert refused.repeated is repeated
    assert not any(isinstance(one, TakeReport) for one in decisions)
    assert after.done == 0


def test_at_the_deadline_enough_reports_close_the_round_and_too_few_abandon_it() -> None:
    late = TimePassed(at_s=10.0)
    _, decisions = reported(report(0), report(2), late, state=begun(0, 1, 2, 3))
    assert decisions[2:] == [CloseRound(attempt=1, number=0, counted=(0, 2))]
    state, decisions = reported(report(0), late, state=begun(0, 1, 2, 3))
    assert isinstance(decisions[1], AbandonRound)
    assert (state.done, state.abandoned, state.phase) == (0, 1, RoundPhase.SELECTING)
    assert state.present.keys() == {0}, "who was silent must come by first"
    _, decisions = reported(TimePassed(at_s=10.1), *seen(0, 1, 2, 3, at_s=11.0), state=state)
    assert decisions[0] == BeginRound(attempt=2, number=0, asked=(0, 1, 2, 3))  # the same round again


def test_a_round_ends_as_soon_as_nobody_is_left_to_wait_for() -> None:
    gone = [ClientGone(client=client, at_s=2.0) for client in (2, 3)]
    _, decisions = reported(report(0), report(1), *gone, state=begun(0, 1, 2, 3))
    assert decisions[-1] == CloseRound(attempt=1, number=0, counted=(0, 1))
    state, decisions = reported(*gone, report(3), state=begun(0, 1, 2, 3))
    assert isinstance(decisions[0], RefuseReport)
    assert "not asked" in decisions[0].why
    assert state.waits_for == (0, 1)


def test_the_server_that_is_started_again_tries_the_open_round_anew() -> None:
    state, _ = reported(report(0), report(1), state=begun(0, 1, 2, 3))
    state, decisions = reported(ServerResumed(at_s=0.5), state=state)
    assert isinstance(decisions[0], AbandonRound)
    assert (state.done, state.attempt, state.present, state.now_s) == (0, 1, {}, 0.5)
    _, decisions = reported(report(2), state=state)
    assert isinstance(decisions[0], RefuseReport)


def test_a_sum_counts_as_a_whole_or_not_at_all() -> None:
    state = begun(0, 1, 2, 3)
    _, decisions = reported(SumCame(attempt=1, clients=(0, 1, 2, 3), at_s=1), state=state)
    assert decisions == [CloseRound(attempt=1, number=0, counted=(0, 1, 2, 3))]
    _, decisions = reported(SumCame(attempt=1, clients=(0,), at_s=1), state=state)
    assert isinstance(decisions[0], AbandonRound)
    assert reported(SumCame(attempt=2, clients=(0, 1, 2), at_s=1), state=state)[1] == []
    _, decisions = reported(RoundFailed(attempt=1, why="too few are left", at_s=1), state=state)
    assert decisions == [AbandonRound(attempt=1, number=0, why="too few are left")]


def test_the_run_ends_with_its_last_round_or_when_nobody_comes() -> None:
    state, decisions = RoundState(), []
    for attempt in (1, 2):
        events = [*seen(0, 1, 2, 3), *(report(client, attempt) for client in (0, 1, 2, 3))]
        state, more = reported(*events, state=state)
        decisions += more
    assert [one.number for one in decisions if isinstance(one, CloseRound)] == [0, 1]
    assert decisions[-2] == EndRounds(complete=True, why="2 rounds have counted")
    assert isinstance(decisions[-1], RefuseReport)
    state, decisions = reported(TimePassed(at_s=100.0))
    assert isinstance(decisions[0], EndRounds)
    assert not decisions[0].complete
    assert reported(*seen(0, 1, 2, 3, at_s=101.0), state=state)[1] == []
    state, decisions = reported(ServerResumed(at_s=0.0), *seen(0, 1, 2, 3), state=state)
    assert isinstance(decisions[0], BeginRound)  # somebody has started it again


@pytest.mark.parametrize(
    ("field", "value"),
    [("rounds", 0), ("goal", 7), ("minimum", 4), ("over", 0.9), ("deadline_s", 0.0), ("patience_s", -1.0)],
)
def test_terms_that_cannot_be_meant_are_refused(field: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{field}="):
        replace(TERMS, **{field: value})


def test_a_damaged_state_is_refused() -> None:
    good = as_json(begun(0, 1, 2, 3))
    for field in good:
        with pytest.raises(DataError):
            state_of({**good, field: {"x": None}})
    with pytest.raises(DataError):
        state_of([])


class Course(RuleBasedStateMachine):
    """A driver whose process dies at any moment: what it had saved is what it goes on with."""

    @initialize(
        goal=st.integers(1, 4),
        minimum=st.integers(1, 4),
        over=st.sampled_from([1.0, 1.3, 2.0]),
        seed=st.integers(0, 9),
    )
    def start(self, goal: int, minimum: int, over: float, seed: int) -> None:
        self.terms = RoundTerms(
            rounds=3, clients=6, goal=goal, minimum=min(goal, minimum), over=over, deadline_s=10, select_s=5,
            present_s=15, seed=seed,
        )  # fmt: skip
        self.state = RoundState()
        self.saved = json.dumps(as_json(self.state))
        self.counted: list[int] = []
        self.ended: set[int] = set()
        self.begun: list[int] = []
        self.taken: dict[int, set[int]] = {}
        self.asked: dict[int, tuple[int, ...]] = {}

    def tell(self, event: RoundEvent, *, dies_before_saving: bool = False) -> None:
        twin = state_of(json.loads(json.dumps(as_json(self.state))))
        after, decisions = handle(self.terms, self.state, event)
        assert handle(self.terms, twin, event) == (after, decisions)
        self.state = after
        if dies_before_saving and any(
            isinstance(one, BeginRound | CloseRound | AbandonRound) for one in decisions
        ):
            self.resume()
            return
        for decision in decisions:
            self.act(decision)

    def act(self, decision: RoundDecision) -> None:
        match decision:
            case BeginRound():
                assert decision.attempt not in self.begun, "an attempt has its number for ever"
                assert len(set(decision.asked)) == len(decision.asked) <= self.terms.asks
                assert decision.number == len(self.counted)
                self.begun.append(decision.attempt)
                self.asked[decision.attempt] = decision.asked
                self.taken[decision.attempt] = set()
            case TakeReport():
                assert decision.attempt == self.begun[-1]
                assert decision.attempt not in self.ended
                assert decision.client in self.asked[decision.attempt]
                assert decision.client not in self.taken[decision.attempt], "nobody is summed twice"
                self.taken[decision.attempt].add(decision.client)
            case CloseRound():
                assert decision.attempt not in self.ended
                assert set(decision.counted) == self.taken[decision.attempt]
                assert self.terms.minimum <= len(decision.counted) <= self.terms.goal
                assert decision.number == len(self.counted), "each round counts once, in order"
                self.ended.add(decision.attempt)
                self.counted.append(decision.number)
            case AbandonRound():
                assert decision.attempt not in self.ended
                self.ended.add(decision.attempt)
            case _:
                return
        if not isinstance(decision, TakeReport):
            self.saved = json.dumps(as_json(self.state))

    def resume(self) -> None:
        """Its memory is gone: it goes on with what was saved, and a clock that begins anew."""
        self.state = state_of(json.loads(self.saved))
        self.tell(ServerResumed(at_s=0.0))

    @rule(client=st.integers(0, 5), later=st.sampled_from([0.0, 0.1, 3.0]), dies=st.booleans())
    def joins(self, client: int, later: float, dies: bool) -> None:
        self.tell(ClientsSeen(clients=(client,), at_s=self.state.now_s + later), dies_before_saving=dies)

    @rule(later=st.sampled_from([0.0, 1.0]))
    def all_join(self, later: float) -> None:
        at_s = self.state.now_s + later
        for client in range(6):
            self.tell(ClientsSeen(clients=(client,), at_s=at_s))

    @rule(client=st.integers(0, 5))
    def leaves(self, client: int) -> None:
        self.tell(ClientGone(client=client, at_s=self.state.now_s))

    @rule(client=st.integers(0, 6), back=st.integers(-1, 2), digest=st.sampled_from("ab"), dies=st.booleans())
    def reports(self, client: int, back: int, digest: str, dies: bool) -> None:
        event = ReportCame(
            client=client, attempt=self.state.attempt - back, digest=digest, at_s=self.state.now_s + 0.1
        )
        self.tell(event, dies_before_saving=dies)

    @precondition(lambda self: self.state.phase is RoundPhase.REPORTING)
    @rule(digest=st.sampled_from("ab"))
    def everybody_reports(self, digest: str) -> None:
        for client in self.state.asked:
            event = ReportCame(client=client, attempt=self.begun[-1], digest=digest, at_s=self.state.now_s)
            self.tell(event)

    @rule(later=st.sampled_from([0.5, 5.0, 11.0]), dies=st.booleans())
    def time_passes(self, later: float, dies: bool) -> None:
        self.tell(TimePassed(at_s=self.state.now_s + later), dies_before_saving=dies)

    @rule()
    def crash(self) -> None:
        self.resume()

    @invariant()
    def rounds_count_once(self) -> None:
        assert self.state.done == len(self.counted) == len(set(self.counted))
        assert self.state.is_over == (self.state.done == self.terms.rounds)
        assert len(self.begun) == len(set(self.begun)) == self.state.attempt
        assert len(self.ended) == self.state.done + self.state.abandoned
        assert len(self.ended) == self.state.attempt - (self.state.phase is RoundPhase.REPORTING)


Course.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_course_keeps_its_promises = Course.TestCase


@pytest.mark.parametrize("block", range(3))
def test_the_simulators_faults_leave_every_run_as_promised(block: int) -> None:
    seeds = range(block * 30, block * 30 + 30)
    assert {seed: found for seed in seeds if (found := rounds_complaints(seed))} == {}
