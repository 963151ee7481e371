"""What a checkpoint directory must hold, with hashes, and how a damaged one is detected.

`manifest.json` is written last of a checkpoint's files: the byte length and SHA-256 of each of the others,
the step, the score, the format's version, and a SHA-256 over all of that. It must read exactly as this
module would write it, so any changed byte shows. The set of file names is fixed here; a name in a manifest
is compared with it and never opened.

Hashes find damage, not malice: a writer of the files can write the hashes, too. Nothing in a checkpoint is
code, and nothing in it makes a reader open another file or read more than the file's own length.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from manyhands.data.store.atomic import FileDigest, reason

__all__ = [
    "CONTENT_FILES",
    "MANIFEST_FILE",
    "MODEL_FILE",
    "OPTIMIZER_FILE",
    "STATE_FILE",
    "Damage",
    "Damaged",
    "Manifest",
    "damaged_files",
    "read_manifest",
    "read_whole",
]

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
CONTENT_FILES = (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE)

MANIFEST_LIMIT_BYTES = 1 << 20
_FORMAT, _VERSION = "manyhands checkpoint", 1


@dataclass(frozen=True, slots=True)
class Damage:
    """One file of a checkpoint that cannot be trusted, and why."""

    file: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.file.parent.name}/{self.file.name} {self.reason}"


class Damaged(Exception):
    """A checkpoint cannot be trusted; `damages` names the files. Raised inside the store alone."""

    def __init__(self, *damages: Damage) -> None:
        super().__init__("; ".join(str(damage) for damage in damages))
        self.damages = damages


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint's table of contents."""

    step: int
    score: float | None
    files: Mapping[str, FileDigest]

    def render(self) -> bytes:
        body: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "step": self.step,
            "score": self.score,
            "files": {
                name: {"bytes": digest.num_bytes, "sha256": digest.sha256}
                for name, digest in self.files.items()
            },
        }
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
        body["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
        return json.dumps(body, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"

    @classmethod
    def parse(cls, text: bytes) -> Manifest:
        """The manifest that renders to exactly `text`; ValueError says what is wrong with it."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("is not JSON") from None
        match body:
            case {"format": str(name), "version": int(version)} if (name, version) != (_FORMAT, _VERSION):
                raise ValueError(
                    f"is of the format {name!r} version {version}, not {_FORMAT!r} version {_VERSION}"
                )
            case {"step": int(step), "score": None | int() | float() as score, "files": dict(entries)}:
                files = {}
                for name, entry in entries.items():
                    match entry:
                        case {"bytes": int(num_bytes), "sha256": str(sha256)}:
                            files[name] = FileDigest(num_bytes=num_bytes, sha256=sha256)
                        case _:
                            raise ValueError("does not give each file a length and a hash")
                manifest = cls(step=step, score=score, files=files)
            case _:
                raise ValueError("is no manifest of a checkpoint")
        if manifest.render() != text:
            raise ValueError("does not match its own hash")
        if set(files) != set(CONTENT_FILES):
            raise ValueError(f"lists {', '.join(sorted(files))} instead of {', '.join(CONTENT_FILES)}")
        return manifest


def read_manifest(folder: Path, step: int) -> Manifest:
    """The manifest of the checkpoint of `step` in `folder`, or Damaged."""
    path = folder / MANIFEST_FILE
    text = read_whole(path, MANIFEST_LIMIT_BYTES)
    try:
        manifest = Manifest.parse(text)
    except ValueError as error:
        raise Damaged(Damage(path, str(error))) from None
    if manifest.step != step:
        raise Damaged(Damage(path, f"is of step {manifest.step}"))
    return manifest


def damaged_files(folder: Path, manifest: Manifest, *, hashes: bool) -> tuple[Damage, ...]:
    """The files of `folder` that are not as the manifest says: their lengths only, or their hashes too."""
    damages: list[Damage] = []
    for name in CONTENT_FILES:
        path, expected = folder / name, manifest.files[name]
        try:
            with _opened(path) as (file, num_bytes):
                if num_bytes != expected.num_bytes:
                    damages.append(Damage(path, f"is {num_bytes} bytes long instead of {expected.num_bytes}"))
                elif hashes and hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                    damages.append(
                        Damage(path, "does not have the content that was saved (its SHA-256 differs)")
                    )
        except Damaged as found:
            damages.extend(found.damages)
    return tuple(damages)


def read_whole(path: Path, limit_bytes: int) -> bytes:
    """A file's content, or Damaged where it is missing, unreadable or longer than `limit_bytes`."""
    with _opened(path) as (file, num_bytes):
        if num_bytes > limit_bytes:
            raise Damaged(Damage(path, f"is {num_bytes} bytes long; at most {limit_bytes} make sense"))
        return file.read(limit_bytes)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BufferedReader, int]]:
    """A plain file, opened, with its length; whatever the system objects to is Damaged."""
    try:
        # Without O_NONBLOCK, opening a pipe put in the place of a file would wait for its writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Damaged(Damage(path, "is no plain file"))
            with open(descriptor, "rb", closefd=False) as file:
                yield file, status.st_size
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise Damaged(Damage(path, "is missing")) from None
    except OSError as error:
        raise Damaged(Damage(path, f"cannot be read: {reason(error)}")) from error
