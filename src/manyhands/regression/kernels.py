"""Compiled logistic regression: one example after the other, weights and what a learner keeps of them side by side.

A feature is one row of a table, a few numbers in one piece of memory, so that looking a feature up costs one line of
cache whatever the learner keeps; the first row is the bias, and feature i is row i + 1. Whoever trains on a table holds
it alone (`FREE` with one worker), shares it without any order (`FREE`, HOGWILD!: Recht et al., 2011), takes a lock for
every example (`LOCKED`), or waits for its turn (`TURNS`: example k is the work of worker k mod n, and the result that
of one worker).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int32, njit, types, uint32, uint64

from manyhands.memory.atomics import (
    clock_ns,
    compare_swap_u32,
    fence,
    load_i64,
    load_u32,
    pause,
    store_i64,
    store_u32,
)

__all__ = [
    "ADAGRAD",
    "BETA",
    "DONE",
    "FREE",
    "FTRL",
    "LEFT",
    "LOCKED",
    "LOSS",
    "ORDERS",
    "PATIENCE_S",
    "RULES",
    "SGD",
    "TIMED_OUT",
    "TURNS",
    "WEIGHT",
    "WIDTHS",
    "margins",
    "train",
]

SGD, ADAGRAD, FTRL = 0, 1, 2
RULES = {"sgd": SGD, "adagrad": ADAGRAD, "ftrl": FTRL}
BETA = 0.1
"""Where the roots of Σg² begin (McMahan's β; adagrad's Σg² begins with its square): small features move soon, too."""
WIDTHS = {"sgd": 1, "adagrad": 2, "ftrl": 4}
"""Numbers of a row: the weight; then Σg² (adagrad); or √Σg², z and one to fill the line (ftrl)."""

FREE, LOCKED, TURNS = 0, 1, 2
ORDERS = {"free": FREE, "locked": LOCKED, "turns": TURNS}

LOSS, WEIGHT = 0, 1
"""Places of what `train` adds up: weight times loss before the update, and weight."""

DONE, LEFT, TIMED_OUT = 0, 1, 2
"""How `train` ended."""

PATIENCE_S = 120
"""How long one worker waits for another's example: it takes microseconds, but the machine may be busy."""

_PATIENCE_NS = PATIENCE_S * 1_000_000_000
_SPINS = 200
_FACTORS = 64  # of at most 2 each
_MATH = {"reassoc", "contract", "nsz", "arcp"}  # NaN stays NaN, so that a run that breaks shows it
_sched_yield = types.ExternalFunction("sched_yield", int32())


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _wait(count: int, deadline: int) -> Any:
    """Wait a moment, the `count`-th: whoever is waited for may need this very core.

    The next count, -1 when the deadline is past, and that deadline, which is set when pausing has not helped.
    """
    if count < _SPINS:
        pause()
        return count + 1, deadline
    now = clock_ns()
    if count == _SPINS:
        deadline = now + _PATIENCE_NS
    elif now > deadline:
        return np.int64(-1), deadline
    _sched_yield()
    return count + 1, deadline


@njit(inline="always")  # type: ignore[untyped-decorator]
def _place(index: int, width: int) -> Any:
    """Where the row of a feature begins; unsigned, as a signed index would be tested for its sign."""
    return (uint64(index) + uint64(1)) * uint64(width)


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_MATH)  # type: ignore[untyped-decorator]
def _margin(table: Any, width: int, indices: Any, values: Any) -> Any:
    """The scalar product of a row and the weights, with the bias."""
    total = table[0]
    for j in range(indices.size):
        total += table[_place(indices[j], width)] * values[j]
    return total


@njit(inline="always")  # type: ignore[untyped-decorator]
def _shrunk(weight: Any, by: Any, zero: Any) -> Any:
    """A weight moved towards 0 by `by`, and not beyond; `zero` is that of its type."""
    return np.copysign(max(abs(weight) - by, zero), weight)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _sgd_row(table: Any, at: Any, gradient: Any, rate: Any, l1: Any, l2: Any, zero: Any) -> None:
    weight = table[at]
    table[at] = _shrunk(weight - rate * (gradient + l2 * weight), rate * l1, zero)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _adagrad_row(table: Any, at: Any, gradient: Any, rate: Any, l1: Any, l2: Any, beta: Any) -> None:
    weight = table[at]
    gradient += l2 * weight
    total = table[at + uint64(1)] + gradient * gradient
    own = rate / np.sqrt(beta * beta + total)
    table[at] = _shrunk(weight - own * gradient, own * l1, beta - beta)
    table[at + uint64(1)] = total


