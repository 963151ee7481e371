"""The tests of one process under every Python and torch that `pyproject.toml` allows, one environment each.

    python release/matrix.py [--json FILE] [--python python3.12 ...] [--torch 2.11 ...] [tests/unit ...]

Without options: each of Python 3.11 to 3.14 that is installed, with the lowest and the newest torch of the allowed
range. A Python that is not here is a row that says so; a failure of any environment is the exit status 1. Environments
are kept in build/matrix, so a second call begins with the tests.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
INSTALL_LIMIT_S, TEST_LIMIT_S = 1800.0, 3600.0


@dataclass(frozen=True, slots=True)
class Row:
    """One environment: what was asked for, and what its tests ended with."""

    python: str
    torch: str
    passed: bool | None  # None: this Python is not installed
    found: str
    seconds: float = 0.0


def allowed_torch(requirements: list[str]) -> tuple[str, str]:
    """The lowest and the newest minor version of `torch>=A.B,<C.D`."""
    for one in requirements:
        bounds = re.fullmatch(r"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)", one)
        if bounds:
            major, low, _, end = map(int, bounds.groups())
            return f"{major}.{low}", f"{major}.{end - 1}"
    raise SystemExit("pyproject.toml: torch must be given as torch>=A.B,<C.D")


def tested(python: str, torch: str, paths: list[str]) -> Row:
    """Install, and run the tests; the last line of whatever failed is told."""
    program = shutil.which(python)
    if program is None:
        return Row(python, torch, None, "not installed here")
    begun = time.monotonic()
    home = ROOT / "build" / "matrix" / f"{Path(python).name}-torch{torch}"
    inside = home / "bin" / "python"
    pip = [str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps = [
        ([program, "-m", "venv", str(home)], INSTALL_LIMIT_S),
        ([*pip, f"torch=={torch}.*"], INSTALL_LIMIT_S),
        ([*pip, "-e", ".[dev]", f"torch=={torch}.*"], INSTALL_LIMIT_S),
        (
            [str(inside), "-m", "pytest", "-m", "not soak", "-n", "2", "--dist", "loadfile", *paths],
            TEST_LIMIT_S,
        ),
    ]
    if (home / ".installed").exists():
        del steps[:3]
    for words, limit_s in steps:
        said, passed = run(words, limit_s)
        if not passed:
            return Row(python, torch, False, said, time.monotonic() - begun)
        if "-e" in words:
            (home / ".installed").touch()
    return Row(python, torch, True, said, time.monotonic() - begun)


def run(words: list[str], limit_s: float) -> tuple[str, bool]:
    """The last line that a command prints, and whether it succeeded within the limit."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"{words[2]} took more than {limit_s:.0f} s", False
    lines = (done.stdout + done.stderr).strip().splitlines()
    return (lines[-1] if lines else ""), done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--python", nargs="+", default=list(PYTHONS), help="programs to test with")
    parser.add_argument("--torch", nargs="+", help="minor versions, such as 2.11")
    parser.add_argument("paths", nargs="*", default=["tests/unit", "tests/cluster"])
    asked = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = asked.torch or list(dict.fromkeys(allowed_torch(project["dependencies"])))
    rows = []
    for python in asked.python:
        for torch in versions:
            rows.append(tested(python, torch, asked.paths))
            row = rows[-1]
            sign = {True: "passed", False: "FAILED", None: "absent"}[row.passed]
            print(
                f"{sign}  {row.python:12} torch {row.torch:6} {row.seconds:6.0f} s  {row.found}", flush=True
            )
            if asked.json:
                asked.json.parent.mkdir(parents=True, exist_ok=True)
                found = {"machine": platform.machine(), "rows": [asdict(one) for one in rows]}
                asked.json.write_text(json.dumps(found, indent=1) + "\n")
    if all(row.passed is None for row in rows):
        print("none of these Pythons is installed", file=sys.stderr)
        return 1
    return 1 if any(row.passed is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
