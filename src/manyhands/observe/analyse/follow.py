"""Incremental reader of a run directory, usable while the run writes it and after its end.

The run itself is not involved, so a viewer may attach and detach at any time. Damaged content is left out with a
note. Times are on the clock of the run's first file; files of a resumed run and of other hosts are shifted onto it by
the difference of their offsets to the time of day.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.data.store.rundir import EPISODE, RunDirectory
from manyhands.errors import DataError, UserError, printable
from manyhands.observe.analyse.run_view import Gather
from manyhands.observe.analyse.view import RunView
from manyhands.observe.record.checked_values import number, text, whole
from manyhands.observe.record.event_files import has_header, read_events, read_header
from manyhands.observe.record.events import MAX_SHOWN, RECORD, EventKind, Records
from manyhands.observe.record.recorded import part_of, read_run_events, shift_clock

_PORTION = 1 << 14  # events that are gathered in one batch
_MAX_STEPS = 1 << 20
_MOST_PICTURE = 1 << 20  # bytes
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_BYTES = 16 << 20  # bytes of a JSON-lines file read at once; no valid line is that long


class RunFollower:
    """Reader of one run directory; each `poll` reads what is new. Not thread-safe."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._directory: RunDirectory | None = None
        self._gather = Gather()
        self._files: dict[Path, _EventTail] = {}
        self._offsets: dict[tuple[int, int], int] = {}  # offset to the time of day, by part and clock
        self._first_offset_ns = 0
        self._metrics: _LineTail | None = None
        self._members: _LineTail | None = None
        # When each of the newest million global batches was done, and which that is: the step plus 1. The last worker
        # counts where several share a batch. Pages that are never written are never allocated.
        self._step_ends_ns = np.zeros(_MAX_STEPS, np.int64)
        self._steps_done = np.zeros(_MAX_STEPS, np.int64)
        self.new_rows: list[dict[str, Any]] = []  # rows of the history that the last poll found

    def wall_s(self, seconds: float) -> float | None:
        """Convert a time in the view's seconds to seconds since 1970; None before the first event."""
        if not self._offsets or not self._gather.seen.first_ns:
            return None
        return (self._gather.seen.first_ns + self._first_offset_ns) / 1e9 + seconds

    def wall_of_row(self, row: Mapping[str, Any], *, guess: bool) -> float | None:
        """When a row's global batch was done, in seconds since 1970, by its events; with `guess`, else by the row."""
        step = int(row["step"])
        if self._steps_done[(step - 1) % _MAX_STEPS] == step:
            return (int(self._step_ends_ns[(step - 1) % _MAX_STEPS]) + self._first_offset_ns) / 1e9
        return self.wall_s(self._gather.training_began_s + float(row.get("at_s") or 0.0)) if guess else None

    def poll(self) -> RunView:
        """Read what is new; a directory without a configuration is a run that has not begun. UserError without one."""
        if self._directory is None and not self._open():
            return self._gather.view(0)
        directory = self._directory
        assert directory is not None
        # Look for the summary first: everything written before it is then read below.
        try:
            summary = directory.read_summary()
        except DataError as error:
            self._gather.note(str(error))
            summary = None
        self._read_events(directory)
        assert self._metrics is not None
        assert self._members is not None
        rows, anew = self._metrics.read()
        if anew:
            self._gather.forget_rows()
        self.new_rows = self._gather.add_rows(rows)
        self._gather.add_members(self._members.read()[0])
        for tail in (self._metrics, self._members):
            if tail.damaged:
                self._gather.note(f"{tail.path} has lines that are not JSON objects; they are left out")
        held = RunDirectory.is_live(directory.path)
        if summary is not None:  # a resumed run has that of its earlier part until it ends
            files = directory.events_path.glob("*.bin")
            newest_ns = max((path.stat().st_mtime_ns for path in files), default=0)
            is_newer = directory.summary_path.stat().st_mtime_ns >= newest_ns
            # Modification times mean nothing in a copy of a run.
            is_all = not held and (whole(summary.get("steps")) or 0) >= self._gather.history.step
            summary = summary if is_newer or is_all else None
        self._gather.summary = summary
        self._gather.episode = _picture(self.path / EPISODE) if summary is not None else b""
        if summary is not None or not self._offsets:
            return self._gather.view(self._gather.seen.last_ns)
        now_ns = self._gather.seen.last_ns if held is False else time.time_ns() - self._first_offset_ns
        return self._gather.view(now_ns, held=held)

    def _open(self) -> bool:
        if not self.path.is_dir():
            raise UserError(f"{self.path} is not a directory; name the directory of a run, as in runs/digits")
        if not (self.path / "config.json").exists():
            return False
        directory = RunDirectory.open(self.path, lock=False)
        config = directory.config
        self._directory = directory
        self._gather = Gather(
            task=text(config.get("task")),
            strategy=text(config.get("strategy")),
            steps_asked=max(0, whole(config.get("steps")) or 0),
            workers=min(MAX_SHOWN, max(1, whole(config.get("workers")) or 1)),
            about=about_run(config, directory.origin),
        )
        self._metrics = _LineTail(directory.metrics_path)
        self._members = _LineTail(directory.members_path)
        return True

    def _read_events(self, directory: RunDirectory) -> None:
        found = ((part_of(path), path) for path in directory.events_path.glob("*.bin"))
        for part, path in sorted((part, path) for part, path in found if part is not None):
            if path not in self._files and has_header(path):
                self._meet(path, part)
        pieces = []
        for tail in self._files.values():
            if tail.is_damaged:
                continue
            try:
                pieces.append(tail.read(self._offsets[tail.clock] - self._first_offset_ns))
            except DataError as error:
                self._gather.note(f"{error}; the rest of the file is left out")
                tail.is_damaged = True
            if tail.note:
                self._gather.note(tail.note)
        records = _interleaved(pieces)
        steps = records[(records["kind"] == EventKind.STEP) & (records["step"] >= 0)]
        # Records are ordered by end time, and numpy keeps the last of several assignments to one index.
        self._steps_done[steps["step"] % _MAX_STEPS] = steps["step"] + 1
        self._step_ends_ns[steps["step"] % _MAX_STEPS] = steps["start_ns"] + steps["duration_ns"]
        for begin in range(0, len(records), _PORTION):
            self._gather.add_events(records[begin : begin + _PORTION])

    def _meet(self, path: Path, part: int) -> None:
        try:
            header = read_header(path)
            if header.role >= MAX_SHOWN:
                raise DataError(f"{path.name} is of role {header.role}; views show roles below {MAX_SHOWN}")
        except DataError as error:
            self._gather.note(str(error))
            self._files[path] = _EventTail(path=path, clock=(part, 0), is_damaged=True)
            return
        clock = (part, header.clock)
        if not self._offsets:
            self._first_offset_ns = header.wall_offset_ns
            self._gather.offset_ns = header.wall_offset_ns
        self._offsets.setdefault(clock, header.wall_offset_ns)
        self._files[path] = _EventTail(path=path, clock=clock)
        self._gather.meet(header.role, header.name)


