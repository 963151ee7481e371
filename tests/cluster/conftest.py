"""Ranks that are threads run on one core, but for tests of the memory that they share."""

import pytest

SEVERAL_CORES = (
    "test_c10d_stage",
    "test_executor",
    "test_hogwild",
    "test_link_contract",
    "test_link_group",
    "test_overlapped_sums",
    "test_shared_group",
    "test_shared_scatter",
)
"""Files with tests of what several cores may do at once."""


@pytest.fixture(autouse=True)
def cores(request: pytest.FixtureRequest) -> None:
    if request.path.stem not in SEVERAL_CORES:
        request.getfixturevalue("one_core")
