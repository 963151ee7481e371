"""Compiled logistic regression: one example after the other, weights and what a learner keeps of them side by side.

A feature is one row of a table, a few numbers in one piece of memory, so that looking a feature up costs one line of
cache whatever the learner keeps; the first row is the bias, and feature i is row i + 1. Whoever trains on a table holds
it alone, shares it without any order (HOGWILD!: Niu et al., 2011), or goes through a gate for every example: see
`manyhands.native.group.gate`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint64

from manyhands.native.atomics import fence
from manyhands.native.decorators import helper, inlined, njit
from manyhands.native.group.gate import FREE, CompiledGate, enter, leave
from manyhands.native.waiting import REACHED

SGD, ADAGRAD, FTRL = 0, 1, 2
RULES = {"sgd": SGD, "adagrad": ADAGRAD, "ftrl": FTRL}
BETA = 0.1
"""Where the roots of Σg² begin (McMahan's β; adagrad's Σg² begins with its square): small features move soon, too."""
WIDTHS = {"sgd": 1, "adagrad": 2, "ftrl": 4}
"""Numbers of a row: the weight; then Σg² (adagrad); or √Σg², z and one to fill the line (ftrl)."""

LOSS, WEIGHT = 0, 1
"""Places of what `train` adds up: weight times loss before the update, and weight."""

_FACTORS = 64  # of at most 2 each
_MATH = {"reassoc", "contract", "nsz", "arcp"}  # NaN stays NaN, so that a run that breaks shows it


@inlined()
def _place(index: int, width: int) -> Any:
    """Where the row of a feature begins; unsigned, as a signed index would be tested for its sign."""
    return (uint64(index) + uint64(1)) * uint64(width)


@inlined()
def _width(rule: int) -> int:
    return 1 if rule == SGD else 2 if rule == ADAGRAD else 4


@helper(error_model="numpy", fastmath=_MATH)
def _margin(table: Any, width: int, indices: Any, values: Any) -> Any:
    total = table[0]
    for j in range(indices.size):
        total += table[_place(indices[j], width)] * values[j]
    return total


@inlined(error_model="numpy", fastmath=_MATH)
def _shrunk(weight: Any, by: Any, zero: Any) -> Any:
    """A weight moved towards 0 by `by`, and not beyond; `zero` is that of its type."""
    return np.copysign(max(abs(weight) - by, zero), weight)


@inlined(error_model="numpy", fastmath=_MATH)
def _sgd_row(table: Any, at: Any, gradient: Any, rate: Any, l1: Any, l2: Any, zero: Any) -> None:
    weight = table[at]
    table[at] = _shrunk(weight - rate * (gradient + l2 * weight), rate * l1, zero)


@inlined(error_model="numpy", fastmath=_MATH)
def _adagrad_row(table: Any, at: Any, gradient: Any, rate: Any, l1: Any, l2: Any, beta: Any) -> None:
    weight = table[at]
    gradient += l2 * weight
    total = table[at + uint64(1)] + gradient * gradient
    own = rate / np.sqrt(beta * beta + total)
    table[at] = _shrunk(weight - own * gradient, own * l1, beta - beta)
    table[at + uint64(1)] = total


@inlined(error_model="numpy", fastmath=_MATH)
def _ftrl_row(table: Any, at: Any, gradient: Any, rate: Any, l1: Any, l2: Any, beta: Any) -> None:
    """McMahan's Algorithm 1; the root of Σg² is kept instead of it, which spares a root."""
    root = table[at + uint64(1)]
    new_root = np.sqrt(root * root + gradient * gradient)
    z = table[at + uint64(2)] + gradient - (new_root - root) / rate * table[at]
    table[at] = -_shrunk(z, l1, beta - beta) * rate / (beta + new_root + l2 * rate)
    table[at + uint64(1)] = new_root
    table[at + uint64(2)] = z


@helper(error_model="numpy", fastmath=_MATH)
def _step(rule: int, table: Any, indices: Any, values: Any, slope: Any, rate: Any, settings: Any) -> None:
    """Move the bias and the weights of one example, whose loss has the derivative `slope` in its margin.

    The bias has no penalty: it is no feature. Without one its row is not written, for all examples would share it.
    """
    l1, l2, beta = settings[1], settings[2], settings[3]
    zero = beta - beta
    has_bias = settings[4] != zero
    if rule == SGD:
        if has_bias:
            _sgd_row(table, uint64(0), slope, rate, zero, zero, zero)
        for j in range(indices.size):
            _sgd_row(table, _place(indices[j], 1), slope * values[j], rate, l1, l2, zero)
    elif rule == ADAGRAD:
        if has_bias:
            _adagrad_row(table, uint64(0), slope, rate, zero, zero, beta)
        for j in range(indices.size):
            _adagrad_row(table, _place(indices[j], 2), slope * values[j], rate, l1, l2, beta)
    else:
        if has_bias:
            _ftrl_row(table, uint64(0), slope, rate, zero, zero, beta)
        for j in range(indices.size):
            _ftrl_row(table, _place(indices[j], 4), slope * values[j], rate, l1, l2, beta)


@inlined(error_model="numpy", fastmath=_MATH)
def _move(rule: int, table: Any, at: Any, gradient: Any, rate: Any, l1: Any, l2: Any, beta: Any) -> None:
    if rule == SGD:
        _sgd_row(table, at, gradient, rate, l1, l2, beta - beta)
    elif rule == ADAGRAD:
        _adagrad_row(table, at, gradient, rate, l1, l2, beta)
    else:
        _ftrl_row(table, at, gradient, rate, l1, l2, beta)


