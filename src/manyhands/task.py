"""What to train: a model, a loss, data and an optimizer, and nothing about how the work is spread.

A Task holds functions rather than built things, because every worker builds its own model and optimizer. They
may be closures, and may live in a notebook or in a script's `__main__`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import IterableDataset, WeightedRandomSampler

from manyhands.data.batches import BatchSource
from manyhands.data.experience import Experience
from manyhands.data.own import WorkerData, own_data
from manyhands.data.reading import Loading, sample_weights
from manyhands.data.store.rundir import OWN_NAMES
from manyhands.errors import UserError, check_count, named_arguments, nearest, require_parameters
from manyhands.strategy import Strategy

__all__ = ["Metric", "Passes", "RowsOf", "StatefulMetric", "Task", "TextWork"]

_RESERVED_METRICS = ("loss", "evaluation_loss")
_BUILDERS = (
    ("model", nn.Module, "a function without arguments that builds an nn.Module"),
    ("loss", nn.Module, "a function (model, batch) -> scalar tensor"),
    ("optimizer", Optimizer, "a function (parameters) -> torch.optim.Optimizer"),
    ("scheduler", LRScheduler, "a function (optimizer) -> LRScheduler, or None"),
)
_OPTIONAL_FUNCTIONS = (
    ("collate", "(list of samples) -> batch"),
    ("read_input", "(JSON value) -> tensor"),
    ("write_answer", "(output of the model) -> JSON value"),
)

Metric: TypeAlias = Callable[[nn.Module, Any], Tensor | float]
_STATEFUL = ("update", "compute", "reset")
RowsOf: TypeAlias = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class StatefulMetric:
    """A metric of torchmetrics' shape: `update` takes what `of_batch` makes of each batch, then `compute` is called."""

    name: str
    metric: Any
    of_batch: Callable[[nn.Module, Any], Any] | None = None  # None: of a batch (inputs, targets)

    @classmethod
    def of(cls, name: str, given: Any) -> StatefulMetric | None:
        """Of an entry of `Task.metrics`, an object or (object, function); None: it is a function."""
        metric, function = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        if isinstance(metric, type) or not all(callable(getattr(metric, one, None)) for one in _STATEFUL):
            return None
        if function is not None and not callable(function):
            raise UserError(
                f"metrics[{name!r}]: {function!r} is not a function (model, batch) -> the arguments of update"
            )
        return cls(name, metric, function)

    def arguments(self, model: nn.Module, batch: Any) -> list[Tensor]:
        """The arguments of `update` for a batch, on the CPU."""
        if self.of_batch is not None:
            found = self.of_batch(model, batch)
        elif isinstance(batch, list | tuple) and len(batch) == 2:
            found = model(batch[0]), batch[1]
        else:
            raise UserError(
                f"metrics[{self.name!r}]: a batch is not (inputs, targets); give a pair of the metric and a function "
                "(model, batch) -> the arguments of update"
            )
        given = found if isinstance(found, list | tuple) else (found,)
        return [torch.as_tensor(one).detach().cpu() for one in given]

    def value(self, batches: Iterable[Sequence[Tensor]]) -> float:
        """From the arguments of the updates, in order."""
        metric = copy.deepcopy(self.metric)
        metric.reset()
        for arguments in batches:
            metric.update(*arguments)
        found = metric.compute()
        if isinstance(found, Mapping) or torch.as_tensor(found).numel() != 1:
            raise UserError(
                f"metrics[{self.name!r}]: {type(metric).__name__}.compute() gives more than one number; give a metric "
                "for each, or one that averages them"
            )
        return float(found)

    def __call__(self, model: nn.Module, batch: Any) -> float:
        """Of one batch alone."""
        return self.value([self.arguments(model, batch)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """How the steps of a run make passes over the data, each of which has a mean loss in the history: `pass_loss`.

    It is the sum of the losses of its steps, each times what it weighs, over `total` (None: over those weights). A row
    that has a `weight` of its own weighs that.
    """

    steps: int
    """Of one pass."""
    weight: float = 1.0
    last_weight: float = 1.0
    """Of the last step of a pass, which may be short."""
    total: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TextWork:
    """What a sample is, where it is text: a run then tells tokens a second, and the share of a GPU's peak (MFU)."""

    tokens: float
    """Of one sample."""
    flops: float
    """Of forward and backward of one sample."""
    formula: str
    """How they are counted, in words."""


@named_arguments
@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One training problem, checked when made: a UserError names the field, its value and what is allowed.

    `loss` and `metrics` are called with the model and a batch as `DataLoader` would collate it, and give the
    mean over that batch: results from several batches are averaged with their sizes as weights.
    """

    model: Callable[[], nn.Module]
    """Builds the model; its initial weights follow from torch's seed."""
    loss: Callable[[nn.Module, Any], Tensor]
    """(model, batch) -> scalar to minimise, the mean over the batch, or as `reduction` says."""
    data: Any
    """Training data: a map-style dataset, a tensor or array, or a tuple, list or dict of them; an `IterableDataset`,
    which every worker draws in the same order; or what each worker reads of its own: `Files`, `PerWorker`, a Ray
    Dataset."""
    optimizer: Callable[[Iterable[Parameter]], Optimizer]
    """Builds the optimizer from the model's parameters."""
    batch_size: int = 64
    """Samples in a global batch, which the workers of a synchronous strategy split among them."""
    reduction: str = "mean"
    """What `loss` gives of a batch: the `mean` over its samples, or their `sum`. The parts of a batch that workers and
    micro-batches compute are put together accordingly."""
    weights: Any | None = None
    """What each sample of `data` weighs: a number of at least 0 for each. `loss` then gives one loss per sample instead
    of their mean, and what is trained is their mean by weight over the global batch."""
    sampler: WeightedRandomSampler | None = None
    """Draw the samples of each epoch by weight: torch's `WeightedRandomSampler(weights, num_samples, replacement)`. Its
    `num_samples` are an epoch; the draws follow from the run's seed, the same for every strategy and any workers."""
    evaluation: Any | None = None
    """Evaluation data, in the same forms as `data`."""
    metrics: Mapping[str, Metric | Any] = field(default_factory=dict)
    """What to measure on `evaluation`, by name: (model, batch) -> mean over the batch; or an object with `update`,
    `compute` and `reset`, as those of torchmetrics, for batches (inputs, targets); or such an object and a function
    (model, batch) -> the arguments of `update`."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch from a list of samples, in place of torch's default_collate."""
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    """Builds the learning rate's schedule, which advances once per global batch, or as `scheduler_metric` says."""
    scheduler_metric: str | None = None
    """Advance the schedule after each evaluation instead, by `step(value of this metric)`, as `ReduceLROnPlateau` wants
    it: the name of a metric, or `evaluation_loss`."""
    clip_norm: float | None = None
    """Scale the gradient of a global batch down to this norm, as `torch.nn.utils.clip_grad_norm_` does; under `local`
    and `hogwild` each worker its own."""
    clip_value: float | None = None
    """Clamp every item of that gradient to ± this; one of the two may be given."""
    microbatches: int = 1
    """Compute a worker's share of a batch in so many pieces, one after another, whose gradients add up to that of the
    whole share: less memory, the same step."""
    loading: Loading = field(default_factory=Loading)
    """Loader processes that get each worker's next batches ready while it computes; by default none."""
    sparse: Mapping[str, RowsOf] = field(default_factory=dict)
    """Row-sparse tables: by the name of a parameter, (batch) -> the rows of it that the batch reads."""
    read_input: Callable[[Any], Any] | None = None
    """How `predict` and `serve` read one input: (JSON value) -> the tensor that the model takes for it, without the
    dimension of the batch; a tuple of tensors, or a dict of named ones, for a model that takes several. None: an array
    of numbers, nested as the tensor is."""
    write_answer: Callable[[Any], Any] | None = None
    """How they write one answer: (the model's output for one input) -> a JSON value. None: as nested arrays."""
    example_input: Any = None
    """One input as JSON, which `serve` shows and warms up with; None: the first sample of `data`."""
    name: str = "task"
    """What run directories and reports call it."""
    options: Mapping[str, Any] | None = None
    """What a built-in task was made of, kept with a run so that a replay can make it again; None for any other."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What a run keeps in its directory besides, by file name: text such as a tokenizer's definition. A run is resumed
    with the same only."""
    passes: Passes | None = None
    """Where the run's history is to tell the mean loss of each pass over the data."""
    records_each: float = 1.0
    """How many records of the user's one sample of `data` stands for, on average, where speed is reported."""
    text_work: Callable[[], TextWork | None] | None = None
    """What a sample of text is, where the run is to tell tokens a second, and MFU; asked when it ends."""
    compiled: ClassVar[bool] = False
    """Whether its step is compiled: see `KernelTask`."""
    epochs: ClassVar[int] = 1
    """How often `fit` goes through the data by default."""

    @property
    def samples(self) -> int:
        """Of one epoch, or of one batch that is made by acting; 0 where nobody knows."""
        if self.sampler is not None:
            return self.sampler.num_samples
        if isinstance(self.data, Experience):
            return self.batch_size
        return 0 if self.streams else len(BatchSource(self.data, self.collate))

    @property
    def loaders(self) -> int:
        """How many loader processes each worker has use for; none where batches are gathered from arrays in memory."""
        asked = self.loading.workers
        if isinstance(self.data, Experience):
            return 0
        if self.streams:  # a stream has one beginning, and continues from there
            return min(1, asked)
        return 0 if not asked or BatchSource(self.data, self.collate).gathers else asked

    @property
    def streams(self) -> bool:
        """Whether the data can only be iterated."""
        return isinstance(self.data, IterableDataset) or self.own is not None

    @property
    def own(self) -> WorkerData | None:
        """The data, where every worker reads its own."""
        return own_data(self.data)

    @property
    def stream_name(self) -> str:
        """What sentences call data that can only be iterated."""
        if isinstance(self.data, Experience):
            return "made by acting with the model"
        return "an IterableDataset" if self.own is None else "each worker's own"

    def checkpoint_every(self, steps: int) -> int:
        """How many steps between checkpoints by default: ten times a run."""
        return max(1, math.ceil(steps / 10))

    def for_strategy(self, strategy: Strategy, workers: int) -> Task:
        """The task as it is trained by `strategy`: itself, whatever that is."""
        del strategy, workers
        return self

    def __post_init__(self) -> None:
        for name, built, allowed in _BUILDERS:
            value = getattr(self, name)
            if isinstance(value, built):  # a finished instance, where a function that makes one is needed
                raise UserError(f"{name} is an instance of {type(value).__name__}; it must be {allowed}")
            if not callable(value) and not (value is None and name == "scheduler"):
                raise UserError(f"{name} is {value!r}; it must be {allowed}")
        require_parameters("loss", self.loss, ("model", "batch"))
        for name, allowed in _OPTIONAL_FUNCTIONS:
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise UserError(f"{name} is {value!r}; it must be a function {allowed}, or None")
        for name, count in (("batch_size", self.batch_size), ("microbatches", self.microbatches)):
            check_count(name, count)
        if not isinstance(self.loading, Loading):
            raise UserError(f"loading is {self.loading!r}; it must be a Loading, such as Loading(workers=2)")
        if self.reduction not in ("mean", "sum"):
            raise UserError(f"reduction is {self.reduction!r}; it must be 'mean' or 'sum'")
        if self.reduction == "sum" and self.weights is not None:
            raise UserError(
                "reduction is 'sum', but with weights the loss has one number per sample and training uses their "
                "weighted mean; leave one out"
            )
        for name, value in (("clip_norm", self.clip_norm), ("clip_value", self.clip_value)):
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise UserError(f"{name} is {value!r}; it must be a number above 0, or None")
        if self.clip_norm is not None and self.clip_value is not None:
            raise UserError(f"clip_norm={self.clip_norm!r} and clip_value={self.clip_value!r}: leave one out")
        if isinstance(self.data, Experience) and self.microbatches > 1:
            raise UserError(
                f"microbatches is {self.microbatches}, but data is {self.stream_name}, a batch at a time; leave it out"
            )
        if not isinstance(self.name, str) or not self.name:
            raise UserError(f"name is {self.name!r}; it must be a non-empty string")
        self._check_sampler()
        # a source looks at types and lengths only: cheap, and better here than in every worker
        if not self.streams:
            samples = len(BatchSource(self.data, self.collate, field="data"))
            if self.weights is not None:
                sample_weights(self.weights, samples)
        elif self.weights is not None:
            raise UserError(
                f"weights need data with indices, but data is {self.stream_name}; "
                "give an indexable dataset, or leave weights out"
            )
        if self.evaluation is not None:
            if own_data(self.evaluation) is not None:
                raise UserError(
                    "evaluation is each worker's own data, but must be the same on all workers; give a "
                    "dataset that all workers have"
                )
            BatchSource(self.evaluation, self.collate, field="evaluation")
        self._check_metrics()
        self._check_scheduler_metric()
        self._check_sparse()
        self._check_files()

    def _check_files(self) -> None:
        for name in self.files:
            if not isinstance(name, str) or Path(name).name != name or name in ("", "..") or "\0" in name:
                raise UserError(
                    f"files has the name {name!r}; it must be that of one file, without a directory"
                )
            if name in OWN_NAMES:
                raise UserError(f"files has the name {name!r}, which a run uses itself; choose another")

    def _check_sparse(self) -> None:
        if not isinstance(self.sparse, Mapping):
            raise UserError(
                f"sparse is {self.sparse!r}; it must be a dict of parameter name: function (batch) -> rows"
            )
        for name, rows_of in self.sparse.items():
            if not isinstance(name, str) or not callable(rows_of):
                raise UserError(
                    f"sparse[{name!r}] is {rows_of!r}; it must be a parameter name: function (batch) -> indices of the "
                    "rows that the batch reads"
                )

    def _check_sampler(self) -> None:
        sampler = self.sampler
        if sampler is None:
            return
        if not isinstance(sampler, WeightedRandomSampler):
            raise UserError(
                f"sampler is a {type(sampler).__name__}; it must be torch's WeightedRandomSampler, or None: epochs are "
                "shuffled by the run's seed, and a part of the data is data=torch.utils.data.Subset(…)"
            )
        if self.streams:
            raise UserError(
                f"sampler needs data with indices, but data is {self.stream_name}; give an indexable dataset, or "
                "leave sampler out"
            )
        samples = len(BatchSource(self.data, self.collate, field="data"))
        weights = sample_weights(sampler.weights, samples, "sampler.weights")
        if not sampler.replacement and sampler.num_samples > (weights > 0).sum():
            raise UserError(
                f"sampler draws {sampler.num_samples} samples without replacement, but {(weights > 0).sum()} have a "
                "weight above 0; use replacement=True, or a smaller num_samples"
            )

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self.clip_norm is not None or self.clip_value is not None

    @property
    def stateful_metrics(self) -> dict[str, StatefulMetric]:
        """Those of `metrics` that keep a state over batches."""
        found = ((name, StatefulMetric.of(name, one)) for name, one in self.metrics.items())
        return {name: one for name, one in found if one is not None}

    def _check_metrics(self) -> None:
        if not isinstance(self.metrics, Mapping):
            raise UserError(
                f"metrics is {self.metrics!r}; it must be a dict of name: function (model, batch) -> number"
            )
        stateful = self.stateful_metrics
        for name, metric in self.metrics.items():
            if name in _RESERVED_METRICS:
                raise UserError(f"metrics has the name {name!r}, which is reserved; choose another")
            if isinstance(name, str) and name in stateful:
                continue
            if not isinstance(name, str) or not callable(metric):
                raise UserError(
                    f"metrics[{name!r}] is {metric!r}; it must be a string: function (model, batch) -> number, "
                    "or an object with update, compute and reset"
                )
            require_parameters(f"metrics[{name!r}]", metric, ("model", "batch"))
        if self.metrics and self.evaluation is None:
            raise UserError(
                f"metrics are {', '.join(self.metrics)}, but evaluation is None; metrics are measured on "
                "evaluation data, so give evaluation= as well"
            )

    def _check_scheduler_metric(self) -> None:
        metric = self.scheduler_metric
        if metric is None:
            return
        if self.scheduler is None:
            raise UserError(f"scheduler_metric is {metric!r}, but scheduler is None; give scheduler= as well")
        if self.evaluation is None:
            raise UserError(
                f"scheduler_metric is {metric!r}, but evaluation is None; metrics are measured on evaluation data, so "
                "give evaluation= as well"
            )
        names = ["evaluation_loss", *self.metrics]
        if metric not in names:
            raise UserError(f"scheduler_metric is {metric!r}; {nearest(str(metric), names)}")
