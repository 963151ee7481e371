"""Compiled histograms: fixed-point gradients summed by bin, rows divided between two leaves, scores moved by a leaf.

A row has two words: its gradient, and its hessian with a one in the low bits, which counts rows. Both are integers
of 64 bits, in units that no sum over all rows can overflow. So sums are exact, whatever their order, and a histogram
is the same however its rows are split over workers, and the difference of two that of the rows between them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint64

from manyhands.native.decorators import njit
from manyhands.workloads.gbdt.bin_kernels import TILE


@njit(cache=True, nogil=True, error_model="numpy")
def histogram(tiles: Any, rows: Any, words: Any, first: int, offsets: Any, ordered: Any, out: Any) -> None:
    """Sum the two words of `rows` by byte into `out`, two for each byte of all columns; then the sums of all rows.

    Bytes lie in tiles of eight columns, so that the part of `out` that a tile moves stays in the nearest cache. `words`
    begin with those of row `first`; they are put in the order of `rows` once for all tiles, into `ordered`.
    """
    height, columns = uint64(tiles.shape[1]), offsets.size - 1
    flat = tiles.reshape(tiles.size)
    out[:] = 0
    gradients, others = np.int64(0), np.int64(0)
    for i in range(rows.size):
        at = uint64(2) * uint64(rows[i] - first)
        gradient, other = words[at], words[at + uint64(1)]
        ordered[uint64(2) * uint64(i)] = gradient
        ordered[uint64(2) * uint64(i) + uint64(1)] = other
        gradients += gradient
        others += other
    out[out.size - 2] = gradients
    out[out.size - 1] = others
    places = np.zeros(TILE, np.uint64)
    for tile in range(tiles.shape[0]):
        width = min(TILE, columns - tile * TILE)
        for f in range(width):
            places[f] = uint64(2) * uint64(offsets[tile * TILE + f])
        base = uint64(tile) * height * uint64(TILE)
        if width == TILE:  # a constant number of times, which the compiler unrolls
            for i in range(rows.size):
                gradient = ordered[uint64(2) * uint64(i)]
                other = ordered[uint64(2) * uint64(i) + uint64(1)]
                begin = base + uint64(rows[i]) * uint64(TILE)
                for f in range(TILE):
                    place = places[uint64(f)] + uint64(2) * uint64(flat[begin + uint64(f)])
                    before, second = out[place], out[place + uint64(1)]
                    out[place] = before + gradient
                    out[place + uint64(1)] = second + other
        else:
            for i in range(rows.size):
                gradient = ordered[uint64(2) * uint64(i)]
                other = ordered[uint64(2) * uint64(i) + uint64(1)]
                begin = base + uint64(rows[i]) * uint64(TILE)
                for f in range(width):
                    place = places[uint64(f)] + uint64(2) * uint64(flat[begin + uint64(f)])
                    before, second = out[place], out[place + uint64(1)]
                    out[place] = before + gradient
                    out[place + uint64(1)] = second + other


@njit(cache=True, nogil=True)
def reduce_areas(areas: Any, begin: int, end: int, out: Any) -> None:
    """The sum over workers of words `begin` to `end` of their histograms."""
    for i in range(end - begin):
        out[i] = areas[0, begin + i]
    for worker in range(1, areas.shape[0]):
        for i in range(end - begin):
            out[i] += areas[worker, begin + i]


@njit(cache=True, nogil=True)
def take_from_parent(areas: Any, begin: int, end: int, pool: Any, child: int, parent: int) -> None:
    """`reduce_areas` into row `child` of `pool`, which is subtracted from row `parent`, in one go."""
    new, whole = pool[child], pool[parent]
    reduce_areas(areas, begin, end, new)
    for i in range(end - begin):
        whole[i] -= new[i]


@njit(cache=True, nogil=True)
def spread(packed: Any, layout: Any, starts: Any, out: Any) -> None:
    """The histograms of features from those of columns; `layout` is columns, firsts, zeros and offsets of it.

    `starts` are where the bins of each feature begin in `out`; the last two words are the sums of all rows.
    """
    columns, firsts, zeros, offsets = layout
    gradients, others = packed[packed.size - 2], packed[packed.size - 1]
    for f in range(columns.size):
        source, target = 2 * offsets[columns[f]], 2 * starts[f]
        count = starts[f + 1] - starts[f]
        if firsts[f] == 0:
            for i in range(2 * count):
                out[target + i] = packed[source + i]
            continue
        source += 2 * firsts[f]
        zero_gradients, zero_others = gradients, others
        for number in range(count - 1):
            place = target + 2 * (number if number < zeros[f] else number + 1)
            gradient, other = packed[source + 2 * number], packed[source + 2 * number + 1]
            out[place] = gradient
            out[place + 1] = other
            zero_gradients -= gradient
            zero_others -= other
        out[target + 2 * zeros[f]] = zero_gradients
        out[target + 2 * zeros[f] + 1] = zero_others
    out[out.size - 2] = gradients
    out[out.size - 1] = others


@njit(cache=True, nogil=True)
def subtract(whole: Any, part: Any) -> None:
    for i in range(whole.size):
        whole[i] -= part[i]


@njit(cache=True, nogil=True)
def divide(tiles: Any, rows: Any, column: int, to_left: Any, spare: Any) -> int:
    """Put the rows whose byte goes to the left before the others, each in their order; how many they are."""
    base = uint64(column // TILE) * uint64(tiles.shape[1]) * uint64(TILE) + uint64(column % TILE)
    flat = tiles.reshape(tiles.size)
    left, right = 0, 0
    for i in range(rows.size):
        row = rows[i]
        goes = to_left[flat[base + uint64(row) * uint64(TILE)]]
        rows[left] = row
        spare[right] = row
        left += goes
        right += 1 - goes
    for i in range(right):
        rows[left + i] = spare[i]
    return left


@njit(cache=True, nogil=True)
def add_to_scores(scores: Any, rows: Any, first: int, value: float) -> None:
    """Move the scores of a leaf's rows; `scores` begin with that of row `first`."""
    for i in range(rows.size):
        scores[uint64(rows[i] - first)] += value


