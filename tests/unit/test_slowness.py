"""Who is slow, since when, on virtual time: runs whose slow worker and its step are known, and runs without one."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import pytest

from manyhands.observe.analyse.slow_workers import Slowness, Straggler, from_summary
from manyhands.observe.record.events import NOBODY, RECORD, EventKind, Records

S = 1_000_000_000
Compute = Callable[[int, int], float]


@dataclass(frozen=True, kw_only=True)
class Reports:
    """The events of a run, each as of the moment it is known: when what it tells of has ended."""

    records: Records
    known_ns: np.ndarray

    def until(self, at_s: float) -> Records:
        return self.records[self.known_ns <= at_s * S]

    def step_begin_s(self, step: int) -> float:
        chosen = (self.records["kind"] == EventKind.STEP) & (self.records["step"] == step)
        return float(self.records["start_ns"][chosen].min()) / S


def report(rows: list[tuple[EventKind, int, float, float, int, int]]) -> Reports:
    """From (kind, role, start in s, duration in s, step, peer)."""
    records = np.zeros(len(rows), RECORD)
    columns = list(zip(*rows, strict=True))
    for name, column in zip(("kind", "role"), columns, strict=False):
        records[name] = column
    records["start_ns"] = np.round(np.asarray(columns[2]) * S)
    records["duration_ns"] = np.round(np.asarray(columns[3]) * S)
    records["step"], records["peer"], records["count"] = columns[4], columns[5], 8
    known = records["start_ns"] + records["duration_ns"]
    order = np.argsort(known, kind="stable")
    return Reports(records=records[order], known_ns=known[order])


def barrier_run(workers: int, seconds: float, compute: Compute) -> Reports:
    """All steps end together, and take equally long: only COMPUTE and WAIT tell the workers apart."""
    rows, now, step = [], 0.0, 0
    while now < seconds:
        own = [compute(worker, step) for worker in range(workers)]
        last, whole = own.index(max(own)), max(own) * 1.02
        for worker in range(workers):
            rows.append((EventKind.COMPUTE, worker, now, own[worker], step, NOBODY))
            rows.append((EventKind.WAIT, worker, now + own[worker], max(own) - own[worker], step, last))
            rows.append((EventKind.EXCHANGE, worker, now + max(own), whole - max(own), step, NOBODY))
            rows.append((EventKind.STEP, worker, now, whole, step, NOBODY))
        now += whole
        step += 1
    return report(rows)


def free_run(workers: int, seconds: float, compute: Compute) -> Reports:
    """Nobody waits: whoever is free takes the next batch."""
    rows, free, step = [], [0.0] * workers, 0
    while min(free) < seconds:
        worker = free.index(min(free))
        took = compute(worker, step)
        rows.append((EventKind.COMPUTE, worker, free[worker], took, step, NOBODY))
        rows.append((EventKind.STEP, worker, free[worker], took, step, NOBODY))
        free[worker] += took
        step += 1
    return report(rows)


def jittery(seed: int, step_s: float, spread: float = 0.15) -> Compute:
    """Times around `step_s`, now and then one that is three times as long."""
    generator = np.random.default_rng(seed)

    def compute(worker: int, step: int) -> float:
        outlier = 3.0 if generator.random() < 0.01 else 1.0
        return step_s * outlier * float(np.exp(spread * generator.standard_normal()))

    return compute


def slowed(usual: Compute, *, worker: int, since: int, factor: float = 3.0) -> Compute:
    return lambda who, step: usual(who, step) * (factor if who == worker and step >= since else 1.0)


def named(run: Reports, at_s: float) -> tuple[Straggler, ...]:
    slowness = Slowness()
    slowness.add(run.until(at_s))
    return slowness.now()


@pytest.mark.parametrize("make", [barrier_run, free_run])
@pytest.mark.parametrize("step_ms", [5, 50, 300])
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_a_worker_slowed_three_times_is_named_within_five_seconds(
    workers: int, step_ms: int, make: Callable[[int, float, Compute], Reports]
) -> None:
    step_s, slow = step_ms / 1000, workers // 2
    # Everybody takes a batch in a round: those of the free run are as many rounds, and more batches.
    rounds = int(10 / step_s)
    since = rounds * workers if make is free_run else rounds
    run = make(workers, 10 * 1.5 + 8, slowed(jittery(workers, step_s), worker=slow, since=since))
    own = run.records[(run.records["role"] == slow) & (run.records["step"] >= since)]
    began_s = float(own["start_ns"].min()) / S
    assert named(run, began_s) == ()
    (found,) = named(run, began_s + 5)
    assert found.worker == slow
    assert found.until_step is None
    assert not found.from_the_start
    assert found.ratio == pytest.approx(3, rel=0.2)
    assert abs(found.since_step - since) <= 5 * workers
    if make is free_run:
        assert found.others_wait == 0
    else:
        assert found.others_wait == pytest.approx(2 / 3.06, abs=0.08)


def test_equalised_step_times_hide_nobody() -> None:
    """The trap: a delay of 200 ms on one of four reads 293, 292, 293, 293 ms for everyone's steps."""
    run = barrier_run(4, 20, lambda worker, step: 0.290 if worker == 2 else 0.090)
    steps = run.records[run.records["kind"] == EventKind.STEP]
    assert len(np.unique(steps["duration_ns"])) == 1, "the steps of all workers are equally long"
    (found,) = named(run, 20)
    assert (found.worker, found.from_the_start, found.since_step) == (2, True, 0)
    assert found.ratio == pytest.approx(2.9 / 0.9)

    assert named(barrier_run(4, 20, lambda worker, step: 0.290), 20) == ()


