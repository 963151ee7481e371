"""Training by strategies that are one `Exchange` in the common loop: local processes or a caller's loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from manyhands.data.store.checkpoint import CheckpointStore, Loaded
from manyhands.engine.exchange import Exchange
from manyhands.engine.reporting import WorkerContext
from manyhands.engine.training import training_class
from manyhands.engine.worker import Trained, Trainer
from manyhands.engine.worker_processes import ProcessTraining, Train, WorkerJob
from manyhands.engine.worker_resources import Resources
from manyhands.errors import UserError
from manyhands.strategy import Strategy
from manyhands.wire.choice import CHOSEN, codec_sentence
from manyhands.wire.names import RAW, auto_error

__all__ = ["ExchangeTraining", "exchange_for", "exchanging"]


class ExchangeTraining(ProcessTraining):
    """Trains by the common loop with the strategy's exchange.

    Where its workers choose a codec (`codec=auto`), the choice stands in the summary.
    """

    @property
    def _chooses(self) -> bool:
        return auto_error(getattr(self._request.strategy, "codec", RAW)) is not None

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        samples, besides = super().gather(finished)
        return samples, {**besides, CHOSEN: finished[0].get(CHOSEN)} if self._chooses else besides

    def notices(self, finished: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        return (codec_sentence(finished[0].get(CHOSEN)),) if self._chooses else ()

    @classmethod
    @abstractmethod
    def exchange(cls, strategy: Any, resources: Resources) -> Exchange:
        """One worker's exchange of `strategy`, which is of this training's kind."""

    @classmethod
    def exchange_across_hosts(cls, strategy: Any, resources: Resources) -> tuple[Exchange, Any]:
        """One worker's end among workers of several hosts, and a collective for small words over the same links.

        `strategy` is what `Strategy.across_hosts` made it. Here it is for those that ask for nothing but links, and
        for no loop of one's own, so that there are no words.
        """
        return cls.exchange(strategy, resources), None

    @classmethod
    def end(cls, strategy: Any, resources: Resources) -> Exchange:
        if not resources.several_hosts:
            return cls.exchange(strategy, resources)
        return cls.exchange_across_hosts(strategy.across_hosts(resources.hosts), resources)[0]

    @classmethod
    @contextmanager
    def worker(
        cls,
        job: WorkerJob,
        resources: Resources,
        worker_context: WorkerContext,
        checkpoints: CheckpointStore | None,
    ) -> Iterator[Train]:
        with closing(cls.end(job.strategy, resources)) as exchange:

            def train(start: Loaded | None) -> tuple[Trained, Mapping[str, Any]]:
                trainer = Trainer(job.plan, exchange, worker_context, checkpoints)
                trained = trainer.run(start)
                return trained, {"sent": trainer.sent().to_dict(), **exchange.summary()}

            yield train


def exchanging(strategy: Strategy) -> type[ExchangeTraining]:
    """The training of a strategy that is one exchange; UserError, naming alternatives, for any other."""
    kind = training_class(strategy)
    if not issubclass(kind, ExchangeTraining) or strategy.facts.instead_of_own_loop:
        raise UserError(
            f"strategy={strategy} is not for a loop of your own; use mirrored, central or allreduce there, or "
            f"{strategy.facts.instead_of_own_loop}"
        )
    return kind


def exchange_for(strategy: Strategy, resources: Resources) -> Exchange:
    return exchanging(strategy).exchange(strategy, resources)
