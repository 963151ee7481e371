"""300 faults at live runs, drawn from a seed that moves, and broken builds that the same looks must find.

MANYHANDS_SEED chooses the seed; `python tests/livefaults.py --seed S --only N` is one case of it again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from livefaults import campaign, execute, moving_seed
from livefaults_plans import Case

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

FAULTS, PARTS = 300, 30
SEED = moving_seed()


@pytest.mark.parametrize("part", range(PARTS))
def test_no_live_fault_breaks_a_promise(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    processes = max(1, len(os.sched_getaffinity(0)) // 2)
    lines: list[str] = []
    failed = campaign(FAULTS // PARTS, processes, SEED, say=lines.append, first=part * (FAULTS // PARTS))
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert not failed


@pytest.mark.parametrize(
    ("breakage", "plan", "consistency", "reported"),
    [
        ("acknowledge early", "kill servers", "async", "twice|never took|audit says|differ|not within"),
        ("do not apply", "kill workers", "sync", "plain loop|replay"),
        ("do not apply", "kill workers", "async", "replay"),
        ("look before fencing", "wake a worker that computed", "async", "not struck|ended"),
        ("leave a process", "kill workers", "async", "every process"),
    ],
)
def test_a_broken_build_is_found(
    breakage: str, plan: str, consistency: str, reported: str, tmp_path: Path
) -> None:
    case = Case(number=0, seed=0, consistency=consistency, link="shared", replicas=1, plan=plan)
    report = execute(case, tmp_path, breakage)
    assert report.struck
    assert report.problem, f"{breakage}: nothing was found"
    assert re.search(reported, report.problem), report.problem
