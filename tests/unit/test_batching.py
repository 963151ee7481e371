"""What goes into the next batch and when, told by made-up clocks: nothing here sleeps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import UserError
from manyhands.serving.batching import BatchLimits, Dispatch, KillReplica, RefuseRequest, SendBatch

LIMITS = BatchLimits(batch=4, wait_s=0.01, waiting=10, deadline_s=1.0, tries=2)


def test_a_full_batch_leaves_at_once_and_a_request_waits_no_longer_than_it_may() -> None:
    core = Dispatch(LIMITS)
    assert core.free(1, 0.0) == []
    assert core.asked(10, 1, 0.0) == []
    assert core.wakes_at == pytest.approx(0.01)
    assert core.asked(11, 2, 0.004) == []
    assert core.asked(12, 1, 0.005) == [SendBatch(1, (10, 11, 12))]
    assert core.asked(13, 1, 0.006) == []
    assert core.wakes_at == 1.0, "nobody is free: the next thing that happens is that worker 1 is late"
    assert core.free(1, 0.012) == []
    assert core.look(0.0159) == []
    assert core.look(0.016) == [SendBatch(1, (13,))]


def test_batches_hold_no_more_than_they_may_in_the_order_of_asking() -> None:
    core = Dispatch(LIMITS)
    for number, size in ((1, 3), (2, 2), (3, 2), (4, 1)):
        assert core.asked(number, size, 0.0) == []
    assert core.free(7, 0.02) == [SendBatch(7, (1,))]
    assert core.free(8, 0.02) == [SendBatch(8, (2, 3))]
    assert core.free(9, 0.02) == [SendBatch(9, (4,))]
    assert core.waiting_inputs == 0


def test_a_request_larger_than_a_batch_is_one_of_its_own() -> None:
    core = Dispatch(LIMITS)
    core.free(1, 0.0)
    assert core.asked(1, 9, 0.0) == [SendBatch(1, (1,))]


def test_free_workers_take_turns() -> None:
    core = Dispatch(BatchLimits(wait_s=0.0))
    core.free(1, 0.0)
    core.free(2, 0.0)
    assert core.asked(1, 1, 0.0) == [SendBatch(1, (1,))]
    assert core.free(1, 0.1) == []
    assert core.asked(2, 1, 0.1) == [SendBatch(2, (2,))]


def test_too_many_are_refused_and_nobody_waits_for_ever() -> None:
    core = Dispatch(LIMITS)
    assert core.asked(1, 8, 0.0) == []
    assert core.asked(2, 3, 0.1) == [
        RefuseRequest(2, 503, "8 inputs are already waiting; try again in a moment.")
    ]
    assert core.wakes_at == 1.0
    assert core.look(0.99) == []
    assert core.look(1.0) == [RefuseRequest(1, 503, "No worker was free within 1 s; try again later.")]
    assert core.wakes_at is None
    assert core.waiting_inputs == 0


def test_the_requests_of_a_dead_worker_go_first_and_each_alone() -> None:
    core = Dispatch(LIMITS)
    core.free(1, 0.0)
    core.asked(1, 2, 0.0)
    assert core.asked(2, 2, 0.0) == [SendBatch(1, (1, 2))]
    core.asked(3, 1, 0.001)
    assert core.gone(1, 0.002) == []
    assert core.free(2, 0.003) == [SendBatch(2, (1,))]
    assert core.free(3, 0.003) == [SendBatch(3, (2,))]
    assert core.free(2, 0.004) == [], "the third was never lost, and waits as others do"
    assert core.look(0.011) == [SendBatch(2, (3,))]


def test_a_request_that_kills_workers_is_given_up_and_takes_nobody_along() -> None:
    core = Dispatch(BatchLimits(batch=4, wait_s=0.0, tries=2))
    core.asked(1, 1, 0.0)
    core.asked(2, 1, 0.0)
    assert core.free(1, 0.0) == [SendBatch(1, (1, 2))]
    core.gone(1, 0.1)
    assert core.free(2, 0.1) == [SendBatch(2, (1,))]
    (given_up,) = core.gone(2, 0.2)
    assert given_up == RefuseRequest(1, 503, "2 workers died while computing this request; it was abandoned.")
    assert core.free(3, 0.3) == [SendBatch(3, (2,))]


TOO_SLOW = "The answer was not computed within 1 s; send fewer inputs at a time, or try again later."


def test_a_worker_that_computes_for_too_long_is_killed_once() -> None:
    core = Dispatch(LIMITS)
    core.free(1, 0.0)
    core.asked(1, 4, 0.0)
    assert core.look(0.99) == []
    assert core.look(1.0) == [RefuseRequest(1, 503, TOO_SLOW), KillReplica(1)]
    assert core.look(1.1) == []
    assert core.wakes_at is None
    assert core.gone(1, 1.2) == []


def test_a_worker_is_not_killed_for_what_waited_before_it_was_sent() -> None:
    """As on a server with too much to do: the request is given up in time, and the worker is left to finish."""
    core = Dispatch(LIMITS)
    core.asked(1, 4, 0.0)
    assert core.free(1, 0.9) == [SendBatch(1, (1,))]
    assert core.wakes_at == 1.0
    assert core.look(1.0) == [RefuseRequest(1, 503, TOO_SLOW)]
    assert core.wakes_at == pytest.approx(1.9), "the worker's own time"
    assert core.free(1, 1.2) == []
    assert core.look(5.0) == []


def test_the_oldest_goes_first_whichever_worker_died_first() -> None:
    """Else its time would run out unseen behind a younger one."""
    core = Dispatch(BatchLimits(batch=1, wait_s=0.0, deadline_s=1.0))
    core.free(1, 0.0)
    core.free(2, 0.0)
    core.asked(1, 1, 0.0)
    core.asked(2, 1, 0.5)
    core.gone(1, 0.6)
    core.gone(2, 0.7)
    (late,) = core.look(1.0)
    assert isinstance(late, RefuseRequest)
    assert late.request == 1
    assert core.free(3, 1.1) == [SendBatch(3, (2,))]


@pytest.mark.parametrize(
    "bad",
    [
        {"batch": 0}, {"waiting": 0}, {"tries": 0}, {"wait_s": -1}, {"wait_s": 99}, {"wait_s": float("nan")},
        {"deadline_s": float("inf")}, {"deadline_s": float("nan")},
    ],
)  # fmt: skip
def test_limits_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        BatchLimits(**bad)  # type: ignore[arg-type]


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["ask", "done", "die", "wait"]), st.integers(1, 5), st.floats(0, 0.4)),
        max_size=80,
    )
)
@settings(max_examples=200, deadline=None)
def test_every_request_ends_once_and_is_on_one_worker_at_a_time(
    events: list[tuple[str, int, float]],
) -> None:
    core, now, number, next_worker = Dispatch(LIMITS), 0.0, 0, 3
    sizes: dict[int, int] = {}
    on: dict[int, tuple[int, ...]] = {}
    sent_at: dict[int, float] = {}
    ended: list[int] = []

    def answer(worker: int) -> None:
        ended.extend(one for one in on.pop(worker) if one not in ended)  # some were given up meanwhile

    def take(actions: list[object]) -> None:
        for action in actions:
            match action:
                case SendBatch(worker, requests):
                    assert worker not in on, "it has one already"
                    total = sum(sizes[one] for one in requests)
                    assert total <= LIMITS.batch or len(requests) == 1
                    busy = {one for batch in on.values() for one in batch}
                    assert not busy & set(requests)
                    assert not set(ended) & set(requests)
                    on[worker], sent_at[worker] = requests, now
                case KillReplica(worker):
                    assert now >= sent_at[worker] + LIMITS.deadline_s
                case RefuseRequest(request, status, _):
                    assert status == 503
                    ended.append(request)

    for worker in (1, 2):
        take(core.free(worker, now))
    for kind, amount, passed in events:
        now += passed
        if kind == "ask":
            number += 1
            sizes[number] = amount
            take(core.asked(number, amount, now))
        elif kind == "done" and on:
            worker = min(on)
            answer(worker)
            take(core.free(worker, now))
        elif kind == "die" and on:
            worker = max(on)
            on.pop(worker)
            take(core.gone(worker, now))
            take(core.free(next_worker, now))
            next_worker += 1
        else:
            take(core.look(now))
        assert len(ended) == len(set(ended))
    for _ in range(number + 2):
        now += LIMITS.wait_s
        for worker in list(on):
            answer(worker)
            take(core.free(worker, now))
        take(core.look(now))
    assert sorted(ended) == list(range(1, number + 1)), "none is lost, none is answered twice"
