"""One worker's side of a strategy: how its gradients become the step that everyone takes.

The training loop (`worker.py`) knows this interface and nothing else of strategies; each strategy's package has one
implementation. All methods marked *collective* are called by every worker, in the same order. Every strategy has the
methods of `Exchange`; what only some can do is a capability, a small value that an exchange has or leaves out:

    part      which part of a batch this worker computes on, and of the model it holds
    meter     what it measures: times and traffic
    hooks     where gradients arrive, for a caller's own loop and for accumulation
    parts     the gradient, where a worker holds parts of it
    kept      what a resumed run needs besides model and optimizer
    cut       the model, where a worker of a caller's own loop holds a part of it
    runner    forward and backward of a caller's own batch, where nobody can call the model
    average   parameters that are synchronized after some steps, not after each
    members   workers that come and go
    rounds    steps that are rounds of clients
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import nn
from torch._C._distributed_c10d import Store
from torch.optim import Optimizer

from manyhands.engine.computing import Computed, Computer
from manyhands.engine.fusing import take_step
from manyhands.engine.options import SYNCHRONIZE
from manyhands.errors import UserError
from manyhands.native.group.shared_group import SharedGroup
from manyhands.transport.link.interface import Link
from manyhands.transport.link.wire import Wire
from manyhands.transport.liveness import Alarm


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalStep:
    """What one worker brings to a step: its mean loss, its share of the global batch, and whether it wants to stop."""

    loss: float
    share: float
    stop: bool = False
    step: int = 0  # its number, from 0
    last: bool = False  # the run ends with it
    pause: bool = False  # it wants all to meet before the next step, because somebody comes or goes

    @property
    def is_finite(self) -> bool:
        """Whether the loss is finite; a worker without samples brings none, which is fine."""
        return self.share == 0 or math.isfinite(self.loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedStep:
    """What all workers agree on after a step: the same on each."""

    loss: float  # mean over the global batch; not a number before the step is `settled`
    bad_workers: tuple[int, ...] = ()  # workers whose loss was not finite
    stop: bool = False  # a worker asked to stop: all stop after this step
    pause: bool = False  # a worker wants all to meet before the next step
    # Whether the workers' parameters are the same after this step; if not, nothing was agreed on yet
    settled: bool = True
    # The mean losses of the steps before this one that were not settled, the oldest first
    earlier: tuple[float, ...] = ()


@dataclass(kw_only=True, slots=True)
class PeerTraffic:
    """What went to and came from one other worker: how much, when the first message left and the last arrived."""

    messages_sent: int = 0
    bytes_sent: int = 0
    sent_ns: int = 0
    received_ns: int = 0

    def add(self, more: PeerTraffic) -> None:
        self.messages_sent += more.messages_sent
        self.bytes_sent += more.bytes_sent
        self.sent_ns = min((moment for moment in (self.sent_ns, more.sent_ns) if moment), default=0)
        self.received_ns = max(self.received_ns, more.received_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchTime:
    """The time of one work item of a step computed in micro-batches with other workers, or of a wait in it."""

    begin_ns: int
    end_ns: int
    microbatch: int  # from 0
    waited_for: int | None = None  # which worker; None: the time was this worker's own work
    # What went, after it and inside the same work item, into passing things between slices of a layer
    exchange_ns: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Where the time of an exchange went, in nanoseconds, since the last call."""

    exchange_ns: int = 0  # reducing and moving data
    wait_ns: Mapping[int, int] = field(default_factory=dict)  # waiting for each worker that came later
    # Messages to and from each worker, where there are any
    posts: Mapping[int, PeerTraffic] = field(default_factory=dict)
    # What computing was made of, in order, where workers share micro-batches
    microbatches: Sequence[MicrobatchTime] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What this worker has sent so far."""

    messages_sent: int = 0
    bytes_sent: int = 0

    def __add__(self, more: Traffic) -> Traffic:
        messages, sent = self.messages_sent + more.messages_sent, self.bytes_sent + more.bytes_sent
        return Traffic(messages_sent=messages, bytes_sent=sent)

    def __sub__(self, before: Traffic) -> Traffic:
        messages, sent = self.messages_sent - before.messages_sent, self.bytes_sent - before.bytes_sent
        return Traffic(messages_sent=messages, bytes_sent=sent)


@dataclass(frozen=True, kw_only=True, slots=True)
class SentFor:
    """The bytes sent, by purpose."""

    # In steps: gradients or parameters, and with them a few words on the loss and who wants to stop
    gradients: Traffic = Traffic()
    # Between steps: first weights, probes of codecs and algorithms, evaluations, checks, steps that were cut
    control: Traffic = Traffic()
    # What came together on worker 0 to be saved or returned: states, weights, what codecs keep
    checkpoints: Traffic = Traffic()

    @property
    def total(self) -> Traffic:
        return self.gradients + self.control + self.checkpoints

    def __add__(self, more: SentFor) -> SentFor:
        return SentFor(
            gradients=self.gradients + more.gradients,
            control=self.control + more.control,
            checkpoints=self.checkpoints + more.checkpoints,
        )

    def to_dict(self) -> dict[str, dict[str, int]]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Mapping[str, int]]) -> SentFor:
        return cls(**{name: Traffic(**sent) for name, sent in record.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPart:
    """Which part of each batch a worker computes on, and which part of the model it holds."""

    index: int  # which part of each global batch this worker computes on
    count: int  # how many parts a batch has: fewer than workers where several share the work on one
    speaks: bool = True  # whether this worker's results count, of several that share the work on one
    # Groups of workers whose parameters must be equal after every step; empty where none holds copies
    copies: Sequence[Sequence[int]] = ()
    # After `attach`: every parameter by name, in one order on all workers; None for one that is remote
    parameters: Callable[[nn.Module], Iterable[tuple[str, torch.Tensor | None]]] = nn.Module.named_parameters
    # After `attach`: the buffers that this worker computes with, in one order on all workers that use them
    buffers: Callable[[nn.Module], Iterable[torch.Tensor]] = nn.Module.buffers
    # Collective: the sum over the workers that hold the same part of the model; None: that is over all
    total_of_copies: Callable[[torch.Tensor], torch.Tensor] | None = None
    # Collective, inside a forward and backward in which all compute: the sum over workers; None: as `total`
    total_in_step: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Meter:
    """What an exchange measures."""

    take_times: Callable[[], Times] = Times  # where time went since the last call
    traffic: Callable[[], Traffic] = Traffic  # the traffic that this worker has sent so far


class GradientHooks(Protocol):
    """Where gradients arrive while backward runs, also one that is not run by the exchange."""

    weight: float  # the factor for every gradient of a backward that `Exchange.backward` does not run
    # Called once, at the next gradient: this detects a backward that is not run by the exchange
    on_next_gradient: Callable[[], None] | None

    def begin_step(self, step: int) -> None:
        """Gradients that come from here on are of step `step`."""

    def holding(self) -> AbstractContextManager[None]:
        """While this is open, gradients of several backwards only add up; nothing is sent before the one after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientParts:
    """Between `agree` and `apply`: the gradient of the whole batch, of which a worker holds parts."""

    held: Callable[[], Sequence[torch.Tensor]]  # the parts that this worker holds, to be changed in place
    # Those that this worker counts towards the norm: every item is counted on `holders` workers
    counted: Callable[[], Sequence[torch.Tensor]]
    # Collective: the sum over the workers that hold the whole gradient together
    total: Callable[[torch.Tensor], torch.Tensor]
    holders: int = 1


