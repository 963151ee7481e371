"""The auditor: clean logs of a driven shard pass, and every planted violation is caught and named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manyhands.consistency.parse import parse_consistency
from manyhands.errors import DataError
from manyhands.server.actions import Action, Log, Send
from manyhands.server.audit import Audit, audit
from manyhands.server.log import (
    LateRow,
    LostRow,
    RestoredRow,
    Row,
    SkippedRow,
    SlotsRow,
    StepRow,
    UpdateRow,
    row_from_json,
    row_to_json,
)
from manyhands.server.messages import Parameters, Push, Read, ShardView, SlotView, View, WorkKind
from manyhands.server.replica import ShardReplica
from manyhands.server.steps import ShardConfig

SLOTS = (0, 1, 2)


def drive(consistency: str, steps: int = 30, order: tuple[int, ...] = SLOTS) -> list[Row]:
    """The log of one shard whose workers take turns in `order`, to the end of the run."""
    policy = parse_consistency(consistency)
    shard = ShardReplica(ShardConfig(shard=0, num_shards=1, policy=policy, steps=steps, slots=SLOTS), 1)
    rows: list[Row] = []
    work: dict[int, Parameters] = {}

    def take(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Log):
                rows.append(action.row)
            elif isinstance(action, Send) and isinstance(action.message, Parameters):
                work[action.message.slot] = action.message

    place = ShardView(shard=0, epoch=1, primary=1)
    members = tuple(SlotView(slot=slot, member=slot + 2) for slot in SLOTS)
    take(shard.view(View(epoch=1, shards=(place,), slots=members)))
    for slot in SLOTS:
        take(shard.handle(Read(shard=0, slot=slot, member=slot + 2, clock=0), slot + 2))
    turns = 0
    while any(answer.work.kind is WorkKind.TRAIN for answer in work.values()):
        slot = order[turns % len(order)]
        turns += 1
        answer = work.pop(slot, None)
        if answer is None or answer.work.kind is not WorkKind.TRAIN:
            continue
        task = answer.work
        push = Push(
            shard=0,
            slot=slot,
            member=slot + 2,
            clock=task.clock,
            read_version=answer.version,
            batch=task.batch,
            part=task.part,
            parts=task.parts,
            weight=1 / task.parts,
            skip=task.batch == 3,
        )
        take(shard.handle(push, slot + 2))
        take(shard.handle(Read(shard=0, slot=slot, member=slot + 2, clock=task.clock + 1), slot + 2))
    return rows


def check(rows: list[Row], consistency: str, steps: int = 30) -> Audit:
    return audit({0: [rows]}, parse_consistency(consistency), steps)


CONSISTENCIES = ["sync", "sync:1", "bounded:1", "bounded:3", "async", "softsync:1", "softsync:3"]


@pytest.mark.parametrize("order", [SLOTS, (2, 2, 2, 0, 1, 1)])
@pytest.mark.parametrize("consistency", [*CONSISTENCIES, *(f"aware:{text}" for text in CONSISTENCIES)])
def test_what_a_shard_logs_is_clean_and_complete(consistency: str, order: tuple[int, ...]) -> None:
    rows = drive(consistency, order=order)
    assert [row_from_json(row_to_json(row)) for row in rows] == rows
    found = check(rows, consistency)
    assert found.violations == ()
    [summary] = found.shards
    parted = parse_consistency(consistency).stepwise
    assert summary.applied + summary.skipped + summary.late == (90 if parted else 30)
    assert summary.skipped
    assert sum(summary.staleness.values()) == summary.applied


def planted(rows: list[Row], version: int, **fields: object) -> list[Row]:
    """The log with another value in the first update of one step."""
    result: list[Row] = []
    for row in rows:
        if isinstance(row, StepRow) and row.version == version:
            update = replace(row.updates[0], **fields)  # type: ignore[arg-type]
            row = replace(row, updates=(update, *row.updates[1:]))
        result.append(row)
    return result


def test_an_update_applied_twice_is_named() -> None:
    rows = drive("async")
    [twice] = [row for row in rows if isinstance(row, StepRow) and row.version == 8]
    update = twice.updates[0]
    found = check(planted(rows, 9, slot=update.slot, clock=update.clock), "async")
    assert found.violations[0].sentence == (
        f"shard 0: version 9, slot {update.slot}, clock {update.clock}: applied as version 9, although it was applied "
        "as version 8 already"
    )


def test_an_update_that_vanished_is_named() -> None:
    rows = drive("bounded:2")
    found = check([row for row in rows if not isinstance(row, SkippedRow)], "bounded:2")
    assert found.violations[0].sentence.startswith(
        "shard 0: version 29, slot 0, clock 1: it was neither applied nor reported"
    )


def test_a_read_beyond_the_bound_is_named() -> None:
    rows = drive("bounded:3", order=(2, 2, 2, 0, 1, 1))
    assert check(rows, "bounded:3").clean
    found = check(rows, "bounded:1")
    [first, *_] = found.violations
    assert first.shard == 0
    assert first.sentence == (
        "shard 0: version 3, slot 2, clock 2: it read version 2, which lacks clock 0 of slot 0; bounded:1 includes all "
        "below 1"
    )


def test_a_read_one_version_too_early_is_caught_under_sync() -> None:
    rows = planted(drive("sync"), 10, read_version=8, staleness=1)
    sentences = [violation.sentence for violation in check(rows, "sync").violations]
    assert len(sentences) == 1
    assert "version 10, slot 0, clock 10: it read version 8" in sentences[0]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"staleness": 5}, "staleness 5 is logged"),
        ({"read_version": 50}, "staleness"),
        ({"batch": 30}, "batch 30 is none of the run's 30"),
        ({"factor": 0.5}, "scaled by"),
    ],
)
def test_a_wrong_entry_is_caught(fields: dict[str, object], says: str) -> None:
    found = check(planted(drive("async"), 5, **fields), "async")
    assert says in found.violations[0].sentence
    assert "version 5, slot" in found.violations[0].sentence


def test_a_missing_version_is_caught() -> None:
    rows = [row for row in drive("async") if not (isinstance(row, StepRow) and row.version == 4)]
    assert check(rows, "async").violations[0].sentence == "shard 0: version 5 follows version 3"


def test_rates_that_the_policy_does_not_ask_for_are_caught() -> None:
    found = check(drive("async", order=(2, 2, 2, 0, 1, 1)), "aware:async")
    assert "where aware:async asks for 0.5" in found.violations[0].sentence


def test_two_replicas_tell_one_story() -> None:
    rows = drive("bounded:2")
    late_start = [row for row in rows if row.sequence > 9]
    slots = [replace(row, sequence=9) for row in rows if isinstance(row, SlotsRow)]
    early_end = [row for row in rows if row.sequence < 20]
    found = audit({0: [[*slots, *late_start], early_end]}, parse_consistency("bounded:2"), 30)
    assert found.violations == ()
    assert found.shards[0].versions == 29

    other = planted(early_end, 12, member=99)
    found = audit({0: [rows, other]}, parse_consistency("bounded:2"), 30)
    [violation] = found.violations
    assert "two replicas wrote different rows about version 12 (slot" in violation.sentence


def step(
    version: int,
    sequence: int,
    slot: int,
    clock: int,
    *,
    term: int = 0,
    read: int | None = None,
    read_term: int = 0,
    stale: int = 0,
) -> StepRow:
    update = UpdateRow(
        slot=slot,
        clock=clock,
        batch=0,
        part=0,
        parts=1,
        member=2,
        read_version=version - 1 if read is None else read,
        staleness=stale,
        weight=1.0,
        factor=1.0,
        read_term=read_term,
    )
    return StepRow(shard=0, term=term, sequence=sequence, version=version, rate=1.0, updates=(update,))


def test_after_a_restore_the_rows_beyond_the_snapshot_did_not_happen() -> None:
    before = [step(1, 1, 0, 0), step(2, 2, 0, 1), step(3, 3, 0, 2)]
    after = [
        RestoredRow(shard=0, term=4, sequence=1, version=1),
        LostRow(shard=0, term=4, sequence=2, slot=0, first=1, until=3),
        step(2, 3, 0, 3, term=4, read=3),
        step(3, 4, 0, 4, term=4, read=3, stale=1),
        step(4, 5, 0, 5, term=4, read=3, read_term=4),
    ]
    found = audit({0: [after, before]}, parse_consistency("async"), 30)
    assert found.violations == ()
    [summary] = found.shards
    assert (summary.versions, summary.applied, summary.lost, summary.restores) == (4, 4, 2, 1)
    dishonest = [*after[:-1], step(4, 5, 0, 5, term=4, read=3)]
    found = audit({0: [dishonest, before]}, parse_consistency("async"), 30)
    assert [violation.sentence for violation in found.violations] == [
        "shard 0: version 4, slot 0, clock 5: staleness 0 is logged, but it read version 3 of a life "
        "of which 1 were kept, which makes 2"
    ]
    found = audit({0: [[*before, step(4, 4, 0, 2)]]}, parse_consistency("async"), 30)
    assert "although it was applied as version 3" in found.violations[0].sentence


def test_the_bound_is_judged_where_the_log_still_says_what_was_read() -> None:
    slots = SlotsRow(shard=0, term=0, sequence=0, start=0, base=0, slots=(0, 1))
    restored = RestoredRow(shard=0, term=4, sequence=4, version=4)
    rows = [slots, *(step(v + 1, v + 1, v % 2, v // 2) for v in range(4)), restored]
    policy = parse_consistency("bounded:1")
    unknown = step(5, 5, 0, 4, term=4, read=6)
    lost = LostRow(shard=0, term=4, sequence=5, slot=0, first=2, until=4)
    assert audit({0: [[*rows, lost, unknown]]}, policy, 30).clean, (
        "of a version that is not in the log any more"
    )
    known = step(5, 5, 0, 4, term=4, read=3, stale=1)
    [violation] = audit({0: [[*rows, lost, known]]}, policy, 30).violations
    assert "which lacks clock 1 of slot 1; bounded:1 includes all below 3" in violation.sentence


def test_violations_name_the_shard() -> None:
    bad = replace(step(2, 1, 0, 0), shard=5)
    found = audit({5: [[bad]], 0: [drive("async")]}, parse_consistency("async"), 30)
    assert [(violation.shard, violation.sentence[:8]) for violation in found.violations] == [(5, "shard 5:")]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        '{"row":"stepp"}',
        '{"row":"late","shard":0,"term":0,"sequence":1,"slot":0}',
        '{"row":"late","shard":0,"term":0,"sequence":1,"slot":0,"clock":"1"}',
        '{"row":"late","shard":0,"term":0,"sequence":1,"slot":0,"clock":true}',
        '{"row":"slots","shard":0,"term":0,"sequence":1,"start":0,"base":0,"slots":["a"]}',
        '{"row":"step","shard":0,"term":0,"sequence":1,"version":1,"rate":1.0,"updates":[1]}',
    ],
)
def test_a_damaged_line_is_refused(line: str) -> None:
    with pytest.raises(DataError, match=r"row|not JSON"):
        row_from_json(line)


def test_rows_survive_json() -> None:
    row = LateRow(shard=1, term=2, sequence=3, slot=4, clock=5)
    assert row_to_json(row) == '{"row":"late","shard":1,"term":2,"sequence":3,"slot":4,"clock":5}'
    assert row_from_json(row_to_json(row)) == row
