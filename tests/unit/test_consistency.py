"""The policies: text forms, who makes a step, who may read, and what staleness does to a step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import UserError
from manyhands.strategies.common.consistency import (
    Async,
    BatchPlace,
    Bounded,
    Buffered,
    Group,
    Policy,
    SoftSync,
    Sync,
    blend,
    parse_consistency,
)

TEXTS = {
    "sync": Sync(),
    "sync:2": Sync(backup=2),
    "bounded:3": Bounded(3),
    "async": Async(),
    "softsync:4": SoftSync(4),
    "aware:softsync:30": SoftSync(30, rates="aware"),
    "damped:bounded:2": Bounded(2, rates="damped"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_names_a_policy_and_the_policy_says_its_text(text: str) -> None:
    assert parse_consistency(text) == TEXTS[text]
    assert str(TEXTS[text]) == text


@pytest.mark.parametrize(
    ("text", "ours"),
    [("strong", "sync"), ("weak:3", "bounded:3"), ("eventual", "async"), ("aware:weak:2", "aware:bounded:2")],
)
def test_words_that_people_know_are_other_words_for_ours(text: str, ours: str) -> None:
    assert parse_consistency(text) == parse_consistency(ours)
    assert str(parse_consistency(text)) == ours


def test_a_bound_of_zero_is_sync() -> None:
    assert parse_consistency("bounded:0") == Sync()
    assert parse_consistency("sync:0") == Sync()
    assert parse_consistency("aware:bounded:0") == Sync(rates="aware")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("assync", "did you mean 'async'"),
        ("", "allowed: sync, bounded, async, softsync, aware, damped"),
        ("async:1", "has no number"),
        ("bounded", "'' is not an integer"),
        ("bounded:", "a value must follow the colon"),
        ("bounded:-1", "'-1' is not an integer"),
        ("bounded:1.5", "'1.5' is not an integer"),
        ("bounded:²", "is not an integer"),
        ("softsync:0", "must be at least 1"),
        ("softsync:99999999999", "is not an integer"),
        ("aware", "as in aware:async"),
        ("aware:aware:async", "at most one of"),
        ("damped:aware:async", "at most one of"),
        ("damped", "as in damped:async"),
        ("buffered:5", "'buffered' is not a policy"),
        ("aware:bonded:1", "did you mean 'bounded'"),
    ],
)
def test_a_wrong_text_is_reported_what_is_allowed(text: str, says: str) -> None:
    with pytest.raises(UserError, match="consistency=") as caught:
        parse_consistency(text)
    assert says in str(caught.value)


def test_values_are_checked_where_they_are_made() -> None:
    for make in (lambda: Sync(-1), lambda: Bounded(0), lambda: SoftSync(0), lambda: Buffered(0)):
        with pytest.raises(UserError):
            make()


@dataclass
class Arrivals:
    """A book for policies: three slots, and what has arrived of them, in order."""

    names: tuple[tuple[int, int], ...]
    step: int = 0
    drained: bool = False
    num_active: int = 3
    never: set[tuple[int, int]] = field(default_factory=set)

    @property
    def num_waiting(self) -> int:
        return len(self.names)

    def slots_at(self, clock: int) -> tuple[int, ...]:
        return tuple(range(self.num_active))

    def num_arrived(self, clock: int) -> int:
        return sum(at == clock for _, at in (*self.names, *self.never))

    def waits(self, slot: int, clock: int) -> bool:
        return (slot, clock) in self.names

    def first_waiting(self, count: int) -> tuple[tuple[int, int], ...]:
        return self.names[:count]


ONE = ((2, 0),)
TWO = ((2, 0), (0, 0))
ALL = ((2, 0), (0, 0), (1, 0))
ROWS: list[tuple[Policy, Arrivals, tuple[tuple[int, int], ...] | None]] = [
    (Sync(), Arrivals(TWO), None),
    (Sync(), Arrivals(ALL), ((0, 0), (1, 0), (2, 0))),
    (Sync(), Arrivals(TWO, never={(1, 0)}), ((0, 0), (2, 0))),
    (Sync(backup=1), Arrivals(ONE), None),
    (Sync(backup=1), Arrivals(TWO), ((0, 0), (2, 0))),
    (Sync(backup=9), Arrivals(ONE), ((2, 0),)),
    (Bounded(2), Arrivals(ONE), ((2, 0),)),
    (Bounded(2), Arrivals(()), None),
    (Async(), Arrivals(TWO), ((2, 0),)),
    (SoftSync(1), Arrivals(TWO), None),
    (SoftSync(1), Arrivals(ALL), ((2, 0), (0, 0), (1, 0))),
    (SoftSync(1), Arrivals(TWO, drained=True), ((2, 0), (0, 0))),
    (SoftSync(1), Arrivals((), drained=True), None),
    (SoftSync(3), Arrivals(TWO), ((2, 0),)),
    (SoftSync(30), Arrivals(TWO), ((2, 0),)),
    (Buffered(3), Arrivals(TWO), None),
    (Buffered(2), Arrivals(ALL), ((2, 0), (0, 0))),
    (Buffered(3), Arrivals(TWO, drained=True), ((2, 0), (0, 0))),
    (Buffered(3), Arrivals((), drained=True), None),
    (Buffered(3, rates="damped"), Arrivals(ALL, num_active=1), ALL),
    (Sync(rates="aware"), Arrivals(ALL), ((0, 0), (1, 0), (2, 0))),
]


@pytest.mark.parametrize(("policy", "book", "updates"), ROWS)
def test_what_makes_a_step(
    policy: Policy, book: Arrivals, updates: tuple[tuple[int, int], ...] | None
) -> None:
    group = policy.next_group(book)
    assert group == (None if updates is None else Group(0, updates))


@pytest.mark.parametrize(
    ("policy", "lag", "by_clock", "chosen_by_lead", "outlives_read"),
    [
        (Sync(), 0, True, False, False),
        (Sync(backup=1), 0, True, True, False),
        (Bounded(3), 3, True, False, False),
        (Async(), None, False, False, False),
        (SoftSync(2), None, False, True, True),
        (Buffered(2), None, False, True, True),
    ],
)
def test_what_a_shard_is_reported(
    policy: Policy, lag: int | None, by_clock: bool, chosen_by_lead: bool, outlives_read: bool
) -> None:
    for one in (policy, replace(policy, rates="aware"), replace(policy, rates="damped")):
        assert (one.lag, one.by_clock) == (lag, by_clock)
        assert (one.chosen_by_lead, one.outlives_read) == (chosen_by_lead, outlives_read)
        assert one.stepwise is isinstance(policy, Sync)


def test_batches_are_shared_out_by_clock() -> None:
    first = (10, 100)  # from clock 10 on, beginning with batch 100
    shared = [Bounded(1).place(rank, 3, clock, first) for clock in (10, 11) for rank in range(3)]
    assert [place.batch for place in shared] == [100, 101, 102, 103, 104, 105]
    assert all((place.part, place.parts) == (0, 1) for place in shared)
    assert Sync().place(1, 3, 12, first) == BatchPlace(12, 1, 3)


def test_a_whole_batch_is_summed_as_it_is() -> None:
    tenths = [0.1] * 10
    assert sum(tenths) != 1.0  # so dividing by it would not be exact
    assert blend(Sync(), tenths, [0] * 10, parts=10) == ([1.0] * 10, 1.0)
    assert blend(Async(), [1.0], [7], parts=1) == ([1.0], 1.0)


def test_what_is_left_of_a_batch_is_divided_by_its_weight() -> None:
    factors, rate = blend(Sync(backup=1), [0.25, 0.5], [0, 0], parts=3)
    assert factors == [1 / 0.75] * 2
    assert rate == 1.0


@settings(deadline=None)  # the first example pays for warming torch up
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_stale_gradients_move_sgd_by_the_mean_of_their_rated_steps(staleness: list[int]) -> None:
    count = len(staleness)
    gradients = torch.randn(count, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    factors, rate = blend(SoftSync(1, rates="aware"), [1.0] * count, staleness, parts=1)
    step = rate * sum(factor * gradient for factor, gradient in zip(factors, gradients, strict=True))
    paper = sum(gradient / max(tau, 1) for gradient, tau in zip(gradients, staleness, strict=True)) / count
    torch.testing.assert_close(step, paper, rtol=1e-12, atol=1e-12)
    assert rate == pytest.approx(sum(1 / max(tau, 1) for tau in staleness) / count)


def test_a_fresh_update_keeps_its_whole_rate() -> None:
    aware = Async(rates="aware")
    assert [aware.rate(tau) for tau in (0, 1, 2, 4)] == [1.0, 1.0, 0.5, 0.25]
    assert Async().rate(9) == 1.0
    damped = Buffered(2, rates="damped")
    assert [damped.rate(tau) for tau in (0, 3, 8)] == [1.0, 0.5, 1 / 3]
    assert [Buffered(size).includes_own(9) for size in (1, 2)] == [True, False]
