"""Truncated SVD: every way through the iteration against LAPACK's and ARPACK's values, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.linalg import svds
from sklearn.datasets import load_digits, load_svmlight_file
from sklearn.decomposition import PCA

from manyhands.data.table_files import open_matrix
from manyhands.errors import DataError, UserError
from manyhands.serving.opening import open_predictor
from manyhands.workloads.predictor import ReadAs
from manyhands.workloads.svd import in_memory, product_kernels
from manyhands.workloads.svd import options as options_module
from manyhands.workloads.svd.in_memory import truncated_svd
from manyhands.workloads.svd.krylov import (
    POWER,
    KrylovSpace,
    PassTotals,
    advance,
    begin,
    components_of,
    numbers_of,
)
from manyhands.workloads.svd.model import SvdModel, SvdPredictor
from manyhands.workloads.svd.options import Shape, SvdOptions, sizes_of

DATA = Path(__file__).parents[2].parent / "shared" / "data"
DRAW = np.random.default_rng(11)


def with_values(rows: int, columns: int, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A matrix that has these singular values."""
    left = np.linalg.qr(DRAW.normal(size=(rows, len(values))))[0]
    right = np.linalg.qr(DRAW.normal(size=(columns, len(values))))[0]
    return np.asarray((left * values) @ right.T)


MATRICES: dict[str, Any] = {
    "slow decay": with_values(300, 120, 1 / np.sqrt(np.arange(1.0, 121))),
    "no decay": DRAW.normal(size=(250, 90)),
    "wide": DRAW.normal(size=(40, 300)),
    "square": with_values(60, 60, np.geomspace(1, 1e-3, 60)),
    "down to a millionth": with_values(200, 80, np.geomspace(1, 1e-6, 10)),
    "far from 0": with_values(200, 80, 1 / np.arange(1.0, 81)) + 30.0,
    "twice the same": with_values(150, 70, np.repeat(np.arange(35.0, 0, -1), 2)),
    "single precision": DRAW.normal(size=(100, 50)).astype(np.float32),
    "sparse": sp.random(300, 150, 0.05, random_state=3, format="csr"),
    "sparse and wide": sp.random(60, 500, 0.05, random_state=4, format="csr"),
    "sparse, eight times the same": sp.diags_array([5.0] * 8 + list(np.linspace(4.5, 0.1, 112))).tocsr(),
}
_SAME = ("twice the same", "sparse, eight times the same")


