"""The run that profiles a task: every worker computes shares of its batches, at once with the others and alone.

The processes, the threads, the loop and the data are those of a run; only the exchange is missing. So what workers
take from each other's memory and cores is in the times. Each step is of one of several sizes, in turn, so that a
machine that becomes slower for a while does not make one size look expensive.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from manyhands.engine.computing import Computed, Computer
from manyhands.engine.exchange import Exchange, LocalStep, Resources, SharedStep, SingleExchange, WorkerPart
from manyhands.engine.fusing import take_step
from manyhands.engine.options import Options
from manyhands.engine.request import Length, Request
from manyhands.engine.session import run_session
from manyhands.engine.training import Result, Stage, Training
from manyhands.engine.worker_processes import ExchangeTraining
from manyhands.facts import Facts, Truth
from manyhands.places.local.host import threads_per_role
from manyhands.strategies.common.sharding.layer_units import Unit, units_of
from manyhands.strategies.common.usual_promises import IN_STEP
from manyhands.strategy import Strategy
from manyhands.task import Task

__all__ = ["Drive", "Profiling", "TimedStep", "profile_run", "profile_training"]

_WARM_ROUNDS = 2  # of all sizes: caches, allocators and lazily made states settle
_FEWEST_ROUNDS = 4  # that count
_MOST_STEPS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step of one worker on one part of so many of a batch: seconds of each part of it."""

    parts: int
    whole_s: float  # from the step before to this one
    input_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    is_owners: bool  # whether that step was one of owners of slices, who take torch's one-pass form
    unit_forward_s: Mapping[int, float]
    unit_backward_s: Mapping[int, float]
    unit_output: Mapping[int, int]  # bytes


