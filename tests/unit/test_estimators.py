"""Estimators with scikit-learn's conventions: its own checks, a pipeline, a grid search, and figures beside its own."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, load_wine
from sklearn.decomposition import PCA
from sklearn.decomposition import TruncatedSVD as TheirSVD
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression as TheirRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import manyhands as mh
from manyhands.errors import UserError

ESTIMATORS = ("GradientBoostingClassifier", "GradientBoostingRegressor", "LogisticRegression", "TruncatedSVD")


@pytest.mark.parametrize("name", ESTIMATORS)
def test_scikit_learns_own_checks_pass(name: str) -> None:
    found = check_estimator(getattr(mh.sklearn, name)(), on_skip=None)
    assert len(found) > 40
    skipped = {one["check_name"] for one in found if one["status"] != "passed"}
    assert skipped <= {"check_array_api_input"}, "which scikit-learn skips unless SCIPY_ARRAY_API is set"


def split(load: Any) -> Any:
    return train_test_split(*load(return_X_y=True), random_state=0)


@pytest.mark.parametrize("load", [load_breast_cancer, load_iris, load_wine])
def test_classifiers_are_as_good_as_theirs(load: Any) -> None:
    train, test, labels, expected = split(load)
    trees = mh.sklearn.GradientBoostingClassifier().fit(train, labels)
    theirs = HistGradientBoostingClassifier(early_stopping=False, min_samples_leaf=5).fit(train, labels)
    assert trees.score(test, expected) >= theirs.score(test, expected) - 0.03
    chances = trees.predict_proba(test)
    np.testing.assert_allclose(chances.sum(axis=1), 1)
    line = make_pipeline(StandardScaler(), mh.sklearn.LogisticRegression()).fit(train, labels)
    other = make_pipeline(StandardScaler(), TheirRegression(C=1e3, max_iter=10_000)).fit(train, labels)
    assert line.score(test, expected) >= other.score(test, expected) - 0.03
    assert log_loss(expected, line.predict_proba(test)) <= log_loss(expected, other.predict_proba(test)) + 0.1


def test_a_regressor_is_as_good_as_theirs() -> None:
    train, test, numbers, expected = split(load_diabetes)
    ours = mh.sklearn.GradientBoostingRegressor(learning_rate=0.05, min_samples_leaf=20).fit(train, numbers)
    theirs = HistGradientBoostingRegressor(early_stopping=False, learning_rate=0.05).fit(train, numbers)
    assert ours.score(test, expected) >= theirs.score(test, expected) - 0.02


@pytest.mark.parametrize("is_sparse", [False, True])
def test_singular_values_are_those_of_theirs(is_sparse: bool) -> None:
    from scipy.sparse import csr_matrix

    values = load_wine().data
    given = csr_matrix(values) if is_sparse else values
    ours, theirs = mh.sklearn.TruncatedSVD(3).fit(given), TheirSVD(3, algorithm="arpack").fit(given)
    np.testing.assert_allclose(ours.singular_values_, theirs.singular_values_, rtol=1e-6)
    np.testing.assert_allclose(
        np.abs(ours.transform(given)), np.abs(theirs.transform(given)), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        ours.explained_variance_ratio_, theirs.explained_variance_ratio_, rtol=1e-5, atol=1e-9
    )
    if not is_sparse:
        centred, pca = mh.sklearn.TruncatedSVD(3, center=True).fit(values), PCA(3).fit(values)
        np.testing.assert_allclose(
            np.abs(centred.transform(values)), np.abs(pca.transform(values)), atol=1e-6
        )
        np.testing.assert_allclose(
            centred.explained_variance_ratio_, pca.explained_variance_ratio_, rtol=1e-6
        )


def test_a_pipeline_and_a_grid_search_are_built_around_one() -> None:
    train, test, labels, expected = split(load_wine)
    line = make_pipeline(
        StandardScaler(), mh.sklearn.TruncatedSVD(5), mh.sklearn.GradientBoostingClassifier(n_estimators=10)
    )
    asked = {"truncatedsvd__n_components": [1, 5], "gradientboostingclassifier__max_leaf_nodes": [2, 8]}
    found = GridSearchCV(line, asked, cv=3).fit(train, labels)
    assert found.best_params_["truncatedsvd__n_components"] == 5
    assert found.score(test, expected) > 0.9
    again = pickle.loads(pickle.dumps(found.best_estimator_))
    np.testing.assert_array_equal(again.predict(test), found.predict(test))
    assert clone(found.best_estimator_).get_params()["truncatedsvd__n_components"] == 5


@pytest.mark.parametrize("kind", ["pandas", "polars"])
@pytest.mark.parametrize("name", ["GradientBoostingClassifier", "LogisticRegression"])
def test_dataframes_may_have_texts(name: str, kind: str) -> None:
    frames = pytest.importorskip(kind)
    draw = np.random.default_rng(0)
    city, labels = draw.integers(0, 3, 600), draw.choice(["no", "yes"], 600)
    names = np.where(
        labels == "yes", np.array(["Oslo", "Rome", "Bonn"])[city], np.array(["Lima", "Pisa", "Kiel"])[city]
    )
    table = frames.DataFrame({"age": draw.normal(size=600), "city": names.tolist()})
    model = getattr(mh.sklearn, name)().fit(table, labels)
    assert model.score(table, labels) == 1.0
    assert model.feature_names_in_.tolist() == ["age", "city"]
    new = frames.DataFrame({"age": [0.1], "city": ["Atlantis"]})  # as missing
    assert 0 < model.predict_proba(new)[0, 0] < 1
    with pytest.raises(UserError, match="X must be a DataFrame with the columns age, city, as in fit"):
        model.predict(np.zeros((1, 2)))


def test_a_decomposition_of_texts_has_a_column_for_each() -> None:
    frames = pytest.importorskip("pandas")
    draw = np.random.default_rng(0)
    city = draw.integers(0, 3, 50)
    table = frames.DataFrame({"age": draw.normal(size=50), "city": np.array(["Bonn", "Oslo", "Rome"])[city]})
    dense = np.column_stack([table["age"], np.eye(3)[city]])
    found = mh.sklearn.TruncatedSVD(3).fit(table)
    np.testing.assert_allclose(found.singular_values_, np.linalg.svd(dense, compute_uv=False)[:3], rtol=1e-6)
    np.testing.assert_allclose(found.transform(table), dense @ found.components_.T, atol=1e-6)
    table.loc[4, "city"] = "Atlantis"
    with pytest.raises(UserError, match="X, row 5, column 'city': the value is missing or new"):
        found.transform(table)


def test_one_class_is_refused() -> None:
    with pytest.raises(UserError, match="y has one class, 'a'; a classifier needs at least two classes"):
        mh.sklearn.LogisticRegression().fit(np.zeros((3, 1)), ["a", "a", "a"])


@pytest.mark.parametrize("missing", [None, np.nan])
def test_a_missing_label_is_said_with_its_row(missing: Any) -> None:
    labels = np.array(["a", "b", missing, "a"], object)
    with pytest.raises(UserError, match=f"y, row 3: {missing} is no label; give texts or numbers"):
        mh.sklearn.LogisticRegression().fit(np.zeros((4, 1)), labels)


def test_zero_is_no_way_to_leave_a_parameter_out() -> None:
    X, y = load_iris(return_X_y=True)  # noqa: N806
    with pytest.raises(UserError, match="passes is 0"):
        mh.sklearn.LogisticRegression(passes=0).fit(X, y)
    with pytest.raises(UserError, match="min_data_in_leaf is 0"):
        mh.sklearn.GradientBoostingClassifier(min_samples_leaf=0).fit(X, y)
