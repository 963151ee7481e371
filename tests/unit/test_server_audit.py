"""The auditor: clean logs of a driven shard pass, and every planted violation is caught and named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import DataError
from manyhands.strategies.common.consistency import parse_consistency
from manyhands.strategies.ps.actions import Action, Apply, Log, SendMessage
from manyhands.strategies.ps.audit import Audit, Verdict, audit, audit_run
from manyhands.strategies.ps.log_rows import (
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
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.ps_messages import Parameters, Push, Read, ShardView, SlotView, View, WorkKind
from manyhands.strategies.ps.shard_replica import ShardReplica
from manyhands.strategies.ps.update_files import RunRecord, read_record, write_record

SLOTS = (0, 1, 2)


def drive(consistency: str, steps: int = 30, order: tuple[int, ...] = SLOTS) -> list[Row]:
    """The log of one shard whose workers take turns in `order`, to the end of the run."""
    policy = parse_consistency(consistency)
    shard = ShardReplica(ShardConfig(shard=0, num_shards=1, policy=policy, steps=steps, slots=SLOTS), 1)
    rows: list[Row] = []
    work: dict[int, Parameters] = {}

    def take(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Log | Apply):
                rows.append(action.row)
            elif isinstance(action, SendMessage) and isinstance(action.message, Parameters):
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
            update = row.updates[0]._replace(**fields)  # type: ignore[arg-type]
            row = row._replace(updates=(update, *row.updates[1:]))
        result.append(row)
    return result


def test_an_update_applied_twice_is_named() -> None:
    rows = drive("async")
    [twice] = [row for row in rows if isinstance(row, StepRow) and row.version == 8]
    update = twice.updates[0]
    found = check(planted(rows, 9, slot=update.slot, clock=update.clock), "async")
    assert found.violations[0].sentence == (
        f"shard 0: version 9, slot {update.slot}, clock {update.clock}: applied as version 9, but it was already "
        "applied as version 8"
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
        "shard 0: version 3, slot 2, clock 2: it read version 2, which lacks clock 0 of slot 0; bounded:1 requires all "
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
        ({"batch": 30}, "batch 30 is not one of the run's 30"),
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
    assert "aware:async scales this step by 0.5" in found.violations[0].sentence


def test_two_replicas_tell_one_story() -> None:
    rows = drive("bounded:2")
    late_start = [row for row in rows if row.sequence > 9]
    slots = [row._replace(sequence=9) for row in rows if isinstance(row, SlotsRow)]
    early_end = [row for row in rows if row.sequence < 20]
    found = audit({0: [[*slots, *late_start], early_end]}, parse_consistency("bounded:2"), 30)
    assert found.violations == ()
    assert found.shards[0].versions == 29

    other = planted(early_end, 12, member=99)
    found = audit({0: [rows, other]}, parse_consistency("bounded:2"), 30)
    [violation] = found.violations
    assert "two replicas wrote different rows for version 12 (slot" in violation.sentence


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
        "shard 0: version 4, slot 0, clock 5: staleness 0 is logged, but it read version 3, and the "
        "restore kept only 1: its staleness is 2"
    ]
    found = audit({0: [[*before, step(4, 4, 0, 2)]]}, parse_consistency("async"), 30)
    assert "but it was already applied as version 3" in found.violations[0].sentence


def test_the_bound_is_judged_where_the_log_still_says_what_was_read() -> None:
    slots = SlotsRow(shard=0, term=0, sequence=0, start=0, base=0, slots=(0, 1))
    restored = RestoredRow(shard=0, term=4, sequence=4, version=4)
    rows = [slots, *(step(v + 1, v + 1, v % 2, v // 2) for v in range(4)), restored]
    policy = parse_consistency("bounded:1")
    unknown = step(5, 6, 0, 4, term=4, read=6)
    lost = LostRow(shard=0, term=4, sequence=5, slot=0, first=2, until=4)
    assert audit({0: [[*rows, lost, unknown]]}, policy, 30).clean, (
        "of a version that is not in the log any more"
    )
    known = step(5, 6, 0, 4, term=4, read=3, stale=1)
    [violation] = audit({0: [[*rows, lost, known]]}, policy, 30).violations
    assert "which lacks clock 1 of slot 1; bounded:1 requires all below 3" in violation.sentence


def test_violations_name_the_shard() -> None:
    bad = step(2, 1, 0, 0)._replace(shard=5)
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


def damaged(**fields: object) -> str:
    """The line of a step, with another value in it or in its update."""
    table = json.loads(row_to_json(step(3, 3, 0, 0)))
    for name, value in fields.items():
        (table if name in table else table["updates"][0])[name] = value
    return json.dumps(table)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"version": -1}, "version=-1 must be int from 0 to"),
        (
            {"version": 10**30},
            "version=1000000000000000000000000000000 must be int from 0 to 9007199254740992",
        ),
        ({"sequence": 2**63}, "sequence=9223372036854775808 must be int"),
        ({"rate": float("nan")}, "rate=nan must be float"),
        ({"rate": -(10**400)}, "rate=-10000.*… must be float within ±1e"),
        ({"updates": []}, r"updates=\(\) must be .* with at least one item"),
        ({"clock": 2**64}, "clock=18446744073709551616 must be int from 0"),
        ({"batch": -1}, "batch=-1 must be int from 0"),
        ({"parts": 0}, "update 0: parts=0 must be int from 1"),
        ({"rows_version": -2}, "rows_version=-2 must be int from -1"),
        ({"staleness": -(10**400)}, "staleness=-10000.*… must be int from -9007199254740992"),
        ({"factor": float("inf")}, "factor=inf must be float"),
        ({"weight": 10**400}, "weight=10000.* must be float from .* to 1, or 0"),
        ({"weight": -0.5}, "weight=-0.5 must be float"),
        ({"weight": 1e-320}, "weight=1e-320 must be float"),
        ({"member": "A" * 3000}, "member='AAA.*AAA… must be int"),
    ],
)
def test_a_number_that_no_log_has_is_refused_by_its_name(fields: dict[str, object], says: str) -> None:
    with pytest.raises(DataError, match=f"a step row, .*{says}") as caught:
        row_from_json(damaged(**fields))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "fields", [{}, {"weight": 0}, {"weight": 1}, {"staleness": -1}, {"rows_version": -1}, {"version": 2**53}]
)
def test_a_number_that_is_only_unusual_is_left_to_the_audit(fields: dict[str, object]) -> None:
    assert isinstance(row_from_json(damaged(**fields)), StepRow)


# ── rows whose numbers say much more than the log has ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("consistency", CONSISTENCIES)
def test_a_run_that_was_to_be_endless_is_audited_by_its_rows(consistency: str) -> None:
    found = check(drive(consistency), consistency, 2**53)
    assert found.clean
    assert found.missing == (
        f"shard 0: its log has 30 of the run's {2**53} batches; batch 30 and {2**53 - 31} more are missing",
    )
    assert found.shards[0].batches == 30


@pytest.mark.parametrize("consistency", CONSISTENCIES)
def test_a_vast_clock_is_one_sentence(consistency: str) -> None:
    rows = planted(drive(consistency), 9, clock=2**52)
    sentences = [violation.sentence for violation in check(rows, consistency).violations]
    assert len([one for one in sentences if "neither applied nor reported" in one]) <= 2
    assert any(f"to {2**52 - 1}: they were neither applied nor reported" in one for one in sentences)


@pytest.mark.parametrize("consistency", CONSISTENCIES)
@pytest.mark.parametrize("version", [0, 2, 2**52])
def test_a_version_that_is_not_the_next_is_named(consistency: str, version: int) -> None:
    rows = drive(consistency)
    last = max(number for number, row in enumerate(rows) if isinstance(row, StepRow))
    row = rows[last]
    assert isinstance(row, StepRow)
    rows[last] = row._replace(version=version)
    sentences = [violation.sentence for violation in check(rows, consistency).violations]
    assert f"shard 0: version {version} follows version {row.version - 1}" in sentences


@pytest.mark.parametrize("consistency", CONSISTENCIES)
def test_slots_of_a_vast_clock_take_no_time(consistency: str) -> None:
    rows = drive(consistency)
    for start in (2**52, 2**53):
        rows.append(SlotsRow(shard=0, term=0, sequence=99, start=start, base=0, slots=(7, 2**40)))
    check(rows, consistency)


@pytest.mark.parametrize("consistency", CONSISTENCIES)
def test_more_lost_clocks_than_the_run_has_batches_are_named(consistency: str) -> None:
    lost = LostRow(shard=0, term=0, sequence=99, slot=1, first=40, until=40 + 2**24)
    found = check([*drive(consistency), lost], consistency)
    [sentence] = [one.sentence for one in found.violations if "were lost" in one.sentence]
    assert (
        sentence
        == f"shard 0: entry 99: clocks 40 to {39 + 2**24} of slot 1 were lost, but the run has only 30 batches"
    )
    assert found.shards[0].lost == 0


def test_two_replicas_of_which_one_wrote_a_step_of_nothing() -> None:
    rows = drive("async")
    [row] = [row for row in rows if isinstance(row, StepRow) and row.version == 5]
    other = [row._replace(updates=()) if one is row else one for one in rows]
    for files in ([rows, other], [other, rows]):
        found = audit({0: files}, parse_consistency("async"), 30)
        assert any("different rows for" in one.sentence for one in found.violations)


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run whose one shard took its steps as `drive` has it."""
    config = {"task": "t", "strategy": "ps consistency=async", "workers": 3, "steps": 30, "seed": 0,
              "batch_size": 4, "samples": 10, "parameters": {}}  # fmt: skip
    with RunDirectory.create(tmp_path / "run", config) as directory:
        directory.write_summary({"servers": [{"shard": 0, "version": 29}]})
    record = RunRecord(torch="", cpu="", threads=1, strategy="ps consistency=async", workers=3, steps=30, seed=0,
                       device="cpu", autocast=False, layout="")  # fmt: skip
    write_record(tmp_path / "run", record)
    log = "".join(f"{row_to_json(row)}\n" for row in drive("async"))
    (tmp_path / "run" / "updates" / "shard-0.member-1.jsonl").write_text(log)
    return tmp_path / "run"


