"""The benchmark of whole training steps: small, but with every contender."""

from __future__ import annotations

import json
from typing import Any

import pytest

from manyhands.errors import ManyhandsError, UserError
from manyhands.lab.bench.harness import from_text, to_text
from manyhands.lab.bench.step import (
    WORKLOADS,
    BenchWorkload,
    Cnn,
    GptBench,
    Mlp,
    StepMeasured,
    agreed_losses,
    format_table,
    named_workloads,
    run_bench,
)

SMALL = (
    Mlp(inputs=12, width=24, hidden=2, classes=5),  # SGD with momentum
    GptBench(context=8, layers=1, width=16, heads=2, batch=3),  # AdamW
)
PARAMETERS = (
    (12 * 24 + 24) + (24 * 24 + 24) + (24 * 5 + 5),
    (256 + 8) * 16 + (12 * 16 * 16 + 9 * 16) + 4 * 16 + 2 * 16,
)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return run_bench(2, SMALL, steps=6, timeout_s=90)


@pytest.mark.soak
def test_every_contender_trains_the_same_and_is_measured(result: dict[str, Any]) -> None:
    assert json.loads(json.dumps(result)) == result
    assert [row["workload"] for row in result["results"]] == ["mlp", "gpt"]
    for row, parameters, workload in zip(result["results"], PARAMETERS, SMALL, strict=True):
        assert row["parameters"] == parameters
        assert (row["rounds"], row["steps_per_round"]) == (2, 4)
        assert row["batch_per_worker"] == workload.batch
        assert 0 <= row["loss_difference"] < 1e-4
        assert row["last_loss"] != pytest.approx(row["first_loss"], abs=10 * row["loss_difference"])
        cells = row["contenders"]
        assert list(cells) == ["ddp", "mirrored", "central", "single", "alone"]
        assert cells["ddp"]["times_ddp"] == 1
        for name, cell in cells.items():
            assert 0 < cell["p10_ms"] <= cell["median_ms"] <= cell["p90_ms"]
            workers = 1 if name == "alone" else 2
            assert cell["samples_per_s"] == pytest.approx(1e3 * workers * workload.batch / cell["median_ms"])
            assert ("efficiency" in cell) == (name in ("ddp", "mirrored", "central"))


@pytest.mark.soak
def test_the_table_names_all_that_ran(result: dict[str, Any]) -> None:
    table = format_table(result)
    assert f"2 workers on {result['cores']} cores" in table
    for word in ("mlp", "gpt", "ddp", "mirrored", "central", "single", "alone"):
        assert table.count(f"\n{word}") == (1 if word in WORKLOADS else 2)


def test_a_loss_that_differs_is_found_out() -> None:
    losses = {"ddp": [2.0, 1.0], "mirrored": [2.0, 1.0], "central": [2.0, 1.0]}
    ranks = [
        StepMeasured(parameters=1, seconds={}, losses={**losses, "single": [2.0, 1.5]}),
        StepMeasured(parameters=1, seconds={}, losses={**losses, "ddp": [2.0, 2.0]}),
    ]
    with pytest.raises(ManyhandsError, match=r"mirrored has a loss of 1 in step 1 and ddp one of 1\.5"):
        agreed_losses(ranks)
    ranks[1].losses.update(mirrored=[2.0, 2.0], central=[2.0, 2.0])
    assert agreed_losses(ranks) == ([2.0, 1.5], 0.0)


def test_a_run_that_takes_too_long_ends() -> None:
    with pytest.raises(ManyhandsError, match=r"rank \d of the benchmark did not end within 0\.1 s"):
        run_bench(2, SMALL[:1], timeout_s=0.1)


def test_bad_input_gets_a_sentence() -> None:
    with pytest.raises(UserError, match="workers=1"):
        run_bench(1)
    with pytest.raises(UserError, match="steps=0"):
        run_bench(2, steps=0)
    with pytest.raises(UserError, match=r"'mpl'.*did you mean 'mlp'"):
        named_workloads("cnn,mpl")


@pytest.mark.parametrize("workload", [*SMALL, Cnn(side=8), *WORKLOADS.values()])
def test_workloads_travel_as_text(workload: BenchWorkload) -> None:
    assert from_text(to_text(workload), Mlp, Cnn, GptBench) == workload


@pytest.mark.parametrize(("word", "millions"), [("mlp", 25.1), ("cnn", 0.097), ("gpt", 3.24)])
def test_sizes_are_those_that_the_documents_name(word: str, millions: float) -> None:
    task = WORKLOADS[word].task(workers=3)
    assert task.batch_size == 3 * WORKLOADS[word].batch
    count = sum(parameter.numel() for parameter in task.model().parameters())
    assert count / 1e6 == pytest.approx(millions, rel=0.01)