@njit(cache=True, nogil=True, error_model="numpy")
def binary_words(scores: Any, targets: Any, weights: Any, units: Any, count_bits: int, words: Any) -> float:
    """Write the words of log loss for targets 0 and 1; the sum of losses.

    `units` are how many there are of a gradient and of a hessian of 1; the hessian stands above `count_bits` bits.
    """
    loss = 0.0
    for i in range(scores.size):
        score = scores[i]
        small = np.exp(-abs(score))
        chance = (1.0 if score > 0 else small) / (1.0 + small)
        weight = weights[i]
        wrong_by = -score if targets[i] > 0 else score
        loss += weight * (max(wrong_by, 0.0) + np.log1p(small))
        words[2 * i] = np.int64(np.rint((chance - targets[i]) * weight * units[0]))
        hessian = np.int64(np.rint(chance * (1.0 - chance) * weight * units[1]))
        words[2 * i + 1] = (hessian << count_bits) + 1
    return loss


@njit(cache=True, nogil=True, error_model="numpy")
def squared_words(scores: Any, targets: Any, weights: Any, units: Any, count_bits: int, words: Any) -> float:
    """The same of squared error; its gradient is the difference and its hessian 1."""
    loss = 0.0
    for i in range(scores.size):
        error = scores[i] - targets[i]
        weight = weights[i]
        loss += weight * error * error
        words[2 * i] = np.int64(np.rint(error * weight * units[0]))
        words[2 * i + 1] = (np.int64(np.rint(weight * units[1])) << count_bits) + 1
    return loss


