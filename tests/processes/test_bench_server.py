"""The benchmark of a parameter server: small, but with every contender."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from manyhands.errors import UserError
from manyhands.lab.bench.bench_server import HAS_RAY, format_table, run_bench
from manyhands.lab.bench.harness import from_text, to_text
from manyhands.lab.bench.server_work import Flat, RowWork, TimedExchange

SMALL = (
    Flat(name="dense", num_bytes=1 << 20),
    RowWork(name="rows", table_rows=500, width=8, rows=50, sets=3),
)
OURS = ["manyhands, shared memory, sync", "manyhands, shared memory, async", "manyhands, TCP, sync"]
ROUNDS = 3


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return run_bench(SMALL, rounds=ROUNDS, memory_bytes=8 << 20, timeout_s=150)


@pytest.mark.soak
def test_every_contender_that_is_there_is_checked_and_measured(result: dict[str, Any]) -> None:
    assert json.loads(json.dumps(result)) == result
    names = [*OURS, *(["ray actor", "ray actor, by hand in place"] if HAS_RAY else []), "torch rpc"]
    for row, exchange, block in zip(result["results"], SMALL, (4, 20), strict=True):
        assert row["exchange"] == exchange.name
        assert row["gradient_bytes"] == exchange.gradient_bytes
        assert row["round_trips"] == ROUNDS * block
        assert list(row["contenders"]) == names
        for cell in row["contenders"].values():
            assert 0 < cell["p10_us"] <= cell["median_us"] <= cell["p90_us"]
            assert cell["round_trips_per_s"] == pytest.approx(1e6 / cell["median_us"])
            assert ("times_ray" in cell) == HAS_RAY


@pytest.mark.soak
def test_ray_is_the_measure_where_it_is_there(result: dict[str, Any]) -> None:
    if not HAS_RAY:
        pytest.skip("ray is not installed: pip install 'manyhands[ray]'")
    for row in result["results"]:
        ray = row["contenders"]["ray actor"]
        assert ray["times_ray"] == 1
        for cell in row["contenders"].values():
            assert cell["times_ray"] == pytest.approx(ray["median_us"] / cell["median_us"])


@pytest.mark.soak
def test_a_server_keeps_no_more_than_two_gradients_per_worker(result: dict[str, Any]) -> None:
    rows = result["memory"]
    assert [(row["link"], row["workers"]) for row in rows] == [
        ("shared", 2),
        ("shared", 4),
        ("tcp", 2),
        ("tcp", 4),
    ]
    for row in rows:
        model = row["parameters_bytes"]
        assert row["state_bytes"] == 2 * model
        assert row["private_bytes"] > 2.5 * model
        # two processes never are alike to the page: a quarter of the model is allowed for that
        assert row["private_per_worker_bytes"] < (0.25 if row["link"] == "shared" else 2.25) * model
        mapped = 2 * model * row["workers"] if row["link"] == "shared" else 0
        assert row["shared_bytes"] == pytest.approx(mapped, abs=0.25 * model)


@pytest.mark.soak
def test_the_table_names_all_that_ran(result: dict[str, Any]) -> None:
    table = format_table(result)
    assert f"on {result['cores']} cores" in table
    assert ("ray is not installed" in table) == (not HAS_RAY)
    for name in (*result["results"][0]["contenders"], "dense: 1.0 MiB", "50 rows × 8 of 500, AdaGrad"):
        assert name in table
    assert "tcp, 4 workers" in table
    without = format_table({**result, "ray": None, "memory": []})
    assert "pip install 'manyhands[ray]'" in without
    assert "memory" not in without.replace("shared memory", "")


@pytest.mark.parametrize("exchange", SMALL)
def test_exchanges_travel_as_text_and_know_a_wrong_answer(exchange: TimedExchange) -> None:
    assert from_text(to_text(exchange), Flat, RowWork) == exchange
    right = exchange.expected(5)
    assert exchange.agrees(right, 5)
    assert not exchange.agrees(exchange.expected(4), 5)
    assert not exchange.agrees(np.where(np.arange(right.size).reshape(right.shape) == 3, 9.0, right), 5)


def test_bad_input_gets_a_sentence() -> None:
    with pytest.raises(UserError, match="rounds=0"):
        run_bench(rounds=0)
    with pytest.raises(UserError, match="memory_bytes=-1"):
        run_bench(memory_bytes=-1)
    with pytest.raises(UserError, match="1023 is not a multiple of 4"):
        Flat(name="odd", num_bytes=1023)
    with pytest.raises(UserError, match="3 sets of 11 rows of 2 are not of a table of 10 rows"):
        RowWork(name="rows", table_rows=10, width=2, rows=11, sets=3)
