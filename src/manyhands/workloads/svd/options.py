"""What a truncated SVD is asked for, and the sizes that follow from it and the matrix: pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from manyhands.errors import UserError, format_bytes, num_of
from manyhands.workloads.task_options import CheckedOptions, memory_option, option

OVERSAMPLING: Final = 10
"""Vectors of a block beyond the rank: the last ones wanted are found the sooner (Halko, Martinsson, Tropp, 2011)."""

_FEW_MORE: Final = 2  # the same where passes are cheap: more of them, with fewer vectors, cost less in all
_BLOCKS: Final = 6  # of the Krylov space that are kept before it is restarted
_NARROW_BLOCKS: Final = 12
_MOST_GRAM: Final = 1024  # columns up to which all products of two columns may be cheaper than several passes
_PASSES_EXPECTED: Final = 6
_LEAST_BLOCK: Final = 1 << 16
_USUAL_BLOCK: Final = 1 << 22  # stays in the cache between its two products


@dataclass(frozen=True, kw_only=True)
class SvdOptions(CheckedOptions):
    """One decomposition."""

    rank: int = option(10, "number of singular values and components", at_least=1)
    center: bool = option(False, "subtract the mean of each column first: PCA", flag="--center")
    tolerance: float = option(1e-8, "stop at this relative error of the singular values", above=0, below=1)
    """As estimated from residual and gap, of every singular value."""
    passes: int = option(100, "maximum passes over the matrix", at_least=1)
    seed: int = option(0, "fixes the random start vectors", at_least=0)
    memory_bytes: int = memory_option(
        "memory of all workers; a larger matrix is read again in every pass", flag="--memory"
    )
    """Besides the interpreter and its libraries."""
    allow_overload: bool = option(False, "start even if this host seems too small for the workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a matrix decides how it is decomposed."""

    rows: int
    columns: int
    entries: int
    is_sparse: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SvdSizes:
    """How large everything is."""

    shape: Shape
    rank: int
    width: int  # vectors of a block
    most: int  # vectors of the Krylov space at most
    is_gram: bool  # whether the first pass takes all products of two columns, which decides nearly all
    block_bytes: int  # of rows that a worker reads at once
    kept_in_memory: bool  # whether the matrix may stay in memory from pass to pass


def sizes_of(shape: Shape, options: SvdOptions, workers: int) -> SvdSizes:
    """SvdSizes that fit into the memory; UserError says how much is needed where none do, and which rank there is."""
    least = min(shape.rows, shape.columns)
    if options.rank > least:
        raise UserError(
            f"rank={options.rank}: a matrix of {shape.rows:,} rows and {shape.columns:,} columns has at most "
            f"rank {least:,}; use a smaller rank"
        )
    is_gram = _gram_pays(shape, min(options.rank + OVERSAMPLING, least))
    least_block = max(_LEAST_BLOCK, 8 * shape.columns if not shape.is_sparse else 0)
    # Where the rows stay in memory nothing is read for a pass: then more passes, each with less to do, pay. A block is
    # never narrower than the rank, or a value that is there as often would not be found as often.
    is_cheap = 4 * 8 * shape.entries <= options.memory_bytes
    for gram in (True, False) if is_gram else (False,):
        is_narrow = not gram and is_cheap
        width = min(options.rank + (_FEW_MORE if is_narrow else OVERSAMPLING), least)
        for blocks in range(_NARROW_BLOCKS if is_narrow else _BLOCKS, 1, -1):
            most = width if gram else min(blocks * width, least + width)
            needed = _needed(shape, width, most, gram, workers)
            block_bytes = min(_USUAL_BLOCK, (options.memory_bytes - needed) // (4 * workers))
            if block_bytes >= least_block:
                held = needed + 4 * workers * block_bytes
                return SvdSizes(
                    shape=shape,
                    rank=options.rank,
                    width=width,
                    most=most,
                    is_gram=gram,
                    block_bytes=block_bytes,
                    kept_in_memory=shape.entries * 8 + held <= options.memory_bytes,
                )
    needed = _needed(shape, width, 2 * width, False, workers) + 4 * workers * least_block
    raise UserError(
        f"memory={format_bytes(options.memory_bytes)} is too little: rank {options.rank} of {shape.columns:,} columns "
        f"with {num_of(workers, 'worker')} needs {format_bytes(needed)}; give more, or a smaller rank or fewer workers"
    )


def _needed(shape: Shape, width: int, most: int, is_gram: bool, workers: int) -> int:
    """Bytes of the Krylov space and of products: each worker's own and what it adds up, and what worker 0 works in."""
    product = shape.columns * (shape.columns if is_gram else width)
    space = most * shape.columns + most * most + 2 * shape.columns
    return 8 * (space + (3 * workers + 3) * product)


def _gram_pays(shape: Shape, width: int) -> bool:
    """Whether all products of two columns take less work than the passes that they save, and than what follows them."""
    if shape.columns > _MOST_GRAM or shape.columns > shape.rows:
        return False
    in_passes = 4.0 * shape.entries * width * _PASSES_EXPECTED
    per_row = shape.entries / shape.rows
    in_gram = shape.entries * per_row * (4.0 if shape.is_sparse else 1.0)  # scattered adds are dear
    return in_gram + 10.0 * shape.columns**3 <= in_passes + 1e8
