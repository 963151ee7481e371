"""GloVe by threads on one memory: the same as one thread where the order is fixed, near it where it is not."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from manyhands.errors import DataError
from manyhands.places.local.signals import ending
from manyhands.strategy import Strategy
from manyhands.workloads.glove import glove_task
from manyhands.workloads.glove.cooccurrence_files import RECORD
from manyhands.workloads.glove.learning import GloveOptions, Keeping, train_glove

SIZE = 2_000
OPTIONS = GloveOptions(dim=16, passes=4, x_max=10.0, dtype="float64")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    drawn = np.random.default_rng(4)
    records = np.empty(20_500, RECORD)  # no multiple of anything that blocks are made of
    for name in ("word", "context"):
        records[name] = (SIZE ** drawn.random(len(records))).astype(np.int32)
    records["count"] = np.exp(drawn.normal(0.0, 2.0, len(records)))
    records.tofile(tmp_path / "records.bin")
    return tmp_path / "records.bin"


@pytest.mark.parametrize(
    ("strategy", "workers"), [("hogwild", 1), ("hogwild order=locked", 1), ("hogwild order=turns", 3)]
)
def test_a_fixed_order_gives_the_result_of_one_thread(path: Path, strategy: str, workers: int) -> None:
    alone = train_glove(path, SIZE, OPTIONS)
    found = train_glove(path, SIZE, OPTIONS, strategy=strategy, workers=workers)
    np.testing.assert_allclose(found.model.word, alone.model.word, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.model.context_bias, alone.model.context_bias, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.costs, alone.costs, rtol=1e-11)


@pytest.mark.parametrize("order", ["free", "locked"])
def test_any_order_reaches_the_cost_of_one_thread_within_a_hundredth(path: Path, order: str) -> None:
    alone = train_glove(path, SIZE, OPTIONS)
    found = train_glove(path, SIZE, OPTIONS, strategy=f"hogwild order={order}", workers=4)
    assert len(found.costs) == OPTIONS.passes
    np.testing.assert_allclose(found.costs[-1], alone.costs[-1], rtol=0.01)


@pytest.mark.parametrize(
    ("strategy", "number"),
    [
        ("single", signal.SIGINT),
        ("single", signal.SIGHUP),
        ("hogwild", signal.SIGINT),
        ("hogwild", signal.SIGTERM),
    ],
)
def test_an_interrupted_run_goes_on_to_the_bytes_of_an_uninterrupted_one(
    path: Path, tmp_path: Path, strategy: str, number: signal.Signals
) -> None:
    def interrupt(_number: int, _cost: float) -> None:
        signal.raise_signal(number)

    endless = replace(OPTIONS, passes=10**6)
    out = tmp_path / "run"
    with ending() as end:
        found = train_glove(
            path, SIZE, endless, strategy=strategy, after_pass=interrupt, keep=Keeping(out=out)
        )
    assert end.signal == number
    assert found.interrupted
    options = replace(OPTIONS, passes=len(found.costs) + 2)
    whole = train_glove(path, SIZE, options, strategy=strategy)
    resumed = train_glove(path, SIZE, options, strategy=strategy, keep=Keeping(out=out, resume=True))
    assert resumed.summary["resumed_from_step"] > 0
    for name in ("word", "context", "word_bias", "context_bias"):
        np.testing.assert_array_equal(getattr(resumed.model, name), getattr(whole.model, name), err_msg=name)
    assert resumed.costs == whole.costs
    assert resumed.costs[: len(found.costs)] == found.costs


def test_without_a_directory_an_interruption_is_raised(path: Path) -> None:
    def interrupt(_number: int, _cost: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_glove(path, SIZE, replace(OPTIONS, passes=10**6), after_pass=interrupt)


def test_a_bad_record_ends_all_threads(tmp_path: Path) -> None:
    records = np.array([(1, 2, 1.0)] * 5_000, RECORD)
    records[4_321] = (1, 7, 1.0)
    records.tofile(tmp_path / "records.bin")
    with pytest.raises(DataError, match="record 4321 is"):
        train_glove(tmp_path / "records.bin", 3, OPTIONS, strategy="hogwild order=locked", workers=3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("manyhands-worker-")]


@pytest.mark.parametrize(
    ("strategy", "in_order"), [("single", False), ("hogwild", False), ("hogwild order=locked", True)]
)
def test_what_takes_turns_is_compiled_only_where_turns_are_taken(
    strategy: str, in_order: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    monkeypatch.setattr(glove_task, "warm", lambda dtype: compiled.append("free"))
    monkeypatch.setattr(glove_task, "warm_in_order", lambda dtype: compiled.append("in turns"))
    np.zeros(4, RECORD).tofile(tmp_path / "records")
    task = glove_task.GloveTask.of(tmp_path / "records", 5, GloveOptions())
    found = task.for_strategy(Strategy.parse(strategy), 1)
    assert isinstance(found, glove_task.GloveTask)
    found.warm()
    assert compiled == ["free", "in turns"][: 1 + in_order]
