"""The benchmark of all-reduce: small, but with every kind of contender."""

from __future__ import annotations

import json

import pytest

from manyhands.errors import ManyhandsError, UserError
from manyhands.lab.bench.allreduce import format_table, run_bench
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS


@pytest.mark.soak
def test_a_small_run_measures_and_checks_every_contender() -> None:
    result = run_bench(2, sizes_bytes=(0, 1024, 2 << 20), repeats=9, timeout_s=90)
    assert json.loads(json.dumps(result)) == result
    assert [(row["size_bytes"], row["repeats"]) for row in result["results"]] == [
        (0, 9),
        (1024, 9),
        (2 << 20, 7),
    ]
    table = format_table(result)
    for row in result["results"]:
        assert list(row["contenders"]) == ["bucket", *ALGORITHMS, "gloo"]
        assert row["contenders"]["gloo"]["times_gloo"] == 1
        for name, one in row["contenders"].items():
            assert 0 < one["p10_us"] <= one["median_us"] <= one["p90_us"]
            assert name in table


def test_a_run_that_takes_too_long_ends() -> None:
    with pytest.raises(ManyhandsError, match=r"rank \d of the benchmark did not end within 0\.1 s"):
        run_bench(2, timeout_s=0.1)


def test_bad_input_gets_a_sentence() -> None:
    with pytest.raises(UserError, match="workers=1"):
        run_bench(1)
    with pytest.raises(UserError, match="repeats=0"):
        run_bench(2, repeats=0)
    with pytest.raises(UserError, match="1023 is not a multiple of 4"):
        run_bench(2, sizes_bytes=(1023,))
    with pytest.raises(UserError, match=r"'rign'.*did you mean 'ring'"):
        run_bench(2, schedules=("rign",))
