"""What is compiled beforehand is what runs need: after `prepare`, training compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_COMPILED_HERE = """
import sys
from numba.core import event

seen = event.RecordingListener()
event.register("numba:compile", seen)
from manyhands.cli.main import main

for words in sys.argv[1:]:
    sys.argv = ["manyhands", *words.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
    compiled = {one.data["dispatcher"].py_func.__module__ for _, one in seen.buffer if one.is_start}
    print("compiled:", *sorted(name for name in compiled if name.startswith("manyhands.")))
"""


def test_training_compiles_nothing_that_was_not_compiled_before(tmp_path: Path) -> None:
    (tmp_path / "rows.svm").write_text(
        "".join(f"{'+1' if i % 2 else '-1'} {1 + i % 3}:1 7:0.5\n" for i in range(50))
    )
    (tmp_path / "rows.vw").write_text("".join(f"{i % 2 or -1} | word{i % 3} other:0.5\n" for i in range(50)))
    (tmp_path / "text.txt").write_text("the cat sees the dog and the dog sees the cat\n" * 30)
    commands = [
        "train logreg --train rows.svm --test rows.svm --passes 1 --out svm",
        "train logreg --train rows.vw --bits 10 --passes 1 --out vw",
        "train gbdt --train rows.svm --test rows.svm --trees 2 --min-data-in-leaf 3 --out gbdt",
        "train gbdt --train diabetes --trees 2 --workers 2 --parallel voting --top-k 2 --out voted",
        "predict gbdt rows.svm --out predicted",
        "train glove --corpus text.txt --dim 8 --passes 1 --workers 2 --out glove",
        "train digits --workers 2 --steps 3 --out digits",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILED_HERE, *commands],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    report = [line for line in done.stdout.splitlines() if line.startswith("compiled:")]
    assert report == ["compiled:"] * len(commands)
