"""Checkpoints that survive crashes and disk damage: one directory each, complete or absent.

    checkpoints/
      step-00000040/  model.safetensors  optimizer.safetensors  state.json  manifest.json
      step-00000050/  ...
      step-00000060.writing/      a writer is here, or crashed here

A checkpoint is written beside its place, every file synced, the directory synced, and then renamed into
place and the parent synced. Names with a suffix are the only states between that a crash can leave, and the
next `save` clears them: `.writing` (not finished), `.removing` (rotated out), `.replaced` (the old copy of
a step that is being saved again; it is read as long as the new one is not in place). There is one writer at
a time; `RunDirectory`'s lock sees to that.

`manifest.json` is written last of a checkpoint's files: the byte length and SHA-256 of each of the others, the step,
the score, the format's version, and a SHA-256 over all of that. It must read exactly as this module would write it, so
any changed byte shows. The set of file names is fixed here; a name in a manifest is compared with it and never opened.
Hashes find damage, not malice: a writer of the files can write the hashes, too. Nothing in a checkpoint is code, and
nothing in it makes a reader open another file or read more than the file's own length.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

from torch import Tensor

from manyhands.data.store.atomic import (
    FileDigest,
    WriteFailed,
    make_directory,
    reason,
    sync_directory,
    write_synced,
)
from manyhands.data.store.state_tree import flatten, unflatten
from manyhands.data.store.tensorfile import (
    encode_tensors,
    first_non_finite,
    read_tensors,
    require_storable,
    without_aliases,
)
from manyhands.errors import (
    CorruptCheckpoint,
    ManyhandsError,
    NonFinite,
    UserError,
    check_count,
    format_bytes,
)

MODEL_FILE, OPTIMIZER_FILE, STATE_FILE = "model.safetensors", "optimizer.safetensors", "state.json"
CONTENT_FILES = (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE)
MANIFEST_FILE, MANIFEST_LIMIT_BYTES = "manifest.json", 1 << 20
_FORMAT, _VERSION = "manyhands checkpoint", 1
_NAME = re.compile(r"(step-(\d{8,}))(|\.writing|\.removing|\.replaced)")


class NoCheckpoint(UserError):
    """There is no checkpoint where one was asked for."""


class NonFiniteSnapshot(NonFinite):
    """A snapshot with NaN or infinity in it was refused; `name` is its first bad tensor, or 'score'."""

    def __init__(self, step: int, name: str) -> None:
        what = f"{name} is not finite at step {step}"
        super().__init__(f"{what}; no checkpoint of it was written, earlier ones are kept")
        self.name = name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """All that a training needs to continue from `step`.

    `model` and `optimizer` are their `state_dict()`s; `extra` is any tree that `state_tree` holds. Of several
    checkpoints the one with the lowest `score` is the best; None takes no part in that. Names of `model` in
    `may_hold_infinity` (buffers such as a causal mask) may hold infinities; NaN is rejected everywhere.
    """

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)
    score: float | None = None
    may_hold_infinity: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_count("step", self.step, 0)
        for name, value in self.model.items():
            if not isinstance(value, Tensor):
                raise UserError(
                    f"model[{name!r}] is a {type(value).__name__}; a checkpoint's model holds tensors"
                )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """A snapshot read back and verified; `skipped` names the damaged files that were skipped."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    extra: dict[str, Any]
    score: float | None
    path: Path
    skipped: tuple[Damage, ...] = ()

    @property
    def tree(self) -> dict[str, Any]:
        return {"step": self.step, "model": self.model, "optimizer": self.optimizer, "extra": self.extra}

    @classmethod
    def of(cls, tree: Any) -> Loaded:
        """A `tree` that came from another process; ManyhandsError where it is none."""
        kinds = {"step": int, "model": dict, "optimizer": dict, "extra": dict}
        if not isinstance(tree, Mapping) or any(not isinstance(tree.get(k), v) for k, v in kinds.items()):
            raise ManyhandsError(f"another process sent an invalid state: {str(tree)[:60]}")
        return cls(**{name: tree[name] for name in kinds}, score=None, path=Path(os.devnull))


