"""`federated`: the common loop, with rounds for steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from manyhands.allreduce.collective import SharedCollective
from manyhands.cluster.template import expect
from manyhands.errors import UserError
from manyhands.federated.clients import held_names
from manyhands.federated.exchange import FederatedExchange, private_rounds, split_over
from manyhands.federated.layers import local_names
from manyhands.federated.privacy.accountant import need_accountant
from manyhands.federated.rounds.simulated import simulated_rounds
from manyhands.federated.secure.primitives import need_cryptography
from manyhands.federated.spread import skew_of, spread_of
from manyhands.federated.strategy import Federated
from manyhands.task import Task
from manyhands.training.exchange import Exchange
from manyhands.training.exchanging import ExchangeTraining
from manyhands.training.request import Request
from manyhands.training.resources import Resources

__all__ = ["FederatedTraining"]


class FederatedTraining(ExchangeTraining):
    """Workers of one host share the clients of every round among them."""

    def __init__(self, request: Request, model: nn.Module) -> None:
        """UserError where the task asks for what clients cannot do, or its data cannot be split over them."""
        super().__init__(request, model)
        task = request.plan.task
        strategy = cast(Federated, request.strategy)
        assert isinstance(task, Task), "a compiled task is refused before"
        for name, wanted in (
            ("weights", task.weights is not None),
            ("microbatches", task.microbatches > 1),
            ("sparse", bool(task.sparse)),
        ):
            if wanted:
                raise UserError(
                    f"task.{name}: clients of strategy {strategy} train plain batches; leave it out"
                )
        found = split_over(strategy, task, request.plan.seed)
        if strategy.secure:
            need_cryptography()
        strategy.check_round(len(found))
        simulated_rounds(strategy, len(found), request.plan.seed)
        local_names(held_names(model), strategy.keep)
        _check_privacy(strategy, model, len(found))

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        """Who the clients are and how the model does for each; what the algorithm tells, and what was given away."""
        samples, besides = super().gather(finished)
        besides |= finished[0]["algorithm"]
        if "participation" in finished[0]:
            besides["participation"] = finished[0]["participation"]
        if "privacy" in finished[0]:
            besides["privacy"] = finished[0]["privacy"]
        task, strategy = self._request.plan.task, cast(Federated, self._request.strategy)
        if strategy.noise:
            return samples, besides  # no promise holds for the rest
        assert isinstance(task, Task), "a compiled task is refused before"
        split = split_over(strategy, task, self._request.plan.seed)
        parties = skew_of(task, split)
        found = {client: one for worker in finished for client, one in worker.get("measured", {}).items()}
        if found and set(found) == {str(number) for number in parties["numbers"]}:
            names = next(iter(found.values()))
            parties["measures"] = {
                name: [found[str(number)][name] for number in parties["numbers"]] for name in names
            }
            besides["fairness"] = {name: spread_of(values) for name, values in parties["measures"].items()}
        return samples, {**besides, "parties": parties}

    def said(self, finished: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """How the clients were played, what was not measured, and what is promised to whom."""
        told = [one.get(name) for name in ("played", "unmeasured") for one in finished]
        told.append(finished[0].get("privacy", {}).get("sentence"))
        return (*super().said(finished), *dict.fromkeys(sentence for sentence in told if sentence))

    @classmethod
    def exchange(cls, strategy: Any, resources: Resources) -> Exchange:
        """One worker's end: alone, or in the shared memory of one host."""
        if strategy.noise:
            need_accountant()  # here, for it takes a second to import and is no part of a round
        collective = SharedCollective(resources.group()) if resources.world > 1 else None
        return FederatedExchange(strategy, resources.seed, collective)


def _check_privacy(strategy: Federated, model: nn.Module, clients: int) -> None:
    """UserError where so many clients, or this model, cannot be given what the strategy promises."""
    if strategy.privacy.rule is None:
        return
    strategy.check_clients(clients)
    if not strategy.noise:
        return
    need_accountant()
    expect(("dp_accounting",))  # which takes a second to import: once, and not in every worker of every run
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    if buffers:
        raise UserError(
            f"noise={strategy.noise:g}: the model's buffer {buffers[0]!r} is averaged over clients, as statistics of "
            "BatchNorm are, and noise would spoil it; use a model without, as with GroupNorm or LayerNorm"
        )
    rounds = private_rounds(strategy, clients, seed=0)
    assert rounds is not None, "there is a clip"
    assert rounds.spending is not None, "there is noise"
    if rounds.spending.most_rounds == 0:
        one = rounds.spending.epsilon_after(1)
        raise UserError(
            f"epsilon={strategy.epsilon:g}: one round with noise={strategy.noise:g} comes to {one:.3g} at "
            f"delta={strategy.delta:g}; use more noise, a smaller fraction, or a larger epsilon"
        )
