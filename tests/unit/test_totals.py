"""Totals against numbers worked out by hand, and the straggler rule against runs whose straggler is known."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest

from manyhands.errors import UserError
from manyhands.observe.analyse.explain import explain, paragraph
from manyhands.observe.analyse.remarks import about_imbalance, about_workers, straggler_advice
from manyhands.observe.analyse.slow_workers import Late, from_summary
from manyhands.observe.analyse.totals import TimeSplit, Totals, TotalsSnapshot, WorkerTotals
from manyhands.observe.record.events import NOBODY, RECORD, EventKind, Records
from manyhands.observe.record.recorded import RoleEvents

MS = 1_000_000
S = 1_000_000_000


def event(
    role: int,
    kind: EventKind,
    duration_ns: int,
    *,
    start_ns: int = 0,
    step: int = 0,
    peer: int = NOBODY,
    count: int = 0,
    value: float = 0.0,
    num_bytes: int = 0,
) -> Records:
    record = np.zeros(1, RECORD)
    record["role"], record["kind"], record["duration_ns"] = role, kind, duration_ns
    record["start_ns"], record["step"], record["peer"] = start_ns, step, peer
    record["count"], record["value"], record["num_bytes"] = count, value, num_bytes
    return record


def totals_of(workers: int, records: Sequence[Records]) -> Totals:
    totals = Totals(workers)
    for record in records:
        totals.update(record)
    return totals


def synchronous_run(
    compute_ms: Sequence[int],
    steps: int = 20,
    *,
    elsewhere_ms: Sequence[int] | None = None,
    through_neighbours: bool = False,
) -> Totals:
    """The totals of `synchronous_records`."""
    records = synchronous_records(
        compute_ms, steps, elsewhere_ms=elsewhere_ms, through_neighbours=through_neighbours
    )
    return totals_of(len(compute_ms), records)


def synchronous_records(
    compute_ms: Sequence[int],
    steps: int = 20,
    *,
    elsewhere_ms: Sequence[int] | None = None,
    through_neighbours: bool = False,
) -> list[Records]:
    """Every step ends for everyone when the last has arrived, as an all-reduce makes it.

    Waits name the last one to arrive or, as in a ring, the neighbour (who itself waits for the last).
    """
    world = len(compute_ms)
    busy_ms = [own + other for own, other in zip(compute_ms, elsewhere_ms or [0] * world, strict=True)]
    last = busy_ms.index(max(busy_ms))
    whole_ms = max(busy_ms) + 1
    records = []
    for step in range(steps):
        for rank in range(world):
            awaited = (rank - 1) % world if through_neighbours else last
            at = step * whole_ms * MS
            waited = (max(busy_ms) - busy_ms[rank]) * MS
            records += [
                event(rank, EventKind.COMPUTE, compute_ms[rank] * MS, step=step, start_ns=at),
                event(rank, EventKind.WAIT, waited, step=step, peer=awaited, start_ns=at),
                event(rank, EventKind.EXCHANGE, 1 * MS, step=step, num_bytes=100, count=2, start_ns=at),
                event(rank, EventKind.STEP, whole_ms * MS, start_ns=at, step=step, count=8),
            ]
    return records


def workers_of(totals: Totals) -> tuple[WorkerTotals, ...]:
    return totals.snapshot(S).workers


# --- sums


def test_sums_are_those_worked_out_by_hand() -> None:
    totals = totals_of(
        3,
        [
            event(0, EventKind.COMPUTE, 250 * MS),
            event(0, EventKind.EXCHANGE, 50 * MS, num_bytes=1000, count=2),
            event(0, EventKind.WAIT, 100 * MS, peer=1),
            event(0, EventKind.WAIT, 300 * MS, peer=2),
            event(0, EventKind.WAIT, 25 * MS, peer=1),
            event(0, EventKind.WAIT, 275 * MS, peer=NOBODY),
            event(0, EventKind.STEP, 1 * S, step=7, count=32, value=0.75),
            event(0, EventKind.EVALUATE, 9 * S, count=1000),
            event(0, EventKind.CHECKPOINT, 9 * S, num_bytes=10**9),
            event(0, EventKind.JOIN, 3 * S),
            event(2, EventKind.EXCHANGE, 50 * MS, num_bytes=24, count=1),
            event(0, EventKind.EXCHANGE, 0, num_bytes=500, count=1),
            event(0, EventKind.STEP, 1 * S, step=8, count=30, value=0.5),
        ],
    )
    first, second, third = workers_of(totals)
    assert first == WorkerTotals(
        worker=0,
        steps=2,
        samples=62,
        compute_s=0.25,
        exchange_s=0.05,
        wait_s=0.7,
        wait_for_s=(0.0, 0.125, 0.3),
        bytes_sent=1500,
        messages_sent=3,
    )
    assert first.split() == pytest.approx(TimeSplit(0.25, 0.05, 0.7))
    assert first.waits_mostly_for() == 2
    assert second.accounted_s == 0
    assert second.split() == TimeSplit(0.0, 0.0, 0.0)
    assert second.waits_mostly_for() is None
    assert (third.bytes_sent, third.messages_sent, third.exchange_s) == (24, 1, 0.05)


def test_portions_and_order_between_workers_do_not_matter() -> None:
    generator = np.random.default_rng(0)
    records = np.zeros(3000, RECORD)
    records["role"] = generator.integers(0, 4, 3000)
    records["kind"] = generator.integers(1, len(EventKind) + 1, 3000)
    records["duration_ns"] = generator.integers(0, 10**7, 3000)
    records["start_ns"] = np.arange(3000) * MS
    records["peer"] = generator.integers(-1, 4, 3000)
    records["step"] = np.arange(3000)
    records["count"] = generator.integers(0, 64, 3000)
    records["num_bytes"] = generator.integers(0, 10**9, 3000)
    records["value"] = generator.random(3000)

    at_once = Totals(4)
    at_once.update(records)
    in_portions = Totals(4)
    for portion in np.array_split(records, 77):
        for role in (2, 0, 3, 1):
            in_portions.update(portion[portion["role"] == role])
    assert at_once.snapshot(3 * S) == in_portions.snapshot(3 * S)

    expected_s = records["duration_ns"][(records["kind"] == 1) & (records["role"] == 2)].sum() / 1e9
    assert at_once.worker(2).compute_s == expected_s
    assert (
        sum(worker.samples for worker in workers_of(at_once)) == records["count"][records["kind"] == 4].sum()
    )


def test_unknown_role_is_refused_and_an_unknown_peer_is_nobody() -> None:
    totals = Totals(2)
    with pytest.raises(UserError, match="role=2 is not allowed; there are workers 0 to 1"):
        totals.update(event(2, EventKind.COMPUTE, 1))
    totals.update(event(0, EventKind.WAIT, S, peer=5))
    assert (totals.worker(0).wait_s, totals.worker(0).wait_for_s) == (1.0, (0.0, 0.0))
    with pytest.raises(UserError, match="workers=0 must be an integer of at least 1"):
        Totals(0)


def test_nothing_recorded_is_nothing_done() -> None:
    totals = Totals(1)
    totals.update(np.empty(0, RECORD))
    snapshot = totals.snapshot(5 * S)
    assert (snapshot.step, snapshot.loss, snapshot.samples_per_s, snapshot.steps_per_s) == (0, None, 0.0, 0.0)


def test_worker_survives_the_summary_file() -> None:
    (worker, _) = workers_of(synchronous_run([10, 30]))
    row = json.loads(json.dumps(worker.to_dict())) | {"added later": 1}
    assert WorkerTotals.from_dict(row) == worker


# --- loss and rates


def test_loss_is_the_mean_over_the_samples_of_the_newest_steps() -> None:
    totals = totals_of(
        3,
        [
            event(0, EventKind.STEP, S, step=0, count=30, value=9.0),
            event(0, EventKind.STEP, S, step=1, count=30, value=1.0),
            event(1, EventKind.STEP, S, step=1, count=10, value=3.0),
            event(2, EventKind.STEP, S, step=1, count=0, value=float("nan")),
        ],
    )
    assert totals.snapshot(S).loss == pytest.approx((30 * 1.0 + 10 * 3.0) / 40)
    assert totals.snapshot(S).step == 2


def test_diverged_loss_shows() -> None:
    totals = totals_of(1, [event(0, EventKind.STEP, S, count=4, value=float("nan"))])
    loss = totals.snapshot(S).loss
    assert loss is not None
    assert np.isnan(loss)


def steady(workers: int, seconds: float, *, first_step: int = 0, step_ms: int = 10) -> Totals:
    """Steps of `step_ms` with 8 samples per worker, from second 100 on."""
    records = [
        event(
            w, EventKind.STEP, step_ms * MS, start_ns=100 * S + k * step_ms * MS, step=first_step + k, count=8
        )
        for k in range(int(seconds * 1000) // step_ms)
        for w in range(workers)
    ]
    return totals_of(workers, records)


def rates(snapshot: TotalsSnapshot) -> tuple[float, float]:
    return snapshot.samples_per_s, snapshot.steps_per_s


def test_steady_pace_is_measured_while_it_begins_and_later() -> None:
    for seconds in (0.5, 2.0, 20.0):
        totals = steady(2, seconds)
        assert rates(totals.snapshot(int((100 + seconds) * S))) == pytest.approx((1600, 100), rel=0.01)


def test_rate_is_recent_and_not_that_of_the_whole_run() -> None:
    totals = steady(1, 20.0)  # 100 steps/s until second 120
    for k in range(50):  # 10 steps/s until second 125
        totals.update(
            event(0, EventKind.STEP, 100 * MS, start_ns=120 * S + k * 100 * MS, step=2000 + k, count=8)
        )
    assert rates(totals.snapshot(125 * S)) == pytest.approx((80, 10), rel=0.1)


def test_resumed_run_counts_only_its_own_steps_as_pace() -> None:
    totals = steady(1, 2.0, first_step=5000)
    snapshot = totals.snapshot(102 * S)
    assert snapshot.step == 5200
    assert snapshot.steps_per_s == pytest.approx(100, rel=0.01)


def test_steps_longer_than_the_window_still_have_a_pace() -> None:
    totals = steady(1, 90.0, step_ms=30_000)
    assert rates(totals.snapshot(199 * S)) == pytest.approx((3 * 8 / 99, 3 / 99))


def test_an_evaluation_shows_and_leaves_the_pace_as_it_was() -> None:
    totals = steady(2, 10.0)  # until second 110
    before = rates(totals.snapshot(110 * S))
    for worker in range(2):
        totals.update(event(worker, EventKind.EVALUATE, 0, start_ns=110 * S, step=999))
    for now_s in (111, 114, 130):
        during = totals.snapshot(now_s * S)
        assert during.evaluating
        assert rates(during) == before
    for worker in range(2):
        totals.update(event(worker, EventKind.EVALUATE, 20 * S, start_ns=110 * S, step=999, count=64))
    after = totals.snapshot(131 * S)
    assert not after.evaluating
    assert rates(after) == before, "nobody has trained since"
    totals.update(event(0, EventKind.STEP, 10 * MS, start_ns=130 * S, step=1000, count=8))
    assert not totals.snapshot(131 * S).evaluating


def test_a_run_whose_other_workers_train_on_is_not_evaluating() -> None:
    totals = steady(2, 10.0)
    totals.update(event(0, EventKind.EVALUATE, 0, start_ns=110 * S, step=999))
    totals.update(event(1, EventKind.STEP, 500 * MS, start_ns=110 * S, step=1000, count=8))
    assert not totals.snapshot(111 * S).evaluating


# --- stragglers


def said(totals: Totals, strategy: str = "mirrored") -> list[str]:
    return about_workers(totals.slowness.ever(), totals.slowness.late_ever(), strategy)


ADVICE = "; a bound on staleness would not help with a permanent straggler; ps consistency=async would"


def test_equal_step_times_hide_nothing() -> None:
    """The trap: all four workers report steps of the same length, because the exchange makes them wait."""
    totals = synchronous_run([10, 29, 10, 10])
    assert len({worker.steps for worker in workers_of(totals)}) == 1
    # Others: 10 ms compute + 19 ms wait + 1 ms exchange.
    assert said(totals) == [
        "worker 1 is 2.9 times slower than the median of the others from the start: "
        f"the others wait 63 % of their time{ADVICE}"
    ]
    for worker in workers_of(totals):
        assert worker.accounted_s == pytest.approx(20 * 0.030)


def test_two_workers_have_a_straggler_too() -> None:
    (sentence,) = said(synchronous_run([30, 10]))
    assert sentence.startswith("worker 0 is 3.0 times slower than the median of the others")


def test_waits_through_neighbours_do_not_mislead() -> None:
    (sentence,) = said(synchronous_run([10, 10, 40, 10], through_neighbours=True), "")
    assert sentence == (
        "worker 2 is 4.0 times slower than the median of the others from the start: "
        "the others wait 73 % of their time"
    )


def test_slow_worker_that_nobody_waits_for() -> None:
    records = [
        event(rank, kind, ms * MS, step=step, start_ns=step * 50 * MS)
        for step in range(10)
        for rank, ms in enumerate([10, 10, 50])
        for kind in (EventKind.COMPUTE, EventKind.STEP)
    ]
    assert said(totals_of(3, records), "ps consistency=async") == [
        "worker 2 is 5.0 times slower than the median of the others from the start: no worker waits for it"
    ]


def test_pace_is_per_step_where_workers_take_different_numbers_of_steps() -> None:
    """Asynchronous: everyone computes all the time, and the slow one has taken fewer steps."""
    records = []
    for rank, (steps, ms) in enumerate([(60, 10), (60, 10), (20, 30)]):
        for step in range(steps):
            records += [
                event(rank, kind, ms * MS, step=step, start_ns=step * ms * MS)
                for kind in (EventKind.COMPUTE, EventKind.STEP)
            ]
    totals = totals_of(3, records)
    assert {round(worker.compute_s, 9) for worker in workers_of(totals)} == {0.6}
    assert said(totals)[0].startswith("worker 2 is 3.0 times slower")


def test_worker_held_up_outside_its_compute_is_named_with_where_to_look() -> None:
    assert said(synchronous_run([10, 10, 10], elsewhere_ms=[15, 0, 0])) == [
        "the others wait 58 % of their median step for worker 0, which computes no longer than they do; "
        "look at its data loading, evaluation and checkpoints"
    ]


@pytest.mark.parametrize("compute_ms", [[10], [10, 10, 10, 10], [10, 12, 11, 13], [10, 0], [0, 0]])
def test_nobody_is_blamed_without_reason(compute_ms: list[int]) -> None:
    assert said(synchronous_run(compute_ms)) == []


def test_a_live_run_blames_nobody_before_it_has_lasted() -> None:
    assert synchronous_run([10, 30], steps=40).snapshot(S).slow == ()
    assert [slow.worker for slow in synchronous_run([10, 30], steps=80).snapshot(S).slow] == [1]


def test_first_steps_blame_nobody() -> None:
    assert said(synchronous_run([10, 50], steps=2)) == []
    assert said(synchronous_run([10, 50], steps=4)) == [], "too few to call it a habit"
    assert said(synchronous_run([10, 50], steps=8)) != []


def a_run_with_a_slow_start(*, elsewhere: bool) -> list[Records]:
    """Ten steps of 10 ms, of which the first takes worker 1 1.83 s; `elsewhere`: it does not compute meanwhile."""
    records, at_ms = [], 0
    for step in range(10):
        busy_ms = [10, 1830 if step == 0 else 10]
        for rank, ms in enumerate(busy_ms):
            compute_ms = 8 if rank == 1 and elsewhere else ms
            waited = (max(busy_ms) - ms) * MS
            records += [
                event(rank, EventKind.COMPUTE, compute_ms * MS, step=step, start_ns=at_ms * MS),
                event(rank, EventKind.WAIT, waited, step=step, peer=1, start_ns=(at_ms + ms) * MS),
                event(rank, EventKind.STEP, max(busy_ms) * MS, step=step, start_ns=at_ms * MS, count=8),
            ]
        at_ms += max(busy_ms)
    return records


@pytest.mark.parametrize("elsewhere", [False, True])
def test_one_long_step_of_ten_blames_nobody_and_explain_agrees(elsewhere: bool) -> None:
    records = a_run_with_a_slow_start(elsewhere=elsewhere)
    totals = totals_of(2, records)
    waited = totals.worker(0)
    assert waited.wait_for_s[1] > 0.9 * waited.accounted_s, "on average it looks like a straggler"
    assert said(totals) == []
    assert about_workers(totals.snapshot(2 * S).slow, totals.snapshot(2 * S).late) == []
    assert "No worker is slower than the others for long." in explained(records)


def explained(records: Sequence[Records]) -> str:
    joined = np.concatenate(records)
    roles = [
        RoleEvents(name=f"worker-{role}", role=role, records=joined[joined["role"] == role])
        for role in np.unique(joined["role"]).tolist()
    ]
    return paragraph(explain(roles, synchronous=True))


def test_explain_names_who_is_late_in_the_words_of_the_table() -> None:
    records = synchronous_records([10, 10, 10], elsewhere_ms=[15, 0, 0])
    (sentence,) = said(totals_of(3, records))
    assert sentence[1:] in explained(records)
    assert "No worker is slow" not in explained(records)


def test_who_was_late_is_in_the_summary_and_comes_back_from_it() -> None:
    late = synchronous_run([10, 10, 10], elsewhere_ms=[15, 0, 0]).slowness.late_ever()
    assert late is not None
    assert from_summary(Late, asdict(late) | {"more": 1}) == late == Late(worker=0, others_wait=15 / 26)


@pytest.mark.parametrize(
    ("strategy", "advice"),
    [
        ("mirrored", "ps consistency=async would"),
        ("pipeline", "a pipeline is as fast as its slowest stage; give that stage fewer layers with cuts=…"),
        ("tensor", "every layer waits for the slowest of its slices"),
        ("allreduce algorithm=ring", "ps consistency=async would"),
        ("ps servers=2", "straggler, consistency=async would"),
        (
            "ps consistency=bounded:4",
            "a larger bound would not hide a lasting straggler, consistency=async would",
        ),
        ("ps consistency=aware:bounded:4", "a larger bound"),
        ("ps consistency=async", ""),
        ("ps consistency=softsync:4", ""),
        ("hogwild order=turns", ""),
        ("", ""),
    ],
)
def test_advice_fits_the_strategy(strategy: str, advice: str) -> None:
    found = straggler_advice(strategy)
    assert advice in found
    assert bool(advice) == bool(found)


def test_server_that_does_most_of_the_applying_is_named() -> None:
    assert about_imbalance([("server 0", 0.5), ("server 1", 0.5)]) == []
    assert about_imbalance([("server 0", 1.0)]) == []
    (sentence,) = about_imbalance([("server 0", 0.1), ("server 1", 0.9)])
    assert sentence.startswith("server 1 does 90 % of the applying instead of 50 %")
