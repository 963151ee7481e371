"""Atomic file writes: a file exists completely or not at all.

A crash may come between any two instructions, so a file is written under a temporary name, synced to the
disk, renamed to its own name, and the directory that holds the name is synced too. A reader then sees the
old file or the new one, never half of one. Hashes are taken of the very bytes that are written, so nothing
is read back.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.errors import DataError, ManyhandsError, UserError

__all__ = [
    "FileDigest",
    "WriteFailed",
    "make_directory",
    "make_output",
    "read_json",
    "read_object",
    "reason",
    "render_json",
    "require_empty",
    "sync_directory",
    "write_all",
    "write_atomically",
    "write_json",
    "write_synced",
]

_ONE_LINE = json.JSONEncoder(allow_nan=False)
_AS_THEY_ARE = frozenset({int, str, bool, type(None)})


class WriteFailed(ManyhandsError):
    """The disk did not take a file; the message names it, and its previous content is unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """The length and the SHA-256 of a file's content."""

    num_bytes: int
    sha256: str


def write_synced(path: Path, chunks: Iterable[bytes], mode: int = 0o666) -> FileDigest:
    """Write `chunks` into the new file `path`, hashing on the way, and sync it.

    `mode` is as of `open(2)`, less the umask. Syncing the directory is left to the caller. Raises OSError where the
    disk does not take it; what was written so far then stays for the caller to remove.
    """
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
    """Put `chunks` in the place of `path`, or raise WriteFailed and leave what was there.

    With `mode` 0600 nobody else can read it, not even while it is written.
    """
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
        raise DataError(f"{file} is damaged, it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} is damaged: it holds no JSON object")
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
                    raise UserError(f"{where} has the key {key!r}; the keys of JSON are strings")
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
        raise UserError(f"--out {out} is not empty (it has {taken.name!r} in it); choose another")


def make_output(out: Path) -> None:
    try:
        make_directory(out)
    except OSError as error:
        raise UserError(f"--out {out} cannot be used: {reason(error)}") from error
