"""The simulation of clients: whose reports count in a round, and how a worker trains them.

    begin(number) ─► who is asked, and whose reports would count ── they are trained ──► close(refused) ─► does it?

`SimulatedRounds` drives the core: every client is there, some stop responding, and time is drawn instead of measured.
How long a client takes, and whether it drops out, follows from (seed, attempt, client): all workers of a run find the
same without a message, and so does a run that continues from a checkpoint. The core is pure, so that it can be asked
what would come of a round before any client is trained; attempts that fail cost nothing.

Clients are trained several at once where that is equivalent and faster, else one by one (`client_runner_for`). The rule
looks at the setting, the optimizer, the model and the batch sizes, and then tries: the vmapped gradient of two copies
must equal the plain one. The outcome is a sentence of the run's summary.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.data.randomness import mix
from manyhands.engine.computing import require_loss
from manyhands.errors import DataError, ManyhandsError, UserError
from manyhands.strategies.federated import round_core as core
from manyhands.strategies.federated.algorithms import FederatedAlgorithm
from manyhands.strategies.federated.algorithms.buff import duration_s
from manyhands.strategies.federated.client_data import Partition, Samples, apart, held_back
from manyhands.strategies.federated.client_states import ClientStates, LocalLayers, restored
from manyhands.strategies.federated.client_updates import ClientAssignment, Tensors
from manyhands.strategies.federated.clients import (
    ClientTrainer,
    LocalWork,
    held,
    held_names,
    steps_in,
    work_of,
)
from manyhands.strategies.federated.secure.secure_messages import fewest_clients
from manyhands.strategies.federated.stacked import ITEM_BY_ITEM, StackedGradients, StackedTrainer
from manyhands.strategies.federated.strategy import ALL, AUTO, FINE_TUNE, Federated, tuning_epochs
from manyhands.task import Task

_DROPPING: Final = 21
_ENDLESS: Final = 1 << 53  # rounds: how many there are, the training loop says
_LONG_S: Final = 1e6  # a deadline that no client misses; a typical one takes a second
_ATTEMPTS: Final = 100
_USUAL_S: Final = 10.0  # an attempt without a deadline; after as long as so many take a round is given up


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedCourse:
    """The course of one attempt, unless updates are rejected."""

    attempt: int  # the attempt's number, from 1
    asked: tuple[int, ...]
    begun: core.RoundState = field(compare=False)
    events: Sequence[core.RoundEvent] = field(compare=False)
    dropped: int = 0  # clients that stop responding
    counted: tuple[int, ...] = ()
    """Where it counts, clients whose reports come first, and in time; no other client needs to be trained."""


class SimulatedRounds:
    """The rounds of a simulation, the same on every worker."""

    def __init__(self, terms: core.RoundTerms, dropout: float = 0.0, *, as_one_sum: bool = False) -> None:
        """With `as_one_sum` no single report is seen, and all clients that stay are in the sum (secure sums)."""
        self._terms, self._dropout, self._as_one_sum = terms, dropout, as_one_sum
        self._has_deadline = terms.deadline_s < _LONG_S
        self._everybody = tuple(range(terms.clients))
        self.all_report: Final = not dropout and not self._has_deadline and terms.asks == terms.goal
        """Whether only a rejected update can keep an attempt from counting in full."""
        self.state = core.RoundState()  # the core's state between rounds
        # Clients that were asked over all rounds so far, that stopped responding, and whose report came after the end
        # of the round; and how long that would have taken, where a typical client takes a second.
        self.participation: dict[str, float] = {"asked": 0, "dropped": 0, "late": 0, "simulated_s": 0.0}
        self._open: SimulatedCourse | None = None

    def begin(self, number: int) -> SimulatedCourse:
        """Try round `number`, from 0, until an attempt has enough reports; again before `close`, the same one."""
        if self.state.done != number:  # of a checkpoint that had nothing to say of it
            self.state = core.RoundState(done=number, attempt=number)
        # Each round starts as after a restart, with its own clock: a run resumed from a checkpoint continues the same.
        state, _ = core.handle(self._terms, self.state, core.ServerResumed(at_s=0.0))
        while True:
            everybody = core.ClientsSeen(clients=self._everybody, at_s=state.now_s)
            state, decisions = core.handle(self._terms, state, everybody)
            if any(isinstance(decision, core.EndRounds) for decision in decisions):
                raise ManyhandsError(
                    f"round {number + 1}: too few of its clients reported in time, up to attempt {state.attempt} "
                    f"({self._terms.minimum} are needed); use a smaller min_reports or dropout, or a larger over or "
                    "deadline"
                )
            attempt = self._attempt(state)
            after, ended = self._outcome(state, attempt.events)
            if isinstance(ended, core.CloseRound):
                self._open = replace(attempt, counted=ended.counted)
                return self._open
            reports = [event for event in attempt.events if isinstance(event, core.ReportCame | core.SumCame)]
            in_time = sum(len(one.clients) if isinstance(one, core.SumCame) else 1 for one in reports)
            self._count(attempt, in_time, after)
            state = after

    def close(self, refused: Collection[int] = ()) -> bool:
        """Close the round after its clients were trained; return whether it counts without the rejected updates."""
        assert self._open is not None, "begin comes before close"
        opened, self._open = self._open, None
        # The same attempt, without the clients whose updates were rejected or never made.
        out = ({*opened.asked} - {*opened.counted}) | {*refused} if refused else set()
        events: list[core.RoundEvent] = []
        for event in opened.events:
            if isinstance(event, core.ReportCame) and event.client in out:
                event = core.ClientGone(client=event.client, at_s=event.at_s)
            elif isinstance(event, core.SumCame):
                event = replace(event, clients=tuple(one for one in event.clients if one not in out))
            events.append(event)
        state, ended = self._outcome(opened.begun, events)
        self._count(opened, len(opened.counted), state)
        return isinstance(ended, core.CloseRound)

    def memory(self) -> dict[str, Any]:
        if self.all_report and self.state.attempt == self.state.done:
            return {}
        return {"state": core.as_json(self.state), "participation": dict(self.participation)}

    def load_state(self, memory: Mapping[str, Any]) -> None:
        if not memory:
            return
        self.state = core.state_of(memory.get("state"))
        found = memory.get("participation")
        if not isinstance(found, dict) or found.keys() != self.participation.keys():
            raise DataError(f"the saved participation of clients is damaged: {found!r}")
        self.participation = dict(found)

    def summary(self) -> dict[str, Any]:
        state = self.state
        return {"attempts": state.attempt, "abandoned": state.abandoned, **self.participation}

    def _attempt(self, begun: core.RoundState) -> SimulatedCourse:
        attempt, asked, since_s = begun.attempt, begun.asked, begun.since_s
        if self.all_report:
            whole = core.SumCame(attempt=attempt, clients=asked, at_s=since_s)
            return SimulatedCourse(attempt=attempt, asked=asked, begun=begun, events=[whole])
        seed, clients = self._terms.seed, self._terms.clients
        gone: set[int] = set()
        if self._dropout:
            draws = {one: np.random.default_rng(mix(seed, attempt, one, _DROPPING)).random() for one in asked}
            gone = {client for client, drawn in draws.items() if drawn < self._dropout}
        trips = sorted(
            (since_s + duration_s(seed, client, attempt * clients + client), client) for client in asked
        )
        until_s = since_s + self._terms.deadline_s if self._has_deadline else trips[-1][0]
        in_time = [(at_s, client) for at_s, client in trips if at_s < until_s or not self._has_deadline]
        events: list[core.RoundEvent]
        if self._as_one_sum:
            stay = tuple(sorted(client for _, client in in_time if client not in gone))
            ends_s = until_s if len(stay) < len(asked) else trips[-1][0]
            events = [core.SumCame(attempt=attempt, clients=stay, at_s=ends_s)]
        else:
            events = []
            for at_s, client in in_time:
                if client not in gone:
                    events.append(core.ReportCame(client=client, attempt=attempt, digest="", at_s=at_s))
                elif not self._has_deadline:  # which would show it; without one the server is taken to know
                    events.append(core.ClientGone(client=client, at_s=at_s))
            events.append(core.TimePassed(at_s=until_s))
        return SimulatedCourse(attempt=attempt, asked=asked, begun=begun, events=events, dropped=len(gone))

    def _outcome(
        self, state: core.RoundState, events: Sequence[core.RoundEvent]
    ) -> tuple[core.RoundState, core.RoundDecision]:
        """Up to the end of the attempt; who comes after that is too late."""
        for event in events:
            state, decisions = core.handle(self._terms, state, event)
            for decision in decisions:
                if isinstance(decision, core.CloseRound | core.AbandonRound):
                    return state, decision
        raise AssertionError("an attempt ends with its last client, or at its deadline")

    def _count(self, attempt: SimulatedCourse, in_time: int, after: core.RoundState) -> None:
        self.state = replace(after, present={}, now_s=0.0, since_s=0.0, counted_s=0.0)
        self.participation["simulated_s"] += after.now_s - attempt.begun.since_s
        self.participation["asked"] += len(attempt.asked)
        self.participation["dropped"] += attempt.dropped
        self.participation["late"] += len(attempt.asked) - attempt.dropped - in_time


def simulated_rounds(strategy: Federated, clients: int, seed: int) -> SimulatedRounds:
    """Those of a strategy with so many clients; UserError where they cannot be held."""
    goal = strategy.per_round(clients)
    if strategy.min_reports > goal:
        raise UserError(
            f"federated min_reports={strategy.min_reports}: a round ends at {goal} reports of {clients} clients; use "
            "fewer, or a larger fraction"
        )
    deadline_s = strategy.deadline or _LONG_S
    terms = core.RoundTerms(
        rounds=_ENDLESS,
        clients=clients,
        goal=goal,
        minimum=strategy.min_reports,
        over=strategy.over,
        deadline_s=deadline_s,
        select_s=1.0,
        present_s=1.0,
        patience_s=_ATTEMPTS * min(deadline_s, _USUAL_S),
        seed=seed,
    )
    if strategy.secure:  # no client can be left out of a sum, and enough must be in it
        strategy.fixed_point.check_capacity(terms.asks)
        least = max(strategy.min_reports, fewest_clients(terms.asks))
        terms = replace(terms, goal=terms.asks, over=1.0, minimum=least)
    return SimulatedRounds(terms, strategy.dropout, as_one_sum=strategy.secure)


_MOST: Final = 100  # clients at once, where the setting names no number
_STACK_BYTES: Final = 256 << 20  # of stacked weights, on a CPU
_PART_OF_MEMORY: Final = 0.02  # of a GPU's free memory; gradients, moments and activations come on top
_LARGE_KERNEL: Final = 1 << 14  # items of a convolution's weights
_WITHOUT_RULE: Final = "batching rule"  # in a warning of torch
_OPERATION: Final = re.compile(r"aten::\w+")
_TRIED: Final = 2  # samples in the batch of a trial
_FEW_STEPS: Final = 64  # of all clients in a round: loading torch.func takes longer in every process

ClientRunner = ClientTrainer | StackedTrainer


@dataclass(frozen=True, slots=True)
class ClientSimulation:
    """How many clients are simulated at once, and why not more."""

    together: int
    why: str

    def __str__(self) -> str:
        if self.together == 1:
            return f"clients were trained one after another: {self.why}"
        return f"up to {self.together} clients were trained at once, as one stacked model"


def client_runner_for(
    task: Task,
    model: nn.Module,
    algorithm: FederatedAlgorithm,
    work: LocalWork,
    seed: int,
    *,
    sizes: Sequence[int],
    each_round: int,
    wanted: int,
) -> tuple[ClientRunner, ClientSimulation]:
    """The runner for a worker's clients of these `sizes`; UserError where `wanted` at once is not possible."""
    simulation = _choose(task, model, work, sizes, each_round, wanted)
    if simulation.together > 1:
        return StackedTrainer(task, model, algorithm, work, seed, simulation.together), simulation
    if wanted > 1 and each_round > 1:
        raise UserError(f"federated together={wanted}: {simulation.why}; use together=auto, or together=1")
    return ClientTrainer(task, model, algorithm, work, seed), simulation