@pytest.fixture(params=["gram", "blocks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Few columns are decomposed in one pass; `blocks` has them take the way of many."""
    if request.param == "blocks":
        monkeypatch.setattr(options_module, "_MOST_GRAM", 0)
    return str(request.param)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("name", MATRICES)
def test_values_and_components_are_those_of_lapack(name: str, center: bool, way: str) -> None:
    matrix = MATRICES[name]
    table = np.asarray(matrix.toarray() if sp.issparse(matrix) else matrix, np.float64)
    table = table - table.mean(axis=0) if center else table
    model = truncated_svd(matrix, SvdOptions(rank=8, center=center))
    _, values, right = np.linalg.svd(table, full_matrices=False)
    np.testing.assert_allclose(model.singular_values, values[:8], rtol=1e-6)
    assert np.max(np.abs(model.singular_values - values[:8]) / values[:8]) <= max(10 * model.error, 1e-12)
    assert model.converged
    np.testing.assert_allclose(model.components @ model.components.T, np.eye(8), atol=1e-10)
    captured = np.linalg.norm(table @ model.components.T) ** 2
    assert captured == pytest.approx(np.sum(values[:8] ** 2), rel=1e-6)
    if name not in _SAME:
        along = np.abs(np.sum(model.components * right[:8], axis=1))
        assert along.min() > 1 - 1e-5
    assert model.energy == pytest.approx(np.sum(table**2), rel=1e-9)


def test_few_columns_take_one_pass_and_others_several(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = MATRICES["slow decay"]
    assert truncated_svd(matrix, SvdOptions(rank=8)).passes == 1
    monkeypatch.setattr(options_module, "_MOST_GRAM", 0)
    model = truncated_svd(matrix, SvdOptions(rank=8))
    assert 3 <= model.passes <= 12


def test_a_smaller_tolerance_takes_more_passes_and_the_error_told_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options_module, "_MOST_GRAM", 0)
    matrix = DRAW.normal(size=(400, 300))
    values = np.linalg.svd(matrix, compute_uv=False)[:5]
    passes = []
    for tolerance in (1e-2, 1e-5, 1e-11):
        model = truncated_svd(matrix, SvdOptions(rank=5, tolerance=tolerance))
        error = float(np.max(np.abs(model.singular_values - values) / values))
        assert error <= model.error <= tolerance
        passes.append(model.passes)
    assert passes == sorted(set(passes))


def test_a_full_space_is_restarted_and_ends_at_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "_MOST_GRAM", 0)
    monkeypatch.setattr(options_module, "_NARROW_BLOCKS", 2)
    matrix = MATRICES["no decay"]
    model = truncated_svd(matrix, SvdOptions(rank=5))
    np.testing.assert_allclose(model.singular_values, np.linalg.svd(matrix, compute_uv=False)[:5], rtol=1e-8)
    monkeypatch.setattr(options_module, "_NARROW_BLOCKS", 12)
    assert truncated_svd(matrix, SvdOptions(rank=5)).passes < model.passes


def test_values_beyond_the_rank_of_the_matrix_are_told_to_be_rounding(way: str) -> None:
    model = truncated_svd(with_values(100, 50, np.array([3.0, 2.0])), SvdOptions(rank=4))
    np.testing.assert_allclose(model.singular_values[:2], [3.0, 2.0])
    assert (model.singular_values[2:] < 1e-7).all()
    assert not model.converged


def test_digits_equal_scipy_and_scikit_learn() -> None:
    table = load_digits().data
    model = truncated_svd(table, SvdOptions(rank=20))
    np.testing.assert_allclose(model.singular_values, np.sort(svds(table, 20)[1])[::-1], rtol=1e-9)
    peer = PCA(12, svd_solver="full").fit(table)
    model = truncated_svd(table, SvdOptions(rank=12, center=True))
    np.testing.assert_allclose(model.explained_variance, peer.explained_variance_, rtol=1e-9)
    np.testing.assert_allclose(model.explained_ratio, peer.explained_variance_ratio_, rtol=1e-9)
    assert model.mean is not None
    np.testing.assert_allclose(model.mean, peer.mean_, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not (DATA / "a9a.gz").exists(), reason="a9a.gz is not in ../shared/data")
def test_a9a_equals_scipy(way: str) -> None:
    matrix, _ = load_svmlight_file(str(DATA / "a9a.gz"))
    model = truncated_svd(matrix, SvdOptions(rank=10))
    np.testing.assert_allclose(model.singular_values, np.sort(svds(matrix, 10)[1])[::-1], rtol=1e-6)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("width", [4, 8, 12, 20, 24])
def test_products_of_sparse_rows_are_those_of_the_same_dense_ones(kind: Any, width: int) -> None:
    matrix = sp.random(70, 40, 0.1, random_state=width, format="csr", dtype=kind)
    matrix.data[:5] = 0  # written down
    dense = matrix.toarray().astype(np.float64)
    vectors, less = DRAW.normal(size=(40, width)), DRAW.normal(size=width)
    csr = matrix.indptr.astype(np.int64), matrix.indices, matrix.data
    product, sums, found = np.ones(40 * width), np.ones(width), np.zeros(70 * width)
    product_kernels.multiply_rows(*csr, vectors.reshape(-1), width, less, product, sums)
    product_kernels.project_rows(*csr, vectors.reshape(-1), width, less, found)
    expected = dense @ vectors - less
    np.testing.assert_allclose(found.reshape(70, width), expected, atol=1e-12)
    np.testing.assert_allclose(product.reshape(40, width), 1 + dense.T @ expected, atol=1e-12)
    np.testing.assert_allclose(sums, 1 + expected.sum(axis=0), atol=1e-12)


@pytest.mark.parametrize("name", ["slow decay", "square", "down to a millionth", "far from 0"])
def test_the_space_stays_orthonormal_while_it_grows(name: str) -> None:
    matrix = MATRICES[name]
    rows, columns = matrix.shape
    shape = Shape(rows=rows, columns=columns, entries=rows * columns, is_sparse=False)
    options = SvdOptions(rank=5, tolerance=1e-12)
    sizes = sizes_of(shape, options, 1)
    object.__setattr__(sizes, "is_gram", False)
    object.__setattr__(sizes, "most", 45)
    space = KrylovSpace.on(np.zeros(numbers_of(sizes)), sizes)
    begin(space, sizes, options, np.zeros(columns))
    nothing = np.zeros(columns)
    for _ in range(8):
        product = (matrix.T @ (matrix @ space.block.T)).T
        advance(space, sizes, options, PassTotals(product=product, sums=nothing, energy=1.0))
        if space.kind != POWER:
            break
        used = int(space.numbers[1])
        basis = space.vectors[:used]
        np.testing.assert_allclose(basis @ basis.T, np.eye(used), atol=1e-12)
    values = np.linalg.svd(matrix, compute_uv=False)[:5]
    np.testing.assert_allclose(components_of(space, 5)[0], values, rtol=1e-6)


def test_a_sparse_matrix_in_memory_takes_narrow_blocks_and_a_large_one_wide_ones() -> None:
    small = Shape(rows=10**5, columns=10**5, entries=10**6, is_sparse=True)
    assert sizes_of(small, SvdOptions(), 1).width == 12
    large = Shape(rows=10**7, columns=10**5, entries=10**8, is_sparse=True)
    assert sizes_of(large, SvdOptions(), 1).width == 20
    assert sizes_of(small, SvdOptions(rank=30), 2).width >= 30


def test_wide_matrices_are_decomposed_across_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for matrix in (DRAW.normal(size=(30, 400)), sp.random(80, 3000, 0.01, random_state=6, format="csr")):
        across = truncated_svd(matrix, SvdOptions(rank=4))
        monkeypatch.setattr(in_memory, "_WIDE", 1e9)
        along = truncated_svd(matrix, SvdOptions(rank=4))
        monkeypatch.undo()
        np.testing.assert_allclose(across.singular_values, along.singular_values, rtol=1e-9)
        np.testing.assert_allclose(across.components, along.components, atol=1e-4)
        np.testing.assert_allclose(across.components @ across.components.T, np.eye(4), atol=1e-12)
        assert (across.rows, across.components.shape) == (matrix.shape[0], (4, matrix.shape[1]))
    lacking = truncated_svd(np.outer(np.arange(1.0, 6), np.ones(50)), SvdOptions(rank=2))
    np.testing.assert_allclose(lacking.components @ lacking.components.T, np.eye(2), atol=1e-12)
    assert not lacking.converged


def test_the_best_so_far_is_there_before_the_end() -> None:
    matrix = MATRICES["no decay"]
    shape = Shape(rows=250, columns=90, entries=250 * 90, is_sparse=False)
    options = SvdOptions(rank=5)
    sizes = sizes_of(shape, options, 1)
    object.__setattr__(sizes, "is_gram", False)
    object.__setattr__(sizes, "most", 60)
    space = KrylovSpace.on(np.zeros(numbers_of(sizes)), sizes)
    begin(space, sizes, options, np.zeros(90))
    found = []
    for _ in range(3):
        product = (matrix.T @ (matrix @ space.block.T)).T
        advance(space, sizes, options, PassTotals(product=product, sums=np.zeros(90), energy=1.0))
        assert space.kind == POWER
        found.append(float(components_of(space, 5)[0].sum()))
    assert found == sorted(found)
    assert found[-1] <= np.linalg.svd(matrix, compute_uv=False)[:5].sum()


def test_entries_that_are_there_twice_are_added_up() -> None:
    twice = sp.csr_matrix((np.ones(4), np.array([0, 0, 1, 2]), np.array([0, 2, 4])), (2, 3))
    model = truncated_svd(twice, SvdOptions(rank=2))
    np.testing.assert_allclose(model.singular_values, np.linalg.svd(twice.toarray(), compute_uv=False))
    assert model.energy == 6.0
    assert not twice.has_canonical_format, "what was given is left as it is"


# ── sizes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

LARGE = Shape(rows=10**7, columns=20_000, entries=2 * 10**11, is_sparse=False)


def test_a_smaller_memory_takes_a_smaller_space_and_smaller_blocks() -> None:
    roomy = sizes_of(LARGE, SvdOptions(memory_bytes=2 << 30), 2)
    tight = sizes_of(LARGE, SvdOptions(memory_bytes=40 << 20), 2)
    assert (roomy.most, roomy.is_gram, roomy.kept_in_memory) == (6 * 20, False, False)
    assert 2 * 20 <= tight.most < roomy.most
    assert tight.block_bytes < roomy.block_bytes
    small = Shape(rows=1000, columns=2000, entries=2 * 10**6, is_sparse=False)
    assert sizes_of(small, SvdOptions(), 2).kept_in_memory


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rank": 0}, "rank is 0; it must be an integer of at least 1"),
        ({"rank": 2.5}, "rank is 2.5; it must be"),
        ({"passes": 0}, "passes is 0; it must be"),
        ({"tolerance": 0.0}, "tolerance is 0.0; it must be a number above 0 and below 1"),
        ({"tolerance": float("nan")}, "tolerance is nan; it must be"),
        ({"seed": -1}, "seed is -1; it must be"),
        ({"memory_bytes": 0}, "memory_bytes is 0; it must be"),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        SvdOptions(**given)


def test_a_rank_or_a_memory_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(UserError, match="rank=65: a matrix of 1,797 rows and 64 columns has at most rank 64"):
        truncated_svd(load_digits().data, SvdOptions(rank=65))
    needs = r"memory=1\.0 MiB is too little: rank 10 of 20,000 columns with 2 workers needs (.*); give more"
    with pytest.raises(UserError, match=needs):
        sizes_of(LARGE, SvdOptions(memory_bytes=1 << 20), 2)
    sizes_of(LARGE, SvdOptions(memory_bytes=40 << 20), 2)


def test_what_is_no_matrix_is_refused() -> None:
    holed = np.ones((40, 5))
    holed[17, 3] = np.nan
    for center in (False, True):
        with pytest.raises(DataError, match="row 17, column 3 is nan, not a number"):
            truncated_svd(holed, SvdOptions(rank=2, center=center))
    with pytest.raises(DataError, match="too large to be squared"):
        truncated_svd(np.full((4, 3), 1e200), SvdOptions(rank=2))
    with pytest.raises(UserError, match=r"shape \(5,\) is not a matrix"):
        truncated_svd(np.ones(5), SvdOptions(rank=1))
    holed = np.ones((3, 50))
    holed[1, 40] = np.inf
    with pytest.raises(DataError, match="row 1, column 40 is inf, not a number"):
        truncated_svd(holed, SvdOptions(rank=2))
    with pytest.raises(DataError, match="too large to be squared"):
        truncated_svd(sp.csr_matrix(np.full((4, 3), 1e200)), SvdOptions(rank=2))
    with pytest.raises(UserError, match=r"a complex128 sparse matrix of shape \(4, 4\) is not a matrix"):
        truncated_svd(sp.eye(4, dtype=complex), SvdOptions(rank=1))
    with pytest.raises(UserError, match="passes=2: the error is still"):
        truncated_svd(DRAW.normal(size=(1200, 1100)), SvdOptions(rank=5, passes=2))


# ── models ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("center", [False, True])
def test_a_saved_model_projects_rows_as_scikit_learn_does(tmp_path: Path, center: bool) -> None:
    table = load_digits().data
    truncated_svd(table, SvdOptions(rank=6, center=center)).save(tmp_path / "svd.safetensors")
    model = SvdModel.load(tmp_path)
    assert (model.mean is not None) == center
    np.save(tmp_path / "table.npy", table)
    expected = (table - table.mean(axis=0) * center) @ model.components.T
    found = np.concatenate(list(model.project_file(open_matrix(tmp_path / "table.npy"), 10_000)))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    lengths = np.linalg.norm(found, axis=0)
    np.testing.assert_allclose(lengths, model.singular_values, rtol=1e-9)
    predictor = open_predictor(tmp_path / "svd.safetensors")
    read = predictor.together(list(predictor.blocks(str(tmp_path / "table.npy"), ReadAs())))
    np.testing.assert_allclose(np.loadtxt(list(predictor.lines(read))), found, rtol=1e-7, atol=1e-7)
    asked = predictor.answers(predictor.inputs(table[:3].tolist()))
    np.testing.assert_allclose(asked, found[:3], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([1, 2], "input 0 has 2 numbers; it must be an array of numbers, one for each column, 3 in all"),
        ("1 2 3", "input 0 is not an array; it must be an array of numbers"),
        ([1, 2, "x"], "input 0 has 'x' at position 2"),
        ([1, 2, float("inf")], "input 0 has a number that is not finite"),
    ],
)
def test_an_input_that_is_no_row_is_refused(value: object, sentence: str) -> None:
    predictor = SvdPredictor(truncated_svd(np.eye(4, 3), SvdOptions(rank=2)))
    with pytest.raises(UserError, match=sentence):
        predictor.inputs([value])


