"""Whose newest few steps are long: `Slowness.suspects`, each of its rules by a run that only that rule decides."""

from __future__ import annotations

import numpy as np
import pytest

from manyhands.analyse.slowness import Slowness
from manyhands.record.events import NOBODY, RECORD, EventKind

USUAL = [100] * 9


def suspects(*computed: list[int], waited: list[int] | None = None) -> set[int]:
    """Of workers with these compute times in ns, step by step; `waited`: what each waited in every step besides."""
    slowness = Slowness()
    for worker, times in enumerate(computed):
        records = np.zeros(2 * len(times), RECORD)
        records["role"], records["peer"] = worker, NOBODY
        records["kind"] = [EventKind.COMPUTE, EventKind.WAIT] * len(times)
        records["step"] = np.repeat(np.arange(len(times)), 2)
        records["start_ns"] = 1000 * records["step"]
        records["duration_ns"][0::2] = times
        records["duration_ns"][1::2] = waited[worker] if waited is not None else 0
        slowness.add(records)
    return set(slowness.suspects())


@pytest.mark.parametrize(
    ("computed", "expected"),
    [
        # who is compared with whom
        ([], set()),
        ([USUAL], set()),  # alone
        ([[900] * 9], set()),
        ([USUAL, [131] * 9], {1}),  # of two
        ([[131] * 9, USUAL], {0}),
        ([USUAL, USUAL, [131] * 9], {2}),
        ([USUAL, USUAL], set()),
        # exactly the factor is not more than it
        ([USUAL, [130] * 9], set()),
        ([USUAL, [129] * 9], set()),
        # by the median of the others: not their mean, least or largest, and without its own
        ([USUAL, USUAL, [1000] * 9, [131] * 9], {2, 3}),
        ([USUAL, [10] * 9, USUAL, USUAL, [129] * 9], set()),
        ([USUAL, [120] * 9, [150] * 9], {2}),  # 1.36 times the others' 110, and 1.25 times the median of all
        ([[100] * 9, [200] * 9, [270] * 9], {2}),  # 1.8 times the others' 150; worker 1 is 1.08 times its 185
        ([[100] * 9, [300] * 9, [300] * 9], {1, 2}),  # 1.5 times the others' 200, and 1.0 times the largest
        # by the newest five steps: their median, whatever came before
        ([USUAL, [900] * 4 + [100] * 5], set()),
        ([USUAL, [100] * 4 + [900] * 5], {1}),
        ([USUAL, [100] * 6 + [900] * 3], {1}),  # three of five
        ([USUAL, [100] * 7 + [900] * 2], set()),  # two of five: their mean is 420, and of four the median 500
        ([USUAL, [900] * 3 + [100] * 3 + [900] * 3], {1}),
        ([USUAL, [100] * 4 + [900] * 2 + [100] * 3], set()),
        ([USUAL, [900] * 4 + [100, 100, 900, 100, 900]], set()),  # of six the median would be 500
        ([USUAL, [900, 100, 900, 100, 900]], {1}),
        # those who came later are compared by what they have
        ([USUAL, [900]], {1}),
        ([[100], [131]], {1}),
        ([[100], [900, 100]], {1}),
    ],
)
def test_who_computes_longer_than_the_others_by_its_newest_steps(
    computed: list[list[int]], expected: set[int]
) -> None:
    assert suspects(*computed) == expected


def test_only_computing_counts() -> None:
    assert suspects(USUAL, USUAL, waited=[0, 900]) == set()
    assert suspects(USUAL, [131] * 9, waited=[900, 0]) == {1}
