"""`hogwild`: worker processes that all step on one shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from manyhands.data.store.checkpoint import CheckpointStore, Loaded
from manyhands.engine.exchange import SentFor
from manyhands.engine.reporting import WorkerContext
from manyhands.engine.run import overlap_summary
from manyhands.engine.worker import Trained
from manyhands.engine.worker_processes import ProcessTraining, Train, WorkerJob
from manyhands.engine.worker_resources import Resources
from manyhands.strategies.hogwild.strategy import Hogwild
from manyhands.strategies.hogwild.trainer import HogwildTrainer

__all__ = ["HogwildTraining"]


class HogwildTraining(ProcessTraining):
    """Uses a separate loop: each worker takes whole batches, without synchronizing at each step."""

    @classmethod
    @contextmanager
    def worker(
        cls,
        job: WorkerJob,
        resources: Resources,
        worker_context: WorkerContext,
        checkpoints: CheckpointStore | None,
    ) -> Iterator[Train]:
        assert isinstance(job.strategy, Hogwild), "the registry leads here from hogwild alone"
        trainer = HogwildTrainer(job.plan, job.strategy.order, resources.group(), worker_context, checkpoints)
        with closing(trainer):

            def train(start: Loaded | None) -> tuple[Trained, Mapping[str, Any]]:
                trained = trainer.run(start)
                return trained, {"sent": SentFor().to_dict(), "overlap": dict(trainer.overlap)}

            yield train

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        overlap = overlap_summary([one["overlap"] for one in finished])
        return sum(one["samples"] for one in finished), {"overlap": overlap}