@dataclass(frozen=True, kw_only=True)
class Profiling(Strategy):
    """Workers that compute without exchanging anything; not a strategy to train by, and in no registry."""

    word: ClassVar[str] = "profile"
    about: ClassVar[str] = "measures how long the parts of a task take"
    truth: ClassVar[Truth] = Truth.EVERYONE

    # A step computes one of so many parts of a batch, for each of these in turn
    parts: tuple[int, ...] = (1,)
    seconds: float = 1.0  # of measuring
    processes_here: int = 0  # that share the cores of a host; 0: the workers alone

    @property
    def facts(self) -> Facts:
        return Facts(promises=IN_STEP)

    @property
    def trains_compiled(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.word


Drive = Callable[[Training, Stage], Result]


def profile_training(task: Task, profiling: Profiling, workers: int, device: str) -> Training:
    """The training that profiles a task on so many workers."""
    request = _request(task, profiling, workers, device)
    return _ProfileTraining(request, request.plan.task.model())


def profile_run(
    task: Task, profiling: Profiling, workers: int, device: str, drive: Drive | None = None
) -> list[list[TimedStep]]:
    """The timed steps of each of so many workers that compute at the same time; `drive` runs it elsewhere than here."""
    request = _request(task, profiling, workers, device)
    here = drive or (lambda training, stage: training.run(stage))
    run = run_session(request, None, False, here, starts=drive is None, train=_ProfileTraining)
    return [[_read(step) for step in steps] for steps in run.summary["profiled"]]


def _request(task: Task, profiling: Profiling, workers: int, device: str) -> Request:
    options = Options(progress="none", check_every=0, allow_overload=True)
    plain = replace(
        task,
        evaluation=None,
        metrics={},
        scheduler=None,
        scheduler_metric=None,
        clip_norm=None,
        clip_value=None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of batches too small for so many workers: the run itself will say it
        return Request.make(plain, profiling, workers, Length(steps=_MOST_STEPS), 0, options, device)


def _read(step: Mapping[str, Any]) -> TimedStep:
    by_unit = {
        name: {int(unit): of for unit, of in step[name].items()} for name in step if name.startswith("unit_")
    }
    return TimedStep(**{**step, **by_unit})


class _ProfileTraining(ExchangeTraining):
    """Workers that compute, each for itself, and report how long what took."""

    @property
    def _threads(self) -> int:
        strategy = cast(Profiling, self._request.strategy)
        return threads_per_role(strategy.processes_here or self._request.workers)

    @classmethod
    def exchange(cls, strategy: Profiling, resources: Resources) -> Exchange:
        return _ProfileExchange(strategy, resources)

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        samples, besides = super().gather(finished)
        return samples, {**besides, "profiled": [one["profiled"] for one in finished]}


class _ProfileExchange(SingleExchange):
    """Exchanges nothing: takes times around what the loop does."""

    _units: _UnitClock

    def __init__(self, strategy: Profiling, resources: Resources) -> None:
        self.rank, self.world = resources.rank, 1
        self._worker, self._strategy, self._device = resources.rank, strategy, resources.device
        self._rounds = 0
        self._counted_from: float | None = None
        self._before: float | None = None  # when the step before this one ended
        self._steps: list[dict[str, Any]] = []
        self._backward_s = 0.0

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().attach(model, optimizer)
        self._units = _UnitClock(units_of(model))

    def compute(self, computer: Computer, model: nn.Module, step: int) -> Computed:
        parts = self._strategy.parts[step % len(self._strategy.parts)]
        self.part = WorkerPart(index=self._worker % parts, count=parts)
        self._backward_s, began = 0.0, self._now()
        with self._units.watching():
            found = super().compute(computer, model, step)
        input_s = found.input_ns / 1e9
        forward_s = self._now() - began - input_s - self._backward_s
        self._timed: dict[str, Any] = {"parts": parts, "input_s": input_s, "forward_s": forward_s}
        return found

    def backward(self, loss: Tensor, share: float) -> None:
        begin = self._now()
        self._units.begin_backward(begin)
        super().backward(loss, share)
        self._backward_s += self._now() - begin

    def agree(self, local: LocalStep) -> SharedStep:
        is_round = (local.step + 1) % len(self._strategy.parts) == 0
        now = time.perf_counter()
        if is_round:
            self._rounds += 1
            if self._rounds == _WARM_ROUNDS:
                self._counted_from = now
        counted = self._rounds - _WARM_ROUNDS
        enough = self._counted_from is not None and now - self._counted_from >= self._strategy.seconds
        return SharedStep(loss=local.loss, stop=is_round and enough and counted >= _FEWEST_ROUNDS)

    def apply(self) -> None:
        """Every other round by the optimizer as it is, and as owners of slices run it."""
        is_owners = self._rounds % 2 == 1
        begin = self._now()
        take_step(self._optimizer, on_cpu=is_owners)
        self._optimizer.zero_grad()
        end = self._now()
        if self._before is not None and self._rounds >= _WARM_ROUNDS:
            whole = {
                "whole_s": end - self._before,
                "optimizer_s": end - begin,
                "is_owners": is_owners,
                "backward_s": self._backward_s,
            }
            self._steps.append({**self._timed, **whole, **self._units.taken()})
        self._before = end

    def summary(self) -> Mapping[str, Any]:
        return {"profiled": self._steps}

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class _UnitClock:
    """How long each unit's forward takes, and its backward: from the last gradient of the unit before to its own last.

    On a GPU these are the times in which work is queued, which have about the same shares.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._forward: dict[int, float] = {}
        self._output: dict[int, int] = {}
        self._arrived: dict[int, float] = {}
        self._began_backward: float | None = None

    def begin_backward(self, now: float) -> None:
        if self._began_backward is None:
            self._began_backward = now

    def taken(self) -> dict[str, Any]:
        backward, last = dict[int, float](), self._began_backward or 0.0
        for number, arrived in sorted(self._arrived.items(), key=lambda one: one[1]):
            backward[number], last = arrived - last, arrived
        found = {
            "unit_forward_s": self._forward,
            "unit_backward_s": backward,
            "unit_output": self._output,
        }
        self._forward, self._output, self._arrived, self._began_backward = {}, {}, {}, None
        return found

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles: list[Any] = []
        for unit in self._units:
            arrived = self._arriving(unit.number)
            trained: list[Any] = [unit.parameters[number] for number in unit.trained]
            handles += [one.register_post_accumulate_grad_hook(arrived) for one in trained]
            if unit.module is not None:
                enter, leave = self._passing(unit.number)
                handles += [
                    unit.module.register_forward_pre_hook(enter),
                    unit.module.register_forward_hook(leave),
                ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _arriving(self, number: int) -> Callable[[Tensor], None]:
        def arrived(_parameter: Tensor) -> None:
            self._arrived[number] = time.perf_counter()

        return arrived

    def _passing(self, number: int) -> tuple[Callable[..., None], Callable[..., None]]:
        begins: list[float] = []

        def enter(*_: Any) -> None:
            begins.append(time.perf_counter())

        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            self._forward[number] = self._forward.get(number, 0.0) + time.perf_counter() - begins.pop()
            self._output[number] = sum(one.nbytes for one in tree_leaves(output) if isinstance(one, Tensor))

        return enter, leave
