"""Compiled search for the best split of a leaf, from the histograms of some of its features.

A split gains G_l²/(H_l + λ) + G_r²/(H_r + λ) - G²/(H + λ), where G and H are sums of gradients and hessians (Friedman,
2001; Chen and Guestrin, 2016). All sums are integers until they are divided, and of splits that gain the same the
first is taken, by feature and then by bin: so all workers come to the same one, however many they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.native.decorators import helper, njit

GAIN, FEATURE, THRESHOLD, FLAGS, LEFT, BITS, RECORD_WORDS = 0, 1, 2, 3, 4, 6, 10
"""Words of a split: its gain (a float64), feature, last bin on the left, flags, the left child's two sums, and, of a
categorical one, which bins are on the left, a bit each."""
CATEGORICAL, DEFAULT_LEFT, SORTED = 1, 2, 4
"""Flags: bins without order; missing values go to the left; categories were sorted, so that `cat_l2` counts."""

_WITH_MISSING, _CATEGORIES = 1, 2


@helper(error_model="numpy")
def _score(gradient: float, hessian: float, l2: float) -> Any:
    return gradient * gradient / (hessian + l2)


@helper(error_model="numpy")
def _numbers(
    hist: Any, bins: Any, missing_left: bool, with_missing: bool, sums: Any, rule: Any, record: Any
) -> Any:
    """The best threshold of one feature, with missing values on one side; what it scores, and the rest in `record`."""
    gradient, hessian, count = sums[0], sums[1], sums[2]
    count_bits = np.int64(rule[0])
    mask = (np.int64(1) << count_bits) - 1
    least, least_hessian, l2, unit_g, unit_h = np.int64(rule[1]), rule[2], rule[3], rule[4], rule[5]
    per_g, per_h = 1.0 / unit_g, 1.0 / unit_h  # powers of two: to multiply is as exact as to divide
    total_g, total_h = gradient * per_g, hessian * per_h
    left_g, left_w = np.int64(0), np.int64(0)
    numbers = bins - 1 if with_missing else bins
    if missing_left:
        left_g, left_w = hist[2 * (bins - 1)], hist[2 * (bins - 1) + 1]
    best = -1.0
    last = numbers - 1 if missing_left or not with_missing else numbers
    for bin_number in range(last):
        left_g += hist[2 * bin_number]
        left_w += hist[2 * bin_number + 1]
        left_count = left_w & mask
        if left_count < least:
            continue
        if count - left_count < least:
            break
        left_h = (left_w >> count_bits) * per_h
        right_h = total_h - left_h
        if left_h < least_hessian:
            continue
        if right_h < least_hessian:
            break
        left = left_g * per_g
        score = _score(left, left_h, l2) + _score(total_g - left, right_h, l2)
        if score > best:
            best = score
            record[THRESHOLD], record[FLAGS] = bin_number, DEFAULT_LEFT if missing_left else 0
            record[LEFT], record[LEFT + 1] = left_g, left_w
    return best


@helper(error_model="numpy")
def _one_category(hist: Any, bins: Any, sums: Any, rule: Any, record: Any) -> Any:
    count_bits = np.int64(rule[0])
    mask = (np.int64(1) << count_bits) - 1
    least, least_hessian, l2, unit_g, unit_h = np.int64(rule[1]), rule[2], rule[3], rule[4], rule[5]
    total_g, total_h, best = sums[0] / unit_g, sums[1] / unit_h, -1.0
    for bin_number in range(1, bins):
        left_g, left_w = hist[2 * bin_number], hist[2 * bin_number + 1]
        left_count = left_w & mask
        left_h = (left_w >> count_bits) / unit_h
        if left_count < least or sums[2] - left_count < least:
            continue
        if left_h < least_hessian or total_h - left_h < least_hessian:
            continue
        left = left_g / unit_g
        score = _score(left, left_h, l2) + _score(total_g - left, total_h - left_h, l2)
        if score > best:
            best = score
            record[FLAGS] = CATEGORICAL
            record[LEFT], record[LEFT + 1] = left_g, left_w
            record[BITS : BITS + 4] = 0
            record[BITS + bin_number // 64] = np.int64(np.uint64(1) << np.uint64(bin_number % 64))
    return best


@helper(error_model="numpy")
def _sorted_categories(hist: Any, bins: Any, sums: Any, rule: Any, record: Any) -> Any:
    """The best of the splits that cut the categories in the order of gradient by hessian (Fisher, 1958), either end."""
    count_bits = np.int64(rule[0])
    mask = (np.int64(1) << count_bits) - 1
    least, least_hessian, unit_g, unit_h = np.int64(rule[1]), rule[2], rule[4], rule[5]
    l2, smooth, limit, group = rule[3] + rule[6], rule[7], np.int64(rule[8]), np.int64(rule[9])
    total_g, total_h, best = sums[0] / unit_g, sums[1] / unit_h, -1.0
    order, means, used = np.empty(bins, np.int64), np.empty(bins), 0
    for bin_number in range(1, bins):
        if (hist[2 * bin_number + 1] & mask) >= smooth:
            hessian = (hist[2 * bin_number + 1] >> count_bits) / unit_h
            mean = (hist[2 * bin_number] / unit_g) / (hessian + smooth)
            place = used
            while place > 0 and means[place - 1] > mean:  # the same mean: in the order of bins
                means[place], order[place] = means[place - 1], order[place - 1]
                place -= 1
            means[place], order[place] = mean, bin_number
            used += 1
    most: Any = min(limit, (used + 1) // 2)
    for from_end in range(2):
        left_g, left_w, held = np.int64(0), np.int64(0), np.int64(0)
        for taken in range(min(used, most)):
            bin_number = order[used - 1 - taken if from_end else taken]
            left_g += hist[2 * bin_number]
            left_w += hist[2 * bin_number + 1]
            held += hist[2 * bin_number + 1] & mask
            left_count = left_w & mask
            left_h = (left_w >> count_bits) / unit_h
            if left_count < least or left_h < least_hessian:
                continue
            right_count = sums[2] - left_count
            if right_count < least or right_count < group or total_h - left_h < least_hessian:
                break
            if held < group:
                continue
            held = np.int64(0)
            left = left_g / unit_g
            score = _score(left, left_h, l2) + _score(total_g - left, total_h - left_h, l2)
            if score > best:
                best = score
                record[FLAGS] = CATEGORICAL | SORTED
                record[LEFT], record[LEFT + 1] = left_g, left_w
                record[BITS : BITS + 4] = 0
                for i in range(taken + 1):
                    one = order[used - 1 - i if from_end else i]
                    record[BITS + one // 64] |= np.int64(np.uint64(1) << np.uint64(one % 64))
    return best


@helper(error_model="numpy")
def _of_feature(hist: Any, bins: Any, kind: int, sums: Any, rule: Any, record: Any, other: Any) -> Any:
    if kind == _CATEGORIES:
        if bins <= np.int64(rule[10]):
            return _one_category(hist, bins, sums, rule, record)
        return _sorted_categories(hist, bins, sums, rule, record)
    best = _numbers(hist, bins, False, kind == _WITH_MISSING, sums, rule, record)
    if kind == _WITH_MISSING:
        second = _numbers(hist, bins, True, True, sums, rule, other)
        if second > best:
            record[THRESHOLD : LEFT + 2] = other[THRESHOLD : LEFT + 2]
            return second
    return best


@helper(error_model="numpy")
def _sums_of(totals: Any, rule: Any) -> Any:
    """A leaf's gradients, hessians and rows from its two words."""
    sums, count_bits = np.empty(3, np.int64), np.int64(rule[0])
    sums[0], sums[1] = totals[0], totals[1] >> count_bits
    sums[2] = totals[1] & ((np.int64(1) << count_bits) - 1)
    return sums


