"""Callbacks: code of the user's own that hears of a run while it goes on, and may ask it to stop.

They live in the process that called `fit` and are called in its thread, whatever the strategy: so they may hold the
state of a notebook, print, and write files, and nothing of them is sent to a worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.engine.run import Run
from manyhands.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """What is known of a run when it begins."""

    config: Mapping[str, Any]
    """What `config.json` holds: task, strategy, workers, steps, seed, batch size, versions."""
    history: Sequence[Mapping[str, Any]]
    """The rows of the run that this one continues; empty where nothing was done yet."""
    resumed: bool
    """Whether a run goes on that was begun before."""
    path: Path | None
    """The run directory, where there is one."""


class Callback:
    """Hears of a run; a subclass overrides what it wants to hear.

    `on_step`, `on_evaluate` and `on_checkpoint` may return True to ask the run to stop: all workers then stop after the
    same step, evaluate and save, and the run can be resumed. What a callback raises ends the run with that exception.
    """

    def on_begin(self, beginning: Beginning) -> None:
        """Before the first step, and before any worker is started."""

    def on_step(self, row: Mapping[str, Any]) -> bool | None:  # noqa: ARG002
        """After a step, with its row of the history: `step`, `loss`, `seconds`, `at_s`."""
        return None

    def on_evaluate(self, row: Mapping[str, Any]) -> bool | None:  # noqa: ARG002
        """After an evaluation, with its row of the history: `step`, `metrics`, `at_s`."""
        return None

    def on_checkpoint(self, step: int, path: Path) -> bool | None:  # noqa: ARG002
        """A checkpoint after `step` steps was written to the folder `path`."""
        return None

    def on_end(self, run: Run | None, error: BaseException | None) -> None:
        """At the end, however it came: `run` is what came out, or `error` is what ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """A callback asked to stop."""

    name: str  # the callback's class
    step: int  # what it had just heard of


class Listeners:
    """The callbacks of one run, in the order given; once one has raised, none hears anything more but the end."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        self._reached = 0
        self._saved: list[tuple[int, Path]] = []  # checkpoints whose steps have not all been reported yet
        self.stop_request: StopRequest | None = None  # of the first to ask
        self.broken: Callback | None = None  # the one that raised

    def begin(self, beginning: Beginning) -> None:
        self._reached = max((int(row["step"]) for row in beginning.history), default=0)
        for callback in self._callbacks:
            self._call(callback, callback.on_begin, beginning)

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self._reached = max(self._reached, int(row["step"]))
            for callback in self._callbacks:
                hears = callback.on_step if "loss" in row else callback.on_evaluate
                self._call(callback, hears, row, step=int(row["step"]))
        self._report_saved(self._reached)

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint was written; it is reported after the steps that it has seen."""
        self._saved.append((step, path))
        self._report_saved(self._reached)

    def end(self, run: Run | None, error: BaseException | None) -> None:
        """The run has ended: every callback hears of that, whatever another raises then."""
        if self.broken is None and error is None:
            self._report_saved(math.inf)
        raised = error
        for callback in self._callbacks:
            try:
                callback.on_end(run, error)
            except Exception as another:
                if raised is not None:
                    raised.add_note(f"and at the end {type(callback).__name__}.on_end raised {another!r}")
                else:
                    raised = another
        if raised is not None and error is None:
            raise raised

    def _report_saved(self, reached: float) -> None:
        while self._saved and self._saved[0][0] <= reached:
            step, path = self._saved.pop(0)
            for callback in self._callbacks:
                self._call(callback, callback.on_checkpoint, step, path, step=step)

    def _call(
        self, callback: Callback, method: Callable[..., Any], *arguments: Any, step: int | None = None
    ) -> None:
        if self.broken is not None:
            return
        name = type(callback).__name__
        try:
            answer = method(*arguments)
            if answer is not None and not isinstance(answer, bool):
                called = f"{name}.{method.__name__} returned {answer!r}"
                raise UserError(f"{called}; return True to ask the run to stop, or nothing")
        except BaseException:
            self.broken = callback
            raise
        if answer is True and step is not None and self.stop_request is None:
            self.stop_request = StopRequest(name=name, step=step)
