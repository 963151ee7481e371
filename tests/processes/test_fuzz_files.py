"""A few damaged files for every reader; and the harness itself, which must see what it is there to see."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import warm
from file_readers import READERS

TESTS = Path(__file__).resolve().parent.parent


def test_damaged_files_are_read_or_refused_in_a_sentence() -> None:
    """Thousands more, with kernels that check their bounds: `make soak`, and `python tests/fuzz_files.py`."""
    names = [name for name, reader in READERS.items() if not reader.live and name != "tensorboard"]
    asked = [part for name in names for part in ("--reader", name)]
    command = [
        sys.executable,
        TESTS / "fuzz_files.py",
        "--here",
        "--no-bounds",
        "--seed",
        "0",
        "--files",
        "25",
        *asked,
    ]
    done = warm.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count('"done"') == len(names)


@pytest.mark.parametrize(
    ("does", "report"),
    [
        ("raise KeyError('x')", "KeyError"),
        ("np.ones(3 << 28)", "MemoryError"),
        ("time.sleep(60)", "Timeout"),
        ("raise ManyhandsError('\\ud800')", "cannot be printed"),
        ("os.abort()", "Aborted"),
        ("outside(np.zeros(3), 7)", "IndexError"),  # as kernels are compiled for a campaign
    ],
)
def test_the_harness_sees(does: str, report: str) -> None:
    script = f"""
import os, sys, tempfile, time
from pathlib import Path
os.environ["NUMBA_BOUNDSCHECK"] = "1"
import numba
import numpy as np
import fuzz_files, file_readers
from file_reader import Reader, written
from manyhands.errors import ManyhandsError

@numba.njit
def outside(array, at):
    return array[np.uint64(at)]

def read(folder):
    if (folder / "sample").read_bytes() != b"good":
        {does}

fuzz_files.LIMIT_S = 3.0
if "outside" in {does!r}:
    outside(np.zeros(3), 1)  # compiled before the clock runs
file_readers.READERS["broken"] = Reader(name="broken", make=written(b"good"), read=read)
sys.exit(fuzz_files.work("broken", 0, range(20), Path(tempfile.mkdtemp(dir=sys.argv[1]))))
"""
    with tempfile.TemporaryDirectory() as place:
        started: Callable[..., Any] = subprocess.run if "outside" in does else warm.run  # numba is told early
        done = started(
            [sys.executable, "-c", script, place], capture_output=True, text=True, timeout=240, cwd=TESTS
        )
    assert done.returncode != 0
    assert report in done.stdout + done.stderr
