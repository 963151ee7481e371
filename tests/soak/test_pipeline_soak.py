"""Every schedule of a pipeline for every number of stages up to 16 and of micro-batches up to 64."""

from __future__ import annotations

from itertools import product

import pytest

from manyhands.strategies.pipeline.schedule_cost import check
from manyhands.strategies.pipeline.schedules import SCHEDULES


@pytest.mark.soak
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_is_valid(name: str) -> None:
    for stages, microbatches in product(range(1, 17), range(1, 65)):
        if name != "interleaved" or microbatches % stages == 0:
            check(SCHEDULES[name](stages, microbatches))