def _choose(
    task: Task, model: nn.Module, work: LocalWork, sizes: Sequence[int], each_round: int, wanted: int
) -> ClientSimulation:
    if wanted == 1:
        return ClientSimulation(1, "together=1 was given")
    if each_round == 1:
        return ClientSimulation(1, "a worker has one client in a round")
    if wanted == AUTO and each_round * steps_in(work, math.ceil(sum(sizes) / len(sizes))) < _FEW_STEPS:
        return ClientSimulation(1, "a round has few steps")
    if cannot := _trial(task, copy.deepcopy(model).train()):
        return ClientSimulation(1, cannot)
    if wanted != AUTO:
        return ClientSimulation(min(wanted, each_round), "")
    device = next(model.parameters()).device
    for name, module in model.named_modules() if device.type == "cpu" else ():
        if isinstance(module, nn.modules.conv._ConvNd) and module.weight.numel() >= _LARGE_KERNEL:
            why = f"a stack of convolutions as large as {name} is slower on a CPU than single ones"
            return ClientSimulation(1, why)
    if work.batch == ALL and len(set(sizes)) > len(sizes) / 2:
        why = "with all of a client's data as one batch, few clients have batches of the same size"
        return ClientSimulation(1, why)
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    room = float(_STACK_BYTES)
    if device.type == "cuda":
        room = _PART_OF_MEMORY * torch.cuda.mem_get_info(device)[0]
    fitting = max(1, min(_MOST, int(room / max(1, weights))))
    return ClientSimulation(min(each_round, fitting), "the model is large")


