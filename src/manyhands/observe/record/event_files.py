"""Event files: a fixed header, then raw 64-byte records, appended while the run continues.

A file can be read at any moment and after any crash: an incomplete record can only be the torn tail, which is
ignored. Any other damage is rejected with file name and offset.
"""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass
from enum import IntEnum
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from manyhands.errors import DataError, UserError, format_bytes
from manyhands.observe.record.clocks import clock_id
from manyhands.observe.record.events import KNOWN_WIRES, MAX_ROLE, NO_STEP, NOBODY, RECORD, EventKind, Records
from manyhands.transport.link.wire import is_codec

_VERSION = 3
_MAGIC = b"MHEVENTS"
_OLD_VERSION = 2
_OLD_RECORD = np.dtype(
    [
        ("peer", "<i4") if name == "peer" else (name, RECORD[name].str)
        for name in RECORD.names or ()
        if name != "codec"
    ]
)  # of version 2: roles up to 65535, and the codec in the high half of the byte that tells the wire


def _words(record: np.dtype[np.void]) -> bytes:
    return " ".join(f"{name}:{record[name].str}" for name in record.names or ()).encode()


_LAYOUTS = {_VERSION: _words(RECORD), _OLD_VERSION: _words(_OLD_RECORD)}
"""What each version that is read has in its header."""
_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("record_bytes", "<u4"),
        ("wall_offset_ns", "<i8"),
        ("dropped", "<u8"),
        ("unwritten", "<u8"),
        ("ending", "<u4"),
        ("role", "<u4"),
        ("name", "S64"),
        ("clock", "<u8"),
        ("layout", "S392"),
    ]
)
_HEADER_BYTES = _HEADER.itemsize
_MOST_NS = 1 << 61
"""Times and differences of clocks lie below this, some 73 years, so that sums of them fit in 64 bits."""
_MOST_STEP = 1 << 40
_MOST_NUMBER = 1 << 62  # of bytes, and of an event


class Ending(IntEnum):
    """How an event file ended."""

    OPEN = 0  # the file was never closed: it is still being written, or its writer was killed
    COMPLETE = 1  # the file holds every event that was read from the ring
    FULL = 2  # the file reached its size limit; later events were counted and not written
    FAILED = 3  # A disk write failed; later events were counted and not written


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFile:
    """The header of an event file."""

    role: int
    name: str
    wall_offset_ns: int  # add it to a start_ns to get nanoseconds since 1970
    clock: int  # files with the same value were written on the same clock
    dropped: int  # events lost because the ring was full
    unwritten: int  # events read from the ring, but beyond the size limit of the file
    ending: Ending
    version: int = _VERSION  # version of the record layout


class EventFileWriter:
    """Appends one role's events to its file, up to `max_bytes`; `close` is idempotent.

    Once it is open it raises nothing: telemetry must not take a run down. What could not be written is counted.
    """

    def __init__(self, file: FileIO, path: Path, max_bytes: int) -> None:
        """Write to an empty `file`, which this object then owns; see `create`."""
        self.path = path
        self._file = file
        self._max_bytes = max_bytes
        self._size = _HEADER_BYTES
        self._header = np.zeros((), _HEADER)
        self._reason = ""

    @classmethod
    def create(
        cls, directory: Path, *, name: str, role: int, max_bytes: int, wall_offset_ns: int | None = None
    ) -> EventFileWriter:
        """Create a new file; `wall_offset_ns` from the monotonic clock to the time of day is by default this host's."""
        if not _is_name(name):
            raise UserError(f"name={name!r} is not allowed; letters, digits and hyphens, at most 64 bytes")
        for part in itertools.count(1):  # an earlier part of a resumed run left files
            path = directory / (f"{name}.bin" if part == 1 else f"{name}.{part}.bin")
            try:
                writer = cls(FileIO(path, "xb"), path, max_bytes)
                break
            except FileExistsError:
                continue
        here = time.time_ns() - time.monotonic_ns()
        for field, value in {
            "magic": _MAGIC,
            "version": _VERSION,
            "record_bytes": RECORD.itemsize,
            "wall_offset_ns": here if wall_offset_ns is None else wall_offset_ns,
            "clock": clock_id(),
            "role": role,
            "name": name.encode(),
            "layout": _LAYOUTS[_VERSION],
        }.items():
            writer._header[field] = value
        writer._put_header()
        return writer

    @property
    def unwritten(self) -> int:
        return int(self._header["unwritten"])

    @property
    def note(self) -> str:
        if not self._reason:
            return ""
        return f"{self.path} {self._reason}: {self.unwritten} later events are in the totals only"

    def append(self, records: Records) -> None:
        room = 0 if self._reason else max(0, self._max_bytes - self._size) // RECORD.itemsize
        # A failed write may leave part of a record. Nothing is appended after it, so it is a torn tail.
        kept = self._put(records[:room].tobytes(), self._size) // RECORD.itemsize
        self._size += kept * RECORD.itemsize
        self._header["unwritten"] += len(records) - kept
        if room < len(records) and not self._reason:
            self._header["ending"] = Ending.FULL
            self._reason = f"reached its bound of {format_bytes(self._max_bytes)}"
            self._put_header()

    def close(self, dropped: int) -> None:
        """Write the number of events the ring `dropped` into the header, and close the file."""
        if self._file.closed:
            return
        if not self._reason:
            self._header["ending"] = Ending.COMPLETE
        self._header["dropped"] = dropped
        self._put_header()
        self._file.close()

    def _put_header(self) -> None:
        self._put(self._header.tobytes(), 0)

    def _put(self, data: bytes, offset: int) -> int:
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file.fileno(), data[written:], offset + written)
        except OSError as error:
            if not self._reason:
                self._header["ending"] = Ending.FAILED
                self._reason = f"could not be written ({error.strerror})"
        return written


