"""A run on disk: what was asked for, what happened, and what is needed to resume.

runs/digits/
  config.json     what was asked for, by which command, where and when; its presence makes the directory a run
  tokenizer.json  and what else its task keeps (`Task.files`)
  metrics.jsonl   one JSON object a line, each with its step
  events/         what each process did when
  checkpoints/    step-00000050/ ...
  summary.json    what came out
  members.jsonl   processes that came and went, where that is no failure (parameter servers)
  shards/         each shard's snapshots
  updates/        every update that each shard applied
  episode.png     what its policy does (reinforcement learning)
  tickets/        who acted for which rollout, with which weights (actors of reinforcement learning)
  run.lock        held by the live run
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from manyhands.data.store.atomic import (
    LineFile,
    MetricsLog,
    WriteFailed,
    make_directory,
    read_object,
    reason,
    sync_directory,
    write_all,
    write_atomically,
    write_json,
)
from manyhands.data.store.checkpoint import CheckpointStore
from manyhands.errors import DataError, Hang, ManyhandsError, UserError, WorkerFailed, printable
from manyhands.native.closeable import Closeable

_log = logging.getLogger("manyhands")
# What to do where a run is in the way, as Python has it, and on the command line
IN_PYTHON: Final = "pass resume=True or choose another out"
ON_COMMAND_LINE: Final = "add --resume to continue it, or choose another --out"

_CONFIG, _SUMMARY, _METRICS, _LOCK = "config.json", "summary.json", "metrics.jsonl", "run.lock"
_HANG, _MEMBERS = "hang.txt", "members.jsonl"
_FOLDERS = ("checkpoints", "events", "federated", "owed", "shards", "tensorboard", "tickets", "updates")
EPISODE: Final = "episode.png"
"""An animated picture of what a trained policy does."""
_PAGES = ("picture.html", "report.html", EPISODE)
OWN_NAMES: Final = frozenset({_CONFIG, _SUMMARY, _METRICS, _LOCK, _HANG, _MEMBERS, *_FOLDERS, *_PAGES})
_FORMAT, _VERSION = "manyhands run", 1
_HEAD: Final = {"format": _FORMAT, "version": _VERSION}
# What a `create` that died before the configuration was written may have left: still an empty directory to us.
_UNFINISHED = {_LOCK, f".{_CONFIG}.writing"}


class RunDirectory(Closeable):
    """One run's directory: `create` starts it, `open` resumes it, or reads it with `lock=False`; its holder writes."""

    def __init__(self, path: Path, config: Mapping[str, Any], lock: RunLock | None) -> None:
        self.path, self.config, self.lock = path, config, lock
        self.events_path = path / "events"  # where the processes of the run put their events
        self.checkpoints_path = path / "checkpoints"
        self.metrics_path = path / _METRICS  # the history, a line a row
        self.members_path = path / _MEMBERS  # what happened to processes, a line each; not every run has it
        self.summary_path = path / _SUMMARY  # a run that has not ended has none, or an earlier one's
        self.metrics = MetricsLog(self.metrics_path)
        self._members = LineFile(self.members_path)
        self._kept: tuple[str, ...] = ()
        if lock is None:
            return
        try:
            for folder in (self.events_path, self.checkpoints_path):
                folder.mkdir(exist_ok=True)
            sync_directory(path)
        except OSError as error:
            raise WriteFailed(f"{path} cannot be filled: {reason(error)}") from error

    @classmethod
    def create(
        cls,
        path: Path | str,
        config: Mapping[str, Any],
        own_files: Collection[str] = (),
        instead: str = IN_PYTHON,
    ) -> RunDirectory:
        """Start a run in a new or empty directory, locked; UserError where something else is there already.

        `config` is any JSON; `fingerprint` says which fields it must have. `own_files` may be there: they are the
        caller's. `instead` says what to do where a run is there.
        """
        path = Path(path)
        fingerprint(config)
        require_free(path, own_files, instead)
        try:
            make_directory(path)
        except OSError as error:
            raise UserError(f"{path} cannot be made: {reason(error)}") from error
        with _locked(path) as lock:
            require_free(path, own_files, instead)  # again, now that nobody else can be creating it
            write_json(path / _CONFIG, {**_HEAD, "config": config, "origin": origin()})
            return cls(path, _read_config(path), lock)

    @classmethod
    def open(cls, path: Path | str, *, lock: bool = True) -> RunDirectory:
        """Continue a run, or look at one (`lock=False`); UserError where there is none or it is in use."""
        path = Path(path)
        if lock and not cls.is_one(path) and not path.is_file():
            raise UserError(f"{path} holds no run ({_CONFIG} is missing); start one without resume")
        config = _read_config(path)
        if not lock:
            return cls(path, config, None)
        with _locked(path) as held:
            return cls(path, config, held)

    def keep(self, files: Mapping[str, str]) -> None:
        """Write these texts beside the configuration; UserError where a run that is resumed has others."""
        for name, text in files.items():
            file = self.path / name
            try:
                before = file.read_text("utf-8") if file.exists() else None
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{file} cannot be read: {error}") from error
            if before is None:
                write_atomically(file, [text.encode()])
                self._kept += (name,)
            elif before != text:
                raise UserError(
                    f"{self.path} cannot be resumed: its {name} is not that of the data; resume with the data it was "
                    "started with, or start another run"
                )

    def update_config(self, config: Mapping[str, Any]) -> None:
        """Write what is asked for from now on: a run that is resumed may have other workers and more steps."""
        if config != self.config:
            write_json(self.path / _CONFIG, {**_HEAD, "config": config, "origin": self.origin})
            self.config = _read_config(self.path)

    @property
    def origin(self) -> Mapping[str, Any]:
        """Command, host and time of day that the run was begun with; empty of a run that does not say."""
        found = read_object(self.path / _CONFIG).get("origin")
        return found if isinstance(found, dict) else {}

    @staticmethod
    def is_one(path: Path) -> bool:
        return (path / _CONFIG).exists()

    @staticmethod
    def is_live(path: Path) -> bool | None:
        """Whether a live run holds the lock of `path`, for viewers; None where no run ever had the directory."""
        try:
            descriptor = os.open(path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def checkpoints(self, keep: int = 3) -> CheckpointStore:
        return CheckpointStore(self.checkpoints_path, keep)

    def record_end(self, error: ManyhandsError, at_s: float) -> None:
        """Record what ended the run, in members.jsonl and a hang in hang.txt; raise nothing that would hide it."""
        name = error.blamed
        if not name and isinstance(error, WorkerFailed) and error.worker_rank >= 0:
            name = f"worker {error.worker_rank}"
        event = {"event": "fault", "at_s": at_s, **({"name": name} if name else {})}
        try:
            self.append_member({**event, "sentence": str(error).partition("\n")[0]})
            if isinstance(error, Hang):
                write_atomically(self.path / _HANG, [f"{error}\n\n{error.details}\n".encode()])
        except WriteFailed as failure:
            _log.warning("the run's error could not be saved in its directory: %s", failure)

    def append_member(self, *events: Mapping[str, Any]) -> None:
        """Add what happened to processes to members.jsonl, now unless `unix_s` says when; WriteFailed leaves it."""
        rows = ({**event, "unix_s": event.get("unix_s", time.time())} for event in events)
        self._members.append(b"".join(json.dumps(row).encode() + b"\n" for row in rows))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.summary_path, summary)

    def read_summary(self) -> dict[str, Any] | None:
        """What came out, None for a run that has not ended; DataError if the file is damaged."""
        try:
            return read_object(self.summary_path)
        except FileNotFoundError:
            return None

    def remove_summary(self) -> None:
        """Remove the summary of a run that is resumed, because it is outdated. WriteFailed if the file stays."""
        try:
            self.summary_path.unlink(missing_ok=True)
        except OSError as error:
            raise WriteFailed(f"{self.summary_path} could not be removed: {reason(error)}") from error

    def discard(self) -> None:
        """Remove what `create` made, of a run that was refused before its first step; files of others stay."""
        for folder in (self.events_path, self.checkpoints_path):
            shutil.rmtree(folder, ignore_errors=True)
        for name in (_MEMBERS, _METRICS, _CONFIG, _LOCK, *self._kept):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):  # something else is in it
            self.path.rmdir()

    def close(self) -> None:
        try:
            self._members.close()
            self.metrics.close()
        finally:
            if self.lock is not None:
                self.lock.close()


