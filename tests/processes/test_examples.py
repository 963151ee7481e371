"""The scripts of `examples/` run as their docstrings say, and do what they claim; timing decides nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def _run(folder: Path, *command: str | Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_told_of_and_tested():
    told = (EXAMPLES / "README.md").read_text()
    for file in EXAMPLES.iterdir():
        if file.suffix in (".py", ".ipynb"):
            assert f"]({file.name})" in told
            assert file.name in Path(__file__).read_text()


def test_own_loop_has_the_same_losses_alone_and_on_two_workers(tmp_path):
    script, words = EXAMPLES / "own_loop_cnn.py", ("--epochs", "1")
    alone = _run(tmp_path, script, *words)
    launched = _run(tmp_path, "-m", "manyhands", "launch", script, "--workers", "2", "--", *words)
    line = re.compile(r"epoch 1: loss ([\d.]+), test accuracy ([\d.]+)")
    (loss, right), (other_loss, other_right) = (line.search(text).groups() for text in (alone, launched))
    assert float(loss) == pytest.approx(float(other_loss), abs=2e-3)
    assert float(right) == pytest.approx(float(other_right), abs=0.02)
    assert float(right) > 0.5


def test_glove_learns_and_names_neighbours(tmp_path):
    printed = _run(
        tmp_path, EXAMPLES / "glove.py", "--bytes", "200000", "--passes", "3", "--dim", "16", "--workers", "2"
    )
    costs = [float(cost) for cost in re.findall(r"pass \d: cost ([\d.]+)", printed)]
    assert len(costs) == 3
    assert costs[-1] < costs[0]
    assert re.search(r"^list: \w+ \d", printed, re.M)


def test_straggler_is_given_fewer_batches_by_the_asynchronous_server(tmp_path):
    printed = _run(tmp_path, EXAMPLES / "straggler.py", "--steps", "60", "--factor", "20")
    rows = {line.split()[1]: line.split() for line in printed.splitlines() if line.startswith("ps ")}
    assert set(rows) == {"consistency=sync", "consistency=async"}
    assert rows["consistency=sync"][-2:] == ["60", "60"]
    fast, slow = map(int, rows["consistency=async"][-2:])
    assert fast + slow == 60
    assert slow < fast


def test_notebook_runs_cell_by_cell(tmp_path, monkeypatch, capsys):
    book = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert book["nbformat"] == 4
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    assert all(cell.get("outputs", []) == [] for cell in book["cells"])
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(book["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"notebook.ipynb, cell {number}", "exec"), namespace)
    assert "largest difference of a weight" in capsys.readouterr().out


def test_hugging_face_trainer_learns_on_two_workers(tmp_path):
    pytest.importorskip("transformers", reason="the example needs transformers and accelerate")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = _run(tmp_path, *launch, EXAMPLES / "hugging_face.py", "--steps", "12")
    told = re.search(r"2 workers, .*: loss ([\d.]+) before, ([\d.]+) after", printed)
    assert told is not None, printed
    assert float(told[2]) < float(told[1]) - 0.3