@helper(error_model="numpy", fastmath=_MATH)
def _step_classes(
    rule: int, table: Any, indices: Any, values: Any, slopes: Any, rate: Any, settings: Any
) -> None:
    """`_step` where the loss has a derivative in the margin of each class."""
    l1, l2, beta = settings[1], settings[2], settings[3]
    zero, width, classes = beta - beta, _width(rule), slopes.size
    if settings[4] != zero:
        for k in range(classes):
            _move(rule, table, uint64(k * width), slopes[k], rate, zero, zero, beta)
    for j in range(indices.size):
        at = _place(indices[j], classes * width)
        for k in range(classes):
            _move(rule, table, at + uint64(k * width), slopes[k] * values[j], rate, l1, l2, beta)


@helper(error_model="numpy", fastmath=_MATH)
def _softmax(table: Any, width: int, indices: Any, values: Any, target: int, slopes: Any) -> Any:
    """The loss of one example, whose label is `target`; its derivatives in the margins of all classes are `slopes`."""
    for k in range(slopes.size):
        slopes[k] = table[k * width]
    for j in range(indices.size):
        at = _place(indices[j], slopes.size * width)
        for k in range(slopes.size):
            slopes[k] += table[at + uint64(k * width)] * values[j]
    most, own = slopes.max(), slopes[target]
    total = most - most
    for k in range(slopes.size):
        slopes[k] = np.exp(slopes[k] - most)
        total += slopes[k]
    for k in range(slopes.size):
        slopes[k] /= total
    slopes[target] -= total / total
    return np.log(np.float64(total)) + (most - own)


@njit(cache=True, nogil=True, error_model="numpy")
def train_classes(
    table: Any, rows: Any, targets: Any, span: Any, rule: int, settings: Any, gate: Any, seen: int, sums: Any
) -> int:
    """`train` for several classes (softmax): a row of `table` has the numbers of one after the other."""
    starts, indices, values, weights = rows
    width, flat = _width(rule), table.reshape(table.size)
    slopes, one = np.empty(table.shape[1] // width, table.dtype), settings[0] / settings[0]
    number = np.int64(0)
    for row in range(span[0], span[1]):
        mine, given = indices[starts[row] : starts[row + 1]], values[starts[row] : starts[row + 1]]
        if gate[0] != FREE:
            number, status = enter(gate, seen + row)
            if status != REACHED:
                return status  # type: ignore[no-any-return]
        loss = _softmax(flat, width, mine, given, np.int64(targets[row]), slopes)
        if weights[row] != 1:
            for k in range(slopes.size):
                slopes[k] *= weights[row]
        rate = settings[0]
        if rule == SGD:
            rate /= np.sqrt(one * np.float32(seen + row + 1))
        _step_classes(rule, flat, mine, given, slopes, rate, settings)
        if gate[0] != FREE:
            leave(gate, number)
        sums[LOSS] += weights[row] * loss
        sums[WEIGHT] += weights[row]
    fence()
    return REACHED


@njit(cache=True, nogil=True, error_model="numpy")
def train(
    table: Any, rows: Any, targets: Any, span: Any, rule: int, settings: Any, gate: Any, seen: int, sums: Any
) -> int:
    """Learn from rows `span[0]` to `span[1]`; add their loss before each update to `sums`, and say how waiting ended.

    `rows` are starts, indices, values and weights of a `Rows`, `targets` its labels as 0 and 1. `settings` are rate,
    l1, l2, beta and whether there is a bias (1 or 0), in the table's own type. `seen` examples came before row 0.
    `gate` is that of a `Gate`, at which an example has the number of those before it. Returns REACHED, or how a wait
    ended that others did not let end well.
    """
    starts, indices, values, weights = rows
    width = _width(rule)
    one = settings[0] / settings[0]
    loss, total, product, factors = 0.0, 0.0, 1.0, 0
    number = np.int64(0)
    for row in range(span[0], span[1]):
        mine, given = indices[starts[row] : starts[row + 1]], values[starts[row] : starts[row + 1]]
        if gate[0] != FREE:
            number, status = enter(gate, seen + row)
            if status != REACHED:
                return status  # type: ignore[no-any-return]
        margin = _margin(table, width, mine, given)
        wrong_by = -margin if targets[row] else margin
        small = np.exp(-abs(margin))
        probability = (one if margin > 0 else small) / (one + small)
        slope = (probability - targets[row]) * weights[row]
        rate = settings[0]
        if rule == SGD:
            rate /= np.sqrt(one * np.float32(seen + row + 1))
        _step(rule, table, mine, given, slope, rate, settings)
        if gate[0] != FREE:
            leave(gate, number)
        if weights[row] == 1:  # one logarithm for many examples: of the product of what it would be taken of
            product *= 1.0 + np.float64(small)
            factors += 1
            if factors == _FACTORS:
                loss += np.log(product)
                product, factors = 1.0, 0
            loss += max(wrong_by, 0.0)
        else:
            loss += weights[row] * (max(wrong_by, 0.0) + np.log1p(small))
        total += weights[row]
    fence()
    sums[LOSS] += loss + np.log(product)
    sums[WEIGHT] += total
    return REACHED


def warm(dtype: str = "float32") -> None:
    table, sums = np.zeros(4, dtype), np.zeros(2)
    empty = np.zeros(0, np.float32)
    rows = np.zeros(1, np.int64), np.zeros(0, np.int32), empty, empty
    settings = np.ones(5, dtype)
    train(table, rows, empty, (0, 0), SGD, settings, tuple(CompiledGate()), 0, sums)
    train_classes(table.reshape(1, 4), rows, empty, (0, 0), SGD, settings, tuple(CompiledGate()), 0, sums)
    margins(table, rows, sums[:0])


@njit(cache=True, nogil=True, error_model="numpy")
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
