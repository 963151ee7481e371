"""A hundred thousand damaged frames and handshakes of a seed that moves, and some against a run that trains."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

FUZZER = Path(__file__).parent.parent / "wire_fuzz.py"


@pytest.mark.parametrize(
    "options", [["--frames", "100000"], ["--frames", "5000", "--only", "live"]], ids=["readers", "live"]
)
def test_nothing_breaks(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    command = [sys.executable, str(FUZZER), *options, "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    with capsys.disabled():
        print(f"\n{done.stdout.strip()}")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.search(r", 0 failures$", done.stdout.strip())
