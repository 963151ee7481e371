"""Estimators with scikit-learn's conventions, as `mh.sklearn`: trees, regression and SVD of arrays and DataFrames.

    model = mh.sklearn.GradientBoostingClassifier(workers=4).fit(X, y)
    model.predict_proba(X)

They train as `manyhands train gbdt`, `logreg` and `svd` do, by as many workers, and pass scikit-learn's
`check_estimator`. A DataFrame may have columns of text: their categories are found in `fit`, and one that is new in
`predict` counts as missing. It needs pyarrow then (`manyhands[tables]`); arrays do not. `fit` takes no `sample_weight`:
a row of weight 2 would not give exactly the model of two rows, which scikit-learn's checks demand.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    RegressorMixin,
    TransformerMixin,
)
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.sparsefuncs import mean_variance_axis
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

from manyhands.data.row_files import Rows, RowText
from manyhands.data.table_encoding import TableEncoding, unnamed
from manyhands.data.table_files import TableReading, is_frame, open_table
from manyhands.errors import UserError
from manyhands.workloads.gbdt.model import GbdtModel
from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.gbdt.row_sources import ArraySource, RowBlock
from manyhands.workloads.gbdt.training import TableChoice, train_gbdt
from manyhands.workloads.logreg.options import LogregOptions
from manyhands.workloads.logreg.training import train_logreg
from manyhands.workloads.svd.in_memory import truncated_svd
from manyhands.workloads.svd.options import SvdOptions
from manyhands.workloads.svd.training import train_svd

_EXAMPLES_LEARNED = 200_000  # by a regression of few rows, in as many passes as that takes
_MOST_PASSES = 200
_USUAL_LEAF = 20  # rows


def _values(estimator: Any, given: Any, *, fitting: bool, **checks: Any) -> Any:
    """`X` as numbers; of a DataFrame, texts as those of their categories. ValueError says what is wrong."""
    known: TableEncoding | None = None if fitting else estimator.encoding_
    if not is_frame(given) or (not fitting and known is None):
        if known is not None and known.categories:
            raise UserError(f"X must be a DataFrame with the columns {', '.join(known.names)}, as in fit")
        if fitting:
            estimator.encoding_ = None
        return validate_data(estimator, given, reset=fitting, dtype=(np.float64, np.float32), **checks)
    validate_data(estimator, given, reset=fitting, skip_check_array=True)
    table = open_table(given, TableReading(labelled=False, finite=True), scanned=fitting)
    if fitting:
        estimator.encoding_ = table.encoding
    else:
        table = table.encoded(estimator.encoding_, labelled=False)
    return np.concatenate([np.asarray(block.rows) for block in table.blocks()])


def _classes(estimator: Any, labels: Any, rows: int) -> NDArray[np.float64]:
    """The class of each row, from 0; `classes_` are the labels, sorted."""
    labels = column_or_1d(labels, warn=True)
    if labels.dtype == object:
        known = (isinstance(one, str | int | float | np.generic) and bool(one == one) for one in labels)
        wrong = next((at for at, is_known in enumerate(known) if not is_known), None)
        if wrong is not None:
            raise UserError(
                f"y, row {wrong + 1}: {str(labels[wrong])[:40]} is no label; give texts or numbers"
            )
    assert_all_finite(labels, input_name="y")
    check_classification_targets(labels)
    found, codes = np.unique(labels, return_inverse=True)
    check_consistent_length(np.empty(rows), codes)
    if len(found) < 2:
        raise UserError(f"y has one class, {str(found[0])!r}; a classifier needs at least two classes")
    estimator.classes_ = found
    return codes.astype(np.float64)


class _Classifier(ClassifierMixin):  # type: ignore[misc]
    """Labels by the largest of probabilities."""

    def predict(self, X: Any) -> NDArray[Any]:  # noqa: N803 - as scikit-learn calls it
        check_is_fitted(self)
        found: NDArray[Any] = self.classes_[self.predict_proba(X).argmax(axis=1)]
        return found


def _both(chances: NDArray[np.float64]) -> NDArray[np.float64]:
    """A column for each class, where a model gives the second of two."""
    return chances if chances.ndim == 2 else np.column_stack([1 - chances, chances])


class _Boosting(BaseEstimator):  # type: ignore[misc]
    def __init__(
        self,
        *,
        n_estimators: int = 100,
        learning_rate: float = 0.1,
        max_leaf_nodes: int = 31,
        max_depth: int | None = None,
        min_samples_leaf: int | None = None,
        l2_regularization: float = 0.0,
        max_bins: int = 255,
        workers: int = 1,
    ) -> None:
        self.n_estimators, self.learning_rate, self.max_bins = n_estimators, learning_rate, max_bins
        self.max_leaf_nodes, self.max_depth, self.workers = max_leaf_nodes, max_depth, workers
        self.min_samples_leaf, self.l2_regularization = min_samples_leaf, l2_regularization

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _grow(self, values: NDArray[Any], targets: NDArray[np.float64], objective: str) -> None:
        if len(values) < 2:
            raise UserError("X has n_samples=1; trees need at least two rows")
        usual = max(1, min(_USUAL_LEAF, len(values) // _USUAL_LEAF))
        leaf = usual if self.min_samples_leaf is None else self.min_samples_leaf
        options = GbdtOptions(
            objective=objective,
            trees=self.n_estimators,
            rate=self.learning_rate,
            num_leaves=self.max_leaf_nodes,
            max_depth=self.max_depth or 0,
            min_data_in_leaf=leaf,
            min_data_in_bin=1,
            min_data_per_group=5 * leaf,
            lambda_l2=self.l2_regularization,
            max_bin=self.max_bins,
        )
        encoding: TableEncoding | None = self.encoding_
        names = list(encoding.names) if encoding is not None else None
        texts = encoding.categories if encoding is not None else {}
        source = ArraySource(values, targets, name="X", names=names)
        table = TableChoice(train=source, categorical=tuple(texts))
        strategy = "single" if self.workers == 1 else "allreduce"
        self.model_: GbdtModel = train_gbdt(table, options, strategy=strategy, workers=self.workers).model

    def _predicted(self, given: Any) -> NDArray[np.float64]:
        check_is_fitted(self)
        values = _values(self, given, fitting=False, ensure_all_finite="allow-nan")
        found: NDArray[np.float64] = self.model_.predict(RowBlock(labels=None, dense=values))
        return found


class GradientBoostingClassifier(_Classifier, _Boosting):
    """Boosted trees for two labels or several; `model_` is what `manyhands.workloads.gbdt` trained.

    `min_samples_leaf` is 20, and a twentieth of the rows where these are fewer than 400, unless it is given. The trees
    are the same for any number of `workers`.
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        values = _values(self, X, fitting=True, ensure_all_finite="allow-nan")
        targets = _classes(self, y, len(values))
        self._grow(values, targets, "binary" if len(self.classes_) == 2 else "multiclass")
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        return _both(self._predicted(X))