def test_the_directory_of_a_run_is_audited(run: Path) -> None:
    found = audit_run(run).found
    assert found.shards[0].batches == 30
    assert [one.sentence for one in found.violations][:1] == [
        "shard 0: version 1, slot 0, clock 0: no worker recorded that member 2 computed it"
    ]


@pytest.mark.parametrize("odd", [0, -1, 10**30, 2**63, True, "x", [], 1.5], ids=repr)
@pytest.mark.parametrize("name", ["samples", "batch_size"])
def test_a_configuration_of_another_size_is_refused_by_name(run: Path, name: str, odd: object) -> None:
    table = json.loads((run / "config.json").read_text())
    table["config"][name] = odd
    (run / "config.json").write_text(json.dumps(table))
    with pytest.raises(DataError, match=rf"config\.json: {name} is {re.escape(repr(odd))}; it must be"):
        audit_run(run)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, ""),
        ({"strategy": "ps consistency=async link=tcp"}, ""),
        ({"strategy": "ps"}, "strategy=ps, but config.json says strategy=ps consistency=async"),
        ({"strategy": "what"}, "strategy=what, but config.json says strategy=ps consistency=async"),
        ({"workers": 2}, "workers=2, but config.json says workers=3"),
        ({"seed": 1}, "seed=1, but config.json says seed=0"),
    ],
)
def test_a_record_of_another_run_than_the_configuration_is_reported(
    run: Path, fields: dict[str, Any], says: str
) -> None:
    write_record(run, read_record(run)._replace(**fields))
    report = [one.sentence for one in audit_run(run).found.violations if "run.json" in one.sentence]
    assert report == ([f"updates/run.json says {says}"] if says else [])


