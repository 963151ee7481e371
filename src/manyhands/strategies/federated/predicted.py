"""What the clients of `federated` send in a round: an update each, of what the algorithm reports, encoded."""

from __future__ import annotations

from manyhands.facts import TracedModel
from manyhands.strategies.federated.algorithms import FederatedFacts, algorithm_named
from manyhands.strategies.federated.client_data import NATURAL
from manyhands.strategies.federated.client_states import EVERYTHING_SHARED, UpdateCoding
from manyhands.strategies.federated.clients import held
from manyhands.strategies.federated.strategy import Federated
from manyhands.strategy import WorkerTraffic
from manyhands.wire.names import has_known_size


def sent_in_round(strategy: Federated, traced: TracedModel, workers: int) -> list[WorkerTraffic] | None:
    """None for secure sums, private rounds, rounds in which some may not report, clients with data of their own,
    layers that stay with clients, and codecs whose size depends on values.
    """
    del workers  # they share the clients of a simulation
    private = strategy.secure or strategy.privacy.rule is not None
    all_report = not (private or strategy.dropout or strategy.deadline)
    whole = strategy.partition != NATURAL and strategy.keep == EVERYTHING_SHARED
    if not (all_report and whole and has_known_size(strategy.codec)):
        return None
    weights, algorithm = held(traced.model), algorithm_named(strategy.algorithm)
    algorithm.facts = FederatedFacts(parameters=len(list(traced.model.parameters())))
    num_bytes = UpdateCoding(strategy.codec).size(algorithm.sent(weights), len(weights))
    updates = algorithm.updates_in_round(strategy.per_round(strategy.clients))
    return [WorkerTraffic(who="client", count=updates, num_bytes=num_bytes, messages=1.0)]