class CheckpointStore:
    """The checkpoints of one run: the last `keep`, the best and `spared` steps.

    One process saves; any may load meanwhile.
    """

    def __init__(self, folder: Path, keep: int = 3, spared: Collection[int] = ()) -> None:
        check_count("keep", keep)
        self.folder, self.keep, self.spared = Path(folder), keep, frozenset(spared)

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, snapshot: Snapshot, spare_from: int | None = None) -> Path:
        """Write a checkpoint to the disk, then rotate out old ones before `spare_from`; return its directory.

        A step that was saved before is replaced. NonFiniteSnapshot, UserError (a value no checkpoint can
        hold) and WriteFailed (a full disk, say) leave the checkpoints that are there as they are.
        """
        target = self.path_of(snapshot.step)
        model, aliases = without_aliases(snapshot.model)
        others, tree = flatten({"optimizer": dict(snapshot.optimizer), "extra": dict(snapshot.extra)})
        require_storable(model)
        require_storable(others)
        bad = "score" if snapshot.score is not None and not math.isfinite(snapshot.score) else None
        bad = (
            bad
            or first_non_finite(model, snapshot.may_hold_infinity)
            or first_non_finite(others, frozenset())
        )
        if bad is not None:
            raise NonFiniteSnapshot(snapshot.step, bad)
        try:
            make_directory(self.folder)
            self._sweep()
            writing = target.with_name(f"{target.name}.writing")
            state = json.dumps({"aliases": aliases, "tree": tree}, allow_nan=False).encode() + b"\n"
            _write(writing, snapshot, model, others, state)
            replaced = target.with_name(f"{target.name}.replaced")
            if os.path.lexists(target):
                target.rename(replaced)
            writing.rename(target)
            sync_directory(self.folder)
            _discard(replaced)
        except BaseException as error:
            with suppress(OSError):  # the error that brought us here is reported; the next save sweeps again
                self._sweep()
            if not isinstance(error, OSError):
                raise
            room = ""
            with suppress(OSError):
                room = f" and {format_bytes(shutil.disk_usage(self.folder).free)} are free"
            needed = sum(tensor.nbytes for tensor in (*model.values(), *others.values()))
            raise WriteFailed(
                f"the checkpoint of step {snapshot.step} could not be written to {self.folder}: {reason(error)} (it "
                f"needs {format_bytes(needed)}{room}); existing checkpoints are kept"
            ) from error
        found = [(step, _intact(path, step)) for step, path in self._candidates()]
        entries = [
            SavedStep(step=step, score=manifest.score if manifest else None, intact=manifest is not None)
            for step, manifest in found
        ]
        for step in set(rotated_out(entries, snapshot.step, self.keep, spare_from)) - self.spared:
            with suppress(OSError):  # the checkpoint asked for is safe; the next save tries again
                self._remove(self.path_of(step))
        return target

    @staticmethod
    def _remove(path: Path) -> None:
        removing = path.with_name(f"{path.name}.removing")
        path.rename(removing)  # first out of sight, so that a crash leaves no half-removed checkpoint
        _discard(removing)

    def load(self, step: int | None = None) -> Loaded:
        """The newest checkpoint whose every byte is as saved, or that of `step`; NoCheckpoint, CorruptCheckpoint."""
        try:
            candidates = [found for found in self._candidates() if step is None or found[0] == step]
        except OSError as error:
            raise NoCheckpoint(f"{self.folder} cannot be read: {reason(error)}") from error
        if not candidates:
            steps = ", ".join(str(other) for other in self.steps())
            others = f" of step {step}; there are: {steps}" if steps else ""
            raise NoCheckpoint(f"{self.folder} holds no checkpoint{others}")
        skipped: list[Damage] = []
        for found_step, path in candidates:
            try:
                return replace(_read(path, found_step), skipped=tuple(skipped))
            except Damaged as damaged:
                skipped.extend(damaged.damages)
        named = "; ".join(str(damage) for damage in skipped)
        which = "no checkpoint can" if step is None else f"the checkpoint of step {step} cannot"
        raise CorruptCheckpoint(f"{which} be trusted in {self.folder}: {named}")

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, and what a crashed writer left; WriteFailed if one stays."""
        try:
            self._sweep()
            for found, path in self._candidates():
                if found > step:
                    self._remove(path)
            if self.folder.is_dir():
                sync_directory(self.folder)
        except OSError as error:
            raise WriteFailed(
                f"{self.folder} holds checkpoints after step {step} that could not be removed: {reason(error)}"
            ) from error

    def steps(self) -> tuple[int, ...]:
        return tuple(sorted({step for step, _ in self._candidates()}))

    def _sweep(self) -> None:
        """Clear what a crashed writer left: its in-between names, and nothing else."""
        for step, suffix, path in list(self._scan()):
            if suffix == ".replaced" and _intact(self.path_of(step), step) is None:
                _discard(self.path_of(step))
                path.rename(self.path_of(step))
            elif suffix:
                _discard(path)

    def _candidates(self) -> list[tuple[int, Path]]:
        """Everything that may be a checkpoint, newest first; a replaced copy stands behind its successor."""
        found = [(step, path) for step, suffix, path in self._scan() if suffix in ("", ".replaced")]
        return sorted(found, key=lambda item: (-item[0], item[1].name))

    def _scan(self) -> Iterator[tuple[int, str, Path]]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return
        for name in names:
            match = _NAME.fullmatch(name)
            if match and match[1] == self.path_of(int(match[2])).name:
                yield int(match[2]), match[3], self.folder / name


def _write(
    folder: Path, snapshot: Snapshot, model: Mapping[str, Tensor], others: Mapping[str, Tensor], state: bytes
) -> None:
    """Write and sync a checkpoint's files into the new directory `folder`, the manifest last."""
    folder.mkdir()
    contents = zip(CONTENT_FILES, (encode_tensors(model), encode_tensors(others), [state]), strict=True)
    files = {name: write_synced(folder / name, content) for name, content in contents}
    score = None if snapshot.score is None else float(snapshot.score)
    write_synced(folder / MANIFEST_FILE, [Manifest(step=snapshot.step, score=score, files=files).render()])
    sync_directory(folder)


