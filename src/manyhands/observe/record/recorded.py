"""Reads all events of a run back from its directory: one array per role, on one time axis.

A resumed run has several files per role (`worker-0.bin`, `worker-0.2.bin`), and a run on several hosts has files of
several clocks, which need not agree. All files of one clock in one part are shifted by the same difference of offsets
to the time of day, so that intervals among them stay as measured.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from manyhands.errors import DataError, UserError
from manyhands.observe.record.event_files import EventFile, read_events, read_header
from manyhands.observe.record.events import EventKind, Records

_FILE = re.compile(r"(?P<name>[^.]+)(?:\.(?P<part>\d+))?\.bin")
_PART_SHIFT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleEvents:
    """The records of one role, in recording order."""

    role: int
    name: str
    records: Records
    resumes: tuple[int, ...] = ()  # indices in `records` at which the run was resumed

    def of(self, *kinds: EventKind) -> Records:
        return self.records[np.isin(self.records["kind"], kinds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvents:
    """The records of all roles, by role number; `notes` has sentences on what is missing."""

    roles: tuple[RoleEvents, ...]
    notes: tuple[str, ...] = ()


def part_of(path: Path) -> int | None:
    """Return which part of a run wrote this file: 1, plus one per resume; None for another kind of file."""
    match = _FILE.fullmatch(path.name)
    return int(match["part"] or 1) if match is not None else None


def role_name(name: str) -> str:
    return name.replace("-", " ")


def step_keys(events: RoleEvents) -> npt.NDArray[np.int64]:
    """Return a key of each record's step, which grows with the resumes, then with the steps (modulo 2^40)."""
    part = np.searchsorted(np.asarray(events.resumes, np.int64), np.arange(len(events.records)), side="right")
    keys: npt.NDArray[np.int64] = (part.astype(np.int64) << _PART_SHIFT) + events.records["step"]
    return keys


def read_run_events(directory: Path) -> RunEvents:
    """Read all event files of a run's `events` directory; UserError where there is none, DataError on damage."""
    files: dict[int, list[tuple[EventFile, Path]]] = defaultdict(list)
    for path in sorted(directory.glob("*.bin")):
        part = part_of(path)
        if part is not None:
            files[part].append((read_header(path), path))
    if not files:
        raise UserError(f"{directory} holds no event files; only runs with `out` have them")
    first_offset: int | None = None
    pieces: dict[int, list[Records]] = defaultdict(list)
    names: dict[int, str] = {}
    notes: list[str] = []
    for _, group in sorted(files.items()):
        group.sort(key=lambda item: item[0].role)
        offsets: dict[int, int] = {}
        for header, path in group:
            offset = offsets.setdefault(header.clock, header.wall_offset_ns)
            first_offset = offset if first_offset is None else first_offset
            if names.setdefault(header.role, header.name) != header.name:
                raise DataError(f"{path}: role {header.role} is {header.name}, but was {names[header.role]}")
            records = read_events(path)
            shift_clock(records, offset - first_offset)
            pieces[header.role].append(records)
            missing = header.dropped + header.unwritten
            if missing:
                notes.append(f"{path.name} lacks {missing} events that were recorded but not kept")
    roles = []
    for role, parts in sorted(pieces.items()):
        resumes = tuple(np.cumsum([len(part) for part in parts])[:-1].tolist())
        records = np.concatenate(parts)
        roles.append(RoleEvents(role=role, name=names[role], records=records, resumes=resumes))
    return RunEvents(roles=tuple(roles), notes=tuple(notes))


def shift_clock(records: Records, by_ns: int) -> None:
    if by_ns:
        starts = np.maximum(0, records["start_ns"].astype(np.int64) + by_ns)
        records["start_ns"] = starts.astype(np.uint64)