@njit(cache=True, nogil=True, error_model="numpy")
def best_split(
    hist: Any, features: Any, starts: Any, kinds: Any, totals: Any, rule: Any, record: Any, gain: Any
) -> None:
    """The best split of a leaf among `features`, whose bins begin at `starts` in `hist`, into `record`.

    `totals` are the leaf's two words. `rule` are, as floats: bits of a count, least rows and hessian of a leaf, λ,
    units of gradients and hessians, and of categories cat_l2, cat_smooth, most on the left, least rows moved, most that
    are tried one by one; and the least gain. `gain` is the same memory as `record`, as floats; its first is -1 where
    there is no split.
    """
    sums = _sums_of(totals, rule)
    here = _score(sums[0] / rule[4], sums[1] / rule[5], rule[3])
    found, spare = np.zeros(RECORD_WORDS, np.int64), np.zeros(RECORD_WORDS, np.int64)
    best = -1.0
    if sums[2] >= 2 * np.int64(rule[1]):
        for i in range(features.size):
            feature = features[i]
            begin, end = starts[i], starts[i + 1]
            own = hist[2 * begin : 2 * end]
            score = _of_feature(own, end - begin, kinds[feature], sums, rule, found, spare)
            gained = score - here
            if score >= 0 and gained > rule[11] and gained > best:
                best = gained
                found[FEATURE] = feature
                record[:] = found
                if found[FLAGS] & CATEGORICAL:  # what it has no use for may be of the feature before
                    record[THRESHOLD] = 0
                else:
                    record[BITS:] = 0
    gain[GAIN] = best


