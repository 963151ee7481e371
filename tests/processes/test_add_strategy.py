"""Adding a strategy as docs/internals/extending.md says it: a folder, a line of the registry, a row of the contract."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import manyhands

SOURCE = Path(manyhands.__file__).parent
ROOT = SOURCE.parents[1]


def recipe() -> tuple[str, str, str, str]:
    """The example's value and training, and its lines of registry and contract."""
    section = (
        (ROOT / "docs/internals/extending.md").read_text().partition("## A strategy")[2].partition("\n## ")[0]
    )
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    [value] = [block for block in blocks if "class EveryOther(" in block]
    [training] = [block for block in blocks if "class EveryOtherTraining(" in block]
    line, row = re.findall(r'^"every-other": .*$', section, re.MULTILINE)
    return value, training, line, row


def with_line(text: str, after: str, line: str) -> str:
    """`text` with one more line, the first of the dict that begins with `after`."""
    assert text.count(after) == 1
    return text.replace(after, f"{after}\n    {line}")


def test_a_folder_a_line_and_a_row_add_a_strategy(tmp_path: Path) -> None:
    value, training, line, row = recipe()
    package, strategies = tmp_path / "manyhands", tmp_path / "manyhands/strategies"
    strategies.mkdir(parents=True)
    for one in SOURCE.iterdir():  # all else is as it is
        if one.name != "strategies":
            (package / one.name).symlink_to(one)
    for one in (SOURCE / "strategies").iterdir():
        if one.name != "registry.py":
            (strategies / one.name).symlink_to(one)
    registry = (SOURCE / "strategies/registry.py").read_text()
    begin = "STRATEGIES: Final[dict[str, StrategyEntry]] = {"
    (strategies / "registry.py").write_text(with_line(registry, begin, line))
    folder = strategies / "every_other"
    folder.mkdir()
    for name, content in {"__init__": "", "strategy": value, "training": training}.items():
        (folder / f"{name}.py").write_text(content)
    tests = tmp_path / "tests"
    tests.mkdir()
    contract = (ROOT / "tests/processes/test_contract.py").read_text()
    (tests / "test_contract.py").write_text(with_line(contract, "ROWS = {", row))
    asked = "every-other or has_a_row or but_for_a_few"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "test_contract.py",
            "-n0",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            asked,
        ],
        cwd=tests,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) == 7
