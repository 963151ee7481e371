"""LightGBM's text form of a model, read and written; and what a model that was read answers.

A header (`tree`, then `name=value` lines) is followed by each tree (`Tree=0`, then arrays by node and by leaf, values
between blanks) and `end of trees`; what comes after that is for a reader. Written by the description of the format in
LightGBM's documentation and by the files that it writes itself: `lightgbm.Booster(model_file=…)` reads what
`write_model` wrote and predicts the same, and the other way round.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from manyhands.data.row_files import FORMATS, Reading
from manyhands.data.store.atomic import write_atomically
from manyhands.data.table_encoding import TableEncoding
from manyhands.data.table_files import TableReading
from manyhands.errors import DataError, UserError
from manyhands.workloads.exporting import Export, ExportAsked
from manyhands.workloads.gbdt.model import LINKS, DecisionTree, GbdtModel
from manyhands.workloads.gbdt.row_sources import RowBlock, open_source
from manyhands.workloads.logreg.labels import MOST_CLASSES, NO_LABELS, Labels
from manyhands.workloads.predictor import Predictor, ReadAs, encoded_inputs, table_of

MODEL_TEXT = "model.txt"
_COLUMNS = "table_columns:"
_LABELS = "class_labels:"
_MOST_BYTES = 1 << 30
_PART_BYTES = 1 << 20
_BY_NODE = {
    "split_feature": ("feature", np.int64),
    "split_gain": ("gain", np.float64),
    "threshold": ("threshold", np.float64),
    "decision_type": ("decision", np.int64),
    "left_child": ("left", np.int64),
    "right_child": ("right", np.int64),
    "internal_value": ("node_value", np.float64),
    "internal_weight": ("node_weight", np.float64),
    "internal_count": ("node_count", np.int64),
}
_BY_LEAF = {
    "leaf_value": ("leaf_value", np.float64),
    "leaf_weight": ("leaf_weight", np.float64),
    "leaf_count": ("leaf_count", np.int64),
}
_NEEDED = {"split_feature", "threshold", "decision_type", "left_child", "right_child", "leaf_value"}


class _Wrong(Exception):
    """What a file is not."""


def write_model(model: GbdtModel, path: Path) -> None:
    write_atomically(path, [render_model(model).encode()])


def render_model(model: GbdtModel) -> str:
    trees = [_tree_text(number, tree) for number, tree in enumerate(model.trees)]
    header = {
        "version": "v4",
        "num_class": model.classes,
        "num_tree_per_iteration": model.classes,
        "label_index": model.label_index,
        "max_feature_idx": model.columns - 1,
        "objective": model.objective,
        "feature_names": " ".join(model.names),
        "feature_infos": " ".join(model.infos),
        "tree_sizes": " ".join(str(len(text.encode())) for text in trees),
    }
    lines = "".join(f"{name}={value}\n" for name, value in header.items())
    counts = model.importance("split").astype(int)
    order = np.argsort(-counts, kind="stable")
    importances = "".join(f"{model.names[at]}={counts[at]}\n" for at in order if counts[at])
    parameters = "".join(f"[{name}: {value}]\n" for name, value in model.parameters.items())
    own = f"{_LABELS}{model.labels}\n" if model.labels else ""
    texts = "null"
    if model.encoding is not None:  # once for us, and once as LightGBM takes columns of categories of pandas
        own += f"{_COLUMNS}{replace(model.encoding, classes=()).to_json()}\n"
        texts = json.dumps(list(model.encoding.categories.values()))
    return (
        f"tree\n{lines}\n{''.join(trees)}end of trees\n\nfeature_importances:\n{importances}\n"
        f"parameters:\n{parameters}\nend of parameters\n\n{own}pandas_categorical:{texts}\n"
    )


def _tree_text(number: int, tree: DecisionTree) -> str:
    sets = len(tree.category_starts) - 1
    lines = [f"Tree={number}", f"num_leaves={tree.num_leaves}", f"num_cat={sets}"]
    names = {name: own for name, (own, _) in (_BY_NODE | _BY_LEAF).items()}
    if tree.num_leaves == 1:
        names = {"leaf_value": "leaf_value"}
    if sets:
        names |= {"cat_boundaries": "category_starts", "cat_threshold": "categories"}
    # Each number as the shortest text that is read back as the same.
    lines += [f"{name}={' '.join(map(repr, getattr(tree, own).tolist()))}" for name, own in names.items()]
    return "\n".join([*lines, "is_linear=0", f"shrinkage={tree.shrinkage!r}", "\n\n"])


def read_model(path: Path | str) -> GbdtModel:
    """Read a file, or that in the directory of a run; DataError says what is wrong with it."""
    file = Path(path) / MODEL_TEXT if Path(path).is_dir() else Path(path)
    content = bytearray()
    try:
        with file.open("rb") as stream:  # in parts: memory for all that is allowed is not taken beforehand
            while len(content) <= _MOST_BYTES and (part := stream.read(_PART_BYTES)):
                content += part
    except OSError as error:
        raise DataError(f"model {file} cannot be read: {error.strerror}") from error
    if len(content) > _MOST_BYTES:
        raise DataError(f"model {file} is larger than the limit of {_MOST_BYTES >> 30} GiB")
    return parse_model(content, str(file))


def parse_model(content: bytes | bytearray, where: str) -> GbdtModel:
    """The model of a text; DataError names `where` and what is wrong."""
    try:
        text = content.decode()
        if not text.startswith("tree\n") and not text.startswith("tree\r\n"):
            raise _Wrong("it does not begin with the word tree")
        body, end, after = text.partition("end of trees")
        if not end:
            raise _Wrong("the words `end of trees` are missing, so it was cut short")
        after = "\n".join(after.splitlines())
        head, *parts = body.split("\nTree=")
        lines = head.splitlines()[1:]
        if "average_output" in lines:  # a word of its own, without a value
            raise _Wrong("it is a random forest, which is not supported")
        header = _fields(lines)
        names, objective, label_index = _checked_header(header)
        labels = _labels(header, objective, after)
        trees = tuple(_tree(number, part, len(names)) for number, part in enumerate(parts))
        encoding = _encoding(after, len(names))
        if len(trees) % int(header.get("num_class", 1)):
            raise _Wrong(f"it has {len(trees)} trees, which {header['num_class']} classes cannot share")
        sizes = header.get("tree_sizes")
        if sizes is not None and len(sizes.split()) != len(trees):
            raise _Wrong(f"tree_sizes names {len(sizes.split())} trees, but it has {len(trees)}")
    except UnicodeDecodeError as error:
        raise DataError(f"model {where} is not text: {error.reason} at byte {error.start}") from error
    except _Wrong as error:
        what = "gradient boosting model in LightGBM's text format"
        raise DataError(f"model {where} is not a {what}: {error}") from error
    infos = tuple(header.get("feature_infos", "").split(" "))
    return GbdtModel(
        trees=trees,
        objective=objective,
        names=names,
        infos=infos if len(infos) == len(names) else ("none",) * len(names),
        parameters=dict(re.findall(r"(?m)^\[(.*?): (.*)\]$", after)),
        label_index=label_index,
        encoding=encoding,
        labels=labels,
    )


def _labels(header: Mapping[str, str], objective: str, after: str) -> Labels:
    """Those of the classes: as a line after the parameters has them, else from 0, as LightGBM has no other."""
    classes = [header.get(name, "1").strip() for name in ("num_class", "num_tree_per_iteration")]
    word, *settings = objective.split()
    wanted = {f"num_class:{classes[0]}"} if LINKS[word] == "softmax" else set()
    counts = {one for one in settings if one.startswith("num_class:")}
    if len(set(classes)) != 1 or counts != wanted or (not wanted and classes[0] != "1"):
        raise _Wrong(f"num_class is {classes[0][:20]!r}, which its objective {objective!r} does not have")
    count = 2
    if wanted:
        count = int(classes[0]) if classes[0].isdecimal() and len(classes[0]) < 6 else 0
        if not 2 <= count <= MOST_CLASSES:
            raise _Wrong(f"num_class is {classes[0][:20]!r}; it must be from 2 to {MOST_CLASSES}")
    given = re.search(rf"(?m)^{_LABELS}(.*)$", after)
    if given is None:
        return Labels(*map(float, range(count))) if wanted else NO_LABELS
    try:
        found = Labels.parse(given[1])
    except ValueError as error:
        raise _Wrong(str(error)) from error
    if len(found) != count or not (wanted or LINKS[word] == "sigmoid"):
        raise _Wrong(f"it names {len(found)} labels, but its objective is {objective!r}")
    return found


def _encoding(after: str, columns: int) -> TableEncoding | None:
    """How texts become categories, as a line after the parameters has it."""
    given = re.search(rf"(?m)^{_COLUMNS}(.*)$", after)
    if given is None:
        return None
    try:
        found = TableEncoding.from_json(given[1])
    except (ValueError, RecursionError) as error:
        raise _Wrong(str(error)) from error
    if len(found.names) != columns:
        raise _Wrong(f"it describes {len(found.names)} columns, but has {columns} features")
    return found


def _fields(lines: Iterable[str]) -> dict[str, str]:
    return {name: value for name, sign, value in (line.partition("=") for line in lines) if sign}


def _checked_header(header: Mapping[str, str]) -> tuple[tuple[str, ...], str, int]:
    """Names of features, objective, column of labels; models that are no sums of trees are rejected."""
    objective = header.get("objective", "").strip()
    if not objective or objective.split()[0] not in LINKS or "sqrt" in objective.split():
        raise _Wrong(f"its objective is {objective or 'not named'!r}; supported: {', '.join(LINKS)}")
    for setting in objective.split()[1:]:
        fits = not setting.startswith("sigmoid:")
        with suppress(ValueError):
            fits = fits or 0 < float(setting[8:]) < float("inf")
        if not fits:
            raise _Wrong(f"its objective has {setting!r}")
    names, most = tuple(header.get("feature_names", "").split(" ")), header.get("max_feature_idx")
    if most != str(len(names) - 1):
        raise _Wrong(f"max_feature_idx is {most!r}, but {len(names)} features have names")
    label = header.get("label_index", "0").strip()  # of a table with one column more than there are features
    if not (label.isascii() and label.isdigit()) or len(label) > 9 or int(label) > len(names):
        raise _Wrong(f"label_index is {label[:20]!r}; it must be from 0 to {len(names)}")
    return names, objective, int(label)


def _tree(number: int, text: str, columns: int) -> DecisionTree:
    label, *lines = text.splitlines()
    if label.strip() != str(number):
        raise _Wrong(f"tree {number} is called {label[:20]!r}")
    fields = _fields(lines)
    if fields.get("is_linear", "0") != "0":
        raise _Wrong(f"tree {number} is linear, which is not supported")
    leaves = _whole(fields, "num_leaves", number)
    if leaves < 1:
        raise _Wrong(f"tree {number} has num_leaves={leaves}")
    arrays: dict[str, NDArray[Any]] = {}
    for names, size in ((_BY_NODE, leaves - 1), (_BY_LEAF, leaves)):
        for name, (own, kind) in names.items():
            if name in fields and fields[name].strip():
                arrays[own] = _array(fields[name], kind, size, f"tree {number}: {name}")
            elif name in _NEEDED and size:
                raise _Wrong(f"tree {number} has no {name}")
            else:
                arrays[own] = np.zeros(size, kind)
    sets = _whole(fields, "num_cat", number, usual=0)
    starts, words = np.zeros(1, np.int64), np.zeros(0, np.uint32)
    if sets:
        bounds, given = (fields.get(name, "") for name in ("cat_boundaries", "cat_threshold"))
        starts = _array(bounds, np.int64, sets + 1, f"tree {number}: cat_boundaries")
        if starts[0] != 0 or (starts[1:] <= starts[:-1]).any():  # differences may overflow
            raise _Wrong(f"tree {number}: cat_boundaries do not ascend from 0")
        words = _array(given, np.uint32, int(starts[-1]), f"tree {number}: cat_threshold")
    shrinkage = _array(fields.get("shrinkage", "1"), np.float64, 1, f"tree {number}: shrinkage")
    if np.isinf(arrays["leaf_value"]).any():
        raise _Wrong(f"tree {number}: leaf_value holds inf")
    _check_tree(number, arrays, columns, sets)
    return DecisionTree(**arrays, categories=words, category_starts=starts, shrinkage=float(shrinkage[0]))


def _whole(fields: Mapping[str, str], name: str, number: int, usual: int | None = None) -> int:
    text = fields.get(name, "" if usual is None else str(usual))
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise _Wrong(f"tree {number}: {name} is {text[:20]!r}, not an integer")
    return int(text)


def _array(text: str, kind: Any, size: int, what: str) -> NDArray[Any]:
    words = text.split()
    if len(words) != size:
        raise _Wrong(f"{what} has {len(words)} numbers, not {size}")
    if "_" in text or not text.isascii():  # which Python would read, and nobody writes
        raise _Wrong(f"{what} must hold numbers only")
    try:
        found = np.array([float(word) if kind is np.float64 else int(word) for word in words], kind)
    except (ValueError, OverflowError) as error:
        raise _Wrong(f"{what} must hold numbers only: {error}") from error
    if kind is np.float64 and np.isnan(found).any():
        raise _Wrong(f"{what} holds nan")
    return found


def _check_tree(number: int, arrays: Mapping[str, NDArray[Any]], columns: int, sets: int) -> None:
    """Every node and every leaf hangs on one node before it, and nothing points outside."""
    feature, left, right = arrays["feature"], arrays["left"], arrays["right"]
    nodes = len(feature)
    if ((feature < 0) | (feature >= columns)).any():
        raise _Wrong(f"tree {number} splits on a feature outside the {columns} of the model")
    if ((arrays["decision"] < 0) | (arrays["decision"] > 11)).any():
        raise _Wrong(f"tree {number} has an unknown decision_type")
    is_set = arrays["decision"] & 1 == 1
    chosen = arrays["threshold"][is_set]
    if ((chosen < 0) | (chosen >= sets) | (chosen != np.floor(chosen))).any():
        raise _Wrong(f"tree {number} has a categorical split without its categories")
    wanted = np.concatenate([np.arange(-nodes - 1, 0), np.arange(1, nodes)])[: 2 * nodes]
    if not np.array_equal(np.sort(np.concatenate([left, right])), wanted):
        raise _Wrong(f"tree {number}: every leaf and every node but the first must be a child exactly once")
    if any(((child >= 0) & (child <= np.arange(nodes))).any() for child in (left, right)):
        raise _Wrong(f"tree {number} has a node whose child comes before it")


class GbdtPredictor(Predictor[RowBlock]):
    """The prediction, or the probability of the larger label; of several, or of names, label and probabilities."""

    takes: ClassVar[str] = "an array of numbers, one for each column; null where one is missing"
    formats: ClassVar[tuple[str, ...]] = FORMATS

    model: GbdtModel

    def blocks(self, source: Any, read_as: ReadAs) -> Iterator[RowBlock]:
        """All rows of a file, a DataFrame, or a data set inside scikit-learn, without labels."""
        self.check_format(read_as)
        model, skip = self.model, read_as.skip_bad
        reading = Reading(format=read_as.format, threads=read_as.threads, skip_bad=skip)
        rows = open_source(source, reading, labelled=False, table=TableReading(skip_bad=skip))
        rows = rows.for_names(model.names, model.encoding)
        for block in rows.blocks():
            yield block.for_columns(model.columns, model.label_index)
        self.left_out, self.new_texts = rows.left_out, rows.new_texts

    def inputs(self, values: Sequence[Any]) -> RowBlock:
        values = encoded_inputs(self.model.encoding, values)
        return RowBlock(labels=None, dense=table_of(values, self.model.columns, self.takes, missing=True))

    def together(self, parts: Sequence[RowBlock]) -> RowBlock:
        return RowBlock(labels=None, dense=np.concatenate([part.values for part in parts]))

    def answers(self, inputs: RowBlock) -> list[Any]:
        found = self.model.predict(inputs)
        is_named = self.model.labels.are_named or found.ndim == 2
        return self.model.labels.answers(found) if is_named else list(found.tolist())

    def lines(self, inputs: RowBlock) -> Iterator[str]:
        found = self.model.predict(inputs)
        if self.model.labels.are_named or found.ndim == 2:
            return self.model.labels.lines(found, 17)
        return (f"{value:.17g}" for value in found.tolist())

    @property
    def example(self) -> Any:
        return [0] * self.model.columns if self.model.encoding is None else self.model.encoding.example


def open_gbdt(path: Path) -> GbdtPredictor:
    return GbdtPredictor(read_model(path))


def export_gbdt(asked: ExportAsked) -> Export:
    raise UserError(
        f"{asked.run} holds boosted trees, which are already one file, in LightGBM's format: {asked.own(MODEL_TEXT)}"
    )