def require_free(path: Path, own_files: Collection[str] = (), instead: str = IN_PYTHON) -> None:
    """UserError unless a run may start at `path`; nothing is touched, and files with these names may be there."""
    try:
        others = sorted({entry.name for entry in path.iterdir()} - _UNFINISHED - set(own_files))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path} cannot be a run directory: {reason(error)}") from error
    if not others:
        return
    task = None
    if _CONFIG in others:
        with suppress(UserError):
            task = fingerprint(_read_config(path)).task
    if task is not None:
        raise UserError(f"{path} already holds a run of {task!r}; {instead}")
    raise UserError(
        f"{path} is not empty and holds no run (it contains {others[0]!r}); choose another out, or empty it"
    )


def _read_config(path: Path) -> dict[str, Any]:
    file = path / _CONFIG
    try:
        content = read_object(file)
    except (FileNotFoundError, NotADirectoryError):
        why, hint = ": there is no such directory", "give the directory of a run"
        if path.is_dir():
            below = sorted((*path.glob(f"*/{_CONFIG}"), *path.glob(f"runs/*/{_CONFIG}")))
            newest = max(below, key=lambda config: config.stat().st_mtime, default=None)
            hint = f"did you mean {newest.parent}?" if newest else hint
            why = f" ({_CONFIG} is missing); {hint}"
        elif path.exists():
            why = f": it is a file; {hint}"
        raise UserError(f"{path} holds no run{why}") from None
    match content:
        case {"format": str(name), "version": int(version), "config": dict(config)}:
            if (name, version) == (_FORMAT, _VERSION):
                return config
            raise UserError(
                f"{file} is of the format {name!r} version {version}, not {_FORMAT!r} version {_VERSION}"
            )
    raise DataError(f"{file} is not a run configuration; {path} was made by something else, or is damaged")


