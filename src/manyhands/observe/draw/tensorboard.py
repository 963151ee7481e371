"""A run's numbers as TensorBoard event files: written live beside a run, or from its directory later.

The loss and the metrics have the time of day at which their step ended. Speed, the split of each worker's time and
staleness come from views of the run: one per poll of a live run, and a hundred of a finished one.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.errors import ManyhandsError, UserError
from manyhands.native.closeable import Closeable
from manyhands.observe.analyse.follow import RunFollower, read_interleaved
from manyhands.observe.analyse.run_view import Gather
from manyhands.observe.analyse.view import RunView
from manyhands.observe.record.checked_values import logged_values, number, text

_log = logging.getLogger("manyhands")
_LOOK_EVERY_S = 1.0
_STOP_TIMEOUT_S = 30.0
_MAX_LEFT = 10_000  # rows that wait for their events
_VIEWS = 100  # views of a finished run
_NS_PER_S = 1_000_000_000


class TensorboardFiles(Closeable):
    """The TensorBoard files of one run in `directory`; a context manager, `close` is idempotent."""

    def __init__(self, directory: Path | str) -> None:
        """Create a file there; UserError where the package that writes it is missing."""
        try:
            # Not SummaryWriter, which leaves a thread and a queue behind for a while.
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.proto.summary_pb2 import Summary
        except ImportError as error:
            raise UserError(
                "event files for TensorBoard need the tensorboard extra: pip install 'manyhands[tensorboard]'"
            ) from error
        self._event, self._summary = Event, Summary
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._writer: Any = EventsWriter(
                str(Path(directory) / "events"), f".{os.getpid()}.{time.time_ns()}"
            )
        except OSError as error:
            raise UserError(
                f"{directory} cannot hold event files for TensorBoard: {error.strerror}"
            ) from error
        self._is_closed = False

    def add_row(self, row: Mapping[str, Any], wall_s: float) -> None:
        step = int(row["step"])
        if row.get("loss") is not None:
            self._scalar("loss", row["loss"], step, wall_s)
        for name, value in logged_values(row).items():
            self._scalar(f"optimizer/{name}", value, step, wall_s)
        for name, value in (row.get("metrics") or {}).items():
            if (known := number(value)) is not None:
                self._scalar(f"metrics/{text(name)}", known, step, wall_s)

    def add_view(self, view: RunView, wall_s: float) -> None:
        self._scalar("speed/samples_per_s", view.samples_per_s, view.step, wall_s)
        self._scalar("speed/steps_per_s", view.steps_per_s, view.step, wall_s)
        for worker in view.workers:
            for part in ("compute", "input", "exchange", "wait"):
                share = getattr(worker.recent, part)
                self._scalar(f"time_of_worker_{worker.role}/{part}", share, view.step, wall_s)
        if view.staleness.histogram:
            self._scalar("staleness/mean", view.staleness.mean, view.step, wall_s)
            self._scalar("staleness/max", view.staleness.max, view.step, wall_s)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._writer.close()

    def _scalar(self, tag: str, value: float, step: int, wall_s: float) -> None:
        if math.isfinite(value):
            summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=float(value))])
            self._writer.write_event(self._event(wall_time=wall_s, step=step, summary=summary))


class LiveTensorboard:
    """Writes the files of a run, which may not exist yet, while the body trains it; failures are logged."""

    def __init__(self, run: Path, directory: Path) -> None:
        self._follower = RunFollower(run)
        self._files = TensorboardFiles(directory)
        self._rows_left: list[Mapping[str, Any]] = []
        self._step_shown = -1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="manyhands-tensorboard", daemon=True)

    def __enter__(self) -> LiveTensorboard:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning(
                "the event files for TensorBoard were not complete %.0f s after the end of the run; check that their "
                "disk responds",
                _STOP_TIMEOUT_S,
            )

    def _run(self) -> None:
        try:
            with self._files:
                while not self._over.wait(_LOOK_EVERY_S):
                    self._look()
                self._look()
        except (ManyhandsError, OSError) as error:
            _log.warning("no more event files for TensorBoard: %s", error)

    def _look(self) -> None:
        if not self._follower.path.is_dir():
            return
        view = self._follower.poll()
        rows = [*self._rows_left, *self._follower.new_rows]
        late = self._over.is_set() or len(self._rows_left) > _MAX_LEFT
        self._rows_left = _add_rows(self._files, self._follower, rows, all_of_them=late)
        wall_s = self._follower.wall_s(view.seconds)
        if wall_s is not None and view.step > self._step_shown:
            self._step_shown = view.step
            self._files.add_view(view, wall_s)
        self._files.flush()


def write_run(run: Path | str, directory: Path | str) -> int:
    """Write the files of a run from its directory, finished or not; return how many steps they have."""
    follower = RunFollower(run)
    view = follower.poll()
    if not view.step:
        raise UserError(f"{run} has recorded no step yet; there is nothing to show")
    with TensorboardFiles(directory) as files:
        _add_rows(files, follower, follower.new_rows, all_of_them=True)
        _add_views(files, follower, view)
    return view.step


def _add_rows(
    files: TensorboardFiles,
    follower: RunFollower,
    rows: Sequence[Mapping[str, Any]],
    *,
    all_of_them: bool = False,
) -> list[Mapping[str, Any]]:
    """Write the rows whose time is known from events; return the others, whose events may still arrive."""
    for index, row in enumerate(rows):
        wall_s = follower.wall_of_row(row, guess=all_of_them)  # where its events were not kept
        if wall_s is None and not all_of_them:
            return list(rows[index:])
        if wall_s is not None:
            files.add_row(row, wall_s)
    return []


def _add_views(files: TensorboardFiles, follower: RunFollower, last: RunView) -> None:
    records, names = read_interleaved(follower.path / "events")
    if not len(records):
        return
    # Roles without events are left out: a damaged configuration may request hundreds.
    came = sum(name.startswith("worker") for name in names.values())
    gather = Gather(task=last.task, strategy=last.strategy, steps_asked=last.steps_asked, workers=came)
    for role, name in names.items():
        gather.meet(role, name)
    known_ns = np.maximum.accumulate(records["start_ns"] + records["duration_ns"]).astype(np.int64)
    moments = np.linspace(int(known_ns[0]), int(known_ns[-1]), _VIEWS + 1).astype(np.int64)[1:]
    begin, ends = 0, np.searchsorted(known_ns, moments, side="right")
    for now_ns, end in zip(moments.tolist(), ends.tolist(), strict=True):
        gather.add_events(records[begin:end])
        begin = end
        view = gather.view(now_ns)
        wall_s = follower.wall_s((now_ns - gather.seen.first_ns) / _NS_PER_S)
        if view.step and wall_s is not None:
            files.add_view(view, wall_s)
