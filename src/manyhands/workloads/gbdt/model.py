"""A trained model: trees on values, what they predict, and which features they use. Read and written as text.

The form of a tree is that of LightGBM's text files, see `text_format`: a node sends a value to the left if it is at
most its threshold, or among its categories; missing values (NaN) go where the node says, or count as 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from manyhands.data.row_files import Rows
from manyhands.data.table_encoding import TableEncoding, unnamed
from manyhands.errors import DataError, UserError
from manyhands.workloads.gbdt import bin_kernels
from manyhands.workloads.gbdt.bin_table import Holdout
from manyhands.workloads.gbdt.binning import BinTable, FeatureBins
from manyhands.workloads.gbdt.growing import GrownTree, tree_of
from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.gbdt.row_sources import RowBlock, RowSource
from manyhands.workloads.gbdt.split_kernels import CATEGORICAL, DEFAULT_LEFT
from manyhands.workloads.logreg.labels import NO_LABELS, PAIRS, Labels, measure, softmax

# Of `decision`: NaN goes where the node says. LightGBM's bits: 1 categorical, 2 to the left, 4 and 8 what misses.
_MISSING_NAN = 8
_LARGEST = 1e300  # of a threshold: a value above it is infinity, and has no place in a text
_CHUNK = 4096  # rows that are predicted at a time at most
_CHUNK_NUMBERS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecisionTree:
    """Arrays by node, then by leaf; a child below 0 is leaf -1 - child."""

    feature: NDArray[np.int64]
    threshold: NDArray[np.float64]
    """The largest value on the left; of a categorical node, which of the sets in `categories` is on the left."""
    decision: NDArray[np.int64]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    gain: NDArray[np.float64]
    node_value: NDArray[np.float64]
    node_weight: NDArray[np.float64]
    node_count: NDArray[np.int64]
    leaf_value: NDArray[np.float64]
    leaf_weight: NDArray[np.float64]
    leaf_count: NDArray[np.int64]
    categories: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    """Sets of categories, a bit each."""
    category_starts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    """Where each set begins, and the end of the last."""
    shrinkage: float = 1.0

    @property
    def num_leaves(self) -> int:
        return len(self.leaf_value)

    @staticmethod
    def of(grown: GrownTree, features: Sequence[FeatureBins], bias: float, rate: float) -> DecisionTree:
        """A tree of values from one of bins; `bias` is added to its leaves."""
        leaves, nodes = grown.num_leaves, grown.num_leaves - 1
        used = [features[number] for number in grown.feature[:nodes]]
        thresholds, decisions = np.zeros(nodes), np.zeros(nodes, np.int64)
        sets: list[NDArray[np.uint32]] = []
        for node, bins in enumerate(used):
            flags = int(grown.flags[node])
            if bins.categories is not None:
                assert flags & CATEGORICAL, "a split of categories"
                thresholds[node], decisions[node] = len(sets), 1 | _MISSING_NAN
                bits = np.unpackbits(grown.categories[node].view(np.uint8), bitorder="little")
                members = bins.categories[bits[1 : 1 + len(bins.categories)].astype(bool)]
                chosen = np.zeros(int(members.max(initial=0)) // 32 + 1, np.uint32)
                np.bitwise_or.at(chosen, members // 32, np.uint32(1) << (members % 32).astype(np.uint32))
                sets.append(chosen)
            else:
                assert bins.bounds is not None, "numbers have bounds"
                thresholds[node] = min(bins.bounds[grown.threshold[node]], _LARGEST)
                decisions[node] = flags & DEFAULT_LEFT | (_MISSING_NAN if bins.missing else 0)
        sizes = dict.fromkeys(("left", "right", "gain", "node_weight", "node_count"), nodes)
        sizes |= {"leaf_weight": leaves, "leaf_count": leaves}
        return DecisionTree(
            feature=np.array([bins.column for bins in used], np.int64),
            threshold=thresholds,
            decision=decisions,
            node_value=grown.node_value[:nodes] + bias,
            leaf_value=grown.leaf_value[:leaves] + bias,
            **{name: getattr(grown, name)[:size].copy() for name, size in sizes.items()},
            categories=np.concatenate([np.zeros(0, np.uint32), *sets]),
            category_starts=np.cumsum([0, *map(len, sets)]).astype(np.int64),
            shrinkage=rate,
        )


LINKS = {
    **dict.fromkeys(("regression", "regression_l1", "huber", "fair", "quantile", "mape"), "identity"),
    **dict.fromkeys(("poisson", "gamma", "tweedie"), "exp"),
    **dict.fromkeys(("binary", "cross_entropy"), "sigmoid"),
    "multiclass": "softmax",
}
"""What a sum of leaves means, by the first word of an objective as LightGBM writes it."""


def _predicted(objective: str, scores: NDArray[np.float64]) -> NDArray[np.float64]:
    word, *settings = objective.split()
    if LINKS[word] == "identity":
        return scores
    if LINKS[word] == "softmax":
        return softmax(scores)
    if LINKS[word] == "sigmoid":
        given = (float(one[8:]) for one in settings if one.startswith("sigmoid:"))
        scores = -np.logaddexp(0.0, -next(given, 1.0) * scores)
    found: NDArray[np.float64] = np.exp(scores)
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class GbdtModel:
    """Trees, whose values are summed; `columns` are those of a row, `names` and `infos` what is known of each.

    Of several classes there is a tree for each, and then the next for each.
    """

    trees: tuple[DecisionTree, ...]
    objective: str
    names: tuple[str, ...]
    infos: tuple[str, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)  # what it was trained with; for a reader only
    label_index: int = 0
    """Which column of the table had the labels: in rows to predict that have one column more, it is left out."""
    encoding: TableEncoding | None = None  # which texts the categories of columns stand for, where they do
    labels: Labels = NO_LABELS
    """The label of each class, where there are several, or where two are not such as 0 and 1."""

    @property
    def columns(self) -> int:
        return len(self.names)

    @property
    def classes(self) -> int:
        """How many sums of trees there are."""
        return len(self.labels) if LINKS[self.objective.split()[0]] == "softmax" else 1

    @staticmethod
    def of(
        state: Mapping[str, Tensor],
        rounds: int,
        bins: BinTable,
        options: GbdtOptions,
        biases: Sequence[float],
        names: Sequence[str] | None,
        labels: Labels = NO_LABELS,
    ) -> GbdtModel:
        """The trees of the first `rounds` of a `TreeMemory`; the first of each class has its bias in its leaves."""
        count = len(biases)
        made = tuple(
            DecisionTree.of(
                tree_of(state, number), bins.features, biases[number] if number < count else 0.0, options.rate
            )
            for number in range(rounds * count)
        )
        # What LightGBM's files say of each column: its range, or its categories.
        infos = ["none"] * bins.columns
        for one in bins.features:
            infos[one.column] = f"[{one.low!r}:{one.high!r}]"
            if one.categories is not None:
                infos[one.column] = ":".join(map(str, sorted(one.categories.tolist())))
        in_file = {"binary": "binary sigmoid:1", "multiclass": f"multiclass num_class:{len(labels)}"}
        return GbdtModel(
            trees=made,
            objective=in_file.get(options.objective, options.objective),
            names=tuple(names or unnamed(bins.columns)),
            infos=tuple(infos),
            labels=labels,
        )

    def scores(self, block: RowBlock) -> NDArray[np.float64]:
        """Sums of leaves of some rows, a column for each of several classes.

        UserError where rows have more or fewer columns than the model knows.
        """
        out, begin = np.zeros((self.classes, len(block))), 0
        for part in self._parts(block):
            end = begin + len(part)
            for own, flat in zip(out, self._flat, strict=True):
                bin_kernels.add_trees(part, *flat, own[begin:end])
            begin = end
        return out[0] if self.classes == 1 else np.ascontiguousarray(out.T)

    def predict(self, block: RowBlock) -> NDArray[np.float64]:
        """Numbers, or probabilities: of the larger of two labels, or of each of several in a column."""
        return _predicted(self.objective, self.scores(block))

    def _parts(self, block: RowBlock) -> Iterator[NDArray[np.float64]]:
        if block.sparse is not None:
            yield from self._sparse_parts(block.sparse)
            return
        values = block.values
        if values.shape[1] != self.columns:
            raise UserError(f"rows have {values.shape[1]} columns; the model was trained on {self.columns}")
        for begin in range(0, len(values), _CHUNK):
            yield np.ascontiguousarray(values[begin : begin + _CHUNK], np.float64)

    def _sparse_parts(self, rows: Rows) -> Iterator[NDArray[np.float64]]:
        """Features beyond those that it was trained on count nothing."""
        count = max(1, min(_CHUNK, _CHUNK_NUMBERS // self.columns))  # zeros are written down
        for begin in range(0, len(rows), count):
            end = min(begin + count, len(rows))
            dense = np.zeros((end - begin, self.columns))
            first, last = rows.starts[begin], rows.starts[end]
            which = np.repeat(np.arange(end - begin), np.diff(rows.starts[begin : end + 1]))
            columns, values = rows.indices[first:last], rows.values[first:last]
            known = columns < self.columns
            dense[which[known], columns[known]] = values[known]
            yield dense

    @cached_property
    def _flat(self) -> list[tuple[tuple[NDArray[Any], ...], tuple[NDArray[Any], ...]]]:
        """The trees of each class as compiled code takes them."""
        return [_flattened(self.trees[first :: self.classes]) for first in range(self.classes)]

    def importance(self, kind: str = "split") -> NDArray[np.float64]:
        """For every column, how many nodes ask for it (`split`), or what they gain together (`gain`)."""
        if kind not in ("split", "gain"):
            raise UserError(f"importance must be split or gain, not {kind!r}")
        out = np.zeros(self.columns)
        for tree in self.trees:
            np.add.at(out, tree.feature, tree.gain if kind == "gain" else 1.0)
        return out


def _flattened(
    trees: Sequence[DecisionTree],
) -> tuple[tuple[NDArray[Any], ...], tuple[NDArray[Any], ...]]:
    kinds: dict[str, Any] = dict.fromkeys(
        ("feature", "threshold", "decision", "left", "right", "leaf_value", "category_starts"), np.int64
    )
    kinds |= {"threshold": np.float64, "leaf_value": np.float64, "categories": np.uint32}
    parts = {name: [getattr(tree, name) for tree in trees] for name in kinds}
    starts = ("feature", "leaf_value", "category_starts", "categories")
    return (
        tuple(np.cumsum([0, *map(len, parts[name])]).astype(np.int64) for name in starts),
        tuple(np.concatenate([np.zeros(0, kind), *parts[name]]) for name, kind in kinds.items()),
    )


def measure_model(
    model: GbdtModel, source: RowSource, holdout: Holdout | None = None, labels: Labels = NO_LABELS
) -> dict[str, Any]:
    """Accuracy, AUC and log loss of labels, or the root of the mean squared error and R² of a number.

    On all rows, or on those that are held out; `quality` is what the page of a run shows of it. `labels` are those of
    training, where the model does not say them.
    """
    known, given = model.labels or labels, source
    source = given.for_names(model.names, model.encoding, known)
    scores, truths, weights = [], [], []
    on = "test rows" if holdout is None else "rows held out"
    for block in source.blocks() if holdout is None else holdout.only(source.blocks(), held=True):
        if block.labels is None:
            raise DataError(f"{source.name} has rows without labels; to predict them use `manyhands predict`")
        scores.append(model.scores(block))
        truths.append(block.labels)
        weights.append(block.weights if block.weights is not None else np.ones(len(block)))
    given.left_out = source.left_out
    score, label, weight = (np.concatenate(parts) for parts in (scores, truths, weights))
    if LINKS[model.objective.split()[0]] == "sigmoid" and not known:  # the file does not say which
        known = Labels(*next((pair for pair in PAIRS if np.isin(label, pair).all()), PAIRS[1]))
    if known:
        found = measure(score, known.targets(label, source.name, names=source.label_names), weight)
        return {**found.figures, "test_rows": len(label), "quality": found.quality(on, known)}
    error = float(np.average((_predicted(model.objective, score) - label) ** 2, weights=weight))
    spread = float(np.average((label - np.average(label, weights=weight)) ** 2, weights=weight))
    explained = 1 - error / spread if spread else None
    quality = {
        "measured_on": f"{len(label):,} {on}",
        "scores": {"RMSE": error**0.5, **({"R²": explained} if explained is not None else {})},
    }
    return {"rmse": error**0.5, "r2": explained, "test_rows": len(label), "quality": quality}
