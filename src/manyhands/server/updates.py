"""The folder RUN/updates: everything from which a run is audited, or executed again.

    run.json                    what was set up: versions, threads, strategy, where the parameters lie
    shard-0.member-1.jsonl      the rows of a shard (`server.log`), from each server that kept it
    worker.process-4.jsonl      what a worker process computed, in order, from what, and the hash of it

Servers write what became of updates, and each knows of its own shard alone. A worker writes what it read of all shards
and what came out, before it pushes: so that a gradient can be made again even where shards took it from different
members. Every line is in the kernel's hands when the write returns, and outlives its process.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from manyhands.errors import DataError, UserError
from manyhands.server.log import Row, row_from_json
from manyhands.store.atomic import reason, write_all, write_json

__all__ = [
    "ComputedRow",
    "Recorder",
    "RunRecord",
    "ShardLogs",
    "read_computed",
    "read_logs",
    "read_record",
    "write_record",
]

_FOLDER, _RECORD = "updates", "run.json"
_FORMAT, _VERSION = "manyhands updates", 1
_SHARD = re.compile(r"shard-(\d+)\.member-(\d+)\.jsonl")
_WORKER = re.compile(r"worker\.process-(\d+)\.jsonl")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What decides the bits of a run, beside its task."""

    torch: str
    cpu: str
    """Which instructions torch uses."""

    threads: int
    """Of torch, in each process."""

    strategy: str
    workers: int
    steps: int
    seed: int
    device: str
    autocast: bool
    layout: str
    """The digest of where the parameters lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedRow:
    """One gradient that a worker process made."""

    process: int
    slot: int
    member: int
    clock: int
    batch: int
    part: int
    parts: int
    versions: tuple[int, ...]
    """What was read, by shard."""

    rows_versions: tuple[int, ...]
    """What rows of tables were read, by shard; -1 for none."""

    gradients: tuple[str, ...]
    """The hash of each shard's part, as 16 hexadecimal digits."""

    @property
    def reads(self) -> frozenset[tuple[int, int]]:
        """Every (shard, version) that it is of."""
        rows = ((shard, version) for shard, version in enumerate(self.rows_versions) if version >= 0)
        return frozenset((*enumerate(self.versions), *rows))

    @property
    def name(self) -> tuple[int, int, int]:
        """(slot, clock, member): a successor may have to make an update again, from what it reads itself."""
        return self.slot, self.clock, self.member


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLogs:
    """All rows that servers wrote."""

    files: dict[int, list[list[Row]]]
    """By shard: the rows of each of its files."""

    notes: tuple[str, ...]
    """What was passed over: last lines that were cut."""


class Recorder:
    """The file of one worker process; without a run directory nothing is recorded. `close` is idempotent."""

    def __init__(self, run_path: Path | None, process: int) -> None:
        self._path = run_path / _FOLDER / f"worker.process-{process}.jsonl" if run_path is not None else None
        self._descriptor = -1

    @property
    def records(self) -> bool:
        """Whether rows are wanted."""
        return self._path is not None

    def write(self, row: ComputedRow) -> str | None:
        """Add a row. A disk that does not take it ends the recording and not the run: returns what to say of that."""
        assert self._path is not None, "asked to write although nothing is recorded"
        line = json.dumps(asdict(row), separators=(",", ":")).encode() + b"\n"
        try:
            if self._descriptor < 0:
                self._path.parent.mkdir(exist_ok=True)
                flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o644)
            write_all(self._descriptor, line)
        except OSError as error:
            sentence = f"{self._path} could not be written ({reason(error)}): this run can not be replayed"
            self._path = None
            return sentence
        return None

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def write_record(run_path: Path, record: RunRecord) -> None:
    """Write run.json, before anything else of the run."""
    folder = run_path / _FOLDER
    folder.mkdir(exist_ok=True)
    write_json(folder / _RECORD, {"format": _FORMAT, "version": _VERSION, **asdict(record)})


def read_record(run_path: Path) -> RunRecord:
    """What `write_record` wrote; UserError where nothing was recorded, DataError where it is damaged."""
    path = run_path / _FOLDER / _RECORD
    try:
        table = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{run_path} has no {_FOLDER}/{_RECORD}: only runs of strategy ps with a run directory are recorded"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged, it is not JSON: {error}") from None
    if not isinstance(table, dict) or (table.get("format"), table.get("version")) != (_FORMAT, _VERSION):
        raise DataError(f"{path} is not of the format {_FORMAT!r} version {_VERSION}")
    del table["format"], table["version"]
    return _checked(RunRecord, table, f"{path}")


def read_logs(run_path: Path) -> ShardLogs:
    """The rows of all shards; UserError where there are none, DataError naming a damaged line.

    A last line without its end is of a server that was killed while it wrote: it is passed over, and noted.
    """
    files: dict[int, list[list[Row]]] = {}
    notes: list[str] = []
    for shard, path in _found(run_path, _SHARD):
        files.setdefault(shard, []).append(_read(path, row_from_json, notes))
    if not files:
        raise UserError(f"{run_path} has no logs of updates ({_FOLDER}/shard-….jsonl): was it a run of ps?")
    return ShardLogs(files=files, notes=tuple(notes))


def read_computed(run_path: Path) -> dict[int, list[ComputedRow]]:
    """By process: what it computed, in order; a cut last line is no row."""
    return {process: _read(path, _computed_from_json, []) for process, path in _found(run_path, _WORKER)}


def _found(run_path: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """The files of one kind and the first number in their name, ordered by all of them."""
    folder = run_path / _FOLDER
    matches = [
        (tuple(map(int, match.groups())), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := pattern.fullmatch(path.name)) is not None
    ]
    return [(numbers[0], path) for numbers, path in sorted(matches)]


def _read(path: Path, parse: Callable[[str], _T], notes: list[str]) -> list[_T]:
    try:
        *lines, rest = path.read_text(errors="replace").split("\n")
    except OSError as error:
        raise DataError(f"{path} can not be read: {reason(error)}") from error
    if rest:
        notes.append(
            f"{path.name}: its last line is cut, as of a process that was killed, and was passed over"
        )
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(parse(line))
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
    return rows


def _computed_from_json(line: str) -> ComputedRow:
    try:
        table = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"it is not JSON ({error}): {line[:80]!r}") from None
    if isinstance(table, dict):
        table = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    return _checked(ComputedRow, table, f"{line[:80]!r}")


def _checked(kind: type[_T], table: Any, where: str) -> _T:
    """`table` as a value of `kind`, with exactly its fields and their types."""
    wanted = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(table, dict) or table.keys() != wanted.keys():
        raise DataError(f"{where}: it must have exactly the fields {', '.join(wanted)}")
    for name, hint in wanted.items():
        outer, item = _TYPES[hint]
        value: Any = table[name]
        items: Any = value if item is not None else ()
        if type(value) is not outer or any(type(one) is not item for one in items):
            raise DataError(f"{where}: {name}={value!r} is no {hint}")
    return kind(**table)


_TYPES: dict[str, tuple[type, type | None]] = {
    "int": (int, None),
    "str": (str, None),
    "bool": (bool, None),
    "tuple[int, ...]": (tuple, int),
    "tuple[str, ...]": (tuple, str),
}
