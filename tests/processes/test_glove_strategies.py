"""GloVe in real processes: hogwild on a shared segment, and every batch strategy against one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from manyhands.errors import DataError
from manyhands.workloads.glove.cooccurrence_files import RECORD
from manyhands.workloads.glove.learning import GloveOptions, GloveResult, train_glove

SIZE = 200
BATCHES = GloveOptions(dim=10, passes=2, x_max=10.0, batch=500, dtype="float64", seed=5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    drawn = np.random.default_rng(2)
    records = np.empty(4_300, RECORD)
    for name in ("word", "context"):
        records[name] = (SIZE ** drawn.random(len(records))).astype(np.int32)
    records["count"] = np.exp(drawn.normal(0.0, 2.0, len(records)))
    records.tofile(tmp_path / "records.bin")
    return tmp_path / "records.bin"


def assert_equal(found: GloveResult, expected: GloveResult) -> None:
    for name in ("word", "context", "word_bias", "context_bias"):
        np.testing.assert_allclose(
            getattr(found.model, name), getattr(expected.model, name), rtol=0, atol=1e-9, err_msg=name
        )
    np.testing.assert_allclose(found.costs, expected.costs, rtol=1e-9)


@pytest.mark.parametrize(
    "strategy",
    [
        "tensor",
        pytest.param("ps", marks=pytest.mark.soak),
        pytest.param("allreduce", marks=pytest.mark.soak),
        pytest.param("mirrored", marks=pytest.mark.soak),
        pytest.param("ps servers=2 consistency=bounded:0", marks=pytest.mark.soak),
    ],
)
def test_two_processes_equal_one_with_the_same_batch(path: Path, strategy: str) -> None:
    expected = train_glove(path, SIZE, BATCHES)
    passes: list[tuple[int, float]] = []
    found = train_glove(
        path, SIZE, BATCHES, strategy=strategy, workers=2, after_pass=lambda *report: passes.append(report)
    )
    assert_equal(found, expected)
    assert passes == [(1, found.costs[0]), (2, found.costs[1])]


@pytest.mark.soak
@pytest.mark.parametrize("order", ["free", "turns"])
def test_processes_on_one_memory(path: Path, order: str) -> None:
    options = GloveOptions(dim=10, passes=3, x_max=10.0, dtype="float64")
    alone = train_glove(path, SIZE, options)
    found = train_glove(path, SIZE, options, strategy=f"hogwild hands=processes order={order}", workers=2)
    if order == "turns":
        assert_equal(found, alone)
    else:
        np.testing.assert_allclose(found.costs, alone.costs, rtol=0.05)


@pytest.mark.soak
def test_what_a_worker_finds_in_the_file_is_the_callers_error(tmp_path: Path) -> None:
    records = np.array([(1, 2, 1.0)] * 200, RECORD)
    records[123] = (1, 9, 1.0)
    records.tofile(tmp_path / "records.bin")
    with pytest.raises(DataError, match=r"record 123 is .*ids must be from 1 to 3"):
        train_glove(
            tmp_path / "records.bin", 3, GloveOptions(dim=4), strategy="hogwild hands=processes", workers=2
        )