def _trial(task: Task, model: nn.Module) -> str:
    """Why clients cannot be stacked, "" where two have the same gradient stacked as alone; `model` is a copy."""
    if task.collate is not None:
        return "the task has a collate of its own"
    if not any(one.requires_grad for one in model.parameters()):
        return "the model has nothing to train"
    kind = type(task.optimizer(model.parameters()))
    if kind not in ITEM_BY_ITEM:
        return f"{kind.__name__} is not known to work item by item"
    device = next(model.parameters()).device
    length = min(_TRIED, task.samples)
    indices = np.stack([np.arange(length), np.arange(task.samples - length, task.samples)])
    try:
        batch = apart(Samples(task, device).fetch(indices.reshape(-1)), indices.shape)
    except (TypeError, RuntimeError) as error:
        return f"batches cannot be stacked ({_first_line(error)})"
    buffers = [buffer.clone() for buffer in model.buffers()]
    plain = []
    for own in indices:
        loss = task.loss(model, Samples(task, device).fetch(own))
        require_loss(loss)
        wanted = [one for one in model.parameters() if one.requires_grad]
        plain.append(torch.autograd.grad(loss, wanted, allow_unused=True))
    if any(one is None for found in plain for one in found):
        return "some parameter has no gradient"
    if any(not torch.equal(one, before) for one, before in zip(model.buffers(), buffers, strict=True)):
        return "the model changes its buffers in training"
    stacked = [one.expand(len(indices), *one.shape).clone() for one in held(model)]
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found, _ = StackedGradients(task, model)(stacked, batch)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return f"torch.func.vmap cannot follow the loss ({_first_line(error)})"
    for message in (str(one.message) for one in warned):
        if _WITHOUT_RULE in message:
            [operation] = _OPERATION.findall(message)[:1] or ["an operation"]
            return f"torch.func.vmap has no rule for {operation}, and would take one client after another"
    for position, gradients in enumerate(plain):
        for gradient, stack in zip(gradients, found, strict=True):
            if not _close(gradient, stack[position]):
                return "the stacked gradient differs from the plain one"
    return ""