def _read(folder: Path, step: int) -> Loaded:
    manifest = read_manifest(folder, step)
    damages = damaged_files(folder, manifest, hashes=True)
    if damages:
        raise Damaged(*damages)
    file = folder / STATE_FILE
    try:
        state = json.loads(read_whole(file, manifest.files[STATE_FILE].num_bytes))
        aliases, meta = state["aliases"], state["tree"]
        file = folder / MODEL_FILE
        model = read_tensors(file)
        model |= {name: model[kept] for name, kept in aliases.items()}
        file = folder / OPTIMIZER_FILE
        tree = unflatten(read_tensors(file), meta)
        optimizer, extra = tree["optimizer"], tree["extra"]
        return Loaded(
            step=step, model=model, optimizer=optimizer, extra=extra, score=manifest.score, path=folder
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # Its hash is right, so this is what was written: not damage of the disk but another program's file.
        raise Damaged(Damage(file, f"does not hold a valid checkpoint: {error}")) from error


def _intact(folder: Path, step: int) -> Manifest | None:
    """The manifest of a checkpoint that looks good without reading its tensors, else None."""
    try:
        manifest = read_manifest(folder, step)
    except Damaged:
        return None
    return None if damaged_files(folder, manifest, hashes=False) else manifest


def _discard(path: Path) -> None:
    """Remove whatever stands at `path`; what resists is left for the next save to try again."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """One checkpoint as rotation sees it; the lower the score the better."""

    step: int
    score: float | None = None
    intact: bool = True


def rotated_out(
    entries: Iterable[SavedStep], saved_step: int, keep: int, spare_from: int | None = None
) -> tuple[int, ...]:
    """The steps to remove after `saved_step` was saved: all before the last `keep`, but never the best.

    The best is the intact one with the lowest score, the newest of equals. Those from `spare_from` on stay as well:
    others still need them. A damaged checkpoint does not count as one of those kept. One newer than the step just
    saved (the run went back to an earlier one) is neither counted nor removed: it goes once the run has passed it.
    """
    known = list(entries)
    reached = sorted(entry.step for entry in known if entry.intact and entry.step <= saved_step)
    if len(reached) < keep:
        return ()
    oldest_kept = reached[-keep] if spare_from is None else min(reached[-keep], spare_from)
    scored = [(entry.score, -entry.step) for entry in known if entry.intact and entry.score is not None]
    best = -min(scored)[1] if scored else None
    return tuple(sorted({entry.step for entry in known if entry.step < oldest_kept} - {best}))


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
        files = {name: {"bytes": one.num_bytes, "sha256": one.sha256} for name, one in self.files.items()}
        body: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "step": self.step}
        body |= {"score": self.score, "files": files}
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
                raise ValueError("is not a checkpoint manifest")
        if manifest.render() != text:
            raise ValueError("does not match its own hash")
        if set(files) != set(CONTENT_FILES):
            raise ValueError(f"lists {', '.join(sorted(files))} instead of {', '.join(CONTENT_FILES)}")
        return manifest


def read_manifest(folder: Path, step: int) -> Manifest:
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
                    why = "does not have the content that was saved (its SHA-256 differs)"
                    damages.append(Damage(path, why))
        except Damaged as found:
            damages.extend(found.damages)
    return tuple(damages)


def read_whole(path: Path, limit_bytes: int) -> bytes:
    """A file's content, or Damaged where it is missing, unreadable or longer than `limit_bytes`."""
    with _opened(path) as (file, num_bytes):
        if num_bytes > limit_bytes:
            raise Damaged(Damage(path, f"is {num_bytes} bytes long; at most {limit_bytes} are allowed"))
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
                raise Damaged(Damage(path, "is not a regular file"))
            with open(descriptor, "rb", closefd=False) as file:
                yield file, status.st_size
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise Damaged(Damage(path, "is missing")) from None
    except OSError as error:
        raise Damaged(Damage(path, f"cannot be read: {reason(error)}")) from error
