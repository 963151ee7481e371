"""The batch rule of GloVe as compiled loops: errors of all records first, gradients summed by row, one step per row.

With the parameters as they were before the batch, every record gives its rows a gradient as in `glove_kernels`
(t = r f d u for an item of a vector, t = f d for a bias). A row's are summed, and it takes one step of AdaGrad in the
order of Duchi et al. (2011) and of torch: the accumulator grows first and then divides,

    s += T^2;   v -= T / sqrt(s)          where T is the sum of the row's t

so no item moves by more than 1 in a step, however large the batch. The sum, not the mean: a batch that is short moves
its rows by what its records say, whatever the size of the others.

A row's gradient lies in as many items as its accumulators would take: `lanes` of the vector, then the bias.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.native.decorators import njit
from manyhands.workloads.glove.glove_kernels import PIECE, dot, prepare

__all__ = ["add_rows", "batch_dots", "batch_errors", "step_rows", "sum_gradients"]


@njit(cache=True, nogil=True, error_model="numpy", fastmath=True)
def batch_dots(values: Any, ids: Any, shape: Any, with_bias: bool, dots: Any) -> None:
    """For each record the inner product of its vectors, and both biases where asked."""
    lanes, row_bytes = shape[1], shape[3] * values.itemsize
    base, zero = values.ctypes.data, values.dtype.type(0)
    for i in range(ids.size // 4):
        word, other = np.int64(ids[4 * i] - 1), shape[0] + ids[4 * i + 1] - 1
        total = dot(base + word * row_bytes, base + other * row_bytes, lanes, zero)
        if with_bias:
            total += values[word * shape[3] + lanes] + values[other * shape[3] + lanes]
        dots[i] = total


@njit(cache=True, nogil=True, error_model="numpy")
def batch_errors(counts: Any, dots: Any, settings: Any) -> float:
    """Turn each record's sum of product and biases into f d, in place; the sum of costs."""
    logs, weights = np.empty(PIECE, np.float64), np.empty(PIECE, np.float64)
    cost, count = 0.0, counts.size // 2
    for begin in range(0, count, PIECE):
        size = min(PIECE, count - begin)
        prepare(counts, begin, logs[:size], weights[:size], settings)
        for i in range(size):
            error = dots[begin + i] - logs[i]
            cost += 0.5 * weights[i] * error * error
            dots[begin + i] = weights[i] * error
    return cost


@njit(nogil=True, inline="always")
def _place(row: int, slots: Any, touched: Any, found: int) -> int:
    """The row's number in this batch, `found` if it is new."""
    number = slots[row]
    if number < 0:
        slots[row] = found
        touched[found] = row
        number = found
    return number  # type: ignore[no-any-return]


@njit(cache=True, nogil=True, error_model="numpy", fastmath=True)
def sum_gradients(
    values: Any, ids: Any, errors: Any, shape: Any, rate: float, slots: Any, touched: Any, gradients: Any
) -> int:
    """Number the rows in the order in which they come, and sum their gradients; how many rows there are.

    `slots` has an item per row of the model, all -1, and is left so.
    """
    lanes, span, width = shape[1], shape[2], shape[3]
    found = 0
    for i in range(ids.size // 4):
        word, other = np.int64(ids[4 * i] - 1), shape[0] + ids[4 * i + 1] - 1
        error = errors[i]
        step = values.dtype.type(rate) * error
        for row, partner in ((word, other), (other, word)):
            number = _place(row, slots, touched, found)
            sums = gradients[number * span : number * span + lanes + 1]
            if number == found:
                found += 1
                sums[:] = 0
            source = values[partner * width : partner * width + lanes]
            for item in range(lanes):
                sums[item] += step * source[item]
            sums[lanes] += error
    for number in range(found):
        slots[touched[number]] = -1
    return found


@njit(cache=True, nogil=True, error_model="numpy", fastmath=True)
def add_rows(
    part: Any, part_gradients: Any, shape: Any, found: int, slots: Any, touched: Any, gradients: Any
) -> int:
    """Add the gradients of the rows in `part` to those found so far; how many rows there are now.

    `slots` has the numbers of the rows found so far; `step_rows` clears them.
    """
    span, used = shape[2], shape[1] + 1
    for index in range(part.size):
        number = _place(part[index], slots, touched, found)
        sums = gradients[number * span : number * span + used]
        more = part_gradients[index * span : index * span + used]
        if number == found:
            found += 1
            for item in range(used):
                sums[item] = more[item]
        else:
            for item in range(used):
                sums[item] += more[item]
    return found


@njit(cache=True, nogil=True, error_model="numpy", fastmath=True)
def step_rows(values: Any, touched: Any, gradients: Any, shape: Any, slots: Any) -> None:
    """One step of AdaGrad for each row in `touched`, whose slots are cleared."""
    span, width, used, one = shape[2], shape[3], shape[1] + 1, values.dtype.type(1)
    for number in range(touched.size):
        row = touched[number]
        slots[row] = -1
        items = values[row * width : row * width + used]
        squares = values[row * width + span : row * width + span + used]
        sums = gradients[number * span : number * span + used]
        for item in range(used):
            square = squares[item] + sums[item] * sums[item]
            squares[item] = square
            items[item] -= sums[item] / np.sqrt(one + square)
