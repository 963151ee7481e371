"""Six kills of a training, of workers and of the launcher, leave no process and no shared memory behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from kills import Strike, strike, strikes, training


@pytest.mark.parametrize("plan", strikes(2, seed=6, horizon_s=1.0), ids=lambda plan: str(plan.seed))
def test_a_kill_leaves_nothing_behind(plan: Strike, tmp_path: Path) -> None:
    strike(training(tmp_path), tmp_path, plan)