@njit(inline="always")  # type: ignore[untyped-decorator]
def _ftrl_row(table: Any, at: Any, gradient: Any, rate: Any, l1: Any, l2: Any, beta: Any) -> None:
    """McMahan's Algorithm 1; the root of Σg² is kept instead of it, which spares a root."""
    root = table[at + uint64(1)]
    new_root = np.sqrt(root * root + gradient * gradient)
    z = table[at + uint64(2)] + gradient - (new_root - root) / rate * table[at]
    table[at] = -_shrunk(z, l1, beta - beta) * rate / (beta + new_root + l2 * rate)
    table[at + uint64(1)] = new_root
    table[at + uint64(2)] = z


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_MATH)  # type: ignore[untyped-decorator]
def _step(rule: int, table: Any, indices: Any, values: Any, slope: Any, rate: Any, settings: Any) -> None:
    """Move the bias and the weights of one example, whose loss has the derivative `slope` in its margin.

    The bias has no penalty: it is no feature.
    """
    l1, l2, beta = settings[1], settings[2], settings[3]
    zero = beta - beta
    if rule == SGD:
        _sgd_row(table, uint64(0), slope, rate, zero, zero, zero)
        for j in range(indices.size):
            _sgd_row(table, _place(indices[j], 1), slope * values[j], rate, l1, l2, zero)
    elif rule == ADAGRAD:
        _adagrad_row(table, uint64(0), slope, rate, zero, zero, beta)
        for j in range(indices.size):
            _adagrad_row(table, _place(indices[j], 2), slope * values[j], rate, l1, l2, beta)
    else:
        _ftrl_row(table, uint64(0), slope, rate, zero, zero, beta)
        for j in range(indices.size):
            _ftrl_row(table, _place(indices[j], 4), slope * values[j], rate, l1, l2, beta)


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def train(
    table: Any,
    rows: Any,
    targets: Any,
    span: Any,
    rule: int,
    settings: Any,
    order: int,
    word: int,
    seen: int,
    sums: Any,
) -> int:
    """Learn from rows `span[0]`, `span[0] + span[2]`, ... below `span[1]`; add their loss before each update to `sums`.

    `rows` are starts, indices, values and weights of a `Rows`, `targets` its labels as 0 and 1. `settings` are rate,
    l1, l2 and beta in the table's own type. `seen` examples came before row 0. `word` is the address of what the
    workers share, two words of 8 bytes (0 where there is one worker): a lock (0: free) or whose turn it is, counted
    as `seen` is; and, unless it is 0, a request to leave that ends every wait, with the work left undone. Returns LEFT
    then, TIMED_OUT where a wait took longer than PATIENCE_S, and DONE otherwise.
    """
    starts, indices, values, weights = rows
    width = 1 if rule == SGD else 2 if rule == ADAGRAD else 4
    one = settings[0] / settings[0]
    loss, total, product, factors = 0.0, 0.0, 1.0, 0
    deadline = np.int64(0)
    for row in range(span[0], span[1], span[2]):
        mine, given = indices[starts[row] : starts[row + 1]], values[starts[row] : starts[row + 1]]
        waits = np.int64(0)
        if order == LOCKED:
            while load_u32(word) != 0 or not compare_swap_u32(word, uint32(0), uint32(1)):
                if load_u32(word + 8) != 0:
                    return LEFT
                waits, deadline = _wait(waits, deadline)
                if waits < 0:
                    return TIMED_OUT
        elif order == TURNS:
            while load_i64(word) != seen + row:
                if load_u32(word + 8) != 0:
                    return LEFT
                waits, deadline = _wait(waits, deadline)
                if waits < 0:
                    return TIMED_OUT
        margin = _margin(table, width, mine, given)
        away = -margin if targets[row] else margin
        small = np.exp(-abs(margin))
        probability = (one if margin > 0 else small) / (one + small)
        slope = (probability - targets[row]) * weights[row]
        rate = settings[0]
        if rule == SGD:
            rate /= np.sqrt(one * np.float32(seen + row + 1))
        _step(rule, table, mine, given, slope, rate, settings)
        if order == LOCKED:
            store_u32(word, uint32(0))
        elif order == TURNS:
            store_i64(word, seen + row + 1)
        if weights[row] == 1:  # one logarithm for many examples: of the product of what it would be taken of
            product *= 1.0 + np.float64(small)
            factors += 1
            if factors == _FACTORS:
                loss += np.log(product)
                product, factors = 1.0, 0
            loss += max(away, 0.0)
        else:
            loss += weights[row] * (max(away, 0.0) + np.log1p(small))
        total += weights[row]
    fence()
    sums[LOSS] += loss + np.log(product)
    sums[WEIGHT] += total
    return DONE


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def margins(table: Any, rows: Any, out: Any) -> None:
    """The margin of every row, in double precision, for a table of weights alone (width 1).

    A row's probability is 1 / (1 + exp(-margin)). Features beyond the table, which no example taught, count nothing.
    """
    starts, indices, values, _ = rows
    for row in range(out.size):
        total = np.float64(table[0])
        for j in range(starts[row], starts[row + 1]):
            if indices[j] < table.size - 1:
                total += table[_place(indices[j], 1)] * values[j]
        out[row] = total
