"""The folder RUN/updates: everything from which a run is audited, or executed again.

    run.json                    what was set up: versions, threads, strategy, where the parameters lie
    shard-0.member-1.jsonl      the rows of a shard (`strategies.ps.log_rows`), from each server that kept it
    worker.process-4.jsonl      what a worker process computed, in order, from what, and the hash of it

Servers write what became of updates, and each knows of its own shard alone. A worker writes what it read of all shards
and what came out, before it pushes: so that a gradient can be made again even where shards took it from different
members. Every line is in the kernel's hands when the write returns, and outlives its process.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from manyhands.data.store.atomic import (
    LineFile,
    WriteFailed,
    make_directory,
    reason,
    sync_directory,
    write_json,
)
from manyhands.errors import DataError, UserError
from manyhands.strategies.ps.log_rows import Row, checked, parse_record, row_from_json, row_to_json

_FOLDER, _RECORD = "updates", "run.json"
_FORMAT, _VERSION = "manyhands updates", 1
_SHARD = re.compile(r"shard-(\d+)\.member-(\d+)\.jsonl")
_WORKER = re.compile(r"worker\.process-(\d+)\.jsonl")
_T = TypeVar("_T")


class RunRecord(NamedTuple):
    """What determines the bits of a run, besides its task."""

    torch: str
    cpu: str  # the instruction set that torch uses
    threads: int  # of torch, in each process
    strategy: str
    workers: int
    steps: int
    seed: int
    device: str
    autocast: bool
    layout: str  # its digest
    begun: int = 0  # batches that were trained, by another strategy or other shards, when these shards began


class ComputedRow(NamedTuple):
    """One gradient that a worker process computed."""

    process: int
    slot: int
    member: int
    clock: int
    batch: int
    part: int
    parts: int
    versions: tuple[int, ...]  # that were read, by shard
    rows_versions: tuple[int, ...]  # at which table rows were read, by shard; -1 for none
    gradients: tuple[str, ...]  # the hash of each shard's part, as 16 hexadecimal digits

    @property
    def reads(self) -> frozenset[tuple[int, int]]:
        rows = ((shard, version) for shard, version in enumerate(self.rows_versions) if version >= 0)
        return frozenset((*enumerate(self.versions), *rows))

    @property
    def name(self) -> tuple[int, int, int]:
        """(slot, clock, member): a successor may have to compute an update again, from what it reads itself."""
        return self.slot, self.clock, self.member


class ShardLogs(NamedTuple):
    """All rows that servers wrote."""

    files: dict[int, list[list[Row]]]  # by shard: the rows of each of its files
    lengths: dict[str, int]  # the number of rows, by file
    notes: tuple[str, ...]  # what was skipped: truncated last lines


class RecordMark(NamedTuple):
    """A mark by which two processes, perhaps on two hosts, detect that they see the same run directory."""

    run: str
    inode: int
    changed_ns: int


def record_mark(run_path: Path) -> RecordMark | None:
    """The mark of the directory at this path; None if nothing is recorded there."""
    try:
        found = (run_path / _FOLDER / _RECORD).stat()
    except OSError:
        return None
    return RecordMark(run=str(run_path), inode=found.st_ino, changed_ns=found.st_mtime_ns)


class _RecordFile:
    """One file of records; nothing is recorded without a run directory, or after a write has failed."""

    def __init__(self, run_path: Path | None, name: str) -> None:
        self.log = LineFile(run_path / _FOLDER / name) if run_path is not None else None

    @property
    def kept(self) -> dict[str, int]:
        """The number of rows by file name; empty if recording ended early."""
        return {self.log.path.name: self.log.num_lines} if self.log is not None else {}

    def append(self, line: str | None) -> str | None:
        """Append a line; with None, flush the file to the disk.

        A failed write ends the recording and not the run: returns the sentence that reports it.
        """
        try:
            if self.log is not None and line is not None:
                self.log.append(line.encode() + b"\n")
            elif self.log is not None:
                self.log.sync()
        except WriteFailed as error:
            self.close()
            self.log = None
            return f"{error}: its recording ends; the run continues, but cannot be fully replayed or audited"
        return None

    def close(self) -> None:
        if self.log is not None:
            self.log.close()


class Recorder(_RecordFile):
    """The file of one worker process."""

    def __init__(self, run_path: Path | None, process: int) -> None:
        super().__init__(run_path, record_of(process))

    def write(self, row: ComputedRow) -> str | None:
        return self.append(json.dumps(row._asdict(), separators=(",", ":")))


class ShardRecorder:
    """The files of one server: a log of each shard that it replicates. `close` is idempotent."""

    def __init__(self, run_path: Path | None, member: int) -> None:
        self._run_path, self._member = run_path, member
        self._logs: dict[int, _RecordFile] = {}

    @property
    def kept(self) -> dict[str, int]:
        """The number of rows by file name, without files whose recording ended early."""
        return {name: rows for log in self._logs.values() for name, rows in log.kept.items()}

    def write(self, row: Row) -> str | None:
        """Append a row. A failed write ends the recording of its shard: returns the sentence that reports it."""
        if self._run_path is None:
            return None
        if row.shard not in self._logs:
            name = f"shard-{row.shard}.member-{self._member}.jsonl"
            self._logs[row.shard] = _RecordFile(self._run_path, name)
        return self._logs[row.shard].append(row_to_json(row))

    def sync(self, shard: int) -> str | None:
        """Flush the log of a shard to the disk, before a snapshot that follows from it; a sentence if that fails."""
        return self._logs[shard].append(None) if shard in self._logs else None

    def close(self) -> None:
        for log in self._logs.values():
            log.close()


def is_record(name: str) -> bool:
    """Whether a file of this name is one that servers or workers write."""
    return any(pattern.fullmatch(name) is not None for pattern in (_SHARD, _WORKER))


def record_of(process: int) -> str:
    return f"worker.process-{process}.jsonl"


def record_rows(run_path: Path, name: str) -> int | None:
    """The number of rows of a file of a server or worker; None if it does not exist."""
    path = run_path / _FOLDER / name
    return LineFile(path).num_lines if path.exists() else None


def record_files(run_path: Path) -> list[Path]:
    folder = run_path / _FOLDER
    return sorted(path for path in (folder.iterdir() if folder.is_dir() else ()) if is_record(path.name))


def take_record(run_path: Path, name: str, data: bytes) -> int:
    """Append what a member wrote on another host to the existing file; returns how many rows that had.

    WriteFailed if the disk does not take it.
    """
    assert is_record(name), "what came is checked before"
    log = LineFile(run_path / _FOLDER / name)
    try:
        log.append(data[: data.rfind(b"\n") + 1])  # a process that was killed may have left half a line
        return log.num_lines - data.count(b"\n")
    finally:
        log.close()


def clear_records(run_path: Path) -> None:
    """Remove the records of a run that begins again; WriteFailed if they remain.

    The folder is renamed first, so that a crash leaves nothing half-removed that could be taken for a record.
    """
    folder, removing = run_path / _FOLDER, run_path / f"{_FOLDER}.removing"
    try:
        for path in (removing, folder):
            if path.exists():
                if path == folder:
                    path.rename(removing)
                    sync_directory(run_path)
                shutil.rmtree(removing)
    except OSError as error:
        raise WriteFailed(
            f"{folder} could not be removed before the run restarts: {reason(error)}"
        ) from error


def write_record(run_path: Path, record: RunRecord) -> None:
    """Write run.json, before anything else of the run; WriteFailed where the disk does not take it."""
    folder = run_path / _FOLDER
    try:
        make_directory(folder)
    except OSError as error:
        raise WriteFailed(f"{folder} could not be created: {reason(error)}") from error
    write_json(folder / _RECORD, {"format": _FORMAT, "version": _VERSION, **record._asdict()})


def read_record(run_path: Path) -> RunRecord:
    """What `write_record` wrote; UserError where nothing was recorded, DataError where it is damaged."""
    path = run_path / _FOLDER / _RECORD
    try:
        table = parse_record(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{run_path} has no {_FOLDER}/{_RECORD}: only runs of strategy ps with a run directory are recorded"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: it is not valid JSON: {error}") from None
    if not isinstance(table, dict) or (table.get("format"), table.get("version")) != (_FORMAT, _VERSION):
        raise DataError(f"{path} does not have the format {_FORMAT!r} version {_VERSION}")
    del table["format"], table["version"]
    table.setdefault("begun", 0)  # a record from before runs could change to ps has none
    return checked(RunRecord, table, f"{path}")


def read_logs(run_path: Path) -> ShardLogs:
    """The rows of all shards; UserError if there are none, DataError that names a damaged line.

    A last line without a newline is of a server that was killed while it wrote: it is skipped, and noted.
    """
    files: dict[int, list[list[Row]]] = {}
    lengths: dict[str, int] = {}
    notes: list[str] = []
    for shard, path in _found(run_path, _SHARD):
        rows = _read(path, row_from_json, ("shard", shard), notes)
        files.setdefault(shard, []).append(rows)
        lengths[path.name] = len(rows)
    if not files:
        raise UserError(f"{run_path} has no logs of updates ({_FOLDER}/shard-….jsonl): was it a run of ps?")
    return ShardLogs(files=files, lengths=lengths, notes=tuple(notes))


def read_computed(run_path: Path) -> dict[int, list[ComputedRow]]:
    """The rows that each process computed, in order; a truncated last line is skipped."""

    def parse(line: str) -> ComputedRow:
        try:
            table = parse_record(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"it is not a valid JSON row ({error}): {line[:80]!r}") from None
        if isinstance(table, dict):
            table = {n: tuple(value) if isinstance(value, list) else value for n, value in table.items()}
        return checked(ComputedRow, table, f"{line[:80]!r}")

    found = _found(run_path, _WORKER)
    return {process: _read(path, parse, ("process", process), []) for process, path in found}


def _found(run_path: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """The files of one kind and the first number in their name, ordered by all of them."""
    folder = run_path / _FOLDER
    matches = [
        (tuple(map(int, match.groups())), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := pattern.fullmatch(path.name)) is not None
    ]
    return [(numbers[0], path) for numbers, path in sorted(matches)]


def _read(path: Path, parse: Callable[[str], _T], of: tuple[str, int], notes: list[str]) -> list[_T]:
    """The rows of a file, in each of which a field has the number `of` its name."""
    try:
        *lines, rest = path.read_text(errors="replace").split("\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}") from error
    if rest:
        notes.append(
            f"{path.name}: its last line is incomplete, as when a process is killed, and was skipped"
        )
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(row := parse(line))
            if getattr(row, of[0]) != of[1]:
                raise DataError(f"{of[0]}={getattr(row, of[0])} in the log of {of[0]} {of[1]}: {line[:80]!r}")
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
    return rows
