"""`local`: the common loop, with an exchange of parameters instead of gradients."""

from __future__ import annotations

from manyhands.allreduce.algorithms import ALGORITHMS
from manyhands.allreduce.collective import Collective, SharedCollective, across_hosts, over_links
from manyhands.local.exchange import LocalExchange
from manyhands.local.strategy import Local
from manyhands.training.exchange import Exchange, SingleExchange
from manyhands.training.exchanging import ExchangeTraining
from manyhands.training.resources import Resources

__all__ = ["LocalTraining"]


class LocalTraining(ExchangeTraining):
    """Every worker holds the model, and its own state of the optimizer until the next average."""

    @classmethod
    def exchange(cls, strategy: Local, resources: Resources) -> Exchange:
        """One worker's end: in the shared memory of one host, or in a ring of links."""
        if resources.world == 1:
            return SingleExchange()  # an average of one
        if strategy.uses_links:
            return LocalExchange(over_links(ALGORITHMS["ring"], resources, strategy.codec), strategy.steps)
        return LocalExchange(SharedCollective(resources.group()), strategy.steps)

    @classmethod
    def exchange_across_hosts(cls, strategy: Local, resources: Resources) -> tuple[Exchange, Collective]:
        """In a ring of links."""
        replicas, words = across_hosts(ALGORITHMS["ring"], resources, strategy.codec)
        return LocalExchange(replicas, strategy.steps), words
