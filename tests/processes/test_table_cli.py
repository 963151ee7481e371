"""Tables as a user meets them: from a CSV file to a model and to predictions, for each workload, and what is wrong."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manyhands as mh
from commands import run_command

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'manyhands[tables]'")

CITIES = np.array(["Oslo", "Rome, Italy", "Bonn"])


def csv(rows: int, seed: int, *, target: bool = True) -> str:
    draw = np.random.default_rng(seed)
    city, age = draw.integers(0, 3, rows), draw.normal(40, 9, rows).round(2)
    happy = (city == 1) ^ (age > 45)
    lines = ["id,age,city" + ",happy" * target]
    for at in range(rows):
        label = f",{'yes' if happy[at] else 'no'}" * target
        lines.append(f'p{at},{age[at] if at % 10 else ""},"{CITIES[city[at]]}"{label}')
    return "\n".join(lines) + "\n"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.csv.gz").write_bytes(gzip.compress(csv(2_000, 0).encode()))
    Path("test.csv").write_text(csv(300, 1))
    Path("new.csv").write_text(csv(40, 2, target=False).replace("Bonn", "Atlantis", 1))
    return tmp_path


def test_csv_to_model_to_predictions(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> str:
        assert run_command(monkeypatch, *words) == 0
        return capsys.readouterr().err

    shared = ("--train", "train.csv.gz", "--test", "test.csv", "--target", "happy", "--drop", "id")
    run("train", "gbdt", *shared, "--trees", "20", "--memory", "16MiB", "--out", "trees")
    assert json.loads(Path("trees/summary.json").read_text())["accuracy"] > 0.95
    run("train", "logreg", *shared, "--memory", "0", "--out", "line")
    assert json.loads(Path("line/summary.json").read_text())["accuracy"] > 0.6
    for name in ("trees", "line"):
        said = run("predict", name, "new.csv", "--out", "chances.txt")
        assert "1 value of new.csv counted as missing: categories that training did not have" in said
        lines = [line.split("\t") for line in Path("chances.txt").read_text().splitlines()]
        assert len(lines) == 40
        assert all(label == ("yes" if float(yes) > float(no) else "no") for label, no, yes in lines)
    table = ("--path", "train.csv.gz", "--drop", "id,happy", "--skip-bad")
    said = run("train", "svd", *table, "--rank", "2", "--out", "axes")
    assert "200 bad rows of train.csv.gz left out" in said  # every tenth age is missing
    assert json.loads(Path("axes/summary.json").read_text())["columns"] == 4
    said = run("predict", "axes", "test.csv", "--skip-bad", "--out", "coordinates.txt")
    assert "30 bad rows of test.csv left out" in said
    assert len(Path("coordinates.txt").read_text().splitlines()) == 270


def test_what_is_wrong_with_a_table_ends_with_2_and_one_line(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = csv(50, 0).splitlines()
    lines[8] = "p7,nine,Oslo,yes"
    lines[9] += ",more"
    Path("bad.csv").write_text("\n".join(lines))
    for command in (("gbdt", "--train"), ("logreg", "--train"), ("svd", "--path")):
        words: tuple[Any, ...] = ("train", *command, "bad.csv", "--drop", "id")
        target = ("--target", "happy") if command[0] != "svd" else ("--drop", "id,happy")
        assert run_command(monkeypatch, *words, *target) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1
        assert "bad.csv, row 9 has 5 fields, but there are 4 columns" in said[0]
        if command[0] != "svd":
            assert run_command(monkeypatch, *words, *target, "--skip-bad") == 0
            assert "2 bad" in capsys.readouterr().err
        assert run_command(monkeypatch, *words, "--drop", "ID") == 2
        assert "has no column 'ID'" in capsys.readouterr().err


def test_a_label_of_the_test_file_that_is_new_is_a_bad_row(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = csv(300, 1)
    numbers = texts.replace(",yes", ",1").replace(",no", ",0")
    for text, new in ((texts, ",maybe"), (numbers, ",7")):
        Path("train.csv").write_text(text)
        Path("new.csv").write_text("\n".join([*text.splitlines()[:9], "p9,40,Oslo" + new]))
        named = new.strip(",")
        for workload, option in (("gbdt", "--test"), ("gbdt", "--valid"), ("logreg", "--test")):
            shared = ("--train", "train.csv", option, "new.csv", "--target", "happy", "--drop", "id")
            words = ("train", workload, *shared, *(("--trees", "2") if workload == "gbdt" else ()))
            assert run_command(monkeypatch, *words) == 2
            *notes, said = capsys.readouterr().err.strip().splitlines()
            assert (
                f"new.csv, row 9, column 'happy': the label '{named}' is new; those of training are" in said
            )
            assert all(note.startswith("manyhands: objective=binary: ") for note in notes)
            assert run_command(monkeypatch, *words, "--skip-bad") == 0
            assert "manyhands: 1 bad row of new.csv left out" in capsys.readouterr().err


def test_workers_give_the_trees_of_one(files: Path) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv("train.csv.gz")[["age", "city", "happy"]]
    table["city"] += table["happy"].where(np.arange(2_000) % 5 == 0, "")
    labels = np.where(table["happy"] == "yes", 2, np.arange(2_000) % 2)
    alone, two = (
        mh.sklearn.GradientBoostingClassifier(n_estimators=5, workers=workers).fit(
            table[["age", "city"]], labels
        )
        for workers in (1, 2)
    )
    np.testing.assert_array_equal(
        alone.predict_proba(table[["age", "city"]]), two.predict_proba(table[["age", "city"]])
    )
    assert alone.classes_.tolist() == [0, 1, 2]
    line = mh.sklearn.LogisticRegression(workers=2).fit(table[["age", "city"]], labels)
    assert line.predict_proba(table[["age", "city"]]).shape == (2_000, 3)
    values = np.random.default_rng(0).normal(size=(200, 6))
    axes = [mh.sklearn.TruncatedSVD(2, workers=workers).fit(values).singular_values_ for workers in (1, 2)]
    np.testing.assert_allclose(*axes, rtol=1e-7)


def test_columns_are_named_or_numbered_once(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(0)
    zips, x = draw.integers(0, 4, 300), draw.normal(size=300).round(2)
    rows = [f"{int(a > 1) ^ int(b > 0)},{a},{b}" for a, b in zip(zips, x, strict=True)]
    Path("zips.csv").write_text("y,zip,x\n" + "\n".join(rows) + "\n")
    words = ("train", "gbdt", "--train", "zips.csv", "--trees", "2", "--out", "zips")
    assert run_command(monkeypatch, *words, "--categorical", "0") == 0
    infos = re.search("feature_infos=(.*)", Path("zips/model.txt").read_text())
    assert infos is not None
    assert infos[1] == f"0:1:2:3 [{x.min()}:{x.max()}]"  # and not x, which is column 2
    lines = [line.split(",", 1)[1] for line in csv(300, 1).splitlines()]
    Path("few.csv").write_text("\n".join(lines) + "\n")  # without what was dropped
    shared = ("--target", "happy", "--drop", "id", "--train", "train.csv.gz", "--test")
    for workload in (("gbdt", "--trees", "5"), ("logreg",)):
        figures = []
        for test in ("test.csv", "few.csv"):
            assert (
                run_command(monkeypatch, "train", *workload, *shared, test, "--out", f"{test}-{workload[0]}")
                == 0
            )
            figures.append(json.loads(Path(f"{test}-{workload[0]}/summary.json").read_text())["log_loss"])
        assert figures[0] == figures[1]
    capsys.readouterr()
