"""`manyhands sweep` as a program: killed with -9 in the middle, it leaves no run behind, and goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import warm


def alive_in(folder: Path) -> list[int]:
    """Processes whose command line names this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    words = [sys.executable, "-m", "manyhands", "sweep", "line", "--learning-rate", "0.02,0.1,0.4"]
    words += ["--epochs", "40", "--jobs", "1", "--out", str(out)]
    first = warm.Popen(words, starts=2, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 180
    while not (out / "runs" / "0002" / "metrics.jsonl").exists():
        assert time.monotonic() < deadline, "the second run did not begin"
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    orphans = alive_in(out)
    summary = out / "runs" / "0001" / "summary.json"
    kept = summary.stat().st_mtime_ns
    done = warm.run(  # at once, while the second run may still be leaving
        [*words, "--resume"], starts=2, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not set(orphans) & set(alive_in(out)), "a run has outlived its sweep"
    assert not alive_in(out)
    assert summary.stat().st_mtime_ns == kept
    figures = json.loads((out / "figures.json").read_text())
    assert [one["settings"]["learning_rate"] for one in figures["rows"]].count("0.1") == 1
    assert len(figures["rows"]) == 3
    assert all(one["final"] for one in figures["rows"])
    assert "Best of 3 runs" in done.stdout
    assert "next" in done.stdout
