"""`allreduce`: the common loop, with a collective that sums gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.engine.exchange import Exchange, Resources, SentFor, SingleExchange
from manyhands.engine.reporting import WorkerContext
from manyhands.engine.training import Training
from manyhands.engine.worker_processes import ExchangeTraining
from manyhands.strategies.allreduce.exchange import (
    AllReduceExchange,
    collective_across_hosts,
    collective_for,
)
from manyhands.strategies.allreduce.gpu_sums import SUMS, chosen_sums, sums_on_gpus, sums_sentence
from manyhands.strategies.allreduce.helpers import help_workers
from manyhands.strategies.allreduce.strategy import AllReduce
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.strategy import Strategy


class AllReduceTraining(ExchangeTraining):
    """Training in which every worker holds the model."""

    @classmethod
    def end(cls, strategy: AllReduce, resources: Resources) -> Exchange:
        choice = chosen_sums(strategy, resources) if resources.world > 1 else None
        if choice is not None and choice.nccl:
            exchange: Exchange = AllReduceExchange(sums_on_gpus(strategy, resources), strategy.buckets)
        else:
            exchange = super().end(strategy, resources)
        if choice is not None and isinstance(exchange, AllReduceExchange):
            exchange.besides = choice.summary()
        return exchange

    @classmethod
    def exchange(cls, strategy: AllReduce, resources: Resources) -> Exchange:
        if resources.world == 1:
            return SingleExchange()  # nobody to exchange with
        return AllReduceExchange(collective_for(strategy, resources), strategy.buckets)

    @classmethod
    def helper(
        cls, strategy: Strategy, resources: Resources, worker_context: WorkerContext
    ) -> Mapping[str, Any]:
        assert isinstance(strategy, AllReduce), "the registry leads here from it alone"
        return {"sent": SentFor(gradients=help_workers(resources, strategy.codec, worker_context)).to_dict()}

    @classmethod
    def chosen_for(cls, strategy: Strategy) -> type[Training]:
        assert isinstance(strategy, AllReduce), "the registry leads here from it alone"
        if not strategy.elastic:
            return cls
        # Workers have no use for it.
        from manyhands.strategies.allreduce.elastic.elastic_training import ElasticTraining

        return ElasticTraining

    @classmethod
    def exchange_across_hosts(
        cls, strategy: AllReduce, resources: Resources
    ) -> tuple[Exchange, Collective | None]:
        gradients, words = collective_across_hosts(strategy, resources)
        return AllReduceExchange(gradients, strategy.buckets), words

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        samples, besides = super().gather(finished)
        return samples, {**besides, SUMS: finished[0][SUMS]} if SUMS in finished[0] else besides

    def notices(self, finished: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        choice = finished[0].get(SUMS)
        return (*super().notices(finished), *((sums_sentence(choice),) if choice is not None else ()))