class GradientBoostingRegressor(RegressorMixin, _Boosting):  # type: ignore[misc]
    """Boosted trees for a number, by squared error; parameters as those of `GradientBoostingClassifier`."""

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        values = _values(self, X, fitting=True, ensure_all_finite="allow-nan")
        targets = _targets(y, len(values))
        self._grow(values, targets, "regression")
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        return self._predicted(X)


def _targets(given: Any, rows: int) -> NDArray[np.float64]:
    found = column_or_1d(given, warn=True, dtype=np.float64)
    check_consistent_length(np.empty(rows), found)
    assert_all_finite(found, input_name="y")
    return np.asarray(found, np.float64)


class _Given(RowText):
    """Examples that are in memory already."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(b"")
        self.name, self._rows = "X", rows

    def blocks(self, on_bytes: Any = None) -> Any:  # noqa: ARG002 - nothing is read
        yield self._rows


class LogisticRegression(_Classifier, BaseEstimator):  # type: ignore[misc]
    """Logistic regression of two labels or several, learned one example after the other.

    `passes` are 5, and more of fewer than 40,000 rows (at most 200), unless they are given; `learner` is sgd, adagrad
    or ftrl; several `workers` are threads without locks (hogwild). Features are taken in single precision.
    """

    def __init__(
        self,
        *,
        learner: str = "adagrad",
        passes: int | None = None,
        rate: float | None = None,
        l1: float = 0.0,
        l2: float = 0.0,
        fit_intercept: bool = True,
        workers: int = 1,
    ) -> None:
        self.learner, self.passes, self.rate, self.l1, self.l2 = learner, passes, rate, l1, l2
        self.fit_intercept, self.workers = fit_intercept, workers

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        values = _values(self, X, fitting=True, accept_sparse="csr")
        targets = _classes(self, y, values.shape[0])
        usual = max(5, min(_MOST_PASSES, _EXAMPLES_LEARNED // values.shape[0]))
        options = LogregOptions(
            learner=self.learner,
            passes=usual if self.passes is None else self.passes,
            rate=self.rate,
            l1=self.l1,
            l2=self.l2,
            bias=self.fit_intercept,
        )
        strategy = "single" if self.workers == 1 else "hogwild"
        examples = _Given(self._rows(values, targets))
        self.model_ = train_logreg(examples, options, strategy=strategy, workers=self.workers).model
        return self

    def _rows(self, values: Any, targets: NDArray[np.float64] | None) -> Rows:
        if hasattr(values, "indptr"):
            count = values.shape[0]
            return Rows(
                starts=values.indptr.astype(np.int64),
                indices=values.indices.astype(np.int32),
                values=values.data.astype(np.float32),
                labels=np.full(count, np.nan, np.float32) if targets is None else targets.astype(np.float32),
                weights=np.ones(count, np.float32),
                size=values.shape[1],
            )
        encoding = self.encoding_ or TableEncoding(names=unnamed(values.shape[1]))
        return encoding.sparse(values, targets)

    def predict_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        check_is_fitted(self)
        values = _values(self, X, fitting=False, accept_sparse="csr")
        return _both(self.model_.probabilities(self._rows(values, None)))


class TruncatedSVD(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """The largest singular values and their components; `transform` gives coordinates along them.

    With `center` the mean of each column is subtracted first: PCA. As exact as `tol`, the relative error of the values.
    """

    def __init__(
        self,
        n_components: int = 2,
        *,
        center: bool = False,
        tol: float = 1e-8,
        random_state: int = 0,
        workers: int = 1,
    ) -> None:
        self.n_components, self.center, self.tol = n_components, center, tol
        self.random_state, self.workers = random_state, workers

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:  # noqa: N803, ARG002 - as scikit-learn calls it
        values = self._matrix(X, fitting=True)
        rows, columns = values.shape
        if self.n_components > min(rows, columns):
            raise UserError(
                f"n_components={self.n_components} must be at most n_samples = {rows} and n_features = {columns}"
            )
        seed = self.random_state if isinstance(self.random_state, int) else 0
        options = SvdOptions(rank=self.n_components, center=self.center, tolerance=self.tol, seed=seed)
        if self.workers == 1:
            self.model_ = truncated_svd(values, options)
        else:
            dense = values.toarray() if hasattr(values, "indptr") else np.ascontiguousarray(values)
            self.model_ = train_svd(dense, options, workers=self.workers).model
        self.singular_values_, self.components_ = self.model_.singular_values, self.model_.components
        self._n_features_out = self.n_components
        variances = np.var(self._projected(values), axis=0)
        self.explained_variance_ratio_ = variances / max(_variance(values), np.finfo(float).tiny)
        return self

    def _matrix(self, given: Any, *, fitting: bool) -> Any:
        """Numbers, and a column for each category where a DataFrame has texts."""
        values = _values(self, given, fitting=fitting, accept_sparse="csr")
        encoding: TableEncoding | None = self.encoding_
        if encoding is not None and np.isnan(values).any():
            row, column = np.argwhere(np.isnan(values))[0]
            raise UserError(
                f"X, row {row + 1}, column {encoding.names[column]!r}: the value is missing or new"
            )
        if encoding is None or not encoding.categories:
            return values
        rows = encoding.sparse(values, None)
        return csr_matrix((rows.values, rows.indices, rows.starts), (len(rows), rows.size), np.float64)

    def transform(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        check_is_fitted(self)
        return self._projected(self._matrix(X, fitting=False))

    def _projected(self, values: Any) -> NDArray[np.float64]:
        found = values @ self.components_.T
        if self.model_.mean is not None:
            found = found - self.model_.mean @ self.components_.T
        return np.asarray(found)


def _variance(values: Any) -> float:
    """The sum of the variances of all columns."""
    if not hasattr(values, "indptr"):
        return float(np.var(values, axis=0, dtype=np.float64).sum())
    return float(mean_variance_axis(values, axis=0)[1].sum())
