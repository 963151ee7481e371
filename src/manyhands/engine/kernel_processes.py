"""Compiled steps in worker processes, on the memory that the strategy chooses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from manyhands.data.store.checkpoint import CheckpointStore, Loaded
from manyhands.data.store.rundir import RunDirectory
from manyhands.engine.compiled_worker import Control, KernelTrainer, kernel_task, require_same_options
from manyhands.engine.exchange import SentFor
from manyhands.engine.history_rows import overlap_report
from manyhands.engine.kernel_task import KernelStep, KernelTask
from manyhands.engine.reporting import WorkerContext
from manyhands.engine.training import Result, Stage
from manyhands.engine.worker import Trained
from manyhands.engine.worker_processes import ProcessTraining, Train, WorkerJob
from manyhands.engine.worker_resources import Resources
from manyhands.native.group.shared_group import SharedGroup
from manyhands.strategy import Strategy

__all__ = ["KernelProcesses"]


class KernelProcesses(ProcessTraining):
    """Trains a kernel task in worker processes of this host."""

    @classmethod
    @abstractmethod
    def assemble(cls, task: KernelTask, strategy: Strategy, group: SharedGroup) -> tuple[KernelStep, Control]:
        """Collective, in a worker's process: its compiled step, and the control block that the workers share."""

    def resume(self, directory: RunDirectory, config: Mapping[str, Any]) -> int | None:
        require_same_options(directory, config)
        return super().resume(directory, config)

    def run(self, stage: Stage) -> Result:
        """Compile once in the launcher, so that workers do not each compile, then run."""
        kernel_task(self._request.plan).warm()
        return super().run(stage)

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        overlap = overlap_report([one["overlap"] for one in finished])
        return sum(one["samples"] for one in finished), overlap

    @classmethod
    @contextmanager
    def worker(
        cls,
        job: WorkerJob,
        resources: Resources,
        worker_context: WorkerContext,
        checkpoints: CheckpointStore | None,
    ) -> Iterator[Train]:
        with closing(resources.group()) as group:
            step, control = cls.assemble(kernel_task(job.plan), job.strategy, group)
            with closing(step):

                def train(start: Loaded | None) -> tuple[Trained, Mapping[str, Any]]:
                    trainer = KernelTrainer(job.plan, step, control, worker_context, checkpoints)
                    trained = trainer.run(start)
                    sent = SentFor(gradients=trainer.sent)
                    return trained, {"sent": sent.to_dict(), "overlap": dict(trainer.overlap)}

                yield train
