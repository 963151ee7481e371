"""Damaged files against every reader, on a new seed each time, with kernels that check the bounds of their arrays."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

FUZZ = Path(__file__).resolve().parent.parent / "fuzz_files.py"


def test_a_thousand_damaged_files_for_every_reader() -> None:
    done = subprocess.run(
        [sys.executable, FUZZ, "--files", "1000"], capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