@njit(cache=True, nogil=True, error_model="numpy")
def softmax_words(scores: Any, targets: Any, weights: Any, units: Any, count_bits: int, words: Any) -> float:
    """The same of the log loss of several classes: `scores` and `words` have a row for each, `targets` say which.

    The hessian of class k of K is K/(K - 1) · p_k · (1 - p_k), as in LightGBM.
    """
    loss, classes = 0.0, scores.shape[0]
    chances, factor = np.empty(classes), classes / (classes - 1.0)
    for i in range(scores.shape[1]):
        most, total = scores[:, i].max(), 0.0
        for k in range(classes):
            chances[k] = np.exp(scores[k, i] - most)
            total += chances[k]
        own, weight = np.int64(targets[i]), weights[i]
        loss += weight * (np.log(total) + most - scores[own, i])
        for k in range(classes):
            chance = chances[k] / total
            wrong_by = chance - 1.0 if k == own else chance
            words[k, 2 * i] = np.int64(np.rint(wrong_by * weight * units[0]))
            hessian = np.int64(np.rint(factor * chance * (1.0 - chance) * weight * units[1]))
            words[k, 2 * i + 1] = (hessian << count_bits) + 1
    return loss


@njit(cache=True, nogil=True)
def largest_error(scores: Any, targets: Any, weights: Any) -> float:
    largest = 0.0
    for i in range(scores.size):
        largest = max(largest, abs(scores[i] - targets[i]) * weights[i])
    return largest


@njit(cache=True, nogil=True, error_model="numpy")
def binary_loss(scores: Any, targets: Any, weights: Any, unit: float) -> Any:
    """The log loss of rows in integer multiples of `unit` to 1: as a sum it is the same in any order."""
    total = np.int64(0)
    for i in range(scores.size):
        wrong_by = -scores[i] if targets[i] > 0 else scores[i]
        loss = max(wrong_by, 0.0) + np.log1p(np.exp(-abs(scores[i])))
        total += np.int64(np.rint(weights[i] * loss * unit))
    return total


@njit(cache=True, nogil=True, error_model="numpy")
def squared_loss(scores: Any, targets: Any, weights: Any, unit: float) -> Any:
    total = np.int64(0)
    for i in range(scores.size):
        error = scores[i] - targets[i]
        total += np.int64(np.rint(weights[i] * error * error * unit))
    return total


@njit(cache=True, nogil=True, error_model="numpy")
def softmax_loss(scores: Any, targets: Any, weights: Any, unit: float) -> Any:
    total = np.int64(0)
    for i in range(scores.shape[1]):
        most, chances = scores[:, i].max(), 0.0
        for k in range(scores.shape[0]):
            chances += np.exp(scores[k, i] - most)
        loss = np.log(chances) + most - scores[np.int64(targets[i]), i]
        total += np.int64(np.rint(weights[i] * loss * unit))
    return total


def warm() -> None:
    tiles, rows = np.zeros((0, 1, TILE), np.uint8), np.zeros(0, np.int32)
    words, offsets, out = np.zeros(0, np.int64), np.zeros(2, np.int64), np.zeros(4, np.int64)
    histogram(tiles, rows, words, 0, offsets, words, out)
    reduce_areas(np.zeros((1, 2), np.int64), 0, 2, out[:2])
    subtract(out, out.copy())
    take_from_parent(np.zeros((1, 2), np.int64), 0, 2, np.zeros((2, 2), np.int64), 0, 1)
    spread(np.zeros(2, np.int64), (words, words, words, words), np.zeros(1, np.int64), out)
    divide(tiles, rows, 0, np.zeros(256, np.uint8), rows)
    scores = np.zeros(0)
    add_to_scores(scores, rows, 0, 0.0)
    for step in (binary_words, squared_words):
        step(scores, scores, scores, np.ones(2), 1, words)
    largest_error(scores, scores, scores)
    of_classes = np.zeros((2, 0))
    softmax_words(of_classes, scores, scores, np.ones(2), 1, np.zeros((2, 0), np.int64))
    softmax_loss(of_classes, scores, scores, 1.0)
    for measure in (binary_loss, squared_loss):
        measure(scores, scores, scores, 1.0)
