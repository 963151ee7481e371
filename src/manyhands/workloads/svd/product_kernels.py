"""Compiled products of sparse rows: both halves of AᵀAQ while rows are at hand, and all products of two columns.

The entries of one sparse row are visited some numbers at a time in one register. A plain loop over the numbers of a
line is compiled so that it asks at each entry whether two lines overlap, and writes its sums to memory each time. Here
a line is a vector, which stays in registers while the row lasts. Which lines come is known, and to no processor: they
are asked for some entries ahead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, types, uint64
from numba.core import cgutils
from numba.extending import intrinsic

from manyhands.native.decorators import njit

_INT = ir.IntType(64)
_AHEAD = 16  # entries
_CACHE_LINE = 8  # numbers
_ANY_ORDER = ("contract", "nsz")  # a product and its sum may be one instruction


def _line(builder: Any, data: Any, place: Any, lanes: int) -> Any:
    return builder.bitcast(builder.gep(data, [place]), ir.VectorType(ir.DoubleType(), lanes).as_pointer())


def _in_all_lanes(builder: Any, value: Any, lanes: int) -> Any:
    vector = ir.VectorType(ir.DoubleType(), lanes)
    nothing = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.IntType(32)(0))
    same = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(first, nothing, same)


def _ask_ahead(builder: Any, arrays: tuple[Any, Any], places: tuple[Any, Any, Any, Any], lanes: int) -> None:
    """Have the line on its way of which a later entry is the column, be it one of the next row.

    `arrays` are columns and lines; `places` are those of the entry, of the last one, of a line's part, and the width.
    """
    (columns, lines), (entry, last, offset, width) = arrays, places
    ahead = builder.add(entry, _INT(_AHEAD))
    at = builder.select(builder.icmp_signed("<", ahead, last), ahead, last)
    column = builder.zext(builder.load(builder.gep(columns, [at])), _INT)
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    begin = builder.add(builder.mul(column, width), offset)
    for first in range(0, lanes, _CACHE_LINE):
        address = builder.bitcast(builder.gep(lines, [builder.add(begin, _INT(first))]), byte)
        builder.call(prefetch, [address, number(0), number(3), number(1)])


def _row_loop(*pieces: int, sums: bool) -> Any:
    """An intrinsic over entries `begin` to `end` of a row, for lines of these vectors: registers have 4 or 8 lanes.

    It adds value times line `column` of `table` to `line` where it `sums`, else value times `line` to line `column`.
    Lines of `table` are `width` numbers apart. Its arguments are indices, values, begin, end, table, offset, width,
    line and place.
    """
    parts = [(sum(pieces[:number]), lanes) for number, lanes in enumerate(pieces)]

    @intrinsic
    def visit(_typing, indices, values, _b, _e, table, _o, _w, line, _p):  # type: ignore[no-untyped-def]
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            # Unpacked before the loop, or each round would unpack the arrays again.
            arrays = {at: context.make_array(signature.args[at]) for at in (0, 1, 4, 7)}
            opened = {at: made(context, builder, args[at]) for at, made in arrays.items()}
            row, found, lines, given = (one.data for one in opened.values())
            own = []  # where the line's vectors are, what they are, and where their sums are kept
            for first, lanes in parts:
                place = _line(builder, given, builder.add(args[8], _INT(first)), lanes)
                value = builder.load(place, align=8)
                total = None
                if sums:
                    total = cgutils.alloca_once(builder, ir.VectorType(ir.DoubleType(), lanes))
                    builder.store(value, total)
                own.append((place, value, total))
            last, count = builder.sub(opened[0].nitems, _INT(1)), sum(pieces)
            with cgutils.for_range(builder, args[3], start=args[2]) as loop:
                column = builder.zext(builder.load(builder.gep(row, [loop.index])), _INT)
                value = builder.load(builder.gep(found, [loop.index]))
                if value.type == ir.FloatType():
                    value = builder.fpext(value, ir.DoubleType())
                _ask_ahead(builder, (row, lines), (loop.index, last, args[5], args[6]), count)
                begin = builder.add(builder.mul(column, args[6]), args[5])
                for (first, lanes), (_, mine, total) in zip(parts, own, strict=True):
                    place = _line(builder, lines, builder.add(begin, _INT(first)), lanes)
                    factor, there = _in_all_lanes(builder, value, lanes), builder.load(place, align=8)
                    product = builder.fmul(factor, there if sums else mine, flags=_ANY_ORDER)
                    before = builder.load(total) if sums else there
                    whole = builder.fadd(before, product, flags=_ANY_ORDER)
                    builder.store(whole, total) if sums else builder.store(whole, place, align=8)
            for place, _, total in own if sums else ():
                builder.store(builder.load(total), place, align=8)
            return context.get_dummy_value()

        return types.void(indices, values, int64, int64, table, int64, int64, line, int64), codegen

    return visit


sum_lines_4, sum_lines_8, sum_lines_12 = (_row_loop(*some, sums=True) for some in ((4,), (8,), (8, 4)))
add_line_4, add_line_8, add_line_12 = (_row_loop(*some, sums=False) for some in ((4,), (8,), (8, 4)))


TILE = 4  # blocks are padded to a multiple, so that their lines lie alike

_SCRATCH = 1 << 16  # numbers

_MATH = {"reassoc", "contract", "nsz"}


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_MATH)
def multiply_rows(
    starts: Any, indices: Any, values: Any, vectors: Any, width: int, less: Any, product: Any, sums: Any
) -> None:
    """Add Aᵀ(AQ - 1·lessᵀ) to `product` and the columns of AQ - 1·lessᵀ to `sums`; Q has rows of `width`.

    Some rows go through Q and then, while their entries and products are in the cache, through `product`: row by row,
    the two tables would drive each other out of it. `width` is a multiple of `TILE`. Where `sums` is empty, `less`
    is 0.
    """
    rows, wide = starts.size - 1, np.int64(width)
    most: Any = max(1, _SCRATCH // wide)
    found = np.empty(min(most, rows) * wide)
    for first in range(0, rows, most):
        last = min(rows, first + most)
        for row in range(first, last):
            at, begin, end = (row - first) * wide, starts[row], starts[row + 1]
            if begin == end and not sums.size:
                continue
            for place in range(wide):
                found[at + place] = -less[place]
            done = np.int64(0)
            while wide - done >= 12:
                sum_lines_12(indices, values, begin, end, vectors, done, wide, found, at + done)
                done += 12
            if wide - done == 8:
                sum_lines_8(indices, values, begin, end, vectors, done, wide, found, at + done)
            elif wide - done == 4:
                sum_lines_4(indices, values, begin, end, vectors, done, wide, found, at + done)
            for place in range(sums.size):
                sums[place] += found[at + place]
        for row in range(first, last):
            at, begin, end, done = (row - first) * wide, starts[row], starts[row + 1], np.int64(0)
            if begin == end:
                continue
            while wide - done >= 12:
                add_line_12(indices, values, begin, end, product, done, wide, found, at + done)
                done += 12
            if wide - done == 8:
                add_line_8(indices, values, begin, end, product, done, wide, found, at + done)
            elif wide - done == 4:
                add_line_4(indices, values, begin, end, product, done, wide, found, at + done)


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_MATH)
def project_rows(
    starts: Any, indices: Any, values: Any, vectors: Any, width: int, less: Any, found: Any
) -> None:
    """Write AQ - 1·lessᵀ to `found`, row by row."""
    wide = np.int64(width)
    for row in range(starts.size - 1):
        at, begin, end = row * wide, starts[row], starts[row + 1]
        for place in range(wide):
            found[at + place] = -less[place]
        done = np.int64(0)
        while wide - done >= 12:
            sum_lines_12(indices, values, begin, end, vectors, done, wide, found, at + done)
            done += 12
        if wide - done == 8:
            sum_lines_8(indices, values, begin, end, vectors, done, wide, found, at + done)
        elif wide - done == 4:
            sum_lines_4(indices, values, begin, end, vectors, done, wide, found, at + done)


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_MATH)
def gram_rows(starts: Any, indices: Any, values: Any, columns: int, gram: Any) -> None:
    """Add AᵀA to `gram`: of two columns, into both places or one, so that (G + Gᵀ)/2 is right off the diagonal.

    Each pair of entries of a row is added once, twofold; indices may come in any order.
    """
    wide = uint64(columns)
    for row in range(starts.size - 1):
        begin, end = uint64(starts[row]), uint64(starts[row + 1])
        for first in range(begin, end):
            value = np.float64(values[first])
            line = uint64(indices[first]) * wide
            gram[line + uint64(indices[first])] += value * value
            twice = 2.0 * value
            for second in range(first + uint64(1), end):
                gram[line + uint64(indices[second])] += twice * np.float64(values[second])


def warm() -> None:
    rows = np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0, np.float32)
    for values in (rows[2], np.empty(0, np.float64)):
        some, few = np.zeros(TILE), np.zeros(TILE)
        multiply_rows(rows[0], rows[1], values, some, TILE, few, some.copy(), few.copy())
        project_rows(rows[0], rows[1], values, some, TILE, few, some.copy())
        gram_rows(rows[0], rows[1], values, 1, few)
