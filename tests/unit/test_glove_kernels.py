"""GloVe's kernels against plain numpy, written from the published rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.errors import DataError, UserError
from manyhands.workloads.glove.cooccurrence_files import RECORD
from manyhands.workloads.glove.glove_kernels import prepare
from manyhands.workloads.glove.glove_model import GloveModel
from manyhands.workloads.glove.learning import train_glove
from manyhands.workloads.glove.options import GloveOptions


def draw_records(path: Path, count: int, vocabulary_size: int, seed: int = 0) -> NDArray[np.void]:
    """Records with some frequent and many rare words, counts from 1/15 to some hundreds."""
    drawn = np.random.default_rng(seed)
    records = np.empty(count, RECORD)
    for name in ("word", "context"):
        records[name] = (vocabulary_size ** drawn.random(count)).astype(np.int32)
    records["count"] = np.exp(drawn.normal(0.0, 2.0, count)).clip(1 / 15)
    records.tofile(path)
    return records


def published(
    records: NDArray[np.void], vocabulary_size: int, options: GloveOptions
) -> tuple[GloveModel, list[float]]:
    """The published loop, item for item; the model holds the parameters at the end."""
    model = GloveModel(vocabulary_size, options).initialise()
    start = model.snapshot()
    vectors = np.concatenate([start.word, start.context])
    biases = np.concatenate([start.word_bias, start.context_bias])
    squares, bias_squares = np.ones_like(vectors), np.ones_like(biases)
    costs = []
    for _ in range(options.passes):
        cost = 0.0
        for word, context, count in records.tolist():
            i, j = word - 1, vocabulary_size + context - 1
            diff = vectors[i] @ vectors[j] + biases[i] + biases[j] - np.log(count)
            fdiff = diff if count > options.x_max else (count / options.x_max) ** options.alpha * diff
            cost += 0.5 * fdiff * diff
            slope_i, slope_j = options.rate * fdiff * vectors[j], options.rate * fdiff * vectors[i]
            vectors[i] -= slope_i / np.sqrt(squares[i])
            vectors[j] -= slope_j / np.sqrt(squares[j])
            squares[i] += slope_i**2
            squares[j] += slope_j**2
            for row in (i, j):
                biases[row] -= fdiff / np.sqrt(bias_squares[row])
                bias_squares[row] += fdiff**2
        costs.append(cost / len(records))
    model.rows[:, : options.dim] = vectors
    model.rows[:, model.layout.lanes] = biases
    return model, costs


@pytest.mark.parametrize("dim", [50, 8])
def test_one_thread_in_float64_is_the_published_rule(tmp_path: Path, dim: int) -> None:
    options = GloveOptions(dim=dim, passes=2, x_max=10.0, dtype="float64", seed=3)
    records = draw_records(tmp_path / "records.bin", 5_000, 300)
    model, costs = published(records, 300, options)
    expected = model.snapshot()

    result = train_glove(tmp_path / "records.bin", 300, options)

    np.testing.assert_allclose(result.model.word, expected.word, rtol=0, atol=1e-10)
    np.testing.assert_allclose(result.model.context, expected.context, rtol=0, atol=1e-10)
    np.testing.assert_allclose(result.model.word_bias, expected.word_bias, rtol=0, atol=1e-10)
    np.testing.assert_allclose(result.model.context_bias, expected.context_bias, rtol=0, atol=1e-10)
    np.testing.assert_allclose(result.costs, costs, rtol=1e-11)
    assert np.abs(expected.word - GloveModel(300, options).initialise().snapshot().word).max() > 0.01


def test_float32_stays_near_float64(tmp_path: Path) -> None:
    draw_records(tmp_path / "records.bin", 5_000, 300)
    exact, single = (
        train_glove(tmp_path / "records.bin", 300, GloveOptions(passes=2, dtype=dtype))
        for dtype in ("float64", "float32")
    )
    np.testing.assert_allclose(single.model.word, exact.model.word, rtol=0, atol=2e-5)
    np.testing.assert_allclose(single.costs, exact.costs, rtol=1e-5)
    assert single.model.word.dtype == np.float32
    np.testing.assert_array_equal(single.model.vectors(), single.model.word + single.model.context)


def test_logarithms_and_weights_are_numpys() -> None:
    drawn = np.random.default_rng(1)
    counts = np.concatenate(
        [np.exp(drawn.uniform(-690, 690, 500)), drawn.uniform(0.05, 20, 500), [1.0, 100.0, 1e-300]]
    )
    pairs = np.stack([np.zeros_like(counts), counts], axis=1).reshape(-1)
    logs, weights = np.empty(counts.size), np.empty(counts.size)
    prepare(pairs, 0, logs, weights, np.array([100.0, 0.75, 0.05]))
    np.testing.assert_allclose(logs, np.log(counts), rtol=1e-14, atol=1e-16)
    np.testing.assert_allclose(weights, np.minimum(1, (counts / 100) ** 0.75), rtol=1e-12)


@pytest.mark.parametrize(
    ("record", "size", "sentence"),
    [
        ((4, 1, 1.0), 3, r"record 1 is \(4, 1, 1\); ids must be from 1 to 3"),
        ((1, 0, 1.0), 3, r"record 1 is \(1, 0, 1\)"),
        ((1, 1, 0.0), 3, r"record 1 is \(1, 1, 0\).* count above 0"),
        ((1, 1, float("nan")), 3, r"record 1 is \(1, 1, nan\)"),
    ],
)
def test_a_bad_record_is_named(
    tmp_path: Path, record: tuple[int, int, float], size: int, sentence: str
) -> None:
    np.array([(1, 2, 1.0), record], RECORD).tofile(tmp_path / "records.bin")
    with pytest.raises(DataError, match=sentence):
        train_glove(tmp_path / "records.bin", size, GloveOptions(passes=1))


@pytest.mark.parametrize(
    ("field", "value"),
    [("dim", 0), ("passes", 0), ("x_max", 0.0), ("x_max", -1.0), ("alpha", -0.1), ("rate", 0.0), ("rate", float("nan")),
     ("batch", 0), ("seed", -1), ("dtype", "float16")],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"^{field} is "):
        GloveOptions(**{field: value})  # type: ignore[arg-type]
