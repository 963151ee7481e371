"""Logistic regression as a task whose step is compiled: a table of weights, parsed examples, one after the other.

* `single`: one thread, in the order of the file.
* `hogwild`: threads or processes that do the same on one table.
* The others move gradients, and get the same problem as a `Task` of batches: a table of one weight per feature.

A step takes the sum of a batch's gradients, by the rules that the kernels apply to one example. The optimizers are
given the mean, which is B times smaller; so β is B times smaller too, and so are the penalties of FTRL, and the rate of
SGD is B times larger. The bias is a parameter of its own, without penalties. Under `ps`, only the rows that a batch has
travel.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from manyhands.engine.kernel_task import AnyTask, KernelStep, KernelTask, Portion, Taken
from manyhands.errors import UserError, check_count
from manyhands.facts import Split
from manyhands.native.group.gate import CompiledGate, require_admitted
from manyhands.native.segment import Segment
from manyhands.optim import FTRL
from manyhands.strategy import Strategy
from manyhands.task import Passes, Task
from manyhands.workloads.logreg.examples import Parsed, SpooledRows
from manyhands.workloads.logreg.logreg_kernels import (
    BETA,
    LOSS,
    RULES,
    WEIGHT,
    WIDTHS,
    train,
    train_classes,
    warm,
)
from manyhands.workloads.logreg.options import LogregOptions

_TABLE = "table.weight"

Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""For every entry the table's row, the example of the batch and the value; for every example target and weight."""


