"""The grid of workers: every worker has one place, and the axes through it."""

from __future__ import annotations

import re

import pytest

from manyhands.errors import UserError
from manyhands.strategies.common.grid.grid_layout import Coordinates, Grid, GridAxis


@pytest.mark.parametrize("data", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("slices", [1, 2, 3])
def test_every_worker_has_a_place_of_its_own(data: int, stages: int, slices: int) -> None:
    grid = Grid(data=data, stages=stages, slices=slices)
    places = [grid.place(rank) for rank in range(grid.workers)]
    assert len(set(places)) == grid.workers == data * stages * slices
    assert [grid.rank(place) for place in places] == list(range(grid.workers))
    for rank in range(grid.workers):
        lines = [grid.along(axis, rank) for axis in (GridAxis.DATA, GridAxis.STAGE, GridAxis.SLICE)]
        assert [len(line) for line in lines] == [data, stages, slices]
        assert all(rank in line for line in lines)
        assert len(set().union(*lines)) == data + stages + slices - 2, "they meet in this worker alone"


def test_neighbours_share_the_layers_they_slice() -> None:
    grid = Grid(data=2, stages=2, slices=2)
    assert grid.along(GridAxis.SLICE, 5) == (4, 5)
    assert grid.along(GridAxis.STAGE, 5) == (5, 7)
    assert grid.along(GridAxis.DATA, 5) == (1, 5)
    assert grid.copies == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert grid.place(5) == Coordinates(data=1, stage=0, slice=1)


def test_replicas_follow_from_the_number_of_workers() -> None:
    assert Grid.of(8, stages=2, slices=2) == Grid(data=2, stages=2, slices=2)
    assert Grid.of(3) == Grid(data=3)
    assert Grid.of(4, stages=2, data=2) == Grid(data=2, stages=2)


@pytest.mark.parametrize(
    ("workers", "given", "sentence"),
    [
        (3, {"stages": 2}, "workers=3: must be a multiple of 2 (2 stages); use workers=2 or workers=4"),
        (1, {"stages": 4}, "workers=1: must be a multiple of 4 (4 stages); use workers=4"),
        (
            4,
            {"stages": 2, "slices": 2, "data": 2},
            "workers=4: 2 stages × 2 slices × 2 replicas would use 8; use workers=8",
        ),
        (2, {"data": 1}, "workers=2: one worker would use 1; use workers=1"),
        (2, {"stages": 0}, "stages=0 must be an integer of at least 1"),
    ],
)
def test_workers_that_do_not_fill_it_are_refused_with_the_nearest_that_do(
    workers: int, given: dict[str, int], sentence: str
) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
        Grid.of(workers, **given)