@njit(cache=True, nogil=True, error_model="numpy")
def best_pair(
    pool: Any,
    leaves: Any,
    features: Any,
    starts: Any,
    kinds: Any,
    totals: Any,
    rule: Any,
    records: Any,
    gains: Any,
) -> None:
    """`best_split` of the leaves whose histograms are rows `leaves` of `pool`, into a row of `records` each."""
    for i in range(len(leaves)):
        best_split(pool[leaves[i]], features, starts, kinds, totals[i], rule, records[i], gains[i])


@njit(cache=True, nogil=True, error_model="numpy")
def best_of_all(gathered: Any, gains: Any, best: Any) -> None:
    """Of each worker's splits of some leaves the best, of equal ones that of the first feature."""
    for leaf in range(gathered.shape[1]):
        chosen = 0
        for worker in range(1, gathered.shape[0]):
            gain, most = gains[worker, leaf, GAIN], gains[chosen, leaf, GAIN]
            is_earlier = gathered[worker, leaf, FEATURE] < gathered[chosen, leaf, FEATURE]
            if gain > most or (gain == most and is_earlier):
                chosen = worker
        best[leaf] = gathered[chosen, leaf]


@njit(cache=True, nogil=True, error_model="numpy")
def feature_gains(hist: Any, starts: Any, kinds: Any, totals: Any, rule: Any, gains: Any) -> None:
    """What the best split of each feature gains by this histogram alone; -1 where it has none."""
    sums = _sums_of(totals, rule)
    here = _score(sums[0] / rule[4], sums[1] / rule[5], rule[3])
    found, spare = np.zeros(RECORD_WORDS, np.int64), np.zeros(RECORD_WORDS, np.int64)
    for feature in range(gains.size):
        begin, end = starts[feature], starts[feature + 1]
        score = _of_feature(hist[2 * begin : 2 * end], end - begin, kinds[feature], sums, rule, found, spare)
        gains[feature] = score - here if score >= 0 else -1.0


def warm() -> None:
    hist, starts, none = np.zeros(2, np.int64), np.zeros(1, np.int64), np.zeros(0, np.int64)
    rule, record = np.ones(12), np.zeros(RECORD_WORDS, np.int64)
    best_split(hist, none, starts, none, hist, rule, record, record.view(np.float64))
    pool, records = hist.reshape(1, 2), record.reshape(1, -1)
    best_pair(pool, none, none, starts, none, pool, rule, records, records.view(np.float64))
    gathered = records.reshape(1, 1, -1)
    best_of_all(gathered, gathered.view(np.float64), records.copy())
    feature_gains(hist, starts, none, hist, rule, np.zeros(0))
