"""One worker's side of a strategy: how its gradients become the step that everyone takes.

The training loop (`worker.py`) knows this interface and nothing else of strategies; each strategy's package has one
implementation. All methods marked *collective* are called by every worker, in the same order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.engine.computing import Computed, Computer
from manyhands.engine.options import SYNCHRONIZE
from manyhands.engine.row_gradients import clippable
from manyhands.errors import UserError
from manyhands.task import Task
from manyhands.transport.link.wire import Wire

__all__ = [
    "Exchange",
    "LocalStep",
    "MicrobatchTime",
    "PeerTraffic",
    "SentFor",
    "SharedStep",
    "SingleExchange",
    "Times",
    "Traffic",
]

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalStep:
    """What one worker brings to a step: its mean loss, its share of the global batch, and whether it wants to stop."""

    loss: float
    share: float
    stop: bool = False
    step: int = 0
    """Its number, from 0."""

    last: bool = False
    """The run ends with it."""

    pause: bool = False
    """It wants all to meet before the next step, because somebody comes or goes."""

    @property
    def is_finite(self) -> bool:
        """Whether the loss is finite; a worker without samples brings none, which is fine."""
        return self.share == 0 or math.isfinite(self.loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedStep:
    """What all workers agree on after a step: the same on each."""

    loss: float
    """Mean over the global batch; not a number before the step is `settled`."""

    bad_workers: tuple[int, ...] = ()
    """Workers whose loss was not finite."""

    stop: bool = False
    """A worker asked to stop: all stop after this step."""

    pause: bool = False
    """A worker wants all to meet before the next step."""

    settled: bool = True
    """Whether the workers' parameters are the same after this step; if not, nothing was agreed on yet."""

    earlier: tuple[float, ...] = ()
    """The mean losses of the steps before this one that were not settled, the oldest first."""


