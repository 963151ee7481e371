"""The benchmark of the backend: small, but with every contender."""

from __future__ import annotations

import json

import pytest

from manyhands.errors import UserError
from manyhands.lab.bench.allreduce import format_table
from manyhands.lab.bench.allreduce import run_backend_bench as run_bench


@pytest.mark.soak
def test_a_small_run_measures_and_checks_both_backends() -> None:
    result = run_bench(2, sizes_bytes=(0, 1024, 2 << 20), repeats=9, timeout_s=120)
    assert json.loads(json.dumps(result)) == result
    assert [(row["size_bytes"], row["repeats"]) for row in result["results"]] == [
        (0, 9),
        (1024, 9),
        (2 << 20, 7),
    ]
    table = format_table(result)
    for row in result["results"]:
        assert list(row["contenders"]) == ["manyhands", "manyhands async", "gloo"]
        assert row["contenders"]["gloo"]["times_gloo"] == 1
        for name, one in row["contenders"].items():
            assert 0 < one["p10_us"] <= one["median_us"] <= one["p90_us"]
            assert name in table


def test_bad_input_gets_a_sentence() -> None:
    with pytest.raises(UserError, match="workers=1"):
        run_bench(1)
    with pytest.raises(UserError, match="repeats=0"):
        run_bench(2, repeats=0)
    with pytest.raises(UserError, match="1023 is not a multiple of 4"):
        run_bench(2, sizes_bytes=(1023,))