def _close(one: Tensor, other: Tensor) -> bool:
    """To rounding, by the largest item; what is not finite is alike."""
    size = float(one.abs().nan_to_num(0, 0, 0).max()) if one.numel() else 0.0
    rounding = 1e3 * torch.finfo(one.dtype).eps
    if one.is_cuda and one.dtype == torch.float32:
        rounding = 1e-2  # convolutions may be of ten bits there, in one way or another
    return torch.allclose(one, other, rtol=0, atol=rounding * max(size, 1e-12), equal_nan=True)


def _first_line(error: Exception) -> str:
    line = str(error).strip().split("\n", 1)[0]
    return line if len(line) <= 120 else f"{line[:117]}..."


_AFTER_ALL: Final = 2**31 - 1  # a round that no run has: what is random in fine-tuning is drawn apart
Tuned = Iterator[tuple[int, Tensors]]  # clients, and what their models have become, in the order of `held`


class TuningSteps(FederatedAlgorithm):
    """Plain training steps after which a client reports its tensors as they are: they are not averaged."""

    word: ClassVar[str] = FINE_TUNE
    about: ClassVar[str] = "steps on a client's own samples after the last round"

    def report(self, client: int, start: Tensors, trained: Tensors, steps: int) -> Tensors:
        del client, start, steps
        return [one.clone() for one in trained]


