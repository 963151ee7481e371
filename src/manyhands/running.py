"""`start`: a run in the background, whose workers may be added and removed while it goes on."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from manyhands.cluster.template import warm
from manyhands.errors import Aborted, UserError
from manyhands.fitting import fit
from manyhands.run import Run
from manyhands.strategy import Strategy
from manyhands.task import Task
from manyhands.training.commands import AddWorker, Command, RemoveWorker
from manyhands.training.options import Options

__all__ = ["Running", "start"]


class Running:
    """A run under way; a context manager that stops it on leaving, if it has not ended."""

    def __init__(self, task: Task, strategy: Strategy, options: Options, arguments: dict[str, Any]) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._strategy = strategy
        self._run: Future[Run] = Future()
        chosen = replace(options, commands=self._commands)

        def work() -> None:
            try:
                self._run.set_result(fit(task, strategy, options=chosen, **arguments))
            except BaseException as error:  # whatever it was, it is the caller's to see
                self._run.set_exception(error)

        if strategy.forks_workers(compiled=task.compiled):
            warm()  # here, not in the thread: what a thread starts ends with it, and the next run wants it
        self._thread = threading.Thread(target=work, name="manyhands-run", daemon=True)
        self._thread.start()

    def add_worker(self) -> int:
        """One more worker: its slot. It gets work as soon as its process is there."""
        return self._ask(AddWorker())

    def remove_worker(self, slot: int) -> None:
        """One worker less: it finishes what it owes, and leaves."""
        self._ask(RemoveWorker(slot=slot))

    @property
    def done(self) -> bool:
        """Whether the run has ended, well or not."""
        return self._run.done()

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

    def _ask(self, change: AddWorker | RemoveWorker) -> int:
        if not self._strategy.can_change_workers:
            raise UserError(f"strategy {self._strategy} has a fixed number of workers; use ps to change it")
        if self._run.done():
            raise UserError("the run has ended")
        command = Command(change)
        self._commands.put(command)
        done: Future[int] = command.done
        while not self._run.done():
            try:
                return done.result(0.1)
            except TimeoutError:
                continue
        if done.done():
            return done.result()
        raise Aborted("the run ended before it could be changed")


def start(
    task: Task, strategy: str | Strategy = "ps", *, options: Options | None = None, **arguments: Any
) -> Running:
    """`fit` in the background: the same arguments, and a `Running` at once."""
    return Running(task, Strategy.parse(strategy), options or Options(), arguments)
