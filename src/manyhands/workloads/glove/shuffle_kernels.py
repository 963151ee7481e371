"""Compiled loops that put records in another order: each as two int64, its words and the bits of its count."""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.native.decorators import helper, njit

__all__ = ["deal_pairs", "shuffle_pairs", "warm"]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_ONE, _MIX_TWO = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def warm() -> None:
    """Compile everything here, by shuffling two records, which lie apart as those of a file do."""
    records, others, state = np.zeros(4, np.int64), np.zeros(4, np.int64), np.zeros(1, np.uint64)
    shuffle_pairs(records[0::2], records[1::2], state)
    chosen, ends = np.empty(2, np.int32), np.zeros(1, np.int64)
    deal_pairs(records[0::2], records[1::2], others[0::2], others[1::2], chosen, ends, state)


@helper()
def _below(limit: int, state: Any) -> Any:
    """A number from 0 to limit - 1: SplitMix64 (Steele, Lea, Flood 2014), its upper 53 bits as a fraction."""
    state[0] += _STEP
    mixed = state[0]
    mixed = (mixed ^ (mixed >> _S30)) * _MIX_ONE
    mixed = (mixed ^ (mixed >> _S27)) * _MIX_TWO
    mixed ^= mixed >> _S31
    return np.int64(np.float64(mixed >> _S11) * 2.0**-53 * limit)


@njit(cache=True, nogil=True)
def shuffle_pairs(pairs: Any, bits: Any, state: Any) -> None:
    """Fisher and Yates, in place."""
    for last in range(pairs.size - 1, 0, -1):
        other = _below(last + 1, state)
        pairs[last], pairs[other] = pairs[other], pairs[last]
        bits[last], bits[other] = bits[other], bits[last]


@njit(cache=True, nogil=True)
def deal_pairs(
    pairs: Any, bits: Any, out_pairs: Any, out_bits: Any, chosen: Any, ends: Any, state: Any
) -> None:
    """Draw a part for each record and put those of one part together; `ends` says where each part ends."""
    ends[:] = 0
    for index in range(pairs.size):
        chosen[index] = _below(ends.size, state)
        ends[chosen[index]] += 1
    for part in range(1, ends.size):
        ends[part] += ends[part - 1]
    for index in range(pairs.size - 1, -1, -1):
        ends[chosen[index]] -= 1
        out_pairs[ends[chosen[index]]] = pairs[index]
        out_bits[ends[chosen[index]]] = bits[index]
    for part in range(ends.size - 1):  # each end has moved to its start, which is the end of the part before
        ends[part] = ends[part + 1]
    ends[-1] = pairs.size
