"""`hogwild`: worker processes whose steps all go to one memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from manyhands.hogwild.strategy import Hogwild
from manyhands.hogwild.trainer import HogwildTrainer
from manyhands.store.checkpoint import CheckpointStore, Loaded
from manyhands.training.exchange import SentFor
from manyhands.training.overlap import overlap_summary
from manyhands.training.processes import ProcessTraining, Train, WorkerJob
from manyhands.training.reporting import Surroundings
from manyhands.training.resources import Resources
from manyhands.training.worker import Trained

__all__ = ["HogwildTraining"]


class HogwildTraining(ProcessTraining):
    """A loop of its own: whole batches, without meeting at each step."""

    @classmethod
    @contextmanager
    def worker(
        cls,
        job: WorkerJob,
        resources: Resources,
        around: Surroundings,
        checkpoints: CheckpointStore | None,
    ) -> Iterator[Train]:
        """Steps on the memory of all."""
        assert isinstance(job.strategy, Hogwild), "the registry leads here from hogwild alone"
        trainer = HogwildTrainer(job.plan, job.strategy.order, resources.group(), around, checkpoints)
        with closing(trainer):

            def train(start: Loaded | None) -> tuple[Trained, Mapping[str, Any]]:
                trained = trainer.run(start)
                return trained, {"sent": SentFor().to_dict(), "overlap": dict(trainer.overlap)}

            yield train

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        """Each worker has samples of its own there."""
        overlap = overlap_summary([one["overlap"] for one in finished])
        return sum(one["samples"] for one in finished), {"overlap": overlap}
