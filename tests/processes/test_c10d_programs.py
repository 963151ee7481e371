"""Asynchronous works, messages, groups, threads and mistakes, in real processes."""

from __future__ import annotations

import pytest

from processes import c10d_programs
from processes.c10d_launch import run_checks
from processes.c10d_worker import checks_of

CHECKS = [*checks_of(c10d_programs), "descriptors"]


WORLDS = [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(3, marks=pytest.mark.soak)]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"world{world}")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    return run_checks("c10d_programs", request.param, tmp_path_factory.mktemp("c10d"))


@pytest.mark.parametrize("check", CHECKS)
def test_programs_run(outcomes: list[dict[str, str]], check: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.get(check, "did not run") == "", f"rank {rank}: {outcome.get(check)}"
