"""Trees of several classes: a round by hand, LightGBM's numbers, names of classes, resume, and which objective fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import accuracy_score, log_loss

from boosted import choice, drawn_table, predictions, trained
from manyhands.engine.training import Keeping
from manyhands.errors import DataError, UserError
from manyhands.workloads.gbdt.model import measure_model
from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.gbdt.row_sources import ArraySource, RowBlock, RowSource, open_source
from manyhands.workloads.gbdt.text_format import parse_model, render_model
from manyhands.workloads.gbdt.training import TableChoice, train_gbdt
from manyhands.workloads.logreg.labels import Labels


def three_classes(rows: int = 1500, seed: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Integers of few values, so that every library has the same bins."""
    drawn = np.random.default_rng(seed)
    values = drawn.integers(0, 20, (rows, 4)).astype(float)
    scores = np.column_stack(
        [values[:, 0] / 4, (values[:, 1] - 10) ** 2 / 20, values[:, 2] * values[:, 3] / 60]
    )
    return values, (scores + drawn.gumbel(size=scores.shape)).argmax(axis=1).astype(float)


def test_the_first_round_is_the_one_found_by_hand() -> None:
    values, labels = (
        np.array([[0.0], [1.0]]).repeat(6, axis=0),
        np.array([0, 0, 0, 0, 1, 2, 2, 2, 1, 1, 1, 1.0]),
    )
    options = {"trees": 1, "num_leaves": 2, "min_data_in_leaf": 1, "rate": 0.5, "lambda_l2": 1.0}
    result = trained(choice(values, labels), objective="multiclass", **options)
    shares = np.bincount(labels.astype(int)) / 12
    assert result.train_losses == pytest.approx([-(shares * np.log(shares)).sum()])
    for number, tree in enumerate(result.model.trees):
        side = values[:, 0] == 1
        gradients = shares[number] - (labels == number)
        hessian = 1.5 * shares[number] * (1 - shares[number])  # K / (K - 1) is 3 / 2
        leaves = [
            np.log(shares[number]) - 0.5 * gradients[at].sum() / (6 * hessian + 1) for at in (~side, side)
        ]
        assert tree.leaf_value == pytest.approx(leaves)
    scores = np.array([tree.leaf_value for tree in result.model.trees]).T
    expected = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    assert predictions(result.model, np.array([[0.0], [1.0]])) == pytest.approx(expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_it_predicts_as_lightgbm_does(weighted: bool) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    values, labels = three_classes()
    weights = np.random.default_rng(1).integers(1, 4, len(labels)).astype(float) if weighted else None
    table = TableChoice(train=ArraySource(values, labels, weights=weights))
    # By hessians, not by rows: LightGBM only estimates how many rows a leaf has.
    ours = trained(table, objective="multiclass", trees=20, min_data_in_leaf=1, min_sum_hessian=5.0).model
    settings = {"objective": "multiclass", "num_class": 3, "verbose": -1, "num_threads": 1}
    settings |= {"min_data_in_leaf": 1, "min_sum_hessian_in_leaf": 5.0}
    dataset = lightgbm.Dataset(values, labels, weight=weights, params={"verbose": -1, "min_data_in_bin": 1})
    peer = lightgbm.train(settings, dataset, 20)
    assert np.abs(predictions(ours, values) - peer.predict(values)).max() < 1e-7


def test_digits_are_learned_as_well_as_by_lightgbm_and_scikit_learn() -> None:
    lightgbm = pytest.importorskip("lightgbm")
    values, labels = load_digits(return_X_y=True)
    train, test = slice(0, 1200), slice(1200, None)
    ours = predictions(trained(choice(values[train], labels[train]), trees=15).model, values[test])
    settings = {"objective": "multiclass", "num_class": 10, "verbose": -1, "num_threads": 1}
    dataset = lightgbm.Dataset(values[train], labels[train], params={"verbose": -1})
    peer = lightgbm.train(settings, dataset, 15).predict(values[test])
    other = HistGradientBoostingClassifier(max_iter=15, early_stopping=False).fit(
        values[train], labels[train]
    )
    third = other.predict_proba(values[test])
    assert accuracy_score(labels[test], ours.argmax(1)) > accuracy_score(labels[test], peer.argmax(1)) - 0.01
    assert log_loss(labels[test], ours) == pytest.approx(log_loss(labels[test], peer), abs=0.02)
    # Without the factor K / (K - 1) its steps are larger, and after few rounds it is ahead.
    assert log_loss(labels[test], ours) == pytest.approx(log_loss(labels[test], third), abs=0.06)


def test_a_resumed_run_of_classes_has_the_bits_of_a_whole_one_and_stops_early_alike(tmp_path: Path) -> None:
    values, labels = three_classes(600)
    table = choice(values, labels, valid_fraction=0.3)
    options = GbdtOptions(objective="multiclass", trees=40, rate=0.5, early_stopping=3)
    whole = train_gbdt(table, options)
    best = int(np.argmin(whole.valid_losses)) + 1
    assert whole.trees_grown == best + 3 < 40
    assert len(whole.model.trees) == 3 * best
    keep = Keeping(out=tmp_path / "run")
    train_gbdt(table, replace(options, trees=2), keep=keep)
    resumed = train_gbdt(table, options, keep=replace(keep, resume=True))
    assert resumed.summary["resumed_from_step"] == 2
    assert render_model(resumed.model) == render_model(whole.model)
    assert resumed.valid_losses == whole.valid_losses
    model, last = whole.model, best - 1
    rows = ArraySource(values, labels)
    held = measure_model(model, rows)
    assert held["log_loss"] == pytest.approx(log_loss(labels, predictions(model, values)))
    assert 0 < whole.valid_losses[last] < 1.1


def test_training_continues_a_model_of_classes_ours_or_lightgbms() -> None:
    lightgbm = pytest.importorskip("lightgbm")
    values, labels = three_classes(600)
    whole = trained(choice(values, labels), objective="multiclass", trees=6).model
    first = parse_model(
        render_model(trained(choice(values, labels), objective="multiclass", trees=2).model).encode(), "m"
    )
    rest = trained(choice(values, labels, start=first), trees=4).model
    ours, theirs = (render_model(one).partition("parameters:")[0] for one in (rest, whole))
    assert ours == theirs
    settings = {"objective": "multiclass", "num_class": 3, "verbose": -1, "num_threads": 1}
    peer = lightgbm.train(settings, lightgbm.Dataset(values, labels, params={"verbose": -1}), 3)
    start = parse_model(peer.model_to_string().encode(), "peer")
    result = trained(choice(values, labels, start=start), trees=3)
    assert result.train_losses[0] == pytest.approx(log_loss(labels, peer.predict(values)))
    with pytest.raises(UserError, match="'multiclass num_class:3', but binary was given"):
        trained(choice(values, labels, start=first), objective="binary")
    with pytest.raises(DataError, match=r"row 1 has label .*, which is new; labels are 0, 1, 2"):
        trained(choice(values, labels + 5, start=first))


class _Named(RowSource):
    """Rows whose labels are names, numbered as they come."""

    def __init__(self, values: np.ndarray, names: list[str], name: str = "the table") -> None:
        self.name, self._rows, self._own, self._found = name, values, names, []

    def blocks(self, on_rows: Callable[[int], None] | None = None) -> Iterator[RowBlock]:
        for begin in range(0, len(self._rows), 100):
            own = self._own[begin : begin + 100]
            self._found += sorted(set(own) - set(self._found))
            labels = np.array([self._found.index(one) for one in own], float)
            yield RowBlock(labels=labels, dense=self._rows[begin : begin + 100])

    @property
    def label_names(self) -> list[str]:  # type: ignore[override]
        return self._found


@pytest.mark.parametrize("words", [("red", "green", "blue"), ("no", "yes")])
def test_names_are_classes_and_kept_with_the_model(words: tuple[str, ...]) -> None:
    values, labels = three_classes(600)
    codes = labels.astype(int) % len(words)
    result = trained(TableChoice(train=_Named(values, [words[at] for at in codes])), trees=10)
    assert result.objective == ("multiclass" if len(words) == 3 else "binary")
    model = parse_model(render_model(result.model).encode(), "m")
    assert list(model.labels) == sorted(words)
    order = [words.index(one) for one in model.labels]
    numbered = trained(choice(values, np.argsort(order)[codes].astype(float)), trees=10).model
    np.testing.assert_array_equal(predictions(model, values), predictions(numbered, values))
    other = slice(None, None, -1)  # read in another order, they have other numbers
    found = measure_model(model, _Named(values[other], [words[at] for at in codes[other]]))
    assert (
        found["accuracy"]
        == measure_model(numbered, ArraySource(values, np.argsort(order)[codes]))["accuracy"]
    )
    assert found["quality"]["labels"] == sorted(words)
    new = _Named(values[:3], [words[0], words[1], "mauve"], "new.csv")
    with pytest.raises(DataError, match=r"new.csv: row 3 has label mauve, which is new; labels are "):
        measure_model(model, new)
    with pytest.raises(DataError, match="are names; objective=regression needs numbers"):
        trained(TableChoice(train=_Named(values, [words[at] for at in codes])), objective="regression")


@pytest.mark.parametrize(
    ("labels", "objective", "classes"),
    [
        ([0, 1], "binary", ()),
        ([-1, 1], "binary", ()),
        ([2, 4], "binary", (2, 4)),
        ([0, 1, 2], "multiclass", (0, 1, 2)),
        ([-7, 3, 1000], "multiclass", (-7, 3, 1000)),
        ([0, 1, 2.5], "regression", ()),
        ([5], "regression", ()),
        (range(32), "multiclass", tuple(range(32))),
        (range(33), "regression", ()),
    ],
)
def test_the_objective_is_guessed_from_the_labels_with_a_note(
    labels: list[float], objective: str, classes: tuple[float, ...], caplog: pytest.LogCaptureFixture
) -> None:
    values = np.random.default_rng(0).normal(size=(200, 2))
    own = np.resize(np.array(labels, float), 200)
    result = trained(choice(values, own), trees=1)
    assert (result.objective, result.model.labels) == (objective, classes)
    count = f"the label has {len(labels)} value{'s' * (len(labels) > 1)}"
    assert caplog.messages == [f"manyhands: objective={objective}: {count}; give --objective to choose"]
    caplog.clear()
    trained(choice(values, own), trees=1, objective=objective)
    assert not caplog.messages


def test_a_class_that_only_rows_held_out_have_is_predicted_seldom() -> None:
    values, labels = drawn_table()
    held = np.full(40, 2.0)
    result = trained(
        choice(values, labels + (labels == 1), valid=ArraySource(values[:40], held)),
        objective="multiclass",
        trees=2,
    )
    assert list(result.model.labels) == [0, 2]
    with pytest.raises(DataError, match="row 1 has label 3, which is new; labels are 0, 1, 4"):
        trained(
            choice(
                values,
                labels + 3 * (labels == 1) * (values[:, 0] > 0),
                valid=ArraySource(values[:40], held + 1),
            ),
            objective="multiclass",
        )


def test_sparse_text_has_classes_too(tmp_path: Path) -> None:
    lines = [f"{at % 3 + 4} {at % 3 + 1}:1 {at % 7 + 4}:0.5" for at in range(300)]
    (tmp_path / "rows").write_text("\n".join(lines) + "\n")
    source = open_source(tmp_path / "rows")
    model = trained(TableChoice(train=source), trees=3).model
    assert model.labels == Labels(4, 5, 6)
    assert measure_model(model, source)["accuracy"] == 1.0


def test_more_classes_than_fit_into_memory_are_refused() -> None:
    values, labels = np.random.default_rng(0).normal(size=(3000, 2)), np.arange(3000.0) % 1000
    with pytest.raises(UserError, match=r"memory=50.0 MiB: 3,000 rows need 91.7 MiB besides their bins"):
        trained(choice(values, labels), objective="multiclass", memory_bytes=50 << 20)
    with pytest.raises(DataError, match="has 3,000 labels; a classifier has at most 1,000"):
        trained(choice(values, np.arange(3000.0)), objective="multiclass")
