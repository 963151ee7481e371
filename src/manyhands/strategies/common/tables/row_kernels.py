"""Compiled loops over the rows of a gradient: naming rows once, summing, and one update per optimizer.

`settings` are numbers of the table's own type, in the order that each function unpacks them. `rows` count the rows that
are here and are all different. Loops run over one row at a time, as slices, which the compiler turns into vector code.
Compiled for the machine at hand and cached.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.native.atomics import array_at
from manyhands.native.decorators import njit


@njit(cache=True, nogil=True)
def first_foreign_row(rows: Any, owners: Any, shard: int, num_rows: int) -> int:
    """Where the first of `rows` is that a shard does not have; -1 if it has all. Without `owners` it has the table."""
    for index in range(rows.size):
        row = rows[index]
        if row < 0 or row >= num_rows or (owners.size and owners[row] != shard):
            return index
    return -1


@njit(cache=True, nogil=True)
def number_rows(rows: Any, numbers: Any, different: Any) -> int:
    """Number the different rows in the order in which they come.

    `numbers[i]` becomes the number of `rows[i]`, `different[n]` the row of number n. Returns how many there are. A hash
    table with open addressing, at most half full.
    """
    size = 16
    while size < 2 * rows.size:
        size *= 2
    slots = np.full(size, -1, dtype=np.int64)
    found = 0
    for index in range(rows.size):
        row = rows[index]
        place = ((row * 0x9E3779B97F4A7C1) >> 32) & (size - 1)  # the upper bits mix all of the row's
        while slots[place] >= 0 and different[slots[place]] != row:
            place = (place + 1) & (size - 1)
        if slots[place] < 0:
            slots[place] = found
            different[found] = row
            found += 1
        numbers[index] = slots[place]
    return found


@njit(cache=True, nogil=True)
def sum_rows(gradients: Any, numbers: Any, count: int) -> Any:
    total = np.zeros((count, gradients.shape[1]), dtype=gradients.dtype)
    for index in range(numbers.size):
        own, given = total[numbers[index]], gradients[index]
        for item in range(own.size):
            own[item] += given[item]
    return total


@njit(cache=True, nogil=True)
def ascend(rows: Any) -> bool:
    in_order = True
    for index in range(1, rows.size):
        in_order = in_order and rows[index] > rows[index - 1]
    return in_order


@njit(cache=True, nogil=True)
def put_rows(values, rows, given, count, row_bytes):  # type: ignore[no-untyped-def]
    """Overwrite `count` rows, by addresses; torch's own ways to do it take several times as long.

    `given` may lie where nothing but bytes can be read. A row has a multiple of 4 bytes, which nothing here looks at.
    """
    numbers, size = array_at(rows, count, np.int64), row_bytes // 4
    for index in range(count):
        own = array_at(values + numbers[index] * row_bytes, size, np.uint32)
        new = array_at(given + index * row_bytes, size, np.uint32)
        for word in range(size):
            own[word] = new[word]


@njit(cache=True, nogil=True)
def take_rows(values, rows, out, count, row_bytes):  # type: ignore[no-untyped-def]
    """Copy `count` rows one behind the other to `out`, by addresses, as `put_rows` does the other way."""
    numbers, size = array_at(rows, count, np.int64), row_bytes // 4
    for index in range(count):
        own = array_at(values + numbers[index] * row_bytes, size, np.uint32)
        copy = array_at(out + index * row_bytes, size, np.uint32)
        for word in range(size):
            copy[word] = own[word]


@njit(cache=True, nogil=True, error_model="numpy")
def sgd_rows(
    values: Any, buffer: Any, rows: Any, gradients: Any, settings: Any, nesterov: bool, maximize: bool
) -> None:
    """SGD; with an empty buffer there is no momentum."""
    lr, decay, momentum, fresh = settings[0], settings[1], settings[2], settings[3]
    sign = settings.dtype.type(-1 if maximize else 1)
    for index in range(rows.size):
        own, given = values[rows[index]], gradients[index]
        if not buffer.size:
            for item in range(own.size):
                own[item] -= lr * (sign * given[item] + decay * own[item])
            continue
        speeds = buffer[rows[index]]
        for item in range(own.size):
            gradient = sign * given[item] + decay * own[item]
            speed = momentum * speeds[item] + fresh * gradient
            speeds[item] = speed
            own[item] -= lr * (gradient + momentum * speed if nesterov else speed)


@njit(cache=True, nogil=True, error_model="numpy")
def adagrad_rows(values: Any, squares: Any, rows: Any, gradients: Any, settings: Any, maximize: bool) -> None:
    lr, decay, epsilon = settings[0], settings[1], settings[2]
    sign = settings.dtype.type(-1 if maximize else 1)
    for index in range(rows.size):
        own, sums, given = values[rows[index]], squares[rows[index]], gradients[index]
        for item in range(own.size):
            gradient = sign * given[item] + decay * own[item]
            square = sums[item] + gradient * gradient
            sums[item] = square
            own[item] -= lr * gradient / (np.sqrt(square) + epsilon)


@njit(cache=True, nogil=True, error_model="numpy")
def adam_rows(
    values: Any, means: Any, squares: Any, rows: Any, gradients: Any, settings: Any, maximize: bool
) -> None:
    """Adam and AdamW; `keep` is what decoupled weight decay leaves of a value."""
    lr, root, decay, keep = settings[0], settings[1], settings[2], settings[3]
    beta1, beta2, epsilon = settings[4], settings[5], settings[6]
    one = settings.dtype.type(1)
    sign = settings.dtype.type(-1 if maximize else 1)
    for index in range(rows.size):
        own, given = values[rows[index]], gradients[index]
        firsts, seconds = means[rows[index]], squares[rows[index]]
        for item in range(own.size):
            gradient = sign * given[item] + decay * own[item]
            mean = firsts[item] + (one - beta1) * (gradient - firsts[item])
            square = beta2 * seconds[item] + (one - beta2) * gradient * gradient
            firsts[item] = mean
            seconds[item] = square
            own[item] = own[item] * keep - lr * mean / (np.sqrt(square) / root + epsilon)


@njit(cache=True, nogil=True, error_model="numpy")
def ftrl_rows(values: Any, z: Any, n: Any, rows: Any, gradients: Any, settings: Any) -> None:
    lr, first_lr, beta, l1, l2 = settings[0], settings[1], settings[2], settings[3], settings[4]
    for index in range(rows.size):
        row = rows[index]
        for item in range(values.shape[1]):
            gradient = gradients[index, item]
            if gradient == 0:
                continue
            value = values[row, item]
            before = (np.sqrt(n[row, item]) + beta) / first_lr
            n[row, item] += gradient * gradient
            root = np.sqrt(n[row, item]) + beta
            now = root / lr
            linear = z[row, item] + gradient - (now - before) * value
            if abs(linear) <= l1:
                value = value * 0
            elif linear > 0:
                value = -(linear - l1) / (now + l2)
            else:
                value = -(linear + l1) / (now + l2)
            values[row, item] = value
            z[row, item] = linear + (now - root / first_lr) * value


@njit(cache=True, nogil=True, error_model="numpy")
def proximal_rows(values: Any, rows: Any, gradients: Any, settings: Any) -> None:
    lr, l1 = settings[0], settings[1]
    limit = lr * l1
    for index in range(rows.size):
        own, given = values[rows[index]], gradients[index]
        for item in range(own.size):
            moved = own[item] - lr * given[item]
            if abs(moved) <= limit:
                own[item] = 0
            else:
                own[item] = moved - limit if moved > 0 else moved + limit


@njit(cache=True, nogil=True)
def mark_rows(values: Any, rows: Any, forces: Any, limit: float) -> None:
    """Let zeros be -0 in the rows that are all 0 and whose `forces[index]` are all within the limit, else +0."""
    for index in range(rows.size):
        own, force = values[rows[index]], forces[index]
        rests = True
        for item in range(own.size):
            rests = rests and own[item] == 0 and abs(force[item]) <= limit
        zero = own.dtype.type(-0.0 if rests else 0.0)
        for item in range(own.size):
            if own[item] == 0:
                own[item] = zero
