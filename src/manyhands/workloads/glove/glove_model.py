"""The parameters of GloVe (Pennington, Socher, Manning 2014) in one block of memory, laid out for the kernels.

There is one row per word and one per context, contexts after words, so word w and context c are rows w and V + c:

    | vector, dim items, zeros to `lanes` | bias | unused | accumulators of the vector | that of the bias | unused |
      0                                    lanes           accumulators

A record touches two rows, and all of each: a vector and its AdaGrad accumulators lie side by side, so that they come
into the cache together. An accumulator is kept without the 1 that it begins with, beside which float32 would lose the
squares of small gradients. `lanes` is a multiple of 8, so that vector instructions need no remainder; rows are
multiples of 64 bytes, so that none shares a cache line with another.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from manyhands.errors import UserError
from manyhands.native.segment import Segment, ask_for_large_pages, available_bytes, round_up
from manyhands.workloads.glove.options import GloveOptions

LANES = 8
_LINE_ITEMS = 16  # of 4 bytes in a line of 64
_ROWS_AT_ONCE = 4096


class GloveLayout(NamedTuple):
    """Where things lie in a row of vectors of `dim` items."""

    dim: int
    lanes: int  # items that the kernels walk over; the bias comes after them
    accumulators: int  # where they begin, in the order of what they belong to
    width: int

    @classmethod
    def of(cls, dim: int) -> GloveLayout:
        lanes = round_up(dim, LANES)
        accumulators = round_up(lanes + 1, _LINE_ITEMS)
        return cls(dim, lanes, accumulators, 2 * accumulators)


@dataclass(frozen=True, kw_only=True, slots=True)
class GloveSnapshot:
    """The parameters at one moment: vectors (V, dim) and biases (V,), of words and of contexts."""

    word: NDArray[Any]
    context: NDArray[Any]
    word_bias: NDArray[Any]
    context_bias: NDArray[Any]

    def vectors(self) -> NDArray[np.float32]:
        """(V, dim): the sum of each word's two vectors, the usual result."""
        both: NDArray[np.float32] = (self.word + self.context).astype(np.float32)
        return both


class GloveModel(nn.Module):
    """The rows of `vocabulary_size` words and as many contexts, all zero at first.

    `dims` are those of the whole vector that are kept here, all of them unless a strategy splits them. The memory is
    anonymous, or in `segment` from `offset` on, for processes to share; `num_bytes` says how much is needed. As a
    module it has one parameter, `memory`, which is all of it.
    """

    def __init__(
        self,
        vocabulary_size: int,
        options: GloveOptions,
        *,
        dims: range | None = None,
        segment: Segment | None = None,
        offset: int = 0,
    ) -> None:
        super().__init__()
        self.dims = range(options.dim) if dims is None else dims
        self.layout = GloveLayout.of(len(self.dims))
        self.vocabulary_size, self._options = vocabulary_size, options
        dtype, count = options.numpy_dtype, 2 * vocabulary_size * self.layout.width
        memory = _anonymous(count, dtype) if segment is None else segment.array(offset, count, dtype)
        self.values: NDArray[Any] = memory
        self.rows: NDArray[Any] = self.values.reshape(2 * vocabulary_size, self.layout.width)
        """The same memory, one row per row."""
        self.memory = nn.Parameter(torch.from_numpy(self.rows), requires_grad=False)

    @staticmethod
    def num_bytes(vocabulary_size: int, options: GloveOptions) -> int:
        return 2 * vocabulary_size * GloveLayout.of(options.dim).width * options.numpy_dtype.itemsize

    def shape(self) -> NDArray[np.int64]:
        """What the kernels need to know: vocabulary size, lanes, accumulators, width."""
        return np.array([self.vocabulary_size, *self.layout[1:]], np.int64)

    def initialise(self) -> GloveModel:
        """Draw vectors from (-0.5, 0.5) / sqrt(dim) and biases from (-0.5, 0.5) / dim by the seed, then cut out `dims`.

        The published tools divide all of them by dim. Longer vectors have longer gradients to begin with: costs are
        lower after each pass, and analogies better after 15.
        """
        whole, layout, rows = self._options.dim, self.layout, self.rows
        generator = np.random.Generator(np.random.Philox(self._options.seed))
        mine = slice(self.dims.start, self.dims.stop)
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[begin : begin + _ROWS_AT_ONCE]
            drawn = generator.random((len(part), whole + 1)) - 0.5
            part[:, : layout.dim] = drawn[:, mine] / math.sqrt(whole)
            part[:, layout.lanes] = drawn[:, whole] / whole
            part[:, layout.accumulators :] = 0
        return self

    def columns_of(self, part: GloveModel) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """What `part`, which has some of the dimensions, holds: where it lies here, and there; accumulators too."""
        here, there, dims = self.layout, part.layout, part.dims
        for mine, other in ((0, 0), (here.accumulators, there.accumulators)):
            mine_dims = slice(mine + dims.start, mine + dims.stop)
            yield self.rows[:, mine_dims], part.rows[:, other : other + there.dim]
            yield self.rows[:, mine + here.lanes], part.rows[:, other + there.lanes]

    def snapshot(self) -> GloveSnapshot:
        size, vectors = self.vocabulary_size, self.rows[:, : self.layout.dim].copy()
        biases = self.rows[:, self.layout.lanes].copy()
        of_words = {"word": vectors[:size], "word_bias": biases[:size]}
        return GloveSnapshot(**of_words, context=vectors[size:], context_bias=biases[size:])


def _anonymous(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Zeroed memory on pages of its own, large ones where the kernel has them: rows are met in no order."""
    num_bytes, room = max(1, count * dtype.itemsize), available_bytes()
    if num_bytes > room:
        raise UserError(
            f"the parameters need {num_bytes / 2**20:.0f} MiB, but only {room / 2**20:.0f} MiB of memory are free; "
            "use fewer words or a smaller dim"
        )
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ask_for_large_pages(memory)
    return np.frombuffer(memory, dtype, count)
