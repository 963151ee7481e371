"""A trace of some steps by `torch.profiler`: what each worker's operators and kernels took.

The callback is asked for in the process of `fit`; what it asks for goes to the workers with their plan, and each writes
a file of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.engine.callbacks import Beginning, Callback
from manyhands.engine.run import Run
from manyhands.errors import UserError

if TYPE_CHECKING:
    from torch.profiler import profile

_log = logging.getLogger("manyhands")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledSteps:
    """Which steps a worker traces, and into which folder."""

    folder: str
    first: int  # from 1
    steps: int


def named_span(name: str) -> AbstractContextManager[object]:
    """A span of the host with this name, in the trace of a run that takes one."""
    from torch.profiler import record_function

    return record_function(name)


class TorchProfiler(Callback):
    """Traces `steps` steps of every worker from step `first` on with `torch.profiler`.

    The files `worker-0.json`, … in `folder` are for Perfetto (ui.perfetto.dev) or chrome://tracing.
    """

    def __init__(self, folder: str | Path, *, first: int = 4, steps: int = 3) -> None:
        for name, value in (("first", first), ("steps", steps)):
            if not isinstance(value, int) or value < 1:
                raise UserError(f"TorchProfiler: {name} is {value!r}; it must be an integer of at least 1")
        self.profiled = ProfiledSteps(folder=str(Path(folder).absolute()), first=first, steps=steps)
        self._reached = 0

    def on_begin(self, beginning: Beginning) -> None:
        """Make the folder; UserError where that cannot be."""
        del beginning
        try:
            Path(self.profiled.folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"TorchProfiler: {self.profiled.folder} cannot be made: {error.strerror}"
            ) from error

    def on_step(self, row: Mapping[str, Any]) -> None:
        self._reached = max(self._reached, int(row["step"]))

    def on_end(self, run: Run | None, error: BaseException | None) -> None:
        del run, error
        if 0 < self._reached < self.profiled.first:
            _log.warning(f"TorchProfiler: the run ended before step {self.profiled.first}; there is no trace")


class StepProfiler:
    """One worker's trace; `close` writes what there is of one that the run ended in, and is idempotent."""

    def __init__(self, asked: ProfiledSteps | None, worker: int) -> None:
        self._asked, self._worker = asked, worker
        self._running: profile | None = None
        self._taken = 0

    def before(self, step: int) -> None:
        """Before this worker's step `step`, from 0."""
        asked = self._asked
        due = asked is not None and not self._taken and step + 1 >= asked.first
        if due and self._running is None:  # else a step is repeated
            from torch.profiler import profile

            self._running = profile(
                acc_events=True
            )  # of all that this machine can trace, without a warning about it
            self._running.start()

    def after(self) -> None:
        if self._running is not None and self._asked is not None:
            self._taken += 1
            if self._taken == self._asked.steps:
                self.close()

    def close(self) -> None:
        if self._running is not None and self._asked is not None:
            running, self._running = self._running, None
            running.stop()
            try:
                running.export_chrome_trace(f"{self._asked.folder}/worker-{self._worker}.json")
            except (OSError, RuntimeError) as error:  # a trace costs no run
                _log.warning(f"TorchProfiler: {self._asked.folder} cannot be written: {error}")
