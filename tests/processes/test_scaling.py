"""`manyhands scaling` as a program: real runs, each on cores of its own, and what it leaves."""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path

import pytest

import warm
from manyhands.lab.scaling.scaling_curve import fit_amdahl


def test_a_curve_of_two_numbers_of_workers(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "manyhands", "scaling", "line", "--workers", "2", "--steps", "20"]
    words += ["--repeats", "1", "--out", str(tmp_path / "s"), "--json", str(tmp_path / "curve.json")]
    done = warm.run(words, starts=2, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "curve.json").read_text())
    assert [point["workers"] for point in found["points"]] == [1, 2]
    assert found["points"][0]["speedup"] == 1.0
    speeds = {point["workers"]: point["speedup"] for point in found["points"]}
    alone = {workers: speed for workers, speed in speeds.items() if workers <= found["cores"]}
    assert found["serial_share"] == pytest.approx(fit_amdahl(alone))
    assert "Amdahl's fit" in html.unescape((tmp_path / "s" / "report.html").read_text())
    for name in ("001-workers-1", "002-workers-1"):
        assert json.loads((tmp_path / "s" / name / "summary.json").read_text())["steps"] == 20
    assert f"manyhands explain {tmp_path / 's' / '002-workers-1'}" in done.stdout
