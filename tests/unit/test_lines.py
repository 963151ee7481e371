"""Files of lines: whole lines only, whatever the disk takes and whatever an earlier writer left."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from disks import fill, small_disk
from manyhands.data.store.atomic import Backlog, LineFile, WriteFailed


def test_a_torn_tail_is_dropped_on_opening(tmp_path: Path) -> None:
    for left, kept in (
        (b"one\ntwo\nth", b"one\ntwo\n"),
        (b"one\n\0\0\0\0", b"one\n"),
        (b"o", b""),
        (b"", b""),
    ):
        path = tmp_path / "lines"
        path.write_bytes(left)
        file = LineFile(path)
        file.append(b"new\n")
        file.close()
        assert path.read_bytes() == kept + b"new\n"
        assert file.num_lines == kept.count(b"\n") + 1


def test_a_tail_longer_than_a_block_is_dropped_too(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"x\n" * 50_000 + b"y" * 200_000)
    file = LineFile(path)
    file.append(b"new\n")
    file.close()
    assert file.num_lines == 50_001
    assert path.read_bytes() == b"x\n" * 50_000 + b"new\n"


def test_lines_of_earlier_lives_count_before_one_is_added(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert LineFile(path).num_lines == 0
    assert not path.exists()
    path.write_bytes(b"one\ntwo\nth")
    file = LineFile(path)
    assert file.num_lines == 2
    assert path.read_bytes() == b"one\ntwo\nth", "who only counts changes nothing"
    file.append(b"new\n")
    file.close()
    assert file.num_lines == LineFile(path).num_lines == 3


def test_a_disk_that_takes_a_part_of_a_line_keeps_none_of_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        file = LineFile(disk / "lines")
        file.append(b"a" * 4000 + b"\n")
        fill(disk)
        with pytest.raises(WriteFailed, match="No space left on device"):
            file.append(b"b" * 4000 + b"\n")  # of which 95 bytes fit into the page that is there
        assert (disk / "lines").read_bytes() == b"a" * 4000 + b"\n"
        file.append(b"c\n")
        file.sync()
        file.close()
        assert file.num_lines == 2


def test_several_lines_are_taken_together_or_not_at_all(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        file = LineFile(disk / "lines")
        file.append(b"a" * 4000 + b"\n")
        fill(disk)
        with pytest.raises(WriteFailed, match="No space left on device"):
            file.append(b"b\n" * 50)  # of which 47 fit
        file.append(b"c\nd\n")
        file.close()
        assert (disk / "lines").read_bytes() == b"a" * 4000 + b"\nc\nd\n"
        assert file.num_lines == 3


def test_what_a_disk_does_not_take_waits_and_keeps_its_order() -> None:
    written: list[int] = []
    room = 2

    def write(records: Sequence[int]) -> None:
        if len(written) + len(records) > room:
            raise WriteFailed(os.strerror(errno.ENOSPC))
        written.extend(records)

    log = Backlog(write)
    said = [log.add(number) for number in range(5)]
    assert [one is not None for one in said] == [False, False, True, False, False], "said once"
    assert (written, len(log)) == ([0, 1], 3)
    room = 10
    assert log.add(5) is None
    assert (written, len(log)) == ([0, 1, 2, 3, 4, 5], 0)
    room = 8
    assert log.add(6, 7, 8, 9) is not None, "and again when it is full again"
    assert (written[6:], len(log)) == ([6, 7], 2), "as many as there is room for"
