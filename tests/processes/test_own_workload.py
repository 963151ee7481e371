"""Adding a workload is a folder and a line: the recipe of docs/internals/extending.md, in the registry or elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AS_BUILT_IN = """
import scale
from manyhands.workloads.registry import WORKLOADS
WORKLOADS["scale"] = scale.WORKLOAD
from manyhands.cli.main import main
main()
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The recipe's one file, as docs/internals/extending.md has it."""
    text = (ROOT / "docs" / "internals" / "extending.md").read_text()
    recipe = text[text.index("## A workload\n") :]
    found = re.search(r"```python\n(.*?)```", recipe, re.S)
    assert found is not None
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "scale.py").write_text(found[1])
    return folder


def installed(package: Path, name: str, value: str) -> None:
    """What an installer leaves of a package that offers the workload `name`."""
    about = package / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: my-{name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[manyhands.workloads]\n{name} = {value}\n")


def manyhands(
    package: Path, *words: str, start: tuple[str, ...] = ("-m", "manyhands")
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *start, *words],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("way", ["a line", "an entry point"])
def test_the_recipe_is_all_there_is_to_do(way: str, package: Path) -> None:
    start = ("-c", AS_BUILT_IN) if way == "a line" else ("-m", "manyhands")
    if way == "an entry point":
        installed(package, "scale", "scale:WORKLOAD")
    words = ("--factor", "2", "--workers", "2", "--out", "run", "--progress", "none")
    done = manyhands(package, "train", "scale", *words, start=start)
    assert done.returncode == 0, done.stderr
    assert "scale · mirrored · 2 workers · 40 steps" in done.stdout
    (package.parent / "numbers").write_text("1\n-3\n")
    report = manyhands(package, "predict", "run", "numbers", start=start)
    assert report.returncode == 0, report.stderr
    assert [float(line) for line in report.stdout.split()] == pytest.approx([2.0, -6.0], abs=1e-3)
    wrong = manyhands(package, "train", "scale", "--factor", "0", start=start)
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "manyhands: factor is 0.0; it must be a number above 0\n",
    )


def test_a_package_that_takes_a_built_in_name_or_is_broken_is_refused_where_it_is_asked_for(
    package: Path,
) -> None:
    installed(package, "digits", "scale:WORKLOAD")
    installed(package, "broken", "absent:WORKLOAD")
    clash = manyhands(package, "train", "digits")
    assert clash.returncode == 2
    assert clash.stderr == (
        "manyhands: workload 'digits' of the package my-digits (scale:WORKLOAD) has the name of a built-in workload; "
        "rename its entry point, or remove it\n"
    )
    broken = manyhands(package, "train", "broken")
    assert broken.returncode == 2
    assert broken.stderr == (
        "manyhands: workload 'broken' of the package my-broken (absent:WORKLOAD) cannot be loaded: "
        "No module named 'absent'\n"
    )
    others = manyhands(package, "train", "--help")
    assert others.returncode == 0
    assert "mnist" in others.stdout
    assert others.stderr == broken.stderr, "it is said, and the others stay"
