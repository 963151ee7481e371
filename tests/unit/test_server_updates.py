"""What a run leaves in its folder of updates comes back as it was; anything damaged is named."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from disks import fill, small_disk
from manyhands.errors import DataError, UserError
from manyhands.strategies.common.tables.row_tables import RowGradient
from manyhands.strategies.ps.digests import gradient_hash, layout_digest
from manyhands.strategies.ps.log_rows import LateRow, row_to_json
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.update_files import (
    ComputedRow,
    Recorder,
    RunRecord,
    ShardRecorder,
    read_computed,
    read_logs,
    read_record,
    write_record,
)

RECORD = RunRecord(
    torch="2.13.0", cpu="AVX2", threads=1, strategy="ps", workers=2, steps=9, seed=0, device="cpu", autocast=False,
    layout="ab",
)  # fmt: skip
ROW = ComputedRow(
    process=4, slot=1, member=5, clock=0, batch=3, part=0, parts=1, versions=(2, 3), rows_versions=(-1, 4),
    gradients=("0f", "10"),
)  # fmt: skip


def test_what_was_recorded_is_read_again(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD)
    recorder = Recorder(tmp_path, 4)
    later = ROW._replace(clock=1)
    assert [recorder.write(ROW), recorder.write(later)] == [None, None]
    recorder.close()
    recorder.close()
    assert read_record(tmp_path) == RECORD
    assert read_computed(tmp_path) == {4: [ROW, later]}
    assert ROW.reads == {(0, 2), (1, 3), (1, 4)}


def test_a_run_without_a_directory_records_nothing() -> None:
    assert Recorder(None, 1).log is None


def test_a_disk_that_takes_no_record_ends_the_recording_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "updates").write_text("a file where the folder should be")
    recorder = Recorder(tmp_path, 4)
    sentence = recorder.write(ROW)
    assert sentence is not None
    assert "worker.process-4.jsonl could not be written" in sentence
    assert recorder.log is None


def test_a_full_disk_ends_the_log_of_a_shard_at_a_whole_row_and_says_so_once(tmp_path: Path) -> None:
    rows = [LateRow(shard=0, term=0, sequence=number, slot=0, clock=number) for number in range(200)]
    with small_disk(tmp_path / "disk", 32 << 10) as disk:
        write_record(disk, RECORD)
        recorder = ShardRecorder(disk, 1)
        assert recorder.write(rows[0]) is None
        ballast = fill(disk)
        said = [sentence for row in rows[1:] if (sentence := recorder.write(row)) is not None]
        assert len(said) == 1
        assert (
            "shard-0.member-1.jsonl could not be written: No space left on device: its recording ends"
            in said[0]
        )
        ballast.unlink()
        assert recorder.write(rows[0]) is None, "nothing follows a gap"
        assert recorder.sync(0) is None
        assert recorder.kept == {}
        recorder.close()
        kept = read_logs(disk).files[0][0]
        assert kept == rows[: len(kept)]
        assert 1 < len(kept) < 200


def test_a_torn_row_of_an_earlier_life_is_not_glued_to_the_next(tmp_path: Path) -> None:
    row = LateRow(shard=0, term=0, sequence=1, slot=0, clock=1)
    write_record(tmp_path, RECORD)
    for name in ("shard-0.member-1.jsonl", "worker.process-4.jsonl"):
        (tmp_path / "updates" / name).write_text('{"row":"la')
    server, worker = ShardRecorder(tmp_path, 1), Recorder(tmp_path, 4)
    assert (server.write(row), worker.write(ROW)) == (None, None)
    assert (server.kept, worker.kept) == ({"shard-0.member-1.jsonl": 1}, {"worker.process-4.jsonl": 1})
    server.close()
    worker.close()
    assert read_logs(tmp_path).files == {0: [[row]]}
    assert read_logs(tmp_path).notes == ()
    assert read_computed(tmp_path) == {4: [ROW]}


def test_logs_are_found_by_shard_and_a_cut_last_line_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "updates"
    folder.mkdir()
    row = LateRow(shard=1, term=0, sequence=4, slot=2, clock=7)
    line = row_to_json(row)
    (folder / "shard-1.member-2.jsonl").write_text(f"{line}\n{line[:20]}")
    (folder / "shard-1.member-10.jsonl").write_text(f"{line}\n")
    logs = read_logs(tmp_path)
    assert logs.files == {1: [[row], [row]]}
    assert logs.notes == (
        "shard-1.member-2.jsonl: its last line is incomplete, as when a process is killed, and was skipped",
    )
    (folder / "shard-1.member-2.jsonl").write_text(f"{line}\nnonsense\n{line}\n")
    with pytest.raises(DataError, match=r"shard-1\.member-2\.jsonl, line 2: .* not a valid JSON row"):
        read_logs(tmp_path)


def test_a_row_in_the_file_of_another_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "updates"
    folder.mkdir()
    line = row_to_json(LateRow(shard=1, term=0, sequence=4, slot=2, clock=7))
    (folder / "shard-0.member-2.jsonl").write_text(f"{line}\n")
    with pytest.raises(DataError, match=r"shard-0\.member-2\.jsonl, line 1: shard=1 in the log of shard 0"):
        read_logs(tmp_path)
    (folder / "worker.process-5.jsonl").write_text(json.dumps(ROW._asdict()) + "\n")
    with pytest.raises(DataError, match=r"process-5\.jsonl, line 1: process=4 in the log of process 5"):
        read_computed(tmp_path)
    (folder / "worker.process-5.jsonl").write_text(
        json.dumps(ROW._asdict() | {"versions": [1, 10**30]}) + "\n"
    )
    with pytest.raises(
        DataError, match=r"line 1: .*versions=\(1, 1000.* must be tuple\[int, ...\] from 0 to"
    ):
        read_computed(tmp_path)
    greatest = RECORD._replace(seed=2**64 - 1, steps=0)
    write_record(tmp_path, greatest)
    assert read_record(tmp_path) == greatest


def test_what_is_not_there_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no updates/run\.json"):
        read_record(tmp_path)
    with pytest.raises(UserError, match="has no logs of updates"):
        read_logs(tmp_path)
    write_record(tmp_path, RECORD)
    file = tmp_path / "updates" / "run.json"
    table = json.loads(file.read_text())
    for changed, sentence in (
        ({**table, "threads": "one"}, "threads='one' must be int"),
        ({**table, "threads": 0}, "threads=0 must be int from 1 to"),
        ({**table, "workers": -1}, "workers=-1 must be int from 1"),
        ({**table, "steps": -1}, "steps=-1 must be int from 0"),
        (
            {**table, "steps": 10**30},
            r"run\.json: steps=1000000000000000000000000000000 must be int from 0 to",
        ),
        ({**table, "seed": 2**64}, "seed=18446744073709551616 must be int from 0"),
        ({**table, "strategy": 7}, "strategy=7 must be str"),
        ({**table, "autocast": 1}, "autocast=1 must be bool"),
        ({**table, "version": 2}, "does not have the format 'manyhands updates' version 1"),
        ({key: table[key] for key in table if key != "seed"}, "exactly the fields"),
    ):
        file.write_text(json.dumps(changed))
        with pytest.raises(DataError, match=sentence):
            read_record(tmp_path)
    (tmp_path / "updates" / "worker.process-1.jsonl").write_text('{"process":1}\n')
    with pytest.raises(
        DataError, match=r"worker\.process-1\.jsonl, line 1: .* exactly the fields process, slot"
    ):
        read_computed(tmp_path)


# ── hashes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def layout_of(*sizes: int, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam) -> FlatLayout:
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
    return FlatLayout.of(model, optimizer(model.parameters()), 1)


def test_a_gradient_is_what_was_reached_and_nothing_else() -> None:
    layout = layout_of(5, 30)
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    gradient = layout.range_in(memory, 0)
    both, first = torch.ones(64, dtype=torch.uint8), torch.tensor([1, 0], dtype=torch.uint8)
    whole, part = gradient_hash(both, gradient), gradient_hash(first, gradient)
    assert whole != part
    gradient.pieces[1][3] = 1.0  # not reached by the second
    assert gradient_hash(both, gradient) != whole
    assert gradient_hash(first, gradient) == part
    gradient.pieces[0][4] = -0.0  # a bit is a bit
    assert gradient_hash(first, gradient) != part
    rows = {"table": RowGradient(rows=torch.tensor([3]), values=torch.ones(1, 2))}
    others = {"table": RowGradient(rows=torch.tensor([4]), values=torch.ones(1, 2))}
    hashes = {gradient_hash(both, gradient, one) for one in (None, rows, others)}
    assert len(hashes) == 3


def test_a_layout_is_known_by_its_digest() -> None:
    assert layout_digest(layout_of(5, 30)) == layout_digest(layout_of(5, 30))
    assert layout_digest(layout_of(5, 30)) != layout_digest(layout_of(30, 5))
