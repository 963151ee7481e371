"""The command under a limit of its shell: one sentence and exit status 2, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("limit", "fix"), [("-n 20", "ulimit -n 4096"), ("-f 20", "ulimit -f unlimited")])
def test_a_command_that_meets_a_limit_names_it(tmp_path: Path, limit: str, fix: str) -> None:
    command = (
        f"ulimit {limit}; exec {sys.executable} -m manyhands train line --workers 2 --steps 20 --out run"
    )
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    said = [line for line in done.stderr.splitlines() if line.startswith("manyhands: ")]
    assert (done.returncode, said[-1].endswith(f"raise the limit: {fix}")) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