def test_a_record_from_before_a_run_was_to_be_longer_is_incomplete(run: Path) -> None:
    assert not any("run.json" in sentence for sentence in audit_run(run).found.missing)
    write_record(run, read_record(run)._replace(steps=20))
    sentence = "updates/run.json is of a run of 20 steps, but config.json says steps=30"
    assert audit_run(run).found.missing[0] == sentence


@pytest.mark.parametrize("consistency", ["sync", "bounded:2", "async", "softsync:1", "sync:1"])
def test_a_sequence_number_that_comes_twice_is_named(consistency: str) -> None:
    rows = drive(consistency)
    steps = [at for at, row in enumerate(rows) if isinstance(row, StepRow)]
    first, second = steps[4], steps[5]
    row = rows[second]
    assert isinstance(row, StepRow)
    again = row._replace(sequence=rows[first].sequence)
    found = check([*rows[:second], again, *rows[second + 1 :]], consistency)
    assert not found.clean
    assert (
        f"its sequence number {again.sequence} is already used by version 5" in found.violations[0].sentence
    )
    back = row._replace(sequence=rows[first].sequence - 1)
    found = check([*rows[:second], back, *rows[second + 1 :]], consistency)
    assert f"entry {back.sequence} follows entry" in found.violations[0].sentence


