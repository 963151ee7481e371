"""Which worker has which coordinates in a grid, if a model is split and not only its data.

Workers are numbered so that those that communicate most are neighbours: the slices of a layer first, then the stages
of a pipeline, then the data replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, unique

from manyhands.errors import UserError, check_count


@unique
class GridAxis(Enum):
    """An axis of the grid."""

    DATA = "data"  # workers with the same part of the model and different samples
    STAGE = "stage"  # workers with different layers and the same samples
    SLICE = "slice"  # workers with different slices of the same layers and the same samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """The coordinates of one worker."""

    data: int = 0
    stage: int = 0
    slice: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The size of the grid along each axis; at least one."""

    data: int = 1
    stages: int = 1
    slices: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "stages", "slices"):
            check_count(name, getattr(self, name))

    @property
    def workers(self) -> int:
        return self.data * self.stages * self.slices

    @staticmethod
    def of(workers: int, *, stages: int = 1, slices: int = 1, data: int | None = None) -> Grid:
        """The grid of so many workers; without `data`, it follows from their number.

        UserError where they do not fill it, which says the nearest numbers that do.
        """
        each = Grid(data=1 if data is None else data, stages=stages, slices=slices).workers
        counts = {"stages": stages, "slices": slices, "replicas": data or 1}
        words = " × ".join(f"{count} {name}" for name, count in counts.items() if count > 1)
        if data is not None and workers != each:
            raise UserError(
                f"workers={workers}: {words or 'one worker'} would use {each}; use workers={each}"
            )
        require_multiple(workers, each, f"{each} ({words})")
        return Grid(data=data if data is not None else workers // each, stages=stages, slices=slices)

    def place(self, rank: int) -> Coordinates:
        rest, place_slice = divmod(rank, self.slices)
        data, stage = divmod(rest, self.stages)
        return Coordinates(data=data, stage=stage, slice=place_slice)

    def rank(self, place: Coordinates) -> int:
        return (place.data * self.stages + place.stage) * self.slices + place.slice

    def along(self, axis: GridAxis, rank: int) -> tuple[int, ...]:
        """Return the workers that differ from this one along one axis only, itself included, in order."""
        at = self.place(rank)
        size = {GridAxis.DATA: self.data, GridAxis.STAGE: self.stages, GridAxis.SLICE: self.slices}[axis]
        return tuple(self.rank(replace(at, **{axis.value: k})) for k in range(size))

    @property
    def copies(self) -> list[tuple[int, ...]]:
        """The workers that hold the same part of the model, part by part."""
        return [self.along(GridAxis.DATA, rank) for rank in range(self.stages * self.slices)]


def require_multiple(workers: int, each: int, words: str) -> None:
    """Raise UserError with the nearest numbers if `workers` is not a multiple of `each`, which `words` call."""
    if workers % each:
        below, above = workers // each * each, -(-workers // each) * each
        nearest = f"workers={above}" if not below else f"workers={below} or workers={above}"
        raise UserError(f"workers={workers}: must be a multiple of {words}; use {nearest}")
