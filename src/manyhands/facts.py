"""What a strategy or a consistency policy tells the rest of the library about itself, as values.

Whoever wants to know something about a strategy asks the value for a fact; nobody else asks which strategy it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any

__all__ = [
    "NOTHING_TRAVELS",
    "ONE_DEVICE",
    "Answer",
    "CodecRate",
    "ComputeTime",
    "Facts",
    "Growth",
    "LayerFootprint",
    "LayerTimes",
    "LinkRate",
    "Machines",
    "ModelFootprint",
    "PredictedStep",
    "Promise",
    "Promises",
    "Split",
    "StepCosts",
    "Stepping",
    "TaskProfile",
    "TracedModel",
    "Truth",
    "Waits",
]


@unique
class Waits(Enum):
    """Whom a worker waits for."""

    ALL = "all"  # everybody, at each step
    LAGGARDS = "laggards"  # those who are too far behind
    NOBODY = "nobody"  # nobody, or no one in particular


@unique
class Split(Enum):
    """How the work is split."""

    DATA = "data"  # every worker has other samples
    DIMENSIONS = "dimensions"  # every worker has other dimensions of each vector, and sees all samples
    LAYERS = "layers"  # every worker has other layers of the model, and all samples pass through them


@unique
class Stepping(Enum):
    """How the optimizer steps the parameters."""

    TOGETHER = "together"  # each optimizer steps all parameters at once
    APART = "apart"  # several optimizers each step some of the tensors
    IN_TURN = "in turn"  # one optimizer steps some of the tensors at a time, with several calls to a step
    IN_PIECES = "in pieces"  # several optimizers each step some items of the tensors


@unique
class Truth(Enum):
    """Who holds the truth."""

    ONE_PROCESS = "one process"
    EVERYONE = "everyone"  # each worker has a copy, and all copies are the same
    ONE_COPY = "one copy"  # the workers of a host share it, and each updates a slice
    SERVERS = "servers"  # each has a shard, which workers read and push to
    SHARES = "shares"  # each worker has a piece of every layer, and layers are gathered when they are used
    SERVER_OF_CLIENTS = "a server of clients"  # it averages what they send, and never sees their data
    ONE_MEMORY = "one memory"  # every worker reads and writes all of it


@unique
class Answer(Enum):
    """The short answer to whether a strategy promises something."""

    YES = "yes"  # it does, nothing is lost
    PARTLY = "partly"  # it does, and something is lost or must be given for it: the promise's words say what
    NO = "no"  # it does not
    NONE = "–"  # the question does not arise


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """One answer, and the sentence behind it."""

    answer: Answer
    words: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Promises:
    """What users of a strategy may rely on."""

    worker_dies: Promise  # does the run go on when a worker is killed?
    server_dies: Promise  # does it when a server is?
    workers_join: Promise  # may workers come and go while it runs?
    same_numbers: Promise  # are the weights at the end those of one process on the same batches?


# Why a strategy has no codec
NOTHING_TRAVELS = (
    "workers share memory and send nothing; allreduce link=tcp, local link=tcp and ps link=tcp have a codec"
)

# Why a strategy has no order in which gradients leave

# Why a strategy has no limit on the memory of a device
ONE_DEVICE = "only single keeps layers off its device; sharded splits them over the workers instead"

ONE_HOST = "its workers share the memory of one host"  # why workers of a strategy cannot be on several hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What a step of a strategy costs a worker beside computing and moving bytes, as it was measured."""

    step_s: float = 0.0
    message_s: float = 0.0  # of each message that a worker sends
    byte_s: float = 0.0

    def seconds(self, messages: float, num_bytes: float) -> float:
        return self.step_s + self.message_s * messages + self.byte_s * num_bytes


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rest of the library knows about a strategy with its settings, besides its word; a default each.

    A `cannot_…` is a sentence on why something cannot be, and empty where it can.
    """

    promises: Promises  # what its users may rely on
    # How several workers have the optimizer step: the preferred way first, of which an optimizer must fit one
    stepping: tuple[Stepping, ...] = (Stepping.TOGETHER,)
    waits_for: Waits = Waits.ALL
    stepwise: bool = True  # whether every step of every worker waits for all the others
    # Whether each global batch is split over the workers; otherwise a batch is one worker's, whole
    splits_batches: bool = True
    # Whether its runs are counted in rounds of many steps each, and not in global batches
    counts_rounds: bool = False
    # Whether a run that is kept saves a checkpoint after every step, since what one gave away must be counted
    saves_each_step: bool = False
    meets_to_evaluate: bool = True  # whether nobody takes a step while somebody evaluates
    when_evaluating: str = ""  # a sentence on what an evaluation costs, where that is special
    # In which order compiled steps take single records on one memory; None where they work on batches
    record_order: str | None = None
    in_threads: bool = False  # whether workers whose steps are compiled are threads of the caller's process
    can_change_workers: bool = False  # whether workers may be added and removed while it runs
    # Whether a run continues with those who are left when a worker is lost, down to `Options.min_workers`
    continues_with_fewer: bool = False
    # Whether one worker's part can be left out of a step, as where its gradient is not finite
    can_skip_updates: bool = False
    # Whether all workers can leave a step out together, as where a scaled gradient overflows
    leaves_steps_out: bool = False
    # Whether rows of `Task.sparse` are read for each batch and stepped apart from the rest
    moves_rows: bool = False
    logs_updates: bool = False  # whether each update that was applied is in a log, for `audit` and `replay`
    # Families of compiled code that its workers need besides what every run does: compiled before they start
    kernels: tuple[str, ...] = ()
    # Whether the workers of one host exchange over links, besides the memory they share
    uses_links: bool = False
    # How many links there are for each pair between hosts: with two, one is sent over while sums of the other are added
    streams: int = 1
    # Under which name it is measured and remembered what its steps cost beside computing; empty: under its word
    cost_class: str = ""
    # What that is where it was never measured: between what 2 and 16 cores of x86-64 showed
    usual_costs: StepCosts = StepCosts()
    # Over how many workers one copy of the parameters, their gradients and the optimizer's state is split
    model_parts: int = 1
    # Whether gradients have memory of their own, where they are also between steps
    keeps_gradients: bool = False
    kept_copies: int = 1  # how many copies of parameters and optimizer state servers keep
    # What would keep a lasting straggler from holding the others up; empty where nothing in the strategy would
    straggler_advice: str = (
        "a bound on staleness would not help with a permanent straggler; ps consistency=async would"
    )
    cannot_clip: str = ""
    cannot_log: str = ""  # the learning rate and the gradient's norm of each step
    cannot_compile: str = ""  # by torch.compile
    cannot_stream: str = ""  # train on samples that can only be iterated
    cannot_read_apart: str = ""  # have each worker read data of its own
    cannot_act: str = ""  # have each worker make its data by acting with the model
    cannot_heed_evaluations: str = ""  # have an evaluation end a run or set its learning rate
    cannot_stop: str = ""  # have somebody outside end all workers after one step
    cannot_cross_hosts: str = ONE_HOST  # have workers on several hosts
    cannot_loop_across_hosts: str = ""  # have workers of a loop of one's own on several hosts
    # The strategy that stands for it in a loop of one's own; empty: itself
    in_own_loop: str = ""
    # What to do instead, where it is not for a loop of one's own; empty where it is
    instead_of_own_loop: str = ""
    # Choices of `Options.buffers` that it does not have, and why; a sentence each
    refused_buffers: Mapping[str, str] = field(
        default_factory=lambda: {
            "synchronize": "its workers do not compute on parts of the same batch at the same time"
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFootprint:
    """One layer of a model, or what layers share."""

    name: str
    parameters: int  # bytes of its parameters
    activations: float = 0.0  # bytes that its forward leaves for backward, for each sample
    lasts: bool = False  # whether it is used all over the model, so that it cannot come and go with one layer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedModel:
    """A task's model and optimizer, built without memory: strategies lay out, or play, what they send on it.

    Nobody changes it; a strategy whose layers are to be sliced makes a `copy`.
    """

    task: Any  # the Task
    model: Any  # its module; the tensors may have no memory
    optimizer: Any  # of this model's parameters
    copy: Callable[[], Any]  # another one without memory, whatever the task's function returns
    tracing: Callable[[], AbstractContextManager[Any]]  # while it is open, new tensors have no memory
    batch: Callable[[int], Any]  # a batch of so many samples, or fewer where there are fewer; with memory
    played: dict[Any, Any] = field(
        default_factory=dict
    )  # what strategies have found by playing, to find it once


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Bytes that grow with the samples."""

    fixed: float = 0.0
    per_sample: float = 0.0

    @classmethod
    def through(cls, few: int, at_few: float, most: int, at_most: float) -> Growth:
        """Through what was counted for two numbers of samples; what is fixed is not below 0."""
        per_sample = (at_most - at_few) / (most - few) if most > few else at_most / most
        return cls(fixed=max(0.0, at_most - per_sample * most), per_sample=per_sample)

    def of(self, samples: float) -> float:
        return self.fixed + self.per_sample * samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFootprint:
    """The bytes of one whole model in training, each part counted once."""

    parameters: int
    gradients: int
    state: int = 0  # what the optimizer keeps
    buffers: int = 0
    fixed: float = 0.0  # what forward leaves for backward whatever the number of samples
    per_sample: float = 0.0  # what it leaves for each sample
    batch_size: int = 1  # samples of a global batch
    microbatches: int = 1  # in how many pieces a share of it is computed
    together: Growth = Growth()
    """The most of gradients, activations and temporary values at once, where gradients come in backward; 0: unknown."""
    beside: Growth = Growth()  # the same without gradients
    step_work: int = 0  # temporary values of the optimizer's step
    layers: tuple[LayerFootprint, ...] = ()
    traced: TracedModel | None = field(default=None, repr=False, compare=False)  # None: only sums are known

    @property
    def weights(self) -> int:
        """Parameters and buffers."""
        return self.parameters + self.buffers

    @property
    def largest_layer(self) -> int:
        """Bytes of the parameters of the largest layer that may come and go."""
        return max((layer.parameters for layer in self.layers if not layer.lasts), default=0)

    def activations(self, workers: int = 1) -> int:
        """Bytes at the end of a forward of one of so many parts of a batch, or of the largest piece of it."""
        return round(self.fixed + self.per_sample * self._samples(workers))

    def working(self, workers: int = 1, *, keeps_gradients: bool, share: float = 1.0) -> int:
        """What there is at the peak of a step besides parameters, all gradients and state, of the same part.

        Activations go while gradients come, unless the worker `keeps_gradients` in memory of their own. Its optimizer
        steps a `share` of the parameters.
        """
        samples = self._samples(workers)
        known = self.beside.of(samples)
        if not known:
            return self.activations(workers)
        if not keeps_gradients and self.microbatches == 1:
            known = max(self.together.of(samples), self.activations(workers)) - self.gradients
        return round(max(known, share * self.step_work, 0.0))

    def _samples(self, workers: int) -> int:
        """Of the largest piece of one of so many parts of a batch."""
        share = -(-self.batch_size // workers)
        return -(-share // self.microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """A link between two processes: a message of n bytes takes `latency_s` + n / `bytes_per_s`."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRate:
    """How many bytes of gradients a worker gets through in a second."""

    encoded_per_s: float = math.inf
    decoded_per_s: float = math.inf

    def seconds(self, encoded: float, decoded: float) -> float:
        return encoded / self.encoded_per_s + decoded / self.decoded_per_s

    def times(self, factor: float) -> CodecRate:
        """So many times as fast."""
        return CodecRate(encoded_per_s=factor * self.encoded_per_s, decoded_per_s=factor * self.decoded_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Equal hosts with equal workers, whose ranks fill one host after the other.

    The workers of a host share its link to the other hosts, which sends and receives at the same time.
    """

    hosts: int = 1
    per_host: int = 1
    memory: LinkRate = LinkRate()
    """Through memory that the workers of a host share: a meeting of all, and what a worker reads and writes there."""
    inside: LinkRate = LinkRate()
    """By messages between two processes of a host."""
    between: LinkRate = LinkRate()
    """By messages between processes of two hosts."""
    added_per_s: float = math.inf  # bytes of gradients that a worker adds up in a second
    costs: Mapping[str, StepCosts] = field(default_factory=dict)
    """By `Facts.cost_class`: what its steps cost here; one that is missing costs nothing."""
    codecs: Mapping[str, CodecRate] = field(default_factory=dict)
    """By a codec's text: how fast a worker encodes and decodes by it; one that is missing takes no time."""

    @property
    def workers(self) -> int:
        return self.hosts * self.per_host

    def host_of(self, rank: int) -> int:
        """The host of a rank; ranks beyond the workers, such as helpers and servers, continue on the same hosts."""
        return rank // self.per_host % self.hosts

    def link(self, one: int, other: int) -> LinkRate:
        return self.inside if self.host_of(one) == self.host_of(other) else self.between


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTime:
    """How long something computes on some samples: `fixed_s` + `per_sample_s` times their number.

    Where several sizes were `measured`, as pairs of samples and seconds in the order of their size, the time is on the
    line between the two sizes around it; beyond them, on the line through the two nearest.
    """

    fixed_s: float = 0.0
    per_sample_s: float = 0.0
    measured: tuple[tuple[float, float], ...] = ()

    @classmethod
    def through(cls, measured: Mapping[float, float]) -> ComputeTime:
        """Through measured times by samples; neither part of the whole line is below 0."""
        points = tuple(sorted(measured.items()))
        (few, at_few), (most, at_most) = points[0], points[-1]
        slope = at_most / most if few == most else (at_most - at_few) / (most - few)
        slope = min(max(0.0, slope), at_most / most)
        return cls(fixed_s=at_most - slope * most, per_sample_s=slope, measured=points)

    def seconds(self, samples: float) -> float:
        if len(self.measured) < 2:
            return self.fixed_s + self.per_sample_s * samples
        above = next((at for at, (size, _) in enumerate(self.measured) if size >= samples), -1)
        high = max(1, above if above >= 0 else len(self.measured) - 1)
        (one, at_one), (other, at_other) = self.measured[high - 1 : high + 1]
        return max(0.0, at_one + (at_other - at_one) * (samples - one) / (other - one))

    def times(self, factor: float) -> ComputeTime:
        measured = tuple((samples, factor * seconds) for samples, seconds in self.measured)
        return ComputeTime(
            fixed_s=factor * self.fixed_s, per_sample_s=factor * self.per_sample_s, measured=measured
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """How long a layer computes on one worker, and what it gives others."""

    name: str
    forward: ComputeTime
    backward: ComputeTime
    gradient_bytes: int = 0
    output_bytes: float = 0.0  # for each sample


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskProfile:
    """How long each part of a step of a task takes on one worker; layers in forward order."""

    layers: tuple[LayerTimes, ...]
    model: ModelFootprint
    rest: ComputeTime = ComputeTime()
    """Everything else that grows with the samples of a worker: loading, the loss, recording."""
    optimizer_s: float = 0.0  # a step of all parameters, while the other workers take theirs
    owners_s: float | None = None  # the same by owners of slices, in one pass; None: as the optimizer
    owner_alone_s: float | None = None  # by an owner while nobody else does; None: not measured
    slowest: float = 1.0
    """How many times as long as a worker's share of a step takes that of the slowest of all workers, in the median."""

    def samples(self, workers: int) -> int:
        """Of the largest of so many parts of a global batch."""
        return -(-self.model.batch_size // workers)

    def forward_s(self, samples: float) -> float:
        return sum(layer.forward.seconds(samples) for layer in self.layers)

    def backward_s(self, samples: float) -> float:
        return sum(layer.backward.seconds(samples) for layer in self.layers)

    def compute_s(self, workers: int = 1) -> float:
        """Of the largest of so many parts of a global batch."""
        samples = self.samples(workers)
        return self.forward_s(samples) + self.backward_s(samples) + self.rest.seconds(samples)

    @property
    def by_owners_s(self) -> float:
        """A step of all parameters by an owner, while the other workers take theirs."""
        return self.optimizer_s if self.owners_s is None else self.owners_s

    def served_s(self, servers: int, workers: int) -> float:
        """A step of all parameters by so many servers, of which each takes its part of them at once."""
        together = self.by_owners_s
        alone = self.owner_alone_s if self.owner_alone_s is not None else together
        crowded = min(1.0, (servers - 1) / (workers - 1)) if workers > 1 else 0.0
        return (alone + crowded * (together - alone)) / servers

    def waiting_s(self, workers: int) -> float:
        """What a worker of so many that take every step together waits for the slowest of them."""
        return (self.slowest - 1) * self.compute_s(workers) if workers > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """Where the time of one step, or of one global batch, is expected to go; the parts make the whole."""

    compute_s: float  # of a worker
    exchange_s: float = 0.0  # what of the exchange does not hide behind computing
    waiting_s: float = 0.0  # what a worker waits for slower ones, or a stage for others
    optimizer_s: float = 0.0
    costs_s: float = 0.0  # what messages and the strategy itself cost beside that: see `StepCosts`
    batches: float = 1.0  # how many global batches are computed in this time
    with_settings: Any = field(default=None, compare=False)
    """The strategy with the settings that a run measures, as this prediction has them; None: it measures none."""

    @property
    def parts(self) -> dict[str, float]:
        """Of one global batch, by what it is spent on."""
        parts = {
            "computing": self.compute_s,
            "exchanging": self.exchange_s,
            "waiting for others": self.waiting_s,
            "in the optimizer": self.optimizer_s,
            "on messages and bookkeeping": self.costs_s,
        }
        return {name: seconds / self.batches for name, seconds in parts.items()}

    @property
    def seconds(self) -> float:
        """Of one global batch."""
        return sum(self.parts.values())

    def times(self, factor: float) -> PredictedStep:
        """The same step, each part so many times as long."""
        return PredictedStep(
            compute_s=factor * self.compute_s,
            exchange_s=factor * self.exchange_s,
            waiting_s=factor * self.waiting_s,
            optimizer_s=factor * self.optimizer_s,
            costs_s=factor * self.costs_s,
            batches=self.batches,
        )
