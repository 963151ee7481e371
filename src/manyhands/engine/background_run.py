"""`start`: a run in the background, whose workers may be added and removed while it trains."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

from manyhands.engine.fitting import fit
from manyhands.engine.options import Options
from manyhands.engine.run import Run
from manyhands.errors import Aborted, UserError
from manyhands.observe.analyse.totals import TotalsSnapshot
from manyhands.observe.draw.showing import showing
from manyhands.places.local.template import warm
from manyhands.places.place import MORE_WORKERS, AddWorker, Command, RemoveWorker
from manyhands.strategy import Strategy
from manyhands.task import Task


class Running:
    """A run under way, which shows how far it is; a context manager that stops it on leaving, if it has not ended."""

    def __init__(self, task: Task, strategy: Strategy, options: Options, arguments: dict[str, Any]) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._strategy = strategy
        self._run: Future[Run] = Future()
        workers = arguments.get("workers", 1)
        self._next_slot = workers if isinstance(workers, int) else 0  # `fit` names options that make no sense
        self._most = MORE_WORKERS + self._next_slot
        self._slots = tuple(range(self._next_slot))
        self._changing = threading.Lock()
        self._steps = 0
        self._snapshot: Callable[[], TotalsSnapshot] | None = None

        def look_on(steps: int, snapshot: Callable[[], TotalsSnapshot]) -> AbstractContextManager[object]:
            self._steps, self._snapshot = steps, snapshot
            if options.view is not None:
                return options.view(steps, snapshot)
            return showing(options.progress, steps, snapshot, str(strategy))

        chosen = replace(options, commands=self._commands, view=look_on)

        def work() -> None:
            try:
                self._run.set_result(fit(task, strategy, options=chosen, **arguments))
            except BaseException as error:  # any error reaches the caller, through result()
                self._run.set_exception(error)

        if strategy.forks_workers(compiled=task.compiled):
            warm()  # here, not in the thread: what a thread starts ends with it, and the next run wants it
        self._thread = threading.Thread(target=work, name="manyhands-run", daemon=True)
        self._thread.start()

    def add_worker(self) -> int:
        """One more worker: its slot, at once. It gets work as soon as its process is there."""
        self._require_changeable()
        with self._changing:
            if self._next_slot >= self._most:
                raise UserError(f"no more than {self._most} slots can be in one run")
            slot, self._next_slot = self._next_slot, self._next_slot + 1
            self._slots = (*self._slots, slot)
            self._commands.put(Command(AddWorker()))
        return slot

    def remove_worker(self, slot: int) -> None:
        """One worker less: it finishes its outstanding work, and leaves. Waits until the run has heard of it."""
        self._require_changeable()
        command = Command(RemoveWorker(slot=slot))
        self._commands.put(command)
        while not self._run.done() and not command.done.done():
            wait((cast(Future[Any], one) for one in (self._run, command.done)), return_when=FIRST_COMPLETED)
        if not command.done.done():
            raise Aborted("the run ended before it could be changed")
        command.done.result()
        with self._changing:
            self._slots = tuple(one for one in self._slots if one != slot)

    @property
    def done(self) -> bool:
        """Whether the run has ended, well or not."""
        return self._run.done()

    @property
    def steps_done(self) -> int:
        """Global batches that are done, those before a resume included; 0 while it starts."""
        return min(self._snapshot().step, self._steps) if self._snapshot is not None else 0

    @property
    def slots(self) -> tuple[int, ...]:
        """The places of workers, those included whose process is not there yet."""
        return self._slots

    def result(self, timeout_s: float | None = None) -> Run:
        """Wait for the end: what came out, or the error that ended it; TimeoutError after `timeout_s`."""
        return self._run.result(timeout_s)

    def stop(self) -> None:
        """End the run now, if it has not ended; a run with a directory can be resumed."""
        if not self._run.done():
            self._commands.put(Command(None))
        self._thread.join()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        from manyhands.observe.draw.notebook import running_line

        return f"Running({self._ended or running_line(*self._state)})"

    def _repr_html_(self) -> str:
        """What a notebook shows: how far it is, and every slot; the run itself once it has ended."""
        from manyhands.observe.draw.notebook import ended_html, running_html

        if self._ended is None:
            return running_html(*self._state)
        failed = self._run.exception() is not None
        return ended_html(self._ended) if failed else self._run.result()._repr_html_()

    @property
    def _state(self) -> tuple[str, tuple[int, ...], int, TotalsSnapshot | None]:
        now = self._snapshot() if self._snapshot is not None else None
        return str(self._strategy), self._slots, self._steps, now

    @property
    def _ended(self) -> str | None:
        if not self._run.done():
            return None
        error = self._run.exception()
        if error is None:
            return f"ended: {self._run.result()!r}"
        return f"ended with {type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def _require_changeable(self) -> None:
        if not self._strategy.facts.can_change_workers:
            raise UserError(
                f"strategy {self._strategy} has a fixed number of workers; use ps or allreduce elastic=yes to change it"
            )
        if self._run.done():
            raise UserError("the run has ended")


def start(
    task: Task, strategy: str | Strategy = "ps", *, options: Options | None = None, **arguments: Any
) -> Running:
    """`fit` in the background: the same arguments, and a `Running` at once."""
    return Running(task, Strategy.parse(strategy), options or Options(), arguments)
