"""Every collective, reduction, dtype and shape gives what Gloo gives, in the same processes, row by row of a table."""

from __future__ import annotations

import pytest

from processes import c10d_table
from processes.c10d_launch import run_checks
from processes.c10d_worker import checks_of

CHECKS = [*checks_of(c10d_table), "descriptors"]
WORLDS = [2, pytest.param(3, marks=pytest.mark.soak)]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"world{world}")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    return run_checks("c10d_table", request.param, tmp_path_factory.mktemp("c10d"))


@pytest.mark.parametrize("check", CHECKS)
def test_the_table_is_that_of_gloo(outcomes: list[dict[str, str]], check: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.get(check, "did not run") == "", f"rank {rank}: {outcome.get(check)}"