# No gradient is left between `agree` and `apply` that anyone could clip
NO_GRADIENT: Final = GradientParts(held=tuple, counted=tuple, total=torch.Tensor.clone)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeState:
    """What a resumed run needs besides model and optimizer: kept with the checkpoint, ignored by other strategies."""

    # Collective, between steps: a tree of plain values and tensors on worker 0, and nothing on the others
    gather: Callable[[], Mapping[str, Any]]
    # After `attach`, on every worker of a resumed run: load what `gather` gave
    load: Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class CutModel:
    """In a caller's own loop, where each worker holds a part of the model: how whole states come into the parts.

    The user's optimizer lists what this worker holds, and its `step` is that of the strategy.
    """

    # Turns a whole `state_dict()` of the model into what this worker's model loads, in place
    begin_load: Callable[[dict[str, torch.Tensor]], None]
    end_load: Callable[[], None]  # the model has loaded what `begin_load` left
    # What this worker's optimizer loads of a whole `state_dict()`
    optimizer_part: Callable[[Mapping[str, Any]], dict[str, Any]]
    # After `close`: the model is a plain one again, with these values
    make_whole: Callable[[Mapping[str, torch.Tensor]], None]
    # Collective: takes part in what others do until every worker is here, where that is needed
    arrive: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPiece:
    """A part of a caller's batch, which weighs `weight` of it."""

    batch: Any
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRunner:
    """Where workers compute a batch together by a schedule, so that the model cannot be called."""

    pieces: int  # into how many a batch is cut, if it has so many samples
    # Collective: forward and, where gradients are enabled, backward of `loss(model, batch)`; the mean loss of this
    # worker's share of the batch, 0 on a worker that does not speak for it
    run: Callable[[Sequence[BatchPiece], Callable[..., torch.Tensor | float]], float]


