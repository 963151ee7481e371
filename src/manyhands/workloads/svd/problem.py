"""What is decomposed with which sizes, and the memory of that: plain values, which are sent to worker processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from manyhands.data.stored_matrix import StoredMatrix
from manyhands.workloads.svd.krylov import Array, KrylovSpace, numbers_of
from manyhands.workloads.svd.options import Shape, SvdOptions, SvdSizes, sizes_of
from manyhands.workloads.svd.pass_sums import PassSums

__all__ = ["SvdMemory", "SvdWork"]


class SvdMemory(nn.Module):
    """The space, and of a pass that is under way the sums so far, where a run is kept in the middle of one."""

    def __init__(self, memory: NDArray[Any], sizes: SvdSizes) -> None:
        super().__init__()
        count = numbers_of(sizes)
        self.space = KrylovSpace.on(memory[:count], sizes)
        self.krylov = nn.Parameter(torch.from_numpy(memory[:count]), requires_grad=False)
        self.sums = nn.Parameter(torch.from_numpy(memory[count:]), requires_grad=False)
        self.under_way: Array = memory[count:]
        """Sums of all workers, and then the triangle."""

    @staticmethod
    def count(sizes: SvdSizes) -> int:
        """Numbers of the memory."""
        return numbers_of(sizes) + PassSums.count(sizes) + sizes.width**2


@dataclass(frozen=True, kw_only=True)
class SvdWork:
    """A matrix that all workers can read, and what is asked of it; a UserError where the memory is too small."""

    matrix: StoredMatrix
    svd: SvdOptions
    workers: int = 1

    def __post_init__(self) -> None:
        self.sizes  # noqa: B018 - before anything is started

    @property
    def sizes(self) -> SvdSizes:
        """As they fit into the memory."""
        matrix = self.matrix
        shape = Shape(
            rows=matrix.rows, columns=matrix.columns, entries=matrix.entries, is_sparse=matrix.is_sparse
        )
        return sizes_of(shape, self.svd, self.workers)