class CsrDataset:
    """Spooled rows as a dataset that gives whole batches; every process maps them when it first asks for one."""

    def __init__(self, rows: SpooledRows) -> None:
        self._rows = rows
        self._arrays: dict[str, NDArray[Any]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_rows": self._rows, "_arrays": None}

    def __len__(self) -> int:
        return self._rows.examples

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        if self._arrays is None:
            self._arrays = self._rows.arrays()
        arrays, wanted = self._arrays, np.asarray(indices, np.int64)
        begins = arrays["starts"][wanted]
        lengths = arrays["starts"][wanted + 1] - begins
        ends = np.cumsum(lengths)
        entries = np.arange(ends[-1]) + np.repeat(begins - (ends - lengths), lengths)
        rows = arrays["indices"][entries].astype(np.int64)
        of = np.repeat(np.arange(len(wanted)), lengths)
        given = (rows, of, arrays["values"][entries], arrays["targets"][wanted], arrays["weights"][wanted])
        return [tuple(torch.from_numpy(array) for array in given)]  # type: ignore[list-item]


class Bag(nn.Module):
    """A weight per feature and a bias, all 0 at first; a margin is the bias and the weights times the values.

    Of several classes, each has its own. Where it does not learn a bias, that stays 0.
    """

    def __init__(self, size: int, learns_bias: bool = True, outputs: int = 1) -> None:
        super().__init__()
        self._learns_bias, self._outputs = learns_bias, outputs
        self.table = nn.Embedding(size, outputs, _weight=torch.zeros(size, outputs))
        self.bias = Parameter(torch.zeros(outputs))

    def forward(self, rows: Tensor, of: Tensor, values: Tensor, examples: int) -> tuple[Tensor, Tensor]:
        weights, bias = self.table(rows), self.bias if self._learns_bias else self.bias.detach()
        if self._outputs > 1:
            return bias.expand(examples, -1).index_add(0, of, weights * values[:, None]), weights
        weights = weights.squeeze(1)
        return bias.expand(examples).index_add(0, of, weights * values), weights


def logreg_task(rows: Parsed, options: LogregOptions) -> Task:
    """The whole problem; UserError for a penalty that batches do not have."""
    assert isinstance(rows, SpooledRows), "worker processes map them"
    options = options.with_rate(rows.scale)
    if options.l1 and options.learner != "ftrl":
        raise UserError(
            f"l1={options.l1:g}: learner {options.learner} does not support l1 with strategies that use batches; use "
            "learner=ftrl, or strategy single or hogwild"
        )
    steps = -(-rows.examples // options.batch)
    last = rows.examples - options.batch * (steps - 1)
    return Task(
        model=partial(Bag, rows.size, options.bias, rows.outputs),
        loss=partial(_loss, l2=0.0 if options.learner == "ftrl" else options.l2),
        data=CsrDataset(rows),
        optimizer=partial(_optimizer, options=options),
        batch_size=options.batch,
        collate=operator.itemgetter(0),  # the dataset gives batches that are whole already
        scheduler=partial(_by_examples, batch=options.batch) if options.learner == "sgd" else None,
        sparse={_TABLE: operator.itemgetter(0)},
        name="logreg",
        passes=Passes(steps=steps, weight=options.batch, last_weight=last, total=rows.examples),
    )


def table_of(values: Mapping[str, Tensor], outputs: int = 1) -> NDArray[np.float32]:
    """The bias and then the weight of every feature, of the parameters by name; a row for each of several classes."""
    if "rows" in values:  # of the compiled step, whose numbers of each weight are `outputs`' parts of a row
        rows = values["rows"]
        table = rows.reshape(len(rows), outputs, -1)[:, :, 0]
    else:
        table = torch.cat([values["bias"][None], values[_TABLE]])
    found: NDArray[np.float32] = table.T.contiguous().clone().numpy()
    return found[0] if outputs == 1 else found


def _loss(model: nn.Module, batch: Batch, l2: float) -> Tensor:
    """The mean log loss, each example counted with its weight, and the l2 penalty of its features."""
    rows, of, values, targets, counted = batch
    margins, weights = model(rows, of, values, len(targets))
    if margins.dim() == 1:
        losses = F.binary_cross_entropy_with_logits(margins, targets, reduction="none")
    else:
        losses = F.cross_entropy(margins, targets.long(), reduction="none")
    total = (losses * counted).sum() + (l2 / 2 * weights.square().sum() if l2 else 0.0)
    return total / len(targets)


def _optimizer(parameters: Iterable[Parameter], options: LogregOptions) -> Optimizer:
    rate, batch = options.rate or 0.0, options.batch  # of `with_rate`
    beta = BETA / batch
    if options.learner == "sgd":
        return SGD(parameters, lr=rate * batch)
    if options.learner == "adagrad":
        return Adagrad(parameters, lr=rate, initial_accumulator_value=beta * beta, eps=0.0)
    penalties = {"l1": options.l1 / batch, "l2": options.l2 / batch}  # not of the bias
    groups = [{"params": [one], **(penalties if one.dim() > 1 else {})} for one in parameters]
    return FTRL(groups, lr=rate, beta=beta)


def _by_examples(optimizer: Optimizer, batch: int) -> LambdaLR:
    """The rate falls with the root of the examples that have been seen, this batch included."""
    return LambdaLR(optimizer, lambda step: float(((step + 1) * batch) ** -0.5))


_MOST, _LEAST = 1 << 14, 1 << 13  # examples of a step: a millisecond or more
_LEAST_ENTRIES = 1 << 17  # features that take a millisecond: examples with many of them need not be as many
_PER_PASS = 16  # steps that a short file has, so that all workers have some


class _Memory(nn.Module):
    """The bias and then every feature: a row each of the weight and what the learner keeps of it, all 0 at first."""

    def __init__(self, table: NDArray[Any], shape: tuple[int, int]) -> None:
        super().__init__()
        self.table = table
        self.rows = nn.Parameter(torch.from_numpy(table.reshape(shape)), requires_grad=False)


@dataclass(frozen=True, kw_only=True)
class LogregTask(KernelTask):
    """Learning from `parsed` examples; `logreg` has a rate."""

    name: ClassVar[str] = "logreg"
    advice: ClassVar[str] = "use a smaller rate, or scale the features down"

    parsed: Parsed
    logreg: LogregOptions
    dtype: str = "float32"

    @classmethod
    def of(cls, parsed: Parsed, options: LogregOptions, dtype: str = "float32") -> LogregTask:
        return cls(parsed=parsed, logreg=options.with_rate(parsed.scale), dtype=dtype)

    @property
    def samples(self) -> int:
        return self.parsed.examples

    @property
    def batch_size(self) -> int:
        """Enough for all workers, and for what Python does around a step to cost nothing."""
        least = min(_LEAST, -(-_LEAST_ENTRIES * self.samples // max(1, self.parsed.entries)))
        return min(_MOST, max(least, -(-self.samples // _PER_PASS)))

    @property
    def epochs(self) -> int:
        return self.logreg.passes

    @property
    def options(self) -> Mapping[str, Any]:
        kept = asdict(self.logreg) | ({"classes": self.parsed.outputs} if self.parsed.outputs > 1 else {})
        return {name: value for name, value in kept.items() if name not in ("passes", "allow_overload")}

    @property
    def record_bytes(self) -> float:
        return 8.0 * max(1.0, self.parsed.entries / self.samples)

    @property
    def table_shape(self) -> tuple[int, int]:
        return self.parsed.size + 1, WIDTHS[self.logreg.learner] * self.parsed.outputs

    def model(self) -> _Memory:
        return _Memory(np.zeros(math.prod(self.table_shape), self.dtype), self.table_shape)

    def shared_model(self, segment: Segment, offset: int) -> _Memory:
        return _Memory(
            segment.array(offset, math.prod(self.table_shape), np.dtype(self.dtype)), self.table_shape
        )

    @property
    def num_bytes(self) -> int:
        return math.prod(self.table_shape) * np.dtype(self.dtype).itemsize

    def step(self, model: nn.Module, gate: CompiledGate) -> KernelStep:
        assert isinstance(model, _Memory), "a model of this task"
        return _ExampleStep(self, model, gate)

    def warm(self) -> None:
        warm(self.dtype)

    def numbering(self, step: int) -> int:
        portion = self.portion(step)
        return portion.passed * self.samples + portion.begin

    def for_strategy(self, strategy: Strategy, workers: int) -> AnyTask:
        check_strategy(strategy, workers)
        return self if strategy.facts.record_order is not None else logreg_task(self.parsed, self.logreg)


class _ExampleStep(KernelStep):
    def __init__(self, task: LogregTask, model: _Memory, gate: CompiledGate) -> None:
        super().__init__(model)
        several = task.parsed.outputs > 1
        self._train, self._table = (
            (train_classes, model.table.reshape(task.table_shape)) if several else (train, model.table)
        )
        self._gate, self._samples = gate, task.samples
        self._pieces, options = task.parsed.opened(), task.logreg
        settings = np.array([options.rate, options.l1, options.l2, BETA, float(options.bias)], task.dtype)
        self._rule = RULES[options.learner], settings, tuple(gate)

    def fill(self) -> None:
        """It begins with 0, which it is."""

    def take(self, portion: Portion) -> Taken:
        sums = np.zeros(2)
        for rows, targets, span, before in self._pieces(portion.begin, portion.end):
            seen = portion.passed * self._samples + before
            status = self._train(self._table, rows, targets, span, *self._rule, seen, sums)
            require_admitted(status, self._gate)
        count = portion.end - portion.begin
        return Taken(loss=float(sums[LOSS]), weight=float(sums[WEIGHT]), samples=count)


def check_strategy(strategy: Strategy, workers: int) -> None:
    check_count("workers", workers)
    if strategy.most_workers is not None and workers > strategy.most_workers:
        raise UserError(f"workers={workers}: {strategy.word} is one process; use strategy=hogwild for more")
    if strategy.split is Split.DIMENSIONS:
        raise UserError(
            f"strategy {strategy} splits vectors, but a feature has a weight per class; use hogwild or ps"
        )
