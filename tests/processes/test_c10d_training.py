"""DDP, FSDP2 and their friends on the backend, in real processes: gradients and weights equal Gloo's."""

from __future__ import annotations

import pytest

from processes import c10d_training
from processes.c10d_launch import run_checks
from processes.c10d_worker import checks_of

pytestmark = pytest.mark.usefixtures("compiler_imported")
CHECKS = [*checks_of(c10d_training), "descriptors"]


WORLDS = [2, pytest.param(3, marks=pytest.mark.soak)]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"world{world}")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    return run_checks("c10d_training", request.param, tmp_path_factory.mktemp("c10d"), compiler=True)


@pytest.mark.parametrize("check", CHECKS)
def test_training_equals_gloo(outcomes: list[dict[str, str]], check: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.get(check, "did not run") == "", f"rank {rank}: {outcome.get(check)}"
