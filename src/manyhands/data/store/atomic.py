"""Files that survive crashes, resumes and full disks: written atomically, or line by line.

A crash may come between any two instructions, so a file is written under a temporary name, synced to the
disk, renamed to its own name, and the directory that holds the name is synced too. A reader then sees the
old file or the new one, never half of one. Hashes are taken of the very bytes that are written, so nothing
is read back.

Of a file of lines each is there whole or not at all. The metrics of a run are JSON objects, one a line, each with its
`step`; they are synced to the disk at `close` and not one by one: the death of a process takes none, a power failure
may take the last seconds' worth.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from manyhands.errors import DataError, ManyhandsError, UserError
from manyhands.native.closeable import Closeable

_ONE_LINE = json.JSONEncoder(allow_nan=False)
_BLOCK = 1 << 16
_T = TypeVar("_T")
_AS_THEY_ARE = frozenset({int, str, bool, type(None)})


class WriteFailed(ManyhandsError):
    """The disk did not take a file; the message names it, and its previous content is unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """The length and the SHA-256 of a file's content."""

    num_bytes: int
    sha256: str


def write_synced(path: Path, chunks: Iterable[bytes], mode: int = 0o666) -> FileDigest:
    """Write `chunks` into the new file `path`, hashing, and sync it but not its directory; an OSError leaves a part."""
    hasher = hashlib.sha256()
    num_bytes = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        for chunk in chunks:
            hasher.update(chunk)
            write_all(descriptor, chunk)
            num_bytes += len(chunk)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileDigest(num_bytes=num_bytes, sha256=hasher.hexdigest())


def write_all(descriptor: int, content: bytes) -> None:
    """Write the whole of `content`: a nearly full disk takes a part and complains only at the next write."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_directory(path: Path) -> None:
    """Make the names in a directory (files created, renamed, removed) survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing, so that their names survive a power failure."""
    if path.is_dir():
        return
    if not path.parent.exists():
        make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def write_atomically(path: Path, chunks: Iterable[bytes], mode: int = 0o666) -> None:
    """Put `chunks` in the place of `path`, of this `mode` from the start; WriteFailed leaves what was there."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        temporary.unlink(missing_ok=True)  # of a writer that crashed
        try:
            write_synced(temporary, chunks, mode)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
    except OSError as error:
        raise WriteFailed(f"{path} could not be written: {reason(error)}") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, [render_json(value, path.name, indent=1)])


def read_json(path: Path) -> dict[str, Any]:
    """As `read_object`; an empty one where there is no such file."""
    return read_object(path) if path.exists() else {}


def read_object(file: Path) -> dict[str, Any]:
    """A file with one JSON object, or DataError naming it; a missing one is the caller's business."""
    try:
        content = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise DataError(f"{file} cannot be read: {reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is damaged: it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} is damaged: it is not a JSON object")
    return content


def render_json(value: Any, where: str, indent: int | None = None) -> bytes:
    """`value` as one JSON text with a newline; UserError names the first field that JSON cannot hold.

    Tuples become lists, numpy scalars plain numbers, paths text. JSON has no NaN and no infinity: those
    become null, so that every JSON reader accepts the file.
    """
    # A row of plain values, as nearly all are that a run writes by the thousand, is written as it is.
    is_plain = type(value) is dict and all(
        type(key) is str and (type(item) in _AS_THEY_ARE or (type(item) is float and math.isfinite(item)))
        for key, item in value.items()
    )
    encoder = _ONE_LINE if indent is None else json.JSONEncoder(indent=indent, allow_nan=False)
    return encoder.encode(value if is_plain else _plain(value, where)).encode() + b"\n"


def reason(error: OSError) -> str:
    """What the system says went wrong, without the path that the caller names itself."""
    return error.strerror or str(error)


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case os.PathLike():
            return os.fspath(value)
        case list() | tuple():
            return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise UserError(f"{where} has the key {key!r}; JSON keys must be strings")
            return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    raise UserError(
        f"{where} is a {type(value).__name__}, which JSON cannot hold; allowed: numbers, strings, booleans, "
        "None, lists and mappings of them"
    )


def require_empty(out: Path) -> None:
    """UserError unless nothing is at `out`, or an empty directory; nothing is touched."""
    try:
        taken = next(out.iterdir(), None) if out.exists() else None
    except OSError as error:
        raise UserError(f"--out {out} cannot be used: {reason(error)}") from error
    if taken is not None:
        raise UserError(f"--out {out} is not empty (it contains {taken.name!r}); choose another")


def make_output(out: Path) -> None:
    try:
        make_directory(out)
    except OSError as error:
        raise UserError(f"--out {out} cannot be used: {reason(error)}") from error


