"""Every collective of the backend, in real processes, for 1 to 4 ranks: the results are those of Gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import c10d_collectives
from processes.c10d_launch import run_checks
from processes.c10d_worker import checks_of

pytestmark = pytest.mark.usefixtures("compiler_imported")
CHECKS = [*checks_of(c10d_collectives), "descriptors"]


WORLDS = [3, *(pytest.param(world, marks=pytest.mark.soak) for world in (1, 2, 4))]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"world{world}")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("c10d")
    return run_checks("c10d_collectives", request.param, folder, compiler=True)


@pytest.mark.parametrize("check", CHECKS)
def test_results_are_those_of_gloo(outcomes: list[dict[str, str]], check: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.get(check, "did not run") == "", f"rank {rank}: {outcome.get(check)}"
