"""Who is waited for without computing longer: `Slowness.late_ever`, each of its rules by a run that only it decides."""

from __future__ import annotations

import numpy as np
import pytest

from manyhands.observe.analyse.slow_workers import Late, Slowness
from manyhands.observe.record.events import NOBODY, RECORD, EventKind

STEPS = 9
Waits = list[tuple[int, int]]


def late(computed: list[int], waits: list[Waits], steps: int = STEPS) -> Late | None:
    """Of workers that compute so long, in ns, and wait for (whom, so long), step by step and over again."""
    slowness = Slowness()
    for worker, (compute_ns, waited) in enumerate(zip(computed, waits, strict=True)):
        records = np.zeros(2 * steps, RECORD)
        records["role"], records["peer"] = worker, NOBODY
        records["kind"] = [EventKind.COMPUTE, EventKind.WAIT] * steps
        records["step"] = np.repeat(np.arange(steps), 2)
        records["start_ns"] = 1000 * records["step"]
        records["duration_ns"][0::2] = compute_ns
        for step in range(steps):
            peer, wait_ns = waited[step % len(waited)]
            records["peer"][2 * step + 1], records["duration_ns"][2 * step + 1] = peer, wait_ns
        slowness.add(records)
    return slowness.late_ever()


def only(peer: int, wait_ns: int) -> Waits:
    return [(peer, wait_ns)]


NONE: Waits = [(NOBODY, 0)]


@pytest.mark.parametrize(
    ("computed", "waits", "expected"),
    [
        # the share of the others' median step: a quarter is enough, less is not
        ([75, 75], [only(1, 25), NONE], (1, 0.25)),
        ([76, 76], [only(1, 24), NONE], None),
        # on average over all the others, who need not all wait
        ([50, 50, 50], [only(1, 50), NONE, NONE], (1, 0.25)),
        ([51, 50, 50], [only(1, 49), NONE, NONE], None),
        ([60, 60, 60], [only(2, 40), only(2, 40), NONE], (2, 0.4)),
        # twice as much as for any other
        ([50, 50, 50], [only(1, 50), only(0, 25), NONE], None),
        ([50, 60, 50], [only(1, 50), only(0, 10), only(1, 50)], (1, 0.5)),
        ([60, 50, 50], [only(1, 10), only(0, 50), NONE], (0, 0.25)),
        ([50, 50, 50], [only(1, 50), only(0, 50), only(1, 50)], (1, 0.5)),
        # who computes longer than 1.3 times the median of the others is slow, and not late
        ([50, 65, 50], [only(1, 50), NONE, only(1, 50)], (1, 0.5)),
        ([50, 66, 50], [only(1, 50), NONE, only(1, 50)], None),
        ([10, 65, 50, 50], [only(1, 40), NONE, only(1, 50), only(1, 50)], (1, (0.8 + 0.5 + 0.5) / 3)),
        # who computes nothing is no worker that is late with it
        ([50, 0, 50], [only(1, 50), NONE, only(1, 50)], None),
        # nobody waits for itself, and nobody is late for one who is not there
        ([50, 50], [NONE, only(1, 50)], None),
        ([50, 50], [only(7, 50), NONE], None),
        ([50], [only(0, 50)], None),
        # by the median step: long waits in fewer than half of them are none, and in more are those
        ([50, 50], [[(1, 950)] * 4 + [(1, 0)] * 5, NONE], None),
        ([50, 50], [[(1, 50)] * 5 + [(1, 0)] * 4, NONE], (1, 0.5)),
        ([50, 50, 50], [[(1, 50)] * 5 + [(2, 50)] * 4, NONE, NONE], (1, 0.25)),
        ([50] * 4, [[(1, 950)] * 4 + [(2, 950)] * 3 + [(3, 950)] * 2, NONE, NONE, NONE], None),
        ([50, 50, 50], [[(1, 950)] * 4 + [(2, 50)] * 5, NONE, NONE], (2, 0.25)),
    ],
)
def test_who_the_others_wait_for_without_computing_longer(
    computed: list[int], waits: list[Waits], expected: tuple[int, float] | None
) -> None:
    found = late(computed, waits)
    assert (None if found is None else (found.worker, found.others_wait)) == pytest.approx(expected)


def test_eight_steps_of_each_say_something() -> None:
    waits = [only(1, 50), NONE]
    assert late([50, 50], waits, steps=8) == Late(worker=1, others_wait=0.5)
    assert late([50, 50], waits, steps=7) is None