def test_a_row_with_one_key_twice_is_refused() -> None:
    good = row_to_json(LateRow(shard=1, term=2, sequence=3, slot=4, clock=5))
    for name in ("row", "clock"):
        line = good.replace(f'"{name}":', f'"{name}":7,"{name}":')
        with pytest.raises(DataError, match=f"the key '{name}' appears twice"):
            row_from_json(line)


def test_every_file_with_one_key_twice_is_refused(run: Path) -> None:
    files = sorted((run / "updates").iterdir())
    assert len(files) > 1
    for path in files:
        text = path.read_text()
        name = re.search(r'"(\w+)": ?', text)
        assert name is not None
        path.write_text(text.replace(name[0], f"{name[0]}1,{name[0]}", 1))
        with pytest.raises(DataError, match=f"the key '{name[1]}' appears twice"):
            audit_run(run)
        path.write_text(text)


ODD: tuple[object, ...] = (
    None,
    True,
    -1,
    10**400,
    1e308,
    "x",
    "\ud800",
    [],
    [[]],
    {},
    {"shard": 0},
    float("nan"),
)


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_of_a_summary_of_another_kind_an_audit_uses_what_is_of_the_right_one(run: Path, odd: object) -> None:
    def found(summary: object) -> tuple[set[str], Audit]:
        (run / "summary.json").write_text(json.dumps(summary))
        report = audit_run(run).found
        return {*report.missing, *(one.sentence for one in report.violations)}, report

    known, nothing = found({})
    is_whole = type(odd) is int
    for summary, more in (
        ({"servers": odd, "recorded": odd, "unrecorded": odd}, set(map(str, odd)) if odd == [[]] else set()),
        (
            {"servers": [odd], "recorded": {"a": odd, "\ud800": 3}, "unrecorded": [odd]},
            {str(odd), "\ud800 has 0 of the 3 rows that were written"},
        ),
        ({"servers": [{"shard": odd, "version": odd}, {"shard": 0, "version": odd}]}, set()),
    ):
        said, report = found(summary)
        added = said - known
        assert known <= said
        assert more <= added
        # an integer is a number of rows, or a version; the log has neither
        expected = is_whole and summary["servers"] != odd
        assert any(str(odd) in one for one in added - more) == bool(added - more) == expected
        assert report.shards == nothing.shards, "what the log tells stays"
        assert report.verdict in (Verdict.INCOMPLETE, Verdict.BROKEN)


def test_rows_survive_json() -> None:
    row = LateRow(shard=1, term=2, sequence=3, slot=4, clock=5)
    assert row_to_json(row) == '{"row":"late","shard":1,"term":2,"sequence":3,"slot":4,"clock":5}'
    assert row_from_json(row_to_json(row)) == row