@dataclass(kw_only=True, slots=True)
class PeerTraffic:
    """What went to and came from one other worker: how much, when the first message left and the last arrived."""

    messages_sent: int = 0
    bytes_sent: int = 0
    sent_ns: int = 0
    received_ns: int = 0

    def add(self, more: PeerTraffic) -> None:
        """Add the traffic between the same two workers over another channel."""
        self.messages_sent += more.messages_sent
        self.bytes_sent += more.bytes_sent
        self.sent_ns = min((moment for moment in (self.sent_ns, more.sent_ns) if moment), default=0)
        self.received_ns = max(self.received_ns, more.received_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchTime:
    """The time of one work item of a step computed in micro-batches with other workers, or of a wait in it."""

    begin_ns: int
    end_ns: int
    microbatch: int
    """From 0."""

    waited_for: int | None = None
    """Which worker; None: the time was this worker's own work."""

    exchange_ns: int = 0
    """What went, after it and inside the same turn, into passing things between slices of a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Where the time of an exchange went, in nanoseconds, since the last call."""

    exchange_ns: int = 0
    """Reducing and moving data."""

    wait_ns: Mapping[int, int] = field(default_factory=dict)
    """Waiting for each worker that came later."""

    posts: Mapping[int, PeerTraffic] = field(default_factory=dict)
    """Messages to and from each worker, where there are any."""

    turns: Sequence[MicrobatchTime] = ()
    """What computing was made of, in order, where workers take turns at micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What this worker has sent so far."""

    messages_sent: int = 0
    bytes_sent: int = 0

    def __add__(self, more: Traffic) -> Traffic:
        return Traffic(
            messages_sent=self.messages_sent + more.messages_sent,
            bytes_sent=self.bytes_sent + more.bytes_sent,
        )

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(
            messages_sent=self.messages_sent - before.messages_sent,
            bytes_sent=self.bytes_sent - before.bytes_sent,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SentFor:
    """The bytes sent, by purpose."""

    gradients: Traffic = Traffic()
    """In steps: gradients or parameters, and with them a few words on the loss and who wants to stop."""

    control: Traffic = Traffic()
    """Between steps: first weights, probes of codecs and algorithms, evaluations, checks, steps that were cut."""

    checkpoints: Traffic = Traffic()
    """What came together on worker 0 to be saved or returned: states, weights, what codecs keep."""

    @property
    def total(self) -> Traffic:
        """The bytes sent for all purposes."""
        return self.gradients + self.control + self.checkpoints

    def __add__(self, more: SentFor) -> SentFor:
        return SentFor(
            gradients=self.gradients + more.gradients,
            control=self.control + more.control,
            checkpoints=self.checkpoints + more.checkpoints,
        )

    def to_dict(self) -> dict[str, dict[str, int]]:
        """The form in which a worker reports it and a summary holds it."""
        return {
            one.name: {"bytes_sent": sent.bytes_sent, "messages_sent": sent.messages_sent}
            for one in fields(self)
            for sent in (getattr(self, one.name),)
        }

    @classmethod
    def from_dict(cls, told: Mapping[str, Mapping[str, int]]) -> SentFor:
        """Read what `to_dict` wrote."""
        return cls(**{name: Traffic(**sent) for name, sent in told.items()})


class Exchange(ABC):
    """One worker's end of the exchange; `close` is idempotent."""

    rank: int
    world: int

    wire: int = Wire.NONE
    """What carries the gradients, and in which codec: made by `wire_of`."""

    when_broken: ClassVar[str] = "all workers stopped before this step and no parameter was changed"
    """What a loss that is not finite has done to the run."""

    builds_on_host: ClassVar[bool] = False
    """Whether the model is built in the host's memory, and `attach` moves to a GPU what belongs there."""

    may_lose_workers: ClassVar[bool] = False
    """Whether the others go on when any of them is lost: what one alone has told may then be another's to tell."""

    steps_itself: ClassVar[bool] = False
    """Whether `apply` moves the parameters without the optimizer's own `step`, which must then do nothing."""

    @property
    def worker(self) -> int:
        """The identity of this worker; its rank, where the set of workers is fixed."""
        return self.rank

    @property
    def part(self) -> int:
        """Which part of each global batch this worker computes on."""
        return self.rank

    @property
    def parts(self) -> int:
        """How many parts a batch has: fewer than workers where several share the work on one."""
        return self.world

    @property
    def copies(self) -> Sequence[Sequence[int]]:
        """Groups of workers whose parameters must be equal after every step; empty where none holds copies."""
        return ()

    def held_parameters(self, model: nn.Module) -> Iterable[tuple[str, torch.Tensor | None]]:
        """After `attach`: every parameter by name, in one order on all workers; None for one that is remote."""
        return model.named_parameters()

    def held_buffers(self, model: nn.Module) -> Iterable[torch.Tensor]:
        """After `attach`: the buffers that this worker computes with, in one order on all workers that use them."""
        return model.buffers()

    def total_of_copies(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: the sum over the workers that hold the same part of the model, one for each part of a batch."""
        return self.total(values)

    @abstractmethod
    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Collective: take over the model's gradients and give every worker worker 0's weights."""

    def whole(self, work: Callable[[], _T], *, steps_done: int, at_border: bool) -> _T:
        """Collective: do `work` completely on every worker, or on none.

        Where workers join and leave, interrupted work is repeated by the remaining ones. So `work` must change
        nothing of this worker before the last exchange in it is over. `steps_done` says what was trained before it.
        `at_border` says whether it is a step, before which new workers may join.
        """
        del steps_done, at_border
        return work()

    def on_join(self, tell: Callable[[], Mapping[str, Any]]) -> None:  # noqa: B027 - where nobody joins, nobody asks
        """`tell` says what a worker that joins has to know besides model and optimizer, as a checkpoint's `extra`."""

    def compute(self, computer: Computer, model: nn.Module, step: int) -> Computed:
        """Forward and backward of this worker's part of batch `step`."""
        compute = partial(computer.compute, model, step, self.part, self.parts, self.backward)
        if computer.plan.buffers != SYNCHRONIZE or self.parts == 1:
            return compute(accumulate=self.accumulate)
        with self.accumulate():  # no other sum is under way while layers sum their statistics
            found = compute()
        if not found.samples:
            raise UserError(
                f"buffers=synchronize: worker {self.worker} has no sample in step {step + 1}, and every worker needs "
                "one; use fewer workers, larger batches, or buffers=mean"
            )
        return found

    def total_in_step(self, values: torch.Tensor) -> torch.Tensor:
        """Collective, inside the forward and backward of a step in which all compute: the sum over workers."""
        return self.total(values)

    def cannot_go_on(self, computer: Computer, step: int) -> str:
        """Between steps, with `step` of them done: why no step may follow, the same sentence on every worker.

        Usually empty: the run continues.
        """
        del computer, step
        return ""

    def step_samples(self, computer: Computer, step: int) -> int:
        """How many samples all workers together computed in step `step`, which they have agreed on."""
        return computer.batch_samples(step)

    def evaluate(self, computer: Computer, model: nn.Module) -> tuple[dict[str, float], int] | None:
        """Collective: means over the evaluation data and the number of samples; each worker evaluates its part."""
        return computer.evaluate(model, self.rank, self.world, self.total)

    def splits(self, task: Task) -> bool:
        """Whether a loss or a gradient is combined from those of parts of a batch."""
        return self.parts > 1 or task.microbatches > 1

    def evaluate_alike(self, computer: Computer, model: nn.Module) -> tuple[dict[str, float], int] | None:
        """After `attach`, on every worker: means over all of the evaluation data, which must be small."""
        return computer.evaluate(model)

    def begin(self, step: int) -> None:  # noqa: B027 - not everybody sends before `agree`
        """Gradients that come from here on are of step `step`; where `compute` is not called, before the first."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, share: float) -> None:
        """Run backward for this worker's part of the batch, which weighs `share` of the whole."""

    def weigh(self, share: float) -> None:  # noqa: B027 - the whole has no shares
        """Weigh backwards that are not run by `backward` as `share` of the whole, from the next one on."""

    def on_next_gradient(self, listener: Callable[[], None]) -> None:  # noqa: B027 - a single worker needs none
        """Call `listener` once, at the next gradient: this detects a backward that is not run here."""

    def accumulate(self) -> AbstractContextManager[None]:
        """While this is open, gradients of several backwards only add up; nothing is sent before the one after it."""
        return nullcontext()

    @abstractmethod
    def agree(self, local: LocalStep) -> SharedStep:
        """Collective: exchange gradients and learn what all workers brought; changes no parameter."""

    @abstractmethod
    def clip(self, max_norm: float) -> float:
        """Collective, between `agree` and `apply`: scale the gradient down to `max_norm`; the norm that it had.

        As `torch.nn.utils.clip_grad_norm_` on all parameters of the model in one process.
        """

    def held_gradients(self) -> Sequence[torch.Tensor]:
        """Between `agree` and `apply`: what this worker holds of the gradient, in place, where it `steps_itself`.

        None elsewhere: there each parameter's `grad` is the whole.
        """
        return ()

    @abstractmethod
    def apply(self) -> None:
        """Collective: take the agreed step; skipped when a worker's loss was not finite."""

    def settle(self, *, end: bool = False) -> bool:
        """Collective when due: after the optimizer's step, synchronize the parameters; says whether it was due.

        At the `end` of a caller's training loop it is due if any step was taken since the last synchronization.
        Strategies that take every step together have nothing to do.
        """
        del end
        return False

    @abstractmethod
    def optimizer_state(self) -> dict[str, Any] | None:
        """Collective, between steps: the optimizer's whole `state_dict()` on worker 0, None on the others.

        The format is the same under every strategy, so a run may continue under another one. On resume each worker
        loads it into its optimizer as usual, before `attach` or between steps.
        """

    def model_state(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        """Collective, between steps: the whole model's `state_dict()` on worker 0, None on the others."""
        return model.state_dict() if self.rank == 0 else None

    def memory(self) -> Mapping[str, Any]:
        """Collective, between steps: what a resumed run needs besides model and optimizer, on worker 0.

        A tree of plain values and tensors, kept with the checkpoint; other strategies ignore it. Other workers get
        nothing.
        """
        return {}

    def load_state(self, memory: Mapping[str, Any]) -> None:  # noqa: B027 - most remember nothing
        """After `attach`, on every worker of a resumed run: load the state that `memory` gave."""

    @abstractmethod
    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: the sum over all workers of a small float64 vector."""

    def take_times(self) -> Times:
        """Where time went since the last call."""
        return Times()

    def traffic(self) -> Traffic:
        """The traffic that this worker has sent so far."""
        return Traffic()

    def row_facts(self) -> Mapping[str, Any]:
        """Extra fields for the history's row of the last step, the same on every worker: plain values."""
        return {}

    def evaluation_facts(self) -> Mapping[str, Any]:
        """Extra fields for the history's row of the last evaluation, the same on every worker: plain values."""
        return {}

    def summary(self) -> Mapping[str, Any]:
        """What this worker reports at the end of a run besides its traffic: plain values."""
        return {}

    def close(self) -> None:  # noqa: B027 - most have something to let go of, the plain loop has not
        """Release all resources; idempotent."""


class SingleExchange(Exchange):
    """The exchange of a single worker: the plain training loop, without communication."""

    rank = 0
    world = 1

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Keep the model and the optimizer for the steps."""
        self._model, self._optimizer = model, optimizer

    def backward(self, loss: torch.Tensor, share: float) -> None:
        """Plain backward; the share is the whole, unless gradients are accumulated."""
        weighted = loss if share == 1 else loss * share
        weighted.backward()  # type: ignore[no-untyped-call]

    def agree(self, local: LocalStep) -> SharedStep:
        """The agreed step of one worker: what it brought."""
        return SharedStep(loss=local.loss, bad_workers=() if local.is_finite else (0,), stop=local.stop)

    def clip(self, max_norm: float) -> float:
        """Clip by torch's function."""
        assert self._model is not None, "attach comes before clip"
        return float(nn.utils.clip_grad_norm_(clippable(self._model.parameters()), max_norm))

    def apply(self) -> None:
        """Take one optimizer step."""
        assert self._optimizer is not None, "attach comes before apply"
        self._optimizer.step()
        self._optimizer.zero_grad()

    def optimizer_state(self) -> dict[str, Any] | None:
        """The optimizer's `state_dict()`."""
        assert self._optimizer is not None, "attach comes before optimizer_state"
        return self._optimizer.state_dict()

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over one worker: `values`."""
        return values
