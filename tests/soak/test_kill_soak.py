"""A hundred kills at random moments, of roles and of the launcher, leave no process and no memory behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from kills import Strike, practice, strike, strikes, training


@pytest.mark.soak
@pytest.mark.parametrize("plan", strikes(100, seed=100, horizon_s=3.0), ids=lambda plan: str(plan.seed))
def test_a_kill_leaves_nothing_behind(plan: Strike, tmp_path: Path) -> None:
    command = training if plan.seed % 4 else practice
    strike(command(tmp_path), tmp_path, plan)
