"""A run on disk: what was asked for, what happened, and what is needed to resume.

runs/digits/
  config.json     what was asked for, by which command, where and when; its presence makes the directory a run
  metrics.jsonl   one JSON object a line, each with its step
  events/         what each process did when
  checkpoints/    step-00000050/ ...
  summary.json    what came out
  members.jsonl   processes that came and went, where that is no failure (parameter servers)
  shards/         each shard's snapshots
  updates/        every update that each shard applied
  run.lock        held by the live run
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from manyhands.data.store.atomic import (
    WriteFailed,
    make_directory,
    reason,
    sync_directory,
    write_atomically,
    write_json,
)
from manyhands.data.store.checkpoint import CheckpointStore
from manyhands.data.store.fingerprint import fingerprint
from manyhands.data.store.lines import LineFile
from manyhands.data.store.lock import RunLock
from manyhands.data.store.metrics_file import MetricsLog
from manyhands.data.store.origin import origin
from manyhands.errors import DataError, Hang, ManyhandsError, UserError, WorkerFailed

__all__ = ["IN_PYTHON", "ON_COMMAND_LINE", "RunDirectory", "require_free"]

_log = logging.getLogger("manyhands")
IN_PYTHON: Final = "pass resume=True or choose another out"
"""What to do where a run is in the way, as Python has it."""

ON_COMMAND_LINE: Final = "add --resume to go on with it, or choose another --out"
"""The same on the command line."""

_CONFIG, _SUMMARY, _METRICS, _LOCK = "config.json", "summary.json", "metrics.jsonl", "run.lock"
_HANG = "hang.txt"
_MEMBERS = "members.jsonl"
_FORMAT = "manyhands run"
_VERSION = 1
# What a `create` that died before the configuration was written may have left: still an empty directory to
# us.
_UNFINISHED = {_LOCK, f".{_CONFIG}.writing"}


class RunDirectory:
    """One run's directory; `create` starts it, `open` resumes or reads it. A context manager.

    A run that creates it, or opens it with its lock, is the only one that writes there until `close`.
    Processes of that run, and viewers, open it with `lock=False`.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], lock: RunLock | None) -> None:
        self.path = path
        self.config = config
        self.metrics = MetricsLog(path / _METRICS)
        self.lock = lock
        self._members = LineFile(path / _MEMBERS)

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
        lock = RunLock(path / _LOCK)
        lock.acquire()
        try:
            require_free(path, own_files, instead)  # again, now that nobody else can be creating it
            _write_config(path, config, origin())
            return cls(path, _read_config(path), lock)._with_folders()
        except BaseException:
            lock.close()
            raise

    @classmethod
    def open(cls, path: Path | str, *, lock: bool = True) -> RunDirectory:
        """Go on with a run, or look at one (`lock=False`); UserError where there is none or it is in use."""
        path = Path(path)
        if lock and not cls.is_one(path) and not path.is_file():
            raise UserError(f"{path} holds no run ({_CONFIG} is missing); start one without resume")
        config = _read_config(path)
        if not lock:
            return cls(path, config, None)
        held = RunLock(path / _LOCK)
        held.acquire()
        try:
            return cls(path, config, held)._with_folders()
        except BaseException:
            held.close()
            raise

    def go_on_as(self, config: Mapping[str, Any]) -> None:
        """Write what is asked for from now on: a run that is resumed may have other workers and more steps."""
        if config != self.config:
            _write_config(self.path, config, self.origin)
            self.config = _read_config(self.path)

    @property
    def origin(self) -> Mapping[str, Any]:
        """Command, host and time of day that the run was begun with; empty of a run that does not tell."""
        found = _read_object(self.path / _CONFIG).get("origin")
        return found if isinstance(found, dict) else {}

    @staticmethod
    def is_one(path: Path) -> bool:
        """Whether there is a run at `path`."""
        return (path / _CONFIG).exists()

    @staticmethod
    def is_live(path: Path) -> bool:
        """Whether a live run has the directory at `path`, or is about to make it a run."""
        return bool(RunLock.is_held(path / _LOCK))

    @property
    def events_path(self) -> Path:
        """Where the processes of the run put their events."""
        return self.path / "events"

    @property
    def checkpoints_path(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    def checkpoints(self, keep: int = 3) -> CheckpointStore:
        """The run's checkpoints, of which the last `keep` and the best stay."""
        return CheckpointStore(self.checkpoints_path, keep)

    @property
    def metrics_path(self) -> Path:
        """The history, a line a row."""
        return self.path / _METRICS

    @property
    def members_path(self) -> Path:
        """What happened to processes of the run, a line each; not every run has it."""
        return self.path / _MEMBERS

    @property
    def summary_path(self) -> Path:
        """What came out; a run that has not ended has none, or an earlier one's."""
        return self.path / _SUMMARY

    def is_held(self) -> bool | None:
        """Whether a live run has the directory; None where none ever had."""
        return RunLock.is_held(self.path / _LOCK)

    def tell_end(self, error: ManyhandsError, at_s: float) -> None:
        """Record what ended the run: in members.jsonl, and a hang in hang.txt.

        `at_s` is on the time base of the other rows there: seconds since training began. Raises nothing: a disk that
        does not take it must not hide the error itself.
        """
        name = error.blamed
        if not name and isinstance(error, WorkerFailed) and error.worker_rank >= 0:
            name = f"worker {error.worker_rank}"
        blamed = {"name": name} if name else {}
        sentence = str(error).partition("\n")[0]
        try:
            self.append_member({"event": "fault", "at_s": at_s, **blamed, "sentence": sentence})
            if isinstance(error, Hang):
                write_atomically(self.path / _HANG, [f"{error}\n\n{error.details}\n".encode()])
        except WriteFailed as failure:
            _log.warning("what ended the run is not in its directory: %s", failure)

    def append_member(self, *events: Mapping[str, Any]) -> None:
        """Add what happened to processes of the run to members.jsonl; WriteFailed leaves that as it was.

        A row that does not say its time of day (`unix_s`, in seconds since 1970) happened now.
        """
        rows = ({**event, "unix_s": event.get("unix_s", time.time())} for event in events)
        self._members.append(b"".join(json.dumps(row).encode() + b"\n" for row in rows))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Put what came out into summary.json, in the place of an earlier one."""
        write_json(self.summary_path, summary)

    def read_summary(self) -> dict[str, Any] | None:
        """What came out, None for a run that has not ended; DataError if the file is damaged."""
        try:
            return _read_object(self.summary_path)
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
        for name in (_MEMBERS, _METRICS, _CONFIG, _LOCK):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):  # something else is in it
            self.path.rmdir()

    def close(self) -> None:
        """Sync the metrics and let others have the directory."""
        try:
            self._members.close()
            self.metrics.close()
        finally:
            if self.lock is not None:
                self.lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _with_folders(self) -> RunDirectory:
        try:
            for folder in (self.events_path, self.checkpoints_path):
                folder.mkdir(exist_ok=True)
            sync_directory(self.path)
        except OSError as error:
            raise WriteFailed(f"{self.path} cannot be filled: {reason(error)}") from error
        return self


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
    if _CONFIG in others:
        try:
            task = fingerprint(_read_config(path)).task
        except UserError:
            pass
        else:
            raise UserError(f"{path} already holds a run of {task!r}; {instead}")
    raise UserError(
        f"{path} is not empty and holds no run (it has {others[0]!r} in it); choose another out, or empty it"
    )


def _write_config(path: Path, config: Mapping[str, Any], begun: Mapping[str, Any]) -> None:
    write_json(path / _CONFIG, {"format": _FORMAT, "version": _VERSION, "config": config, "origin": begun})


def _read_config(path: Path) -> dict[str, Any]:
    """The configuration of the run at `path`, or UserError with what is wrong."""
    file = path / _CONFIG
    try:
        content = _read_object(file)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(_no_run(path)) from None
    match content:
        case {"format": str(name), "version": int(version), "config": dict(config)}:
            if (name, version) == (_FORMAT, _VERSION):
                return config
            raise UserError(
                f"{file} is of the format {name!r} version {version}, not {_FORMAT!r} version {_VERSION}"
            )
    raise DataError(f"{file} is no configuration of a run; {path} was made by something else, or is damaged")


def _no_run(path: Path) -> str:
    """The error that there is no run at `path`, with the runs below it, where there are some."""
    if not path.exists():
        return f"{path} holds no run: there is no such directory"
    if not path.is_dir():
        return f"{path} holds no run: it is a file; give the directory of a run"
    inside = sorted(file.parent for file in (*path.glob(f"*/{_CONFIG}"), *path.glob(f"runs/*/{_CONFIG}")))
    newest = max(inside, key=lambda run: (run / _CONFIG).stat().st_mtime, default=None)
    hint = f"did you mean {newest}?" if newest is not None else "give the directory of a run"
    return f"{path} holds no run ({_CONFIG} is missing); {hint}"


def _read_object(file: Path) -> dict[str, Any]:
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