@dataclass(kw_only=True)
class _EventTail:
    """An event file, and how many of its records were read."""

    path: Path
    clock: tuple[int, int]  # which part of a resumed run it is of, and whose clock it was written on
    num_read: int = 0
    is_damaged: bool = False
    note: str = ""

    def read(self, by_ns: int) -> Records:
        records = read_events(self.path, skip=self.num_read)
        self.num_read += len(records)
        if unwritten := read_header(self.path).unwritten:
            name = self.path.name
            self.note = f"{name} reached its bound: {unwritten} or more later events are not in this view"
        shift_clock(records, by_ns)
        return records


class _LineTail:
    """A file of JSON lines, and how many of its bytes were read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = False
        self._offset = 0
        self._inode = -1

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the new complete lines, and whether the file was rewritten (then these are all of them)."""
        rows: list[dict[str, Any]] = []
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                anew = status.st_ino != self._inode or status.st_size < self._offset
                if anew:
                    self._inode, self._offset = status.st_ino, 0
                while True:
                    file.seek(self._offset)
                    data = file.read(_MOST_BYTES)
                    # Complete lines; a line that is longer than the bound is cut there.
                    is_cut = len(data) == _MOST_BYTES and b"\n" not in data
                    lines = data if is_cut else data[: data.rfind(b"\n") + 1]
                    self._offset += len(lines)
                    if not lines:
                        break
                    for line in lines.splitlines():
                        try:
                            row = json.loads(line)
                        except (ValueError, RecursionError):
                            row = None
                        if isinstance(row, dict):
                            rows.append(row)
                        else:
                            self.damaged = True
        except OSError:
            return rows, False
        return rows, anew


def read_interleaved(directory: Path) -> tuple[Records, dict[int, str]]:
    """Return all events of a run's `events` directory by end time, and the names of their roles."""
    roles = read_run_events(directory).roles
    return _interleaved([events.records for events in roles]), {events.role: events.name for events in roles}


def _interleaved(pieces: Sequence[Records]) -> Records:
    pieces = [piece for piece in pieces if len(piece)]
    if not pieces:
        return np.zeros(0, RECORD)
    known = [np.maximum.accumulate(piece["start_ns"] + piece["duration_ns"]) for piece in pieces]
    return np.concatenate(pieces)[np.argsort(np.concatenate(known), kind="stable")]


_LONG = frozenset({"parameters"})  # one line per tensor, which is not a setting
_MOST_SETTINGS = 60


def about_run(config: Mapping[str, Any], origin: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Facts by name, in page order; unknown ones, as in runs of older releases, are left out."""
    found = {name: origin.get(name) for name in ("command", "host")}
    rows = [(name, printable(value)) for name, value in found.items() if isinstance(value, str) and value]
    begun = number(origin.get("unix_s"))
    if begun is not None:
        try:
            rows.append(("begun", datetime.fromtimestamp(begun, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")))
        except (OverflowError, OSError, ValueError):
            pass  # outside the range of datetime
    settings = [(name, value) for name, value in config.items() if name not in _LONG and value is not None]
    for name, value in settings[:_MOST_SETTINGS]:
        shown = [_plain(value)]
        if isinstance(value, Mapping):
            shown = [f"{key}={_plain(one)}" for key, one in value.items() if one is not None]
        elif isinstance(value, list):
            shown = [_plain(one) for one in value]
        words = printable(", ".join(shown[:_MOST_SETTINGS]))
        rows.append((printable(str(name).replace("_", " ")), words or "–"))
    return tuple(rows)


def _plain(value: Any) -> str:
    return "…" if isinstance(value, Mapping | list) else str(value)


def _picture(path: Path) -> bytes:
    """A PNG; nothing where there is none, or one that is too large for a page."""
    try:
        with path.open("rb") as file:
            found = file.read(_MOST_PICTURE + 1)
    except OSError:
        return b""
    return found if found.startswith(_PNG) and len(found) <= _MOST_PICTURE else b""


def existing_run(path: Path) -> RunFollower:
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path} holds no run (there is no config.json); name the directory of a run, as in runs/digits"
        )
    return RunFollower(path)


def coming_run(path: Path, task: str, strategy: str, workers: int = 1) -> Callable[[], RunView]:
    """Follow the run in `path` once it exists; until then it is shown as starting."""
    before, follower = Gather(task=task, strategy=strategy, workers=workers).view(0), RunFollower(path)
    return lambda: follower.poll() if (path / "config.json").exists() else before
