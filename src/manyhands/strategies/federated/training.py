"""Strategy `federated`: the common training loop, with rounds as steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from manyhands.data.own import Parties
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import Exchange, Resources
from manyhands.engine.request import Request
from manyhands.engine.training import Result, Stage
from manyhands.engine.worker_processes import ExchangeTraining
from manyhands.errors import UserError
from manyhands.places.local.template import expect
from manyhands.strategies.common.collectives.collective import SharedCollective
from manyhands.strategies.federated.client_data import NATURAL
from manyhands.strategies.federated.client_measures import skew_of, spread_of
from manyhands.strategies.federated.client_states import local_names
from manyhands.strategies.federated.clients import held_names
from manyhands.strategies.federated.exchange import FederatedExchange, private_rounds, split_over
from manyhands.strategies.federated.private_rounds import need_accountant, spoiled_buffer
from manyhands.strategies.federated.secure.primitives import need_cryptography
from manyhands.strategies.federated.simulation import simulated_rounds
from manyhands.strategies.federated.strategy import Federated
from manyhands.task import Task

if TYPE_CHECKING:
    from manyhands.places.external.process_group import ProcessGroup


class FederatedTraining(ExchangeTraining):
    """Training in which the workers of one host share the clients of every round."""

    def __init__(self, request: Request, model: nn.Module) -> None:
        """UserError where the task asks for what clients cannot do, or its data cannot be split over them."""
        super().__init__(request, model)
        task = request.plan.task
        strategy = cast(Federated, request.strategy)
        assert isinstance(task, Task), "a compiled task is refused before"
        for name, wanted in (
            ("weights", task.weights is not None),
            ("sampler", task.sampler is not None),
            ("microbatches", task.microbatches > 1),
            ("sparse", bool(task.sparse)),
        ):
            if wanted:
                why = f"task.{name}: clients of strategy {strategy} train plain batches; leave it out"
                raise UserError(why)
        if request.plan.restore_best and strategy.gives_own_models:
            raise UserError(
                f"restore_best: under {strategy} each client has a model of its own after the last round, and none "
                "of an earlier one; leave it out"
            )
        found = split_over(strategy, task, request.plan.seed)
        if strategy.secure:
            need_cryptography()
        strategy.check_round(len(found))
        simulated_rounds(strategy, len(found), request.plan.seed)
        local_names(held_names(model), strategy.keep)
        self._forecast = _privacy_forecast(strategy, model, len(found), request.plan)

    def run(self, stage: Stage) -> Result:
        self._say_forecast(stage)
        return super().run(stage)

    def lead(self, stage: Stage, process_group: ProcessGroup) -> Result:
        self._say_forecast(stage)
        return super().lead(stage, process_group)

    def _say_forecast(self, stage: Stage) -> None:
        if self._forecast and self._start is None:  # a resumed run has spent some already
            stage.say(self._forecast)

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        samples, besides = super().gather(finished)
        besides |= finished[0]["algorithm"]
        besides |= {name: finished[0][name] for name in ("participation", "privacy") if name in finished[0]}
        task, strategy = self._request.plan.task, cast(Federated, self._request.strategy)
        if strategy.noise:
            return samples, besides  # no promise holds for the rest
        assert isinstance(task, Task), "a compiled task is refused before"
        parties = skew_of(task, split_over(strategy, task, self._request.plan.seed))
        for name in ("updates_refused", "updates_rejected"):
            besides[name] = sum(one[name] for one in finished)
        parties["held_out"] = strategy.held_out
        failed = {name for one in finished for name in one.get("failed", ())}
        for suffix in ("", "_common"):
            # Each measure of these clients, of what each worker reported of its own; None for one without a sample.
            reports = [one.get(f"measured{suffix}", {}) for one in finished]
            found = {client: one for worker in reports for client, one in worker.items()}
            rows = [found.get(str(client), {}) for client in parties["numbers"]]
            names = dict.fromkeys(name for row in rows for name in row if name not in failed)
            if measures := {name: [row.get(name) for row in rows] for name in names}:
                parties[f"measures{suffix}"] = measures
                spreads = {name: spread_of(values) for name, values in measures.items()}
                besides[f"fairness{suffix}"] = spreads
        if strategy.gives_own_models:  # of clients' own models on their own samples
            means = {name: spread["mean"] for name, spread in besides.get("fairness", {}).items() if spread}
            besides["final"] = {f"personal_{name}": mean for name, mean in means.items()}
        return samples, {**besides, "parties": parties}

    def notices(self, finished: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        said = [one.get("played") for one in finished]
        said += [sentence for one in finished for sentence in one.get("unmeasured", ())]
        task, strategy = self._request.plan.task, cast(Federated, self._request.strategy)
        if isinstance(task, Task) and isinstance(task.data, Parties) and strategy.partition != NATURAL:
            said.append(
                f"partition={strategy.partition} has mixed the samples of the data's parties; partition={NATURAL} "
                "keeps each party's own"
            )
        refused, rejected = (
            sum(one[name] for one in finished) for name in ("updates_refused", "updates_rejected")
        )
        if refused and not strategy.noise:  # even the number of rejected updates reveals something
            said.append(
                f"{refused} update{'s' * (refused > 1)} had a number that is not finite, and did not count"
            )
        if rejected:
            said.append(
                f"{rejected} update{'s' * (rejected > 1)} did not count: larger than "
                f"norm_ratio={strategy.norm_ratio:g} times the median of the round; metrics.jsonl names them (rejected)"
            )
        said.append(finished[0].get("privacy", {}).get("sentence"))
        return (*super().notices(finished), *dict.fromkeys(sentence for sentence in said if sentence))

    @classmethod
    def exchange(cls, strategy: Any, resources: Resources) -> Exchange:
        if strategy.noise:
            need_accountant()  # imported here: it takes a second and is not part of a round
        collective = SharedCollective(resources.group()) if resources.world > 1 else None
        return FederatedExchange(strategy, resources.seed, collective)


def _privacy_forecast(strategy: Federated, model: nn.Module, clients: int, plan: TrainingPlan) -> str:
    """What the run's rounds will cost of its budget, if it has one; UserError where nothing can be promised."""
    if strategy.privacy.rule is None:
        return ""
    strategy.check_clients(clients)
    if not strategy.noise:
        return ""
    need_accountant()
    expect(("dp_accounting",))  # which takes a second to import: once, and not in every worker of every run
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    if buffers:
        raise UserError(spoiled_buffer(strategy.noise, buffers[0]))
    rounds = private_rounds(strategy, clients, seed=0)
    assert rounds is not None, "there is a clip"
    assert rounds.spending is not None, "there is noise"
    if rounds.spending.most_rounds == 0:
        one = rounds.spending.epsilon_after(1)
        raise UserError(
            f"epsilon={strategy.epsilon:g}: one round with noise={strategy.noise:g} costs {one:.3g} at "
            f"delta={strategy.delta:g}; use more noise, a smaller fraction, or a larger epsilon"
        )
    return rounds.forecast(strategy.rounds_of_one(plan.steps, clients, plan.seed))
