"""Gradient boosting as a task whose step is compiled: one step is one tree, and its records are all rows.

Of several classes a step is a tree for each, grown on gradients that were taken before any of them (softmax).

* `single`: one thread.
* `allreduce`, `mirrored`: every worker has a part of the rows and all trees; histograms travel.

Gradients are integers in units of their own, so that their sums are exact.

A word has 63 bits and a sign. Of the gradients' word all are for the sum over all rows; the hessians' has the number of
rows in its low bits. Units are powers of two, so that only rounding to them loses anything: with a million rows a
gradient keeps 41 bits after its largest, a hessian 21.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from manyhands.data.batches import split
from manyhands.engine.kernel_task import AnyTask, KernelStep, KernelTask, Portion, Taken, check_shared_rows
from manyhands.engine.options import EarlyStopping, StoppingCount
from manyhands.native.group.gate import CompiledGate
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.segment import Segment
from manyhands.strategy import Strategy
from manyhands.workloads.gbdt import bin_kernels, histogram_kernels, split_kernels
from manyhands.workloads.gbdt.bin_table import BinnedRows
from manyhands.workloads.gbdt.binning import BinTable
from manyhands.workloads.gbdt.growing import (
    DividedRows,
    GrownTree,
    TreeMemory,
    grow,
    node_directions,
    tree_of,
)
from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.gbdt.searching import SEARCHES, LocalRows, SharedHistograms
from manyhands.workloads.logreg.labels import NO_LABELS, Labels

VALID_LOSS = "valid_loss"  # the metric in the history: the mean loss of rows held out, after each tree
_BLOCK = 64  # rows: shares begin at whole blocks, so that compiled loops treat a row alike wherever the shares begin


@dataclass(frozen=True, kw_only=True)
class GbdtTask(KernelTask):
    """Growing trees on rows that are bins already; `gbdt.objective` is binary, multiclass or regression."""

    name: ClassVar[str] = "gbdt"
    advice: ClassVar[str] = "use a smaller rate, or scale the labels down"

    train: BinnedRows
    valid: BinnedRows | None = None
    bins: BinTable
    start_trees: int = 0  # of a model that training continues: the scores of rows begin with its
    largest_weight: float = 1.0  # of the rows to train on: gradients are counted in units that follow from it
    labels: Labels = NO_LABELS  # which label each class has; none of a number
    note: str = ""  # which objective was guessed
    gbdt: GbdtOptions

    @property
    def classes(self) -> int:
        """How many trees a step grows."""
        return len(self.labels) if self.gbdt.objective == "multiclass" else 1

    @property
    def samples(self) -> int:
        return self.train.rows

    @property
    def batch_size(self) -> int:  # all of them: a step is a tree
        return self.train.rows

    @property
    def epochs(self) -> int:
        return self.gbdt.trees

    @property
    def options(self) -> Mapping[str, Any]:
        left_out = ("trees", "allow_overload", "early_stopping")
        kept = {name: value for name, value in asdict(self.gbdt).items() if name not in left_out}
        valid_rows = self.valid.rows if self.valid else 0
        labels = {"labels": list(self.labels)} if self.classes > 1 else {}
        return (
            kept
            | labels
            | {
                "features": len(self.bins.features),
                "valid_rows": valid_rows,
                "start_trees": self.start_trees,
            }
        )

    @property
    def record_bytes(self) -> float:
        return len(self.bins.features) + 40.0 * self.classes

    def model(self) -> TreeMemory:
        return TreeMemory(self.gbdt.trees, self.gbdt.num_leaves, self.classes)

    def shared_model(self, segment: Segment, offset: int) -> nn.Module:
        raise NotImplementedError("workers cannot write trees to one memory without order")

    @property
    def num_bytes(self) -> int:
        return self.classes * self.gbdt.trees * self.gbdt.num_leaves * 17 * 8

    def step(self, model: nn.Module, gate: CompiledGate) -> KernelStep:
        del gate
        assert isinstance(model, TreeMemory), "a model of this task"
        return GbdtStep(self, model, SharedHistograms.alone(self.gbdt, self.bins.offsets))

    def step_on_copies(self, group: SharedGroup, control_bytes: int) -> KernelStep:
        histograms, segment = SharedHistograms.shared(group, control_bytes, self.gbdt, self.bins.offsets)
        step = GbdtStep(self, self.model(), histograms)
        step.segment = segment
        return step

    def warm(self) -> None:
        for module in (bin_kernels, histogram_kernels, split_kernels):
            module.warm()

    def for_strategy(self, strategy: Strategy, workers: int) -> AnyTask:
        check_strategy(strategy, workers)
        return self


class GbdtStep(KernelStep):
    """One worker's part in growing trees."""

    shares_memory = False

    def __init__(self, task: GbdtTask, model: TreeMemory, rendezvous: SharedHistograms) -> None:
        super().__init__(model)
        self._task, self._options, self._rendezvous, self._memory = task, task.gbdt, rendezvous, model
        rank, world = rendezvous.rank, rendezvous.world
        self._train = _Rows(task.train, rank, world, task.gbdt.num_leaves)
        self._held = _Rows(task.valid, rank, world, task.gbdt.num_leaves) if task.valid is not None else None
        self._tables = [self._train] if self._held is None else [self._train, self._held]
        weights = task.valid.opened()[2] if task.valid is not None else np.zeros(1)
        self._valid_weight, self._largest_valid_weight = float(weights.sum()), float(weights.max())
        search, bins = SEARCHES[task.gbdt.parallel], task.bins
        self._search = search(rendezvous, bins.offsets, bins.kinds, task.gbdt)
        count = len(self._train.span)
        self._words = np.zeros((task.classes, 2 * count), np.int64)
        self._local = LocalRows(
            tiles=self._train.tiles,
            layout=task.train.layout,
            words=self._words[0],
            first=self._train.span.start,
            rule=np.zeros(12),
            ordered=np.zeros(2 * count, np.int64),
        )
        patience = task.gbdt.early_stopping if self._held else 0
        rule = EarlyStopping(metric=VALID_LOSS, patience=patience) if patience else None
        self._stopping = StoppingCount(rule) if rule is not None else None
        self._objective, self._classes = task.gbdt.objective, task.classes

    def fill(self) -> None:
        """Scores begin with the best constant, or with those of a model."""
        for rows in self._tables:
            rows.scores[:] = rows.start

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The trees so far, and the scores that they give: each is added as it was when it was grown."""
        self._memory.take(state)
        self.fill()
        kept = np.flatnonzero(self._memory.get_buffer("num_leaves").numpy())
        for number in kept.tolist():
            tree = tree_of(state, number)
            done, number_of_class = divmod(number, self._classes)
            for rows in self._tables:
                self._put_into_leaves(tree, rows.divided)
                self._move(rows, tree, number_of_class)
            if self._stopping is not None and number_of_class == self._classes - 1:
                self._stopping.add(done + 1, {VALID_LOSS: float(state["valid_loss"][done])})

    def take(self, portion: Portion) -> Taken:
        options, task, rendezvous = self._options, self._task, self._rendezvous
        before = rendezvous.bytes_sent
        loss = self._write_words()
        divided, trees = [rows.divided for rows in self._tables], []
        for number_of_class, words in enumerate(self._words):
            self._local.words = words
            tree = grow(self._search, self._local, task.bins.features, options, divided)
            if self._classes > 1 and tree.num_leaves == 1:  # counts nothing, as in LightGBM
                tree.leaf_value[0] = 0.0
            for rows in self._tables:
                self._move(rows, tree, number_of_class)
            trees.append(tree)
        valid = self._valid_loss()
        self._memory.put(portion.passed, trees, valid)
        metrics = {VALID_LOSS: valid} if self._held is not None else {}
        can_split = any(tree.num_leaves > 1 for tree in trees)
        ends = "" if can_split else "no split of all rows gains anything"
        if self._stopping is not None and self._stopping.add(portion.passed + 1, metrics):
            ends = ends or self._stopping.sentence
        return Taken(
            loss=loss,
            weight=float(self._train.weights.sum()),
            samples=len(self._train.span),
            bytes_sent=rendezvous.bytes_sent - before,
            messages_sent=sum(tree.num_leaves for tree in trees) if rendezvous.world > 1 else 0,
            metrics=metrics,
            ends=ends,
        )

    def _write_words(self) -> float:
        rows, options, task = self._train, self._options, self._task
        scores, words = (rows.scores, self._words) if self._classes > 1 else (rows.scores[0], self._words[0])
        if self._classes > 1:
            most = task.largest_weight * self._classes / (self._classes - 1) / 4
            units = units_for(task.train.rows, task.largest_weight, most)
            write = histogram_kernels.softmax_words
        elif self._objective == "binary":
            units = units_for(task.train.rows, task.largest_weight, task.largest_weight / 4)
            write = histogram_kernels.binary_words
        else:
            here = histogram_kernels.largest_error(scores, rows.targets, rows.weights)
            units = units_for(task.train.rows, self._rendezvous.largest(here), task.largest_weight)
            write = histogram_kernels.squared_words
        leaf = options.min_data_in_leaf, options.min_sum_hessian, options.lambda_l2
        sorting = options.cat_l2, options.cat_smooth, options.max_cat_threshold, options.min_data_per_group
        scale = np.array([units.gradient, units.hessian])
        rest = options.max_cat_to_onehot, options.min_gain
        self._local.rule[:] = units.count_bits, *leaf, *scale, *sorting, *rest
        return float(write(scores, rows.targets, rows.weights, scale, units.count_bits, words))

    def _put_into_leaves(self, tree: GrownTree, divided: DividedRows) -> None:
        """Split by split, in the order in which the tree was grown."""
        divided.begin()
        for node in range(tree.num_leaves - 1):
            leaf = node
            while leaf >= 0:  # the left child keeps the number of the leaf that was split
                leaf = int(tree.left[leaf])
            feature = int(tree.feature[node])
            to_left = node_directions(tree, node, self._task.bins.features[feature])
            divided.divide(-1 - leaf, node + 1, feature, to_left)

    @staticmethod
    def _move(rows: _Rows, tree: GrownTree, number_of_class: int) -> None:
        for leaf in range(tree.num_leaves):
            mine, value = rows.divided.of(leaf), tree.leaf_value[leaf]
            histogram_kernels.add_to_scores(rows.scores[number_of_class], mine, rows.span.start, value)

    def _valid_loss(self) -> float:
        """Collective: the mean over all rows held out, the same for any number of workers; infinity of none."""
        held, task = self._held, self._task
        if held is None or task.valid is None:
            return math.inf
        if self._classes > 1:
            scores, measure = held.scores, histogram_kernels.softmax_loss
            sizes = np.ptp(scores, axis=0) + math.log(self._classes)  # no loss is larger
        elif self._objective == "binary":
            scores, measure = held.scores[0], histogram_kernels.binary_loss
            sizes = np.maximum(1.0, np.abs(scores))
        else:
            scores, measure = held.scores[0], histogram_kernels.squared_loss
            sizes = (scores - held.targets) ** 2
        largest = self._rendezvous.largest(float(sizes.max(initial=0.0)))
        unit = units_for(task.valid.rows, largest * self._largest_valid_weight, 1.0).gradient / 4
        total = self._rendezvous.total(int(measure(scores, held.targets, held.weights, unit)))
        return total / unit / self._valid_weight


class _Rows:
    """A worker's part of a table: its scores, and in which leaves its rows are."""

    def __init__(self, table: BinnedRows, rank: int, world: int, most_leaves: int) -> None:
        blocks = split(-(-table.rows // _BLOCK), rank, world)
        self.span = range(min(blocks.start * _BLOCK, table.rows), min(blocks.stop * _BLOCK, table.rows))
        self.tiles, targets, weights, start = table.opened()
        mine = slice(self.span.start, self.span.stop)
        self.targets, self.weights, self.start = targets[mine], weights[mine], start[:, mine]
        self.scores = np.zeros_like(self.start)
        self.divided = DividedRows(self.tiles, table.layout, self.span, most_leaves)


def check_strategy(strategy: Strategy, workers: int) -> None:
    why = "sends histograms through shared memory, so it takes no algorithm or buckets"
    use = f"use {strategy.word}, and --parallel voting to send less"
    check_shared_rows(strategy, workers, "gbdt", f"{why}; {use}")


_WORD_BITS = 62


@dataclass(frozen=True, slots=True)
class WordUnits:
    """How many units make 1, for gradients and hessians, and the bits in which rows are counted."""

    gradient: float
    hessian: float
    count_bits: int


def units_for(rows: int, largest_gradient: float, largest_hessian: float) -> WordUnits:
    """Units in which no sum over `rows` rows overflows; numbers that are not finite or all 0 get any."""
    count_bits = rows.bit_length()

    def unit(largest: float, bits: int) -> float:
        if not 0 < largest < math.inf:
            return 1.0
        _, size = math.frexp(largest)  # largest < 2^size
        return math.ldexp(1.0, min(bits - size - count_bits, 900))

    gradient, hessian = unit(largest_gradient, _WORD_BITS), unit(largest_hessian, _WORD_BITS - count_bits)
    return WordUnits(gradient, hessian, count_bits)