_HIDDEN = "***"
_SECRET = re.compile(r"token|secret|passw|passphrase|credential|auth|api-?key|access-?key", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")
_IN_WORD = re.compile(r"((?:token|secret|password|passwd|api_?key|access_?key)=)[^&\s;,]+", re.IGNORECASE)


def origin() -> dict[str, Any]:
    return {"command": shown_command(sys.argv), "host": socket.gethostname(), "unix_s": time.time()}


def shown_command(arguments: Sequence[str]) -> str:
    """The command line of a process with `***` for its secrets; empty where there is none.

    Of a program of the user's own, whose options nobody here knows, its name alone is kept.
    """
    if not arguments or not arguments[0]:
        return ""
    program = Path(arguments[0])
    if program.name != "manyhands" and program.parent.name != "manyhands":
        return shlex.join(["python", program.name])
    words = list(arguments[1:])
    own = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    if words[:1] == ["launch"] and own is not None and own + 1 < len(words):
        words[own + 1 :] = ["..."]  # the options of the user's own program
    kept, hides_next = ["manyhands"], False
    for word in words:
        name, equals, _ = word.partition("=")
        is_option = word.startswith("-")
        if hides_next and not is_option:
            kept.append(_HIDDEN)
        elif is_option and _SECRET.search(name) and equals:
            kept.append(f"{name}={_HIDDEN}")
        else:
            kept.append(_IN_WORD.sub(rf"\g<1>{_HIDDEN}", _IN_ADDRESS.sub(f"{_HIDDEN}@", word)))
        hides_next = is_option and not equals and _SECRET.search(name) is not None
    return shlex.join(kept)


_TRIES, _TRY_AGAIN_S = 3, 0.02


@contextmanager
def _locked(path: Path) -> Iterator[RunLock]:
    """The lock of a directory, which is let go of where what it was taken for fails."""
    lock = RunLock(path / _LOCK)
    try:
        yield lock
    except BaseException:
        lock.close()
        raise


class RunLock:
    """The right to write into a run directory, held until `close`, which is idempotent.

    An flock on a file in it, which the system releases however the holder dies. The lock belongs to the open file: a
    child that inherits `descriptor` holds it on, should its parent die first.
    """

    def __init__(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UserError(f"{path} cannot be opened: {reason(error)}") from error
        try:
            for tries_left in reversed(range(_TRIES)):  # a viewer that looks has it for a moment only
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not tries_left:
                        raise
                    time.sleep(_TRY_AGAIN_S)
            os.ftruncate(descriptor, 0)
            write_all(descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode())
        except BlockingIOError:
            holder = os.read(descriptor, 256).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise UserError(
                f"{path.parent} is in use by another run (process {holder}); wait for it to end, or choose another out"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise UserError(f"{path} cannot be locked: {reason(error)}") from error
        self.descriptor = descriptor

    def close(self) -> None:
        """Release the lock; the file stays, because a removed one could be locked by two."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


_PLAIN_FIELDS = {"task": str, "seed": int, "batch_size": int, "samples": int}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The part of a configuration that a resumed run shares with the one before."""

    task: str
    seed: int
    batch_size: int
    samples: int
    parameters: Mapping[str, str]

    @property
    def digest(self) -> str:
        fields = [getattr(self, name) for name in _PLAIN_FIELDS]
        text = json.dumps([*fields, sorted(self.parameters.items())])
        return hashlib.sha256(text.encode()).hexdigest()

    def conflict(self, current: Fingerprint) -> str | None:
        """Why `current` cannot continue a run of this fingerprint, as a sentence; None if it can."""
        for name in _PLAIN_FIELDS:
            before, now = getattr(self, name), getattr(current, name)
            if before != now:
                now, before = printable(repr(now)), printable(repr(before))
                return f"{name} is {now}, but the run was started with {before}; resume with that"
        for name in [*self.parameters, *current.parameters]:
            before, now = self.parameters.get(name, "absent"), current.parameters.get(name, "absent")
            if before != now:
                who, now, before = printable(repr(name)), printable(now), printable(before)
                return f"parameter {who} is {now}, but in the run it was {before}; resume with that model"
        return None


def fingerprint(config: Mapping[str, Any]) -> Fingerprint:
    """Pick the fields that must stay the same out of a configuration; UserError names one it lacks."""
    for name, kind in {**_PLAIN_FIELDS, "parameters": dict}.items():
        if not isinstance(config.get(name), kind):
            shown = printable(repr(config.get(name)))
            raise UserError(f"the configuration's {name!r} is {shown}; it must be {kind.__name__}")
    parameters = {str(name): str(shape) for name, shape in config["parameters"].items()}
    return Fingerprint(**{name: config[name] for name in _PLAIN_FIELDS}, parameters=parameters)


def parameter_shapes(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """`model.named_parameters()` as `{"fc.weight": "float32 10×64"}`: the configuration's `parameters`."""
    return {
        name: f"{str(one.dtype).removeprefix('torch.')} {'×'.join(map(str, one.shape)) or 'scalar'}"
        for name, one in named
    }