def fine_tuned(
    task: Task,
    strategy: Federated,
    model: nn.Module,
    *,
    epochs: int | None = None,
    seed: int = 0,
    kept: Mapping[int, Tensors] | None = None,
) -> Iterator[tuple[int, list[Tensor]]]:
    """Each client, and what the model becomes after so many epochs on its own samples alone, with the task's optimizer.

    Tensors are the model's parameters, then its floating-point buffers. Split and epochs are those of a run of this
    strategy with this seed. With `keep=` a client begins with its own layers, which `models_kept(…, "layers")` reads.
    """
    if epochs is not None and epochs < 1:
        raise UserError(f"epochs={epochs}: fine-tuning needs at least 1")
    parts = Partition.parse(strategy.partition).split(task.data, task.samples, strategy.clients, seed)
    samples_of, _ = held_back(parts, strategy.held_out, seed)
    layers = LocalLayers(held_names(model), strategy.keep)
    layers.states.update({client: list(own) for client, own in (kept or {}).items()})
    models = [(client, layers.put(client, held(model))) for client in range(len(samples_of))]
    work = replace(work_of(strategy), epochs=epochs or tuning_epochs(strategy.personal) or 1)
    like, together = task.optimizer(model.parameters()), strategy.together
    for client, tensors in tuned(task, model, models, samples_of, work, like, seed, together=together):
        yield client, list(tensors)


def tuned(
    task: Task,
    model: nn.Module,
    models: Iterable[tuple[int, Tensors]],
    samples_of: Sequence[NDArray[np.int64]],
    work: LocalWork,
    like: Optimizer,
    seed: int,
    *,
    together: int = AUTO,
) -> Tuned:
    assigned = [
        ClientAssignment(client=client, samples=samples_of[client], weights=weights, number=_AFTER_ALL)
        for client, weights in models
    ]
    if not assigned:
        return
    sizes = [len(one.samples) for one in assigned]
    wanted = 1 if together == 1 else AUTO  # too little capacity must not end the run without any
    runner, _ = client_runner_for(
        task, model, TuningSteps(), work, seed, sizes=sizes, each_round=len(sizes), wanted=wanted
    )
    yield from ((update.client, update.change) for update in runner.play(assigned, like))


def models_kept(memory: Mapping[str, Any], name: str = "algorithm") -> ClientStates:
    """What each client had kept in a checkpoint's `extra["exchange"]`: for the `algorithm`, or its own `layers`."""
    return restored(memory.get("clients", {}).get(name, {}), 0, 1, torch.device("cpu"))