@pytest.mark.parametrize("seed", range(50))
def test_jitter_names_nobody(seed: int) -> None:
    workers, step_s = (2, 3, 4, 8)[seed % 4], (0.005, 0.02, 0.05, 0.3)[seed // 4 % 4]
    make = barrier_run if seed % 2 else free_run
    run = make(workers, min(400 * step_s, 30), jittery(seed, step_s, spread=(0.05, 0.15, 0.3)[seed % 3]))
    slowness, seen = Slowness(), 0
    for part in np.array_split(np.arange(len(run.records)), 12):
        slowness.add(run.records[part])
        seen += len(part)
        assert slowness.now() == ()
    assert slowness.ever() == ()


def test_a_machine_that_slows_for_everybody_names_nobody() -> None:
    usual = jittery(3, 0.02)
    run = barrier_run(4, 30, lambda worker, step: usual(worker, step) * (3 if step > 300 else 1))
    for at_s in range(6, 30):
        assert named(run, at_s) == ()


def test_who_recovers_is_named_no_more_and_was_slow_from_here_to_there() -> None:
    usual = jittery(5, 0.02)
    run = barrier_run(
        3, 40, lambda who, step: usual(who, step) * (3 if who == 1 and 300 <= step < 500 else 1)
    )
    begin_s, end_s = run.step_begin_s(300), run.step_begin_s(500)
    assert [one.worker for one in named(run, end_s)] == [1]
    assert named(run, end_s + 2) == ()
    slowness = Slowness()
    slowness.add(run.records)
    (was,) = slowness.ever()
    assert (was.worker, was.until_step is None) == (1, False)
    assert abs(was.since_step - 300) <= 5
    assert abs((was.until_step or 0) - 499) <= 5
    assert was.others_wait == pytest.approx(2 / 3.06, abs=0.08)
    assert end_s - begin_s > 5


def test_a_pause_of_a_second_is_no_straggler() -> None:
    usual = jittery(6, 0.005)
    run = barrier_run(
        2, 20, lambda who, step: usual(who, step) * (3 if who == 1 and 2000 <= step < 2060 else 1)
    )
    begin_s = run.step_begin_s(2000)
    for at_s in np.arange(begin_s, begin_s + 3, 0.1):
        assert named(run, float(at_s)) == ()


def test_memory_is_bounded_and_a_late_slowing_in_a_long_run_is_still_named() -> None:
    """A hundred thousand steps, then a slowing: the rows that are kept stay few."""
    steps, since = 100_000, 99_400
    records = np.zeros(2 * steps, RECORD)
    records["kind"], records["peer"] = EventKind.COMPUTE, NOBODY
    records["step"] = np.repeat(np.arange(steps), 2)
    records["role"] = np.tile([0, 1], steps)
    took = np.where((records["role"] == 1) & (records["step"] >= since), 15_000_000, 5_000_000)
    took += np.random.default_rng(0).integers(0, 500_000, len(took))
    whole = took.reshape(steps, 2).max(axis=1)
    records["start_ns"] = np.repeat(np.cumsum(whole) - whole, 2)
    records["duration_ns"] = took
    slowness = Slowness()
    for part in np.array_split(records, 300):
        slowness.add(part)
        assert max(len(rows) for rows in slowness._rows.values()) <= 4096 + 700
    (found,) = slowness.now()
    assert (found.worker, found.since_step) == (1, since)


def test_portions_do_not_matter() -> None:
    run = barrier_run(3, 20, slowed(jittery(1, 0.02), worker=0, since=300))
    whole, parts = Slowness(), Slowness()
    whole.add(run.records)
    for part in np.array_split(run.records, 97):
        for role in (2, 0, 1):
            parts.add(part[part["role"] == role])
    assert whole.now() == parts.now()
    assert whole.now()[0].worker == 0


def test_straggler_survives_the_summary() -> None:
    found = Straggler(
        worker=1, ratio=2.0, since_step=3, until_step=None, from_the_start=True, others_wait=0.5
    )
    assert from_summary(Straggler, asdict(found) | {"added later": 1}) == found
