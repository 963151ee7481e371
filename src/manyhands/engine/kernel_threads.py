"""Compiled steps in threads of the caller's process, on one memory; they run without the GIL.

The caller's thread waits for notes, so that it sees a signal at once: the worker threads finish their step and save,
and then the signal is raised.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

from manyhands.engine.compiled_worker import Control, KernelTrainer, kernel_task
from manyhands.engine.reporting import WorkerNote
from manyhands.engine.run import RowsInOrder, overlap_report
from manyhands.engine.training import Result, Stage, Training
from manyhands.engine.worker import Trained
from manyhands.errors import Aborted
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles
from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import EventKind
from manyhands.places.local.signals import as_exception, counted_signals
from manyhands.places.local.status import State

_LOOK_S = 0.2  # the interval at which signals are polled


class KernelThreads(Training):
    """Trains a kernel task in threads, in the strategy's order."""

    def run(self, stage: Stage) -> Result:
        kernel_task(self._request.plan).warm()  # compiling is not part of the measured time
        workers = self._request.workers
        rows = RowsInOrder(self._start.step if self._start is not None else 0)
        with ExitStack() as stack:
            files = stack.enter_context(SharedGroupFiles.create(workers))
            rings = [stack.enter_context(EventRing.create(role=rank)) for rank in range(workers)]
            named = {f"worker-{rank}": ring for rank, ring in enumerate(rings)}
            collector = stack.enter_context(stage.collector(named))
            pool = _WorkerThreads(files, rings)
            try:
                with stage.view(collector):
                    trained = pool.run(lambda rank: self._work(rank, pool, stage), stage, rows)
            finally:
                stage.take_rows(rows.rest())
            collector.flush()
            return Result(
                model=self._model,
                steps_done=trained[0].steps_done,
                samples=sum(one.samples for one in trained),
                seconds=trained[0].seconds,
                stopped_early=trained[0].stopped_early,
                observed={**collector.summary(), **overlap_report(pool.overlaps)},
            )

    def _work(self, rank: int, pool: _WorkerThreads, stage: Stage) -> Trained:
        request, worker_context = self._request, _Thread(pool, rank)
        task, order = kernel_task(request.plan), request.strategy.facts.record_order
        assert order is not None, "threads share one memory"
        joined = time.monotonic_ns()
        files = pool.files
        group = SharedGroup(
            control=os.dup(files.control),
            arena=os.dup(files.arena),
            rank=rank,
            world=files.world,
            timeout_s=request.options.timeout_s,
        )
        with closing(group):
            with group.share(Control.num_bytes(files.world), "who takes which step") as segment:
                control = Control(segment, group, order, task)
                with closing(task.step(self._model, control.order.compiled_gate)) as step:
                    worker_context.record(EventKind.JOIN, joined, time.monotonic_ns() - joined)
                    trainer = KernelTrainer(request.plan, step, control, worker_context, stage.checkpoints())
                    trained = trainer.run(self._start)
                    pool.overlaps.append(trainer.overlap)
            worker_context.record(EventKind.LEAVE, time.monotonic_ns())
        return trained


class _WorkerThreads:
    """The threads of one run, and their notes to the thread that started them."""

    def __init__(self, files: SharedGroupFiles, rings: list[EventRing]) -> None:
        self.files, self.rings = files, rings
        self.notes: queue.SimpleQueue[WorkerNote | None] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.overlaps: list[Mapping[int, int]] = []
        self._ended: dict[int, Trained] = {}
        self._errors: list[BaseException] = []

    def run(self, work: Any, stage: Stage, rows: RowsInOrder) -> list[Trained]:
        def life(rank: int) -> None:
            try:
                self._ended[rank] = work(rank)
            except BaseException as error:  # any error reaches the caller
                self._errors.append(error)
                self.files.abort(rank)
            finally:
                self.notes.put(None)

        threads = [
            threading.Thread(target=life, args=(rank,), name=f"manyhands-worker-{rank}", daemon=True)
            for rank in range(self.files.world)
        ]
        with counted_signals() as presses:  # one between taking a note and keeping it would lose rows
            try:
                left = len(threads)
                for thread in threads:
                    thread.start()
                while left:
                    left -= self._hear(stage, rows)
                    if presses:
                        raise as_exception(presses[0])
            except BaseException as error:
                self.stop.set()
                self._end(threads, presses)
                while not self.notes.empty():  # so that the history up to the checkpoint is complete
                    try:
                        self._hear(stage, rows)
                    except BaseException as again:
                        error.add_note(f"and again while the run ended: {again!r}")
                raise
        for thread in threads:
            thread.join()
        if self._errors:  # errors that follow from the first one add nothing
            raise next((one for one in self._errors if not isinstance(one, Aborted)), self._errors[0])
        return [self._ended[rank] for rank in range(self.files.world)]

    def _hear(self, stage: Stage, rows: RowsInOrder) -> int:
        """Process the next note, if one comes soon; 1 where it was a thread's last."""
        try:
            note = self.notes.get(timeout=_LOOK_S)
        except queue.Empty:
            return 0
        if note is None:
            return 1
        stage.hear(note, rows)
        if stage.stop_wanted():
            self.stop.set()
        return 0

    def _end(self, threads: list[threading.Thread], presses: list[int]) -> None:
        """Have all threads finish their step and save; a second interrupt does not wait for that."""
        started = [thread for thread in threads if thread.ident is not None]
        known = len(presses)
        try:
            while any(thread.is_alive() for thread in started):
                for thread in started:
                    thread.join(_LOOK_S)
                if len(presses) > known:
                    raise as_exception(presses[-1])
        except BaseException:
            self.files.abort()
            for thread in started:
                thread.join()
            raise


class _Thread:
    """The worker context of a worker that is a thread."""

    def __init__(self, pool: _WorkerThreads, rank: int) -> None:
        self.record = pool.rings[rank].record
        self.note = pool.notes.put
        self.stop_requested = pool.stop.is_set

    def mark(self, step: int, state: State, *, place: tuple[int, int] | None = None) -> None:
        """Does nothing: no status table is kept for threads."""