def has_header(path: Path) -> bool:
    """Return whether the file exists with a complete header; a file that was just created has none for a moment."""
    try:
        return path.stat().st_size >= _HEADER_BYTES
    except OSError:
        return False


def read_header(path: Path) -> EventFile:
    try:
        with path.open("rb") as file:
            data = file.read(_HEADER_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not data.startswith(_MAGIC):
        raise DataError(f"{path}: offset 0: not an event file (it does not begin with {_MAGIC.decode()})")
    if len(data) < _HEADER_BYTES:
        raise DataError(f"{path}: offset {len(data)}: the header of {_HEADER_BYTES} bytes is cut off")
    header = np.frombuffer(data, _HEADER)[0]
    version = int(header["version"])
    if version not in _LAYOUTS:
        known = f"{_OLD_VERSION} and {_VERSION}"
        raise _refusal(path, "version", f"version {version}, but this manyhands reads {known}")
    if header["record_bytes"] != RECORD.itemsize or header["layout"] != _LAYOUTS[version]:
        raise _refusal(path, "layout", f"the layout of the records is not that of version {version}")
    if header["ending"] not in list(Ending):
        raise _refusal(path, "ending", f"{header['ending']} is not a known ending")
    name = header["name"].decode(errors="replace")
    if header["role"] > MAX_ROLE or not _is_name(name):
        raise _refusal(path, "role", f"role {header['role']}, {name!r}, is not a role of a run")
    if abs(int(header["wall_offset_ns"])) >= _MOST_NS:
        raise _refusal(
            path, "wall_offset_ns", f"{header['wall_offset_ns']} ns is not an offset to the time of day"
        )
    return EventFile(
        role=int(header["role"]),
        name=name,
        wall_offset_ns=int(header["wall_offset_ns"]),
        clock=int(header["clock"]),
        dropped=int(header["dropped"]),
        unwritten=int(header["unwritten"]),
        ending=Ending(int(header["ending"])),
        version=version,
    )


def read_events(path: Path, *, skip: int = 0) -> Records:
    """Read all complete records after `skip`; a torn tail is left out, any other damage raises DataError."""
    header = read_header(path)
    role = header.role
    begin = _HEADER_BYTES + skip * RECORD.itemsize
    count = max(0, path.stat().st_size - begin) // RECORD.itemsize
    if not count:
        return np.zeros(0, RECORD)
    records: Records = np.fromfile(path, RECORD, count, offset=begin)
    peers = records["peer"]
    if header.version == _OLD_VERSION:
        peers = records.view(_OLD_RECORD)["peer"]
        old, records = records.view(_OLD_RECORD), np.zeros(count, RECORD)
        for name in set(_OLD_RECORD.names or ()) - {"wire", "peer"}:
            records[name] = old[name]
        records["wire"], records["codec"] = old["wire"] & 15, old["wire"] >> 4
        fits = (peers >= NOBODY) & (peers <= MAX_ROLE)
        records["peer"] = np.where(fits, peers, NOBODY - 1)  # rejected below, with its offset
    # After a power failure, blocks that never reached the disk read as zeros: part of the torn tail.
    filled = np.flatnonzero(records.view(np.uint8).reshape(-1, RECORD.itemsize).any(axis=1))
    records = records[: filled[-1] + 1 if len(filled) else 0]
    good = good_records(records) & (records["role"] == role) & (records["id"] < _MOST_NUMBER)
    good[1:] &= records["id"][1:] > records["id"][:-1]
    if not good.all():
        first = int(np.argmin(good))
        wrong = records[first]
        raise DataError(
            f"{path}: offset {begin + first * RECORD.itemsize}: not the next event of role {role} "
            f"(it reads kind {wrong['kind']}, role {wrong['role']}, id {wrong['id']}, peer {peers[first]}, step "
            f"{wrong['step']}, {wrong['duration_ns']} ns from {wrong['start_ns']}, {wrong['num_bytes']} bytes, "
            f"value {wrong['value']})"
        )
    return records


def good_records(records: Records) -> npt.NDArray[np.bool_]:
    good: npt.NDArray[np.bool_] = np.isin(records["kind"], list(EventKind))
    good &= np.isin(records["wire"], KNOWN_WIRES)
    good &= np.isin(records["codec"], [one for one in np.unique(records["codec"]) if is_codec(int(one))])
    good &= (records["start_ns"] < _MOST_NS) & (records["duration_ns"] < _MOST_NS)
    good &= (records["step"] >= NO_STEP) & (records["step"] < _MOST_STEP)
    good &= (records["peer"] >= NOBODY) & (records["peer"] <= MAX_ROLE)
    good &= records["num_bytes"] < _MOST_NUMBER
    # Only a loss may be any number; every comparison with NaN is false.
    kind, value = records["kind"], records["value"]
    good &= (kind != EventKind.APPLY) | ((value >= 0) & (value < _MOST_STEP))
    good &= (kind != EventKind.HOLD) | ((value >= NOBODY) & (value <= MAX_ROLE))
    return good


def _is_name(name: str) -> bool:
    return bool(name) and len(name.encode()) <= 64 and name.replace("-", "").isalnum()


def _refusal(path: Path, field: str, problem: str) -> DataError:
    assert _HEADER.fields is not None
    return DataError(f"{path}: offset {_HEADER.fields[field][1]}: {problem}")