class LineFile:
    """Appends lines to `path`, which `append` opens; `close` is idempotent, and a later `append` opens it again.

    A part of a line that a full disk took is taken back; what a crash or a power failure left without its end (the rest
    of a line, or blocks that read as zeros) is removed by the next writer. A line outlives its process when `append`
    returns; `sync` makes it outlive the machine.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._num_lines: int | None = None  # until somebody asks, or the first line comes
        self._descriptor: int | None = None
        self._is_named = False

    @property
    def num_lines(self) -> int:
        """The lines of the whole file, including those from before a resume."""
        if self._num_lines is None:
            try:
                with self.path.open("rb") as file:
                    self._num_lines, _, _ = _count_lines(file.fileno())
            except FileNotFoundError:
                return 0
        return self._num_lines

    def append(self, lines: bytes) -> None:
        """Add a line, its end included, or several at once; WriteFailed leaves the file as it was before."""
        try:
            if self._descriptor is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                descriptor = os.open(self.path, flags, 0o666)
                try:
                    self._num_lines, keep, size = _count_lines(descriptor)
                    if keep < size:
                        os.ftruncate(descriptor, keep)
                except BaseException:
                    os.close(descriptor)
                    raise
                self._descriptor = descriptor
            end = os.fstat(self._descriptor).st_size
            try:
                write_all(self._descriptor, lines)
            except OSError:
                os.ftruncate(self._descriptor, end)
                raise
        except OSError as error:
            raise WriteFailed(f"{self.path} could not be written: {reason(error)}") from error
        self._num_lines = self.num_lines + lines.count(b"\n")

    def sync(self) -> None:
        """Have every line on the disk; WriteFailed where it does not take them."""
        if self._descriptor is not None:
            try:
                os.fsync(self._descriptor)
                if not self._is_named:  # a new file's name is in the directory's own keeping
                    sync_directory(self.path.parent)
                    self._is_named = True
            except OSError as error:
                raise WriteFailed(f"{self.path} could not be synced: {reason(error)}") from error

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


class Backlog(Generic[_T]):
    """Records on their way to a disk that may be full: what `write` rejects waits, and is tried again in order."""

    def __init__(self, write: Callable[[Sequence[_T]], None]) -> None:
        self._write = write
        self._waiting: deque[_T] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, *records: _T) -> str | None:
        """Write records behind those that wait; what to say, where they are the first that the disk does not take."""
        is_first = not self._waiting
        self._waiting.extend(records)
        try:
            self.retry()
        except WriteFailed as error:
            return f"{error}; the run continues, and tries again" if is_first else None
        return None

    def retry(self) -> None:
        """Write all pending records, or as many as the disk has space for; WriteFailed keeps the others."""
        at_once = len(self._waiting)
        while self._waiting:
            try:
                self._write([*itertools.islice(self._waiting, at_once)])
            except WriteFailed:
                if at_once == 1:
                    raise
                at_once = 1
                continue
            for _ in range(min(at_once, len(self._waiting))):
                self._waiting.popleft()


def _count_lines(descriptor: int) -> tuple[int, int, int]:
    """How many whole lines there are, how many bytes those take, and how many bytes there are."""
    num_lines, keep, offset = 0, 0, 0
    while block := os.pread(descriptor, _BLOCK, offset):
        if ends := block.count(b"\n"):
            num_lines, keep = num_lines + ends, offset + block.rindex(b"\n") + 1
        offset += len(block)
    return num_lines, keep, offset


class MetricsLog(Closeable):
    """The metrics of one run; a context manager, `close` is idempotent. `append` opens the file."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = Path(path), LineFile(path)

    def append(self, *records: Mapping[str, Any]) -> None:
        """Add records (null where not finite) that survive this process; WriteFailed leaves the file as before."""
        for record in records:
            _require_step(record, UserError, f"the record {record!r}")
        self._file.append(b"".join(render_json(record, "the record") for record in records))

    def read(self) -> list[dict[str, Any]]:
        """All records in order; a torn last line is none. DataError names any other damaged line."""
        return [record for record, _ in self._records()]

    def truncate_after(self, step: int) -> int:
        """`keep` those up to `step`: a run that resumes from its checkpoint computes the others again."""
        return self.keep(lambda record: bool(record["step"] <= step))

    def keep(self, wanted: Callable[[Mapping[str, Any]], bool]) -> int:
        """Remove the records that are not `wanted`, whole or not at all; return how many they were."""
        self.close()
        records = list(self._records())
        kept = [line for record, line in records if wanted(record)]
        if len(kept) < len(records):
            write_atomically(self.path, kept)
        return len(records) - len(kept)

    def close(self) -> None:
        """Sync the file to the disk and close it; a later `append` opens it again."""
        try:
            self._file.sync()
        finally:
            self._file.close()

    def _records(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            offset = 0
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return  # its writer died, or is writing it just now
                where = f"{self.path} line {number} (at byte {offset})"
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    raise DataError(f"{where} is not JSON; remove that line to continue without it") from None
                _require_step(record, DataError, where)
                yield record, line
                offset += len(line)


def _require_step(record: Any, error: type[UserError], where: str) -> None:
    if not isinstance(record, Mapping) or not isinstance(record.get("step"), int):
        raise error(f"{where} is not a metrics record: its `step` is not an integer")
