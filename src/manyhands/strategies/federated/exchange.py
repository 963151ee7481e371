"""One worker's endpoint of federated rounds in the common loop: a step of the loop is a round.

`compute` simulates this worker's share of the round's clients and adds their updates to the round's tally. `agree`
takes the tally's total over the workers. `apply` moves the model by the mean, as the algorithm says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.engine import exchange as base
from manyhands.engine.computing import Computed, Computer
from manyhands.engine.exchange import Exchange, LocalStep, SharedStep, Traffic
from manyhands.strategies.common.collectives.collective import Collective, broadcast, total
from manyhands.strategies.federated import client_states
from manyhands.strategies.federated.algorithms import FederatedAlgorithm, FederatedFacts, algorithm_named
from manyhands.strategies.federated.client_data import Partition, held_back, reading_ahead, selected
from manyhands.strategies.federated.client_measures import ClientEvaluation
from manyhands.strategies.federated.client_states import ClientStates, LocalLayers, UpdateCoding
from manyhands.strategies.federated.client_updates import (
    ClientUpdate,
    RoundNorms,
    RoundPlace,
    RoundTally,
    TallySum,
    Tensors,
    require_finite,
)
from manyhands.strategies.federated.clients import held, held_names, steps_in, work_of
from manyhands.strategies.federated.private_rounds import PrivateRounds
from manyhands.strategies.federated.simulation import (
    ClientRunner,
    ClientSimulation,
    SimulatedCourse,
    SimulatedRounds,
    Tuned,
    client_runner_for,
    simulated_rounds,
    tuned,
)
from manyhands.strategies.federated.strategy import Federated, tuning_epochs
from manyhands.strategies.federated.update_tally import tally_for
from manyhands.task import Metric, Task
from manyhands.wire.parcels import Parcel

if TYPE_CHECKING:
    from manyhands.places.local.loaders import Loaders

_ROOM = 1 << 17  # items that travel at once
_T = TypeVar("_T")


def split_over(strategy: Federated, task: Task, seed: int) -> list[NDArray[np.int64]]:
    parts = Partition.parse(strategy.partition).split(task.data, task.samples, strategy.clients, seed)
    strategy.check_parties(len(parts))
    return parts


def private_rounds(strategy: Federated, clients: int, seed: int) -> PrivateRounds | None:
    terms = strategy.privacy
    if terms.rule is None:
        return None
    fixed = strategy.fixed_point if strategy.secure else None
    return PrivateRounds(terms, clients, strategy.per_round(clients), fixed, seed)


def _precise(computer: Computer, function: Callable[[nn.Module, Any], _T]) -> Callable[[nn.Module, Any], _T]:

    def computed(model: nn.Module, batch: Any) -> _T:
        with computer.precision():
            found = function(model, batch)
        return found  # noqa: RET504 - by its type, a context may swallow what is raised in it

    return computed


class FederatedExchange(Exchange):
    """Simulates clients and acts as the server; workers that share the clients communicate by collectives."""

    steps_itself = True
    parts = base.NO_GRADIENT  # clients clip their own
    when_broken = "too few clients' updates were finite and within norm_ratio, and the model was not changed"
    _optimizer: Optimizer  # from `attach` on
    _tally: RoundTally  # from `compute` to `agree`
    _found: TallySum  # from `agree` to `apply`

    def __init__(self, strategy: Federated, seed: int, collective: Collective | None = None) -> None:
        self.rank = collective.rank if collective is not None else 0
        self.world = collective.world if collective is not None else 1
        self.part = base.WorkerPart(index=self.rank, count=self.world, copies=(range(self.world),))
        times = collective.take_times if collective is not None else base.Times
        self.meter = base.Meter(take_times=times, traffic=lambda: self._sent)
        self.rounds = self
        self._strategy, self._seed, self._collective = strategy, seed, collective
        self._algorithm: FederatedAlgorithm = algorithm_named(strategy.algorithm)
        self._work = work_of(strategy)
        self._tuning_epochs = tuning_epochs(strategy.personal)
        self._trainer: ClientRunner | None = None
        self._simulation: ClientSimulation | None = None
        self._evaluation: ClientEvaluation | None = None
        self._loaders: Loaders[tuple[int, ...]] | None = None
        self._spread: dict[str, dict[str, float]] = {}  # at the newest evaluation
        self._clients: list[int] = []
        self._samples_of: list[NDArray[np.int64]] = []
        self._tested: list[NDArray[np.int64]] = []  # samples that each client is measured by
        self._weights: list[Tensor] = []
        self._private: PrivateRounds | None = None
        self._rounds: SimulatedRounds | None = None
        self._course: SimulatedCourse | None = None
        self._coding = UpdateCoding(strategy.codec, feedback=strategy.feedback, seed=seed)
        self._counted = 0
        self._sent = Traffic()  # of this worker's clients: an update each, or all that a secure sum takes
        self._refused = 0
        self._refused_now: list[int] = []
        self._norms = RoundNorms(strategy.seen_norm_ratio)
        self._round = 0  # number of the newest simulated round, from 1
        self._loaded_state: Mapping[str, Any] | None = None  # set where the run resumes from a checkpoint
        if collective is not None:
            [self._bucket] = collective.allocate([Parcel.whole(0, _ROOM, torch.float64, exact=True)])

        def load(memory: Mapping[str, Any]) -> None:
            self._loaded_state = memory
            self._algorithm.load_state(memory.get("algorithm", {}))

        self.kept = base.ExchangeState(gather=self._memory, load=load)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._weights = held(model)
        if self._collective is not None:
            broadcast(self._collective, 0, self._bucket, [*model.parameters(), *model.buffers()])

    def compute(self, computer: Computer, model: nn.Module, step: int) -> Computed:
        trainer = self._client_runner(computer, model)
        begin = time.monotonic()
        if self._private is not None and self._private.draws_itself:
            chosen, self._course = self._private.drawn(step, self.total, self.rank), None
        else:
            assert self._rounds is not None, "clients are partitioned before they are asked"
            self._course = self._rounds.begin(step)
            chosen = list(self._course.counted)
        assigned = [  # the same on every worker
            replace(one, samples=self._samples_of[one.client])
            for one in self._algorithm.given(step, chosen, self._weights)
        ]
        self._clients = [one.client for one in assigned]
        # A tally knows those that report and, with secure sums, those that drop out.
        tallied: Sequence[int] = self._clients
        if self._course is not None and self._strategy.secure:
            tallied = self._course.asked
        place = RoundPlace(number=step, clients=tallied, rank=self.rank, total=self.total)
        like = self._algorithm.layers.shared(self._algorithm.sent(self._weights))
        self._tally = tally_for(self._strategy, self._algorithm, place, self._weights, like, self._private)
        # This worker simulates the clients whose state it has, or an equal share.
        mine = assigned[self.rank :: self.world]
        if self._kept_by_clients():
            mine = [one for one in assigned if one.client % self.world == self.rank]
        losses, samples = [], 0
        self._counted, self._refused_now, self._round = 0, [], step + 1
        self._norms.begin_round()
        self._coding.begin_round()
        for update in trainer.play(mine, self._optimizer):
            samples += update.samples * self._work.epochs
            losses.append(update.loss)
            self._add(update, step)
        computer.slow_down(step, time.monotonic() - begin)
        loss = sum(losses) / len(losses) if losses else 0.0
        share, input_ns = len(mine) / max(1, len(assigned)), trainer.samples.take_input_ns()
        return Computed(loss=loss, share=share, samples=samples, input_ns=input_ns)

    def _client_runner(self, computer: Computer, model: nn.Module) -> ClientRunner:
        """The runner that trains this worker's clients; the first call partitions the samples and restores states."""
        if self._trainer is not None:
            return self._trainer
        self._partition(computer.task)
        task = replace(computer.task, loss=_precise(computer, computer.task.loss))
        kinds: dict[str, Metric] = {**computer.measures(), **task.stateful_metrics}
        measures = {name: _precise(computer, one) for name, one in kinds.items()}
        self._evaluation = ClientEvaluation(
            task=task, model=model, measures=measures, tested=self._tested, rank=self.rank, world=self.world
        )
        sizes, strategy = [len(samples) for samples in self._samples_of], self._strategy
        per_round = strategy.per_round(len(sizes))
        self._algorithm.facts = FederatedFacts(
            names=held_names(model),
            parameters=len(list(model.parameters())),
            clients=len(sizes),
            per_round=per_round,
            weight=float(sum(min(size, strategy.max_samples) for size in sizes)),
            most_steps=max(steps_in(self._work, size) for size in sizes),
            seed=self._seed,
        )
        self._algorithm.layers = LocalLayers(held_names(model), self._strategy.keep)
        device = next((one.device for one in self._weights), torch.device("cpu"))
        for name, (states, _) in self._kept_by_clients().items():
            kept = (self._loaded_state or {}).get("clients", {}).get(name, {})
            states.update(client_states.restored(kept, self.rank, self.world, device))
        most = math.ceil(per_round * (strategy.over if strategy.secure else 1))
        each_round = math.ceil(min(len(sizes), most) / self.world)
        self._trainer, self._simulation = client_runner_for(
            *(task, model, self._algorithm, self._work, self._seed),
            sizes=sizes,
            each_round=each_round,
            wanted=strategy.together,
        )
        self._loaders = self._trainer.samples.loaders = reading_ahead(task, f"worker {self.rank}")
        return self._trainer

    def _partition(self, task: Task) -> None:
        if self._samples_of:
            return
        parts = split_over(self._strategy, task, self._seed)
        self._samples_of, self._tested = held_back(parts, self._strategy.held_out, self._seed)
        self._private = private_rounds(self._strategy, len(self._samples_of), self._seed)
        self._rounds = simulated_rounds(self._strategy, len(self._samples_of), self._seed)
        self._rounds.load_state((self._loaded_state or {}).get("rounds", {}))
        if self._private is not None and self._loaded_state is not None:
            self._private.restore(self._loaded_state.get("privacy"))

    def _kept_by_clients(self) -> dict[str, tuple[ClientStates, Tensors]]:
        algorithm, layers = self._algorithm, self._algorithm.layers
        shared, sent = len(layers.shared(self._weights)), layers.shared(algorithm.sent(self._weights))
        found: dict[str, tuple[ClientStates, Tensors]] = {
            "algorithm": (algorithm.states, algorithm.kept(self._weights)),
            "layers": (layers.states, layers.kept(self._weights)),
            "codec": (self._coding.states, self._coding.kept(sent, shared)),
        }
        return {name: (states, like) for name, (states, like) in found.items() if like}

    def _add(self, update: ClientUpdate, step: int) -> None:
        """Add one report; a non-finite update is not counted, or counts as zero where its sender must stay hidden."""
        finite = update.is_finite
        if finite:  # or what is kept for the next time would not be
            shared = len(self._algorithm.layers.shared(self._weights))
            sent, update = update, self._coding.encoded(update, step, shared)
            finite = update is sent or update.is_finite
            if not finite:
                self._coding.refused(update.client)
        if not finite:
            self._algorithm.refused(update.client)
            self._refused += 1
            if self._private is None:
                self._refused_now.append(update.client)
                return
        self._norms.add(update)
        # A client that says it has more samples counts for so many.
        bounded = replace(update, samples=min(update.samples, self._strategy.max_samples))
        self._tally.add(update, self._algorithm.weight(bounded))
        self._counted += update.samples

    def agree(self, local: LocalStep) -> SharedStep:
        largest = self._norms.judge(self._clients, self.total)
        for client in self._norms.rejected_here:  # they keep what they had before the round
            self._algorithm.refused(client)
            self._coding.refused(client)
        found = self._found = self._tally.total(largest)
        del self._tally  # and all that it has kept
        self._sent += Traffic(messages_sent=found.messages_sent, bytes_sent=found.bytes_sent)
        refused = float(len(self._refused_now))
        words = self.total(torch.tensor([local.stop, self._counted, refused], dtype=torch.float64))
        self._counted = round(float(words[1]))
        counts = True
        if self._course is not None and self._rounds is not None:
            left_out: list[int] = []
            if self._clients == list(self._course.counted) and (words[2] or self._norms.rejected):
                whose = torch.zeros(len(self._samples_of), dtype=torch.float64)
                whose[self._refused_now] = 1
                left_out = [*self.total(whose).nonzero().flatten().tolist(), *self._norms.rejected]
            counts = self._rounds.close(left_out)
        broken = not counts or found.weight == 0
        return SharedStep(
            loss=math.nan if broken else found.loss / found.weight,
            bad_workers=(0,) if broken else (),
            stop=bool(words[0] > 0),
        )

    @torch.no_grad()
    def apply(self) -> None:
        like = self._algorithm.sent(self._weights)
        found = self._algorithm.layers.whole(self._found, like)
        del self._found
        mean = [one.to(mine.dtype) for one, mine in zip(self._algorithm.mean(found), like, strict=True)]
        self._algorithm.step(self._weights, mean)

    def personal_models(self, mine: Sequence[int]) -> Tuned:
        """Each of these clients and its own model."""
        algorithm, weights = self._algorithm, self._weights
        return ((one, algorithm.layers.put(one, algorithm.personal(one, weights))) for one in mine)

    def optimizer_state(self) -> dict[str, Any] | None:
        return self._optimizer.state_dict() if self.rank == 0 else None

    def _memory(self) -> Mapping[str, Any]:
        """Collective: what the algorithm keeps on the server, the same on every worker, and all clients' own."""
        if self._trainer is None:
            return (self._loaded_state or {}) if self.rank == 0 else {}  # no round since the checkpoint
        clients = {
            name: client_states.gathered(states, len(self._samples_of), like, self.total)
            for name, (states, like) in self._kept_by_clients().items()
        }
        kept: dict[str, Any] = {"algorithm": self._algorithm.memory(), "clients": clients}
        kept["privacy"] = self._private.state() if self._private is not None else {}
        kept["rounds"] = self._rounds.memory() if self._rounds is not None else {}
        return {name: value for name, value in kept.items() if value} if self.rank == 0 else {}

    def cannot_continue(self, computer: Computer, step: int) -> str:
        if not self._strategy.epsilon:
            return ""
        self._partition(computer.task)
        assert self._private is not None, "a budget is one of noise, and noise needs a clip"
        spending = self._private.spending
        assert spending is not None, "a budget is one of noise"
        clients = len(self._samples_of)
        drawn = selected(self._seed, step, clients, self._strategy.per_round(clients))
        if spending.affords(drawn if self._strategy.secure else ()):
            return ""
        self._private.ended = f"stopped after round {step}: {spending.why_over()}"
        return self._private.ended

    def total(self, values: Tensor) -> Tensor:
        return values if self._collective is None else total(self._collective, 0, self._bucket, values)

    def step_samples(self) -> int:
        return self._counted * self._work.epochs

    def row_facts(self) -> Mapping[str, Any]:
        """Who took part; with noise, a secret on which its promise rests. Where some may not report, who was asked."""
        facts: dict[str, Any] = {} if self._strategy.noise else {"clients": list(self._clients)}
        if self._norms.rejected:
            facts["rejected"] = {str(client): norm for client, norm in self._norms.rejected.items()}
        if self._course is None or self._rounds is None or self._rounds.all_report:
            return facts
        return {**facts, "asked": list(self._course.asked), "attempt": self._course.attempt}

    def summary(self) -> Mapping[str, Any]:
        """How clients were simulated, how well the model serves this worker's clients, and the privacy spent."""
        played = "" if self._trainer is None else f"{self._simulation}{self._trainer.notice}"
        summary: dict[str, Any] = {
            "updates_refused": self._refused,
            "updates_rejected": self._norms.total_rejected,
            "played": played,
            "algorithm": dict(self._algorithm.summary()),
        }
        if self._evaluation is not None and not self._strategy.noise:  # no promise of noise holds for them
            evaluated, epochs = self._evaluation, self._tuning_epochs

            def own_models(mine: list[int]) -> Tuned:
                models = self.personal_models(mine)
                if not epochs:
                    return models
                settings = replace(self._work, epochs=epochs), self._optimizer, self._seed
                tuned_on = evaluated.task, evaluated.model, models, self._samples_of
                return tuned(*tuned_on, *settings, together=self._strategy.together)

            kinds: dict[str, Callable[[list[int]], Tuned]] = {"measured": own_models}
            if self._strategy.gives_own_models:
                kinds["measured_common"] = lambda mine: ((client, self._weights) for client in mine)
            summary |= self._evaluation.summary(kinds)
        if self._rounds is not None and not self._rounds.all_report:
            summary["participation"] = self._rounds.summary()
        return summary if self._private is None else {**summary, "privacy": self._private.summary()}

    def evaluate(
        self, computer: Computer, model: nn.Module, *, alike: bool = False
    ) -> tuple[dict[str, float], int] | None:
        """Collective: the common model on the evaluation data, as ever; and how some of the clients fare."""
        self._client_runner(computer, model)  # who is measured, also where no round is left to play
        found = super().evaluate(computer, model, alike=alike)
        if found is not None and self._round:  # or the model is as it began
            who = [] if self._strategy.noise else self._clients  # with noise that is a secret
            require_finite(found[0], self._round, self._norms.describe(who))
        self._spread = {}
        if found is not None and self._evaluation is not None and not self._strategy.noise:
            self._spread = self._evaluation.spread(self.personal_models, self.total)
        return found

    def evaluation_facts(self) -> Mapping[str, Any]:
        """How the measures spread over clients; with noise nothing, since its promise would not hold for it."""
        return {"fairness": self._spread} if self._spread else {}

    def close(self) -> None:
        if self._loaders is not None:
            self._loaders.close()
        if self._collective is not None:
            self._collective.close()
