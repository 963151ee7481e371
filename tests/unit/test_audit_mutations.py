"""The auditor itself, on trial: whatever is done to the records of a good run changes its verdict to the right word.

The runs are simulated ones, of the cores that live runs are made of, at every consistency with and without replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from manyhands.foresight.simulate.faults import FaultRole, Kill
from manyhands.foresight.simulate.models import LedgerStore
from manyhands.foresight.simulate.simulated_spec import ComputeModel, NetworkModel, SimulationSpec, Timing
from manyhands.foresight.simulate.witness import Witness
from manyhands.strategies.common.consistency import Policy
from manyhands.strategies.ps.audit import Verdict
from manyhands.strategies.ps.log_rows import LostRow, Row, SlotsRow, StepRow
from recorded import Recorded, changed, record
from simulated import PROMISES, STEPS, drawn

RUNS = [(consistency, replicas) for consistency in PROMISES for replicas in (0, 1)]
every_run = pytest.mark.parametrize(("consistency", "replicas"), RUNS)


@cache
def good(consistency: str, replicas: int) -> Recorded:
    """A run without a fault, whose workers are of different speeds."""
    return record(
        SimulationSpec(
            workers=4,
            steps=STEPS,
            consistency=consistency,
            shards=2,
            replicas=replicas,
            seed=3,
            compute=ComputeModel(step_s=0.1, factors={0: 3.0}, delay_probability=0.2, spread=0.5),
            network=NetworkModel(latency_s=1e-3, jitter_s=5e-3),
            timing=Timing(start_s=0.2, limit_s=600.0),
        )
    )


def require(found: Recorded, verdict: Verdict, what: object = "") -> None:
    audited = found.audit()
    report = [violation.sentence for violation in audited.violations][:3], audited.missing[:3]
    assert audited.verdict is verdict, (what, report)


@every_run
def test_a_good_run_is_complete(consistency: str, replicas: int) -> None:
    found = good(consistency, replicas)
    require(found, Verdict.COMPLETE)
    assert found.audit().words == "complete"
    assert len(found.logs[0]) == 1 + replicas
    assert [shard.batches for shard in found.audit().shards] == [STEPS, STEPS]


@every_run
def test_no_fault_makes_a_false_alarm(consistency: str, replicas: int) -> None:
    """Deaths, pauses and slow links: complete, or restored where the judge saw a shard go back to a snapshot."""
    for seed in range(100, 108):
        witness = Witness(PROMISES[consistency])
        found = record(drawn(seed, consistency, replicas), witness)
        require(found, Verdict.RESTORED if witness.at_risk else Verdict.COMPLETE, seed)


# ── rows that are not there ───────────────────────────────────────────────────────────────────────────────────────────


def without_last(count: int) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: rows[:-count]


@pytest.mark.parametrize("count", [1, 10])
@every_run
def test_last_rows_dropped(consistency: str, replicas: int, count: int) -> None:
    """In all replicas, where the other shard, the workers and the summary tell; in one, where the summary does."""
    found = good(consistency, replicas)
    require(found.with_rows(without_last(count)), Verdict.INCOMPLETE)
    require(found.with_rows(without_last(count), shards=range(2)), Verdict.INCOMPLETE)
    require(found.with_rows(without_last(count), files=slice(1)), Verdict.INCOMPLETE)
    require(found.with_rows(without_last(count)).forged(), Verdict.INCOMPLETE)


@every_run
def test_a_shard_cut_short(consistency: str, replicas: int) -> None:
    require(
        good(consistency, replicas).with_rows(lambda rows: rows[: len(rows) * 5 // 6]), Verdict.INCOMPLETE
    )


@pytest.mark.parametrize("version", [1, 5])
@every_run
def test_a_row_missing_on_the_way(consistency: str, replicas: int, version: int) -> None:
    def without(rows: list[Row]) -> list[Row]:
        return [row for row in rows if not isinstance(row, StepRow) or row.version != version]

    found = good(consistency, replicas)
    require(found.with_rows(without).forged(), Verdict.BROKEN)
    require(found.with_rows(without, files=slice(1)), Verdict.BROKEN)
    require(found.with_rows(without, files=slice(replicas, None)).forged(), Verdict.BROKEN)


def test_a_late_row_missing() -> None:
    found = good("sync:1", 0)
    late = [row for row in found.logs[1][0] if not isinstance(row, StepRow | SlotsRow)]
    assert late, "nobody was late"
    require(found.with_rows(lambda rows: [row for row in rows if row != late[3]]).forged(), Verdict.BROKEN)


@every_run
def test_a_run_that_died(consistency: str, replicas: int) -> None:
    """No summary, logs and records that end wherever their processes were."""
    found = good(consistency, replicas).with_rows(lambda rows: rows[: len(rows) // 3], shards=range(2))
    computed = {process: rows[: len(rows) // 3 + 1] for process, rows in found.computed.items()}
    died = replace(found, computed=computed, versions=None, recorded={})
    require(died, Verdict.INCOMPLETE)
    assert "of the run's 30 batches" in " ".join(died.audit().missing)


@every_run
def test_a_workers_record_cut_short(consistency: str, replicas: int) -> None:
    found = good(consistency, replicas)
    process = max(found.computed)
    cut = {**found.computed, process: found.computed[process][:-2]}
    require(replace(found, computed=cut), Verdict.INCOMPLETE)
    holed = {**found.computed, process: found.computed[process][:1] + found.computed[process][2:]}
    require(replace(found, computed=holed).forged(), Verdict.BROKEN)


# ── rows that are other than they were ────────────────────────────────────────────────────────────────────────────────


CHANGES: dict[str, dict[str, Any]] = {
    "batch": {"batch": lambda batch: (batch + 1) % STEPS},
    "member": {"member": 99},
    "another member": {"member": lambda member: member + 1},
    "part": {"part": lambda part: part + 1},
    "parts": {"parts": lambda parts: parts + 1},
    "weight": {"weight": lambda weight: weight / 2},
    "read version": {"read_version": lambda read: read - 1, "staleness": lambda stale: stale + 1},
    "later read": {"read_version": lambda read: read + 1, "staleness": lambda stale: stale - 1},
    "read term": {"read_term": 1},
    "row version": {"rows_version": 3},
    "slot": {"slot": lambda slot: (slot + 1) % 4},
    "clock": {"clock": lambda clock: clock + 1},
}


@every_run
def test_a_value_changed(consistency: str, replicas: int) -> None:
    """At one shard, and at all of them alike: where no replica and no other shard tells."""
    found = good(consistency, replicas)
    for what, values in CHANGES.items():
        change = changed(6, found.policy, **values)
        require(found.with_rows(change), Verdict.BROKEN, what)
        require(found.with_rows(change, shards=range(2)), Verdict.BROKEN, what)
        require(found.with_rows(change, files=slice(1)), Verdict.BROKEN, what)


def again(policy: Policy) -> Callable[[list[Row]], list[Row]]:
    """The last step once more, under the next clocks, and all else in it as it has to be."""

    def change(rows: list[Row]) -> list[Row]:
        steps = [row for row in rows if isinstance(row, StepRow)]
        last = steps[-1]
        tops = {
            u.slot: max(v.clock for row in steps for v in row.updates if v.slot == u.slot)
            for u in last.updates
        }
        updates = tuple(
            u._replace(clock=tops[u.slot] + 1, read_version=u.read_version + 1) for u in last.updates
        )
        more = last._replace(sequence=last.sequence + 1, version=last.version + 1, updates=updates)
        return [*rows, more]

    return change


@every_run
def test_a_batch_applied_again_under_the_next_clock(consistency: str, replicas: int) -> None:
    found = good(consistency, replicas)
    repeated = found.with_rows(again(found.policy))
    require(repeated, Verdict.BROKEN)
    require(repeated.forged(), Verdict.BROKEN)
    require(found.with_rows(again(found.policy), shards=range(2)).forged(), Verdict.BROKEN)
    alone = replace(repeated, computed={}).forged().audit()
    report = " ".join(violation.sentence for violation in alone.violations)
    assert (
        "already had this batch" in report
        or "its slot and clock require" in report
        or "is not one of the run's" in report
    )


# ── updates that a restore lost ───────────────────────────────────────────────────────────────────────────────────────


@cache
def restored(consistency: str) -> Recorded:
    """A run without replicas of which one server is killed after the first snapshots."""
    spec = SimulationSpec(
        workers=4,
        steps=STEPS,
        consistency=consistency,
        shards=2,
        seed=5,
        compute=ComputeModel(step_s=0.1, spread=0.5),
        network=NetworkModel(latency_s=1e-3),
        timing=Timing(start_s=0.2, snapshot_every_s=0.3, limit_s=600.0),
        faults=(Kill(at_s=0.75, role=FaultRole.SERVER, pick=1),),
    )
    witness = Witness(PROMISES[consistency])
    found = record(spec, witness)
    assert witness.at_risk, "no shard went back to a snapshot"
    return found


@pytest.mark.parametrize("consistency", PROMISES)
def test_what_a_restore_lost_is_counted(consistency: str) -> None:
    found = restored(consistency)
    require(found, Verdict.RESTORED)
    assert found.run is not None
    lacking = 0
    for store in found.run.stores:
        assert isinstance(store, LedgerStore)
        lacking += STEPS - len({mark.batch for group in store.groups for mark in group})
    assert found.audit().lost >= lacking > 0
    if not found.policy.stepwise:  # a step may have lost some of its parts
        assert found.audit().lost == lacking
    assert found.audit().words == f"restored, {found.audit().lost} lost"
    require(found.with_rows(without_last_step, files=slice(-1, None)), Verdict.INCOMPLETE)


def without_last_step(rows: list[Row]) -> list[Row]:
    """Behind the last step there may be rows of updates that came too late; after a restore nobody misses those."""
    return rows[: max(number for number, row in enumerate(rows) if isinstance(row, StepRow))]


@pytest.mark.parametrize("consistency", ["bounded:3", "async", "softsync:2"])
def test_what_a_restore_lost_and_does_not_say(consistency: str) -> None:
    found = restored(consistency)
    silent = found.with_rows(
        lambda rows: [row for row in rows if not isinstance(row, LostRow)], shards=range(2)
    )
    require(silent, Verdict.BROKEN)