class ChangingWorkers(Protocol):
    """Where workers join and leave; since worker 0 may be lost, each keeps what worker 0 alone reports."""

    slot: int  # the identity of this worker, whatever its rank becomes

    def atomically(self, work: Callable[[], Any], *, steps_done: int, at_border: bool) -> Any:
        """Collective: do `work` completely on every worker, or on none; returns what it returns.

        Interrupted work is repeated by the remaining workers. So `work` must change nothing of this worker before the
        last exchange in it is over. `steps_done` says what was trained before it. `at_border` says whether it is a
        step, before which new workers may join.
        """

    def on_join(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """`state` gives what a worker that joins needs besides model and optimizer, as a checkpoint's `extra`."""


class TrainingRounds(Protocol):
    """Where a step is a round of clients, each of which computes on whole batches of its own."""

    def cannot_continue(self, computer: Computer, step: int) -> str:
        """Between steps, with `step` of them done: why no step may follow, the same sentence on every worker."""

    def step_samples(self) -> int:
        """How many samples all clients together computed in the step that was agreed on."""

    def row_facts(self) -> Mapping[str, Any]:
        """Extra fields for the history's row of the last step, the same on every worker: plain values."""

    def evaluation_facts(self) -> Mapping[str, Any]:
        """Extra fields for the history's row of the last evaluation, the same on every worker: plain values."""


def _apart() -> SharedGroup:
    raise UserError("the workers of this host share no memory")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """One worker's resources, on one host or several; the caller that requests the group closes it."""

    rank: int
    world: int  # how many workers there are
    timeout_s: float
    # Memory that all of them share, with barriers; UserError where they are on several hosts
    group: Callable[[], SharedGroup]
    # A link to each of the others; only where the strategy `uses_links`, or there are several hosts
    links: Callable[[], Mapping[int, Link]]
    # As many more such links as the strategy has a use for between hosts (`Facts.streams`)
    more_links: Sequence[Mapping[int, Link]] = ()
    # Memory that those of this worker's host share, by their places in it, where there are several hosts
    host_group: Callable[[], SharedGroup] = _apart
    seed: int = 0  # of the run
    # Where this worker computes
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - a value, never changed
    # The ranks of each host, where there are several; empty: all are on this one
    hosts: Sequence[Sequence[int]] = ()
    helpers: int = 0  # processes that only sum for the workers: those of the ranks after them
    shares_memory: bool = True  # whether there is a `group` to ask for
    # A store for the process groups of torch's engines, with the run's deadline; None where nobody keeps one
    torch_store: Callable[[], Store] | None = None
    # Whether the user trusts the network between hosts, so that what cannot be encrypted may go there, too
    in_the_clear: bool = False
    alarm: Alarm | None = None  # ends waits for what comes over links, where somebody watches over the others

    @property
    def several_hosts(self) -> bool:
        """Whether some workers are on other hosts, so that no memory is shared by all."""
        return len(self.hosts) > 1


class Exchange(ABC):
    """One worker's end of the exchange; `close` is idempotent."""

    rank: int
    world: int
    part: WorkerPart

    wire: int = Wire.NONE  # what carries the gradients, and in which codec: made by `wire_of`
    # What a loss that is not finite has done to the run
    when_broken: ClassVar[str] = "all workers stopped before this step and no parameter was changed"
    # Whether the model is built in the host's memory, and `attach` moves to a GPU what belongs there
    builds_on_host: ClassVar[bool] = False
    # Whether `apply` moves the parameters without the optimizer's own `step`, which must then do nothing
    steps_itself: ClassVar[bool] = False
    # Whether each worker of a caller's own loop holds a part of the model; `cut` is set by `attach` then
    cuts_model: ClassVar[bool] = False
    # Whether a recorded loop is executed again, which neither saves nor loads checkpoints
    is_replay: ClassVar[bool] = False
    meter: Meter = Meter()
    hooks: GradientHooks | None = None  # set by `attach`
    # None: between `agree` and `apply` each parameter's `grad` is the whole
    parts: GradientParts | None = None
    kept: ExchangeState | None = None
    cut: CutModel | None = None  # set by `attach`
    runner: BatchRunner | None = None  # set by `attach`
    # Collective when due: after the optimizer's step, synchronize the parameters; returns whether it was due. With
    # True, at the end of a caller's loop, it is due if any step was taken since the last synchronization.
    average: Callable[[bool], bool] | None = None
    members: ChangingWorkers | None = None
    rounds: TrainingRounds | None = None

    @abstractmethod
    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Collective: take over the model's gradients and give every worker worker 0's weights."""

    def compute(self, computer: Computer, model: nn.Module, step: int) -> Computed:
        """Forward and backward of this worker's part of batch `step`."""
        part, hooks = self.part, self.hooks
        holding: Callable[[], AbstractContextManager[None]] = nullcontext
        if hooks is not None:
            hooks.begin_step(step)
            holding = hooks.holding
        compute = partial(computer.compute, model, step, part.index, part.count, self.backward)
        if computer.plan.buffers != SYNCHRONIZE or part.count == 1:
            return compute(accumulate=holding)
        with holding():  # no other sum is under way while layers sum their statistics
            found = compute()
        if not found.samples:
            raise UserError(
                f"buffers=synchronize: worker {self.rank} has no sample in step {step + 1}, and every worker needs "
                "one; use fewer workers, larger batches, or buffers=mean"
            )
        return found

    def backward(self, loss: torch.Tensor, share: float) -> None:
        """Run backward for this worker's part of the batch, which weighs `share` of the whole."""
        weighted = loss if share == 1 else loss * share
        weighted.backward()  # type: ignore[no-untyped-call]

    @abstractmethod
    def agree(self, local: LocalStep) -> SharedStep:
        """Collective: exchange gradients and learn what all workers brought; changes no parameter."""

    @abstractmethod
    def apply(self) -> None:
        """Collective: take the agreed step; skipped when a worker's loss was not finite."""

    def evaluate(
        self, computer: Computer, model: nn.Module, *, alike: bool = False
    ) -> tuple[dict[str, float], int] | None:
        """Collective: means over the evaluation data and the samples, each its part, or with `alike` all of them."""
        if alike:
            return computer.evaluate(model)
        return computer.evaluate(model, self.rank, self.world, self.total)

    @abstractmethod
    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: the sum over all workers of a small float64 vector."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, Any] | None:
        """Collective, between steps: the optimizer's whole `state_dict()` on worker 0, None on the others.

        The format is the same under every strategy, so a run may continue under another one. On resume each worker
        loads it into its optimizer as usual, before `attach` or between steps.
        """

    def model_state(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        """Collective, between steps: the whole model's `state_dict()` on worker 0, None on the others."""
        return model.state_dict() if self.rank == 0 else None

    def summary(self) -> Mapping[str, Any]:
        """What this worker reports at the end of a run besides its traffic: plain values."""
        return {}

    def close(self) -> None:  # noqa: B027 - most have something to let go of, the plain loop has not
        """Release all resources; idempotent."""


class SingleExchange(Exchange):
    """The exchange of a single worker: the plain training loop, without communication."""

    rank = 0
    world = 1
    part = WorkerPart(index=0, count=1)
    _optimizer: Optimizer

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        del model
        self._optimizer = optimizer

    def agree(self, local: LocalStep) -> SharedStep:
        return SharedStep(loss=local.loss, bad_workers=() if local.is_finite else (0,), stop=local.stop)

    def apply(self) -> None:
        take_step(self._optimizer)
        self._optimizer.zero_grad()

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def optimizer_state(self) -> dict[str, Any] | None:
        return self._optimizer.state_dict()