def test_sparse_rows_are_projected_alike(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("1 0:1 2:2\n-1 1:3\n1\n")
    model = truncated_svd(np.array([[1.0, 0, 2], [0, 3, 0], [0, 0, 0]]), SvdOptions(rank=2, center=True))
    (found,) = model.project_file(open_matrix(tmp_path / "rows"))
    dense = np.array([[1.0, 0, 2], [0, 3, 0], [0, 0, 0]])
    np.testing.assert_allclose(found, (dense - dense.mean(axis=0)) @ model.components.T, atol=1e-12)


def test_a_file_that_does_not_fit_the_components_is_refused(tmp_path: Path) -> None:
    model = truncated_svd(np.eye(4), SvdOptions(rank=2))
    np.save(tmp_path / "other.npy", np.ones((3, 5)))
    with pytest.raises(DataError, match="has 5 columns, but the components have 4"):
        list(model.project_file(open_matrix(tmp_path / "other.npy")))
    np.save(tmp_path / "holed.npy", np.array([[1.0, 2, 3, 4], [1, np.nan, 3, 4]]))
    with pytest.raises(DataError, match="row 1 has a value that is not a number"):
        list(model.project_file(open_matrix(tmp_path / "holed.npy")))


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        SvdModel.load(tmp_path)
    (tmp_path / "svd.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="is not a safetensors file"):
        SvdModel.load(tmp_path)
