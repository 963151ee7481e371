"""The harness of the live faults, without a process: what it draws, and what it reads."""

from __future__ import annotations

import pytest

from livefaults import CONSISTENCIES, drawn, read_verdict
from livefaults_plans import PLANS


def test_every_plan_meets_every_consistency_whatever_the_seed() -> None:
    for seed in (0, 7, 123456):
        cases = [drawn(seed, number) for number in range(len(PLANS) * len(CONSISTENCIES))]
        assert len({(case.plan, case.consistency) for case in cases}) == len(cases)
        assert {(case.link, case.replicas) for case in cases} == {
            (link, replicas) for link in ("shared", "tcp") for replicas in (0, 1)
        }
    assert drawn(7, 3) == drawn(7, 3)


@pytest.mark.parametrize(
    ("text", "word", "lost"),
    [
        ("ps · no bound on reads · every update applied once, nothing broken\n", "complete", 0),
        ("ps · no bound on reads · complete\n", "complete", 0),
        ("ps · no bound on reads · incomplete: 3 steps are missing\n", "incomplete", 0),
        ("ps · no bound on reads · restored, 17 lost\n", "restored", 17),
        ("ps · no bound on reads · broken\nmanyhands: shard 0: version 3 follows version 1\n", "broken", 0),
        ("UserError('there is nothing')", "broken", 0),
    ],
)
def test_the_audits_verdict_is_read(text: str, word: str, lost: int) -> None:
    found = read_verdict(text)
    assert (found.word, found.lost) == (word, lost)
