"""`manyhands train glove` and `manyhands glove ...` as a user meets them: files, summaries, exit statuses."""

import gzip
import json
import os
import random
import re
import resource
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import run_command
from manyhands.workloads.glove import learning
from manyhands.workloads.glove.cooccurrence_files import open_records
from manyhands.workloads.glove.demo import demo_corpus
from manyhands.workloads.glove.vector_files import Vectors
from manyhands.workloads.glove.vocabulary import Vocabulary
from watched import watched

RUN = ["checkpoints", "config.json", "events", "metrics.jsonl", "report.html", "run.lock", "summary.json"]
"""What every run leaves in its directory."""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Sentences in which days stand among days and animals among animals."""
    draw = random.Random(0)
    days, animals = ["monday", "friday", "sunday"], ["cat", "dog", "cow", "hen"]
    lines = [" ".join(draw.choices(draw.choice([days, animals]), k=8)) for _ in range(400)]
    path = tmp_path / "corpus.txt.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_train_writes_what_people_have_and_a_summary(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status = run_command(
        monkeypatch, "train", "glove", "--corpus", corpus, "--window", "4", "--dim", "6", "--passes", "20",
        "--x-max", "10", "--strategy", "single", "--workers", "1", "--out", out, "--keep-counts",
        "--json", tmp_path / "s.json",
    )  # fmt: skip
    printed = capfd.readouterr()
    assert status == 0, printed.err
    assert printed.err == "", "quiet when not on a terminal"
    assert sorted(os.listdir(out)) == sorted([*RUN, "cooccurrence.bin", "vectors.txt", "vocab.txt"])
    vocabulary = Vocabulary.load(out / "vocab.txt")
    assert sorted(vocabulary.words) == ["cat", "cow", "dog", "friday", "hen", "monday", "sunday"]
    records = open_records(out / "cooccurrence.bin")
    assert len(records) == 3 * 3 + 4 * 4, "days meet days and animals meet animals"
    # Each of 400 lines of 8 words has 8 - k pairs at the distance k, and both ways round.
    assert records["count"].sum() == pytest.approx(400 * 2 * sum((8 - k) / k for k in range(1, 5)))
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (summary["tokens"], summary["vocabulary"], summary["records"]) == (3200, 7, 25)
    assert (summary["strategy"], summary["workers"]) == ("single", 1)
    assert set(summary["seconds"]) == {"vocabulary", "counting", "shuffling", "training", "total"}
    assert len(summary["costs"]) == 20
    assert summary["costs"][-1] < summary["costs"][0]
    assert summary["records_per_s"] > 0
    vectors = Vectors.load(out / "vectors.txt")
    assert vectors.words == list(vocabulary.words)
    assert vectors.matrix.shape == (7, 6)
    page = watched(out)
    assert "glove" in page
    assert "20 of 20" in page


def test_hogwild_without_keeping_counts_and_only_left_contexts(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status = run_command(
        monkeypatch, "train", "glove", "--corpus", corpus, "--dim", "4", "--passes", "2", "--asymmetric",
        "--memory", "1MiB", "--max-vocab", "4", "--workers", "2", "--out", out,
    )  # fmt: skip
    assert status == 0, capfd.readouterr().err
    assert sorted(os.listdir(out)) == sorted([*RUN, "vectors.txt", "vocab.txt"])
    assert len(Vectors.load(out / "vectors.txt")) == 4


def test_without_a_corpus_it_learns_from_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("manyhands.workloads.glove.demo.demo_corpus", partial(demo_corpus, 150_000))
    assert run_command(monkeypatch, "train", "glove", "--passes", "1", "--dim", "8", "--workers", "1") == 0
    printed = capfd.readouterr().out
    assert all(word in printed for word in ("tensor", "list", "thread", "file"))
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"runs/{folder.name}/vectors.txt" in printed


def test_an_interrupted_run_is_resumed_to_the_bytes_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And everything that looks at runs looks at it."""
    draw, train = random.Random(2), learning.train_glove
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(" ".join(f"w{draw.randrange(3000)}" for _ in range(60_000)))

    def interrupted(*arguments: Any, **options: Any) -> Any:
        return train(*arguments, **options | {"after_pass": lambda *_: signal.raise_signal(signal.SIGINT)})

    out, whole = tmp_path / "out", tmp_path / "whole"

    def command(passes: int, where: Path, *more: str) -> int:
        return run_command(
            monkeypatch, "train", "glove", "--corpus", corpus, "--dim", "4", "--passes", str(passes),
            "--workers", "1", "--strategy", "single", "--out", where, *more,
        )  # fmt: skip

    monkeypatch.setattr(learning, "train_glove", interrupted)
    assert command(10**7, out) == 130
    report = capfd.readouterr().err
    found = re.search(
        r"holds the vectors after (\d+) of 10000000 passes; continue with: .* --resume$", report.strip()
    )
    assert found is not None, report
    assert (out / "shuffled.bin").exists(), "what to go on with"
    monkeypatch.setattr(learning, "train_glove", train)
    passes = int(found[1]) + 3
    assert command(passes, out) == 2, "there is a run already"
    assert command(passes, out, "--resume") == 0, capfd.readouterr().err
    assert command(passes, whole) == 0
    assert (out / "vectors.txt").read_bytes() == (whole / "vectors.txt").read_bytes()
    assert sorted(os.listdir(whole)) == sorted([*RUN, "vectors.txt", "vocab.txt"])
    for looks in (
        ["explain", out],
        ["show", out, "--out", tmp_path / "trace.json"],
        ["show", out, "--as", "tensorboard"],
    ):
        capfd.readouterr()
        assert run_command(monkeypatch, *looks) == 0, capfd.readouterr().err


@pytest.mark.parametrize(
    "strategies",
    [
        "hogwild; tensor",
        pytest.param("hogwild; allreduce; tensor; ps consistency=async", marks=pytest.mark.soak),
    ],
)
def test_compare_ends_with_its_report(
    strategies: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "compared"
    status = run_command(
        monkeypatch, "compare", "glove", "--corpus", corpus, "--dim", "4", "--passes", "2", "--repeats", "1",
        "--strategies", strategies, "--out", out,
    )  # fmt: skip
    printed = capfd.readouterr()
    assert status == 0, printed.err
    assert "pass_loss" in printed.out
    assert (out / "report.html").exists()
    figures = json.loads((out / "figures.json").read_text())
    assert figures["target"]["metric"] == "pass_loss"
    for row in figures["strategies"]:
        assert row["runs"] == 1
        assert row["reached"] in (0, 1)
        assert row["samples_per_s"]["median"] > 0
    reached = [row["reached"] for row in figures["strategies"]]
    assert 2 * sum(reached) >= len(reached), "the target is what the better half reaches"
    assert not list(tmp_path.glob(".tmp-*")), "the records go with the comparison"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--corpus", "missing.txt"], ["missing.txt", "No such file"]),
        (["--corpus", "latin.txt"], ["latin.txt", "not UTF-8", "byte 1"]),
        (["--corpus", "empty.txt"], ["empty.txt", "empty"]),
        (["--corpus", "one.txt"], ["1 word", "min_count=5"]),
        (["--corpus", "good.txt", "--x-max", "0"], ["x_max is 0"]),
        (["--corpus", "good.txt", "--x-max", "-3"], ["x_max is -3"]),
        (["--corpus", "good.txt", "--strategy", "hogwyld"], ["'hogwyld'", "did you mean 'hogwild'?"]),
        (["--corpus", "good.txt", "--workers", "0"], ["workers=0"]),
        (["--corpus", "good.txt", "--window", "0"], ["window is 0"]),
        (["--corpus", "good.txt", "--min-count", "0"], ["min_count is 0"]),
        (["--corpus", "good.txt", "--memory", "lots"], ["'lots'", "25MiB"]),
        (["--corpus", "good.txt", "--memory", "1kB"], ["memory=1000 B", "at least"]),
        (["--corpus", "good.txt", "--json", "no/folder/s.json"], ["no/folder"]),
        (["--corpus", "lines.txt"], ["lines.txt", "longer lines"]),
        (["--corpus", "good.txt", "--out", "good.txt"], ["good.txt", "directory"]),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    arguments: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    contents = {
        "latin.txt": b"a\xe4\xf6 ",
        "empty.txt": b"",
        "one.txt": b"a " * 9,
        "good.txt": b"a b c " * 99,
    }
    for name, content in (contents | {"lines.txt": b"a\nb\n" * 9}).items():
        Path(name).write_bytes(content)
    assert (
        run_command(
            monkeypatch, "train", "glove", *arguments, *(["--out", "o"] if "--out" not in arguments else [])
        )
        == 2
    )
    error = capfd.readouterr().err
    assert error.count("\n") == 1, error
    for part in parts:
        assert part in error
    assert not list(tmp_path.glob("**/.tmp-*"))
    assert not list(tmp_path.glob("**/vectors.txt"))


def test_a_full_disk_is_one_sentence_and_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(1)
    (tmp_path / "c.txt").write_text(" ".join(f"w{draw.randrange(300)}" for _ in range(20_000)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        status = run_command(
            monkeypatch,
            "train",
            "glove",
            "--corpus",
            tmp_path / "c.txt",
            "--memory",
            "600KiB",
            "--out",
            tmp_path / "o",
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = capfd.readouterr().err
    assert status == 1
    assert error.count("\n") == 1, error
    assert "temporary files are removed" in error
    assert os.listdir(tmp_path / "o") == ["vocab.txt"]


def test_vectors_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    matrix = np.array([[5, 1, 0], [5, -1, 0], [1, 1, 0.1], [1, -1, 0.1], [0, 0, 9]], np.float32)
    Vectors(["king", "queen", "man", "woman", "[dim]apple"], matrix).save_word2vec("v.bin", binary=True)
    Path("q.txt").write_text(": family\nman king woman queen\n: gram1\nking queen man boy\n")
    Path("p.tsv").write_text("king\tqueen\t9\nking\tman\t5\nman\twoman\t1\n")
    assert run_command(monkeypatch, "glove", "analogy", "v.bin", "king - man + woman", "--top", "1") == 0
    assert "queen" in capfd.readouterr().out
    assert run_command(monkeypatch, "glove", "neighbours", "v.bin", "king", "woman", "--top", "4") == 0
    assert "[dim]apple" in capfd.readouterr().out, "a word is no markup"
    assert (
        run_command(
            monkeypatch,
            "glove",
            "eval",
            "v.bin",
            "--analogies",
            "q.txt",
            "--similarity",
            "p.tsv",
            "--json",
            "e.json",
        )
        == 0
    )
    printed = capfd.readouterr().out
    assert "100.00 %" in printed
    assert "Spearman" in printed
    found = json.loads(Path("e.json").read_text())
    assert found["analogies"]["total"] == {"asked": 2, "known": 1, "right": 1, "accuracy": 1.0}
    assert found["analogies"]["semantic"]["known"] == 1
    assert found["similarity"]["known"] == 3
    for wrong in (
        ["neighbours", "v.bin", "kingg"],
        ["analogy", "v.bin", "king man"],
        ["eval", "v.bin"],
        ["eval", "no.txt", "--similarity", "p.tsv"],
    ):
        assert run_command(monkeypatch, "glove", *wrong) == 2
        assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.soak
def test_the_demo_finds_sensible_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "train", "glove", "--out", tmp_path / "o") == 0
    vectors = Vectors.load(tmp_path / "o" / "vectors.txt")
    near = {
        word: {one for one, _ in vectors.neighbours(word, 20)}
        for word in ("tensor", "list", "thread", "file")
    }
    assert near["tensor"] & {"tensors", "torch", "input"}
    assert near["list"] & {"tuple", "sequence", "lists"}
    assert near["thread"] & {"threads", "threading", "lock", "process"}
    assert near["file"] & {"files", "path", "directory", "filename"}


def test_plain_counts_without_the_diagonal(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    status = run_command(
        monkeypatch, "train", "glove", "--corpus", corpus, "--window", "4", "--dim", "4", "--passes", "1",
        "--strategy", "single", "--workers", "1", "--out", out, "--keep-counts",
        "--weighting", "count", "--no-diagonal", "--json", tmp_path / "s.json",
    )  # fmt: skip
    assert status == 0
    records = open_records(out / "cooccurrence.bin")
    assert len(records) == 3 * 2 + 4 * 3, "days meet other days and animals meet other animals"
    lines = [line.split() for line in gzip.decompress(corpus.read_bytes()).decode().split("\n")]
    pairs = [
        (line[left], line[right])
        for line in lines
        for right in range(8)
        for left in range(max(0, right - 4), right)
    ]
    assert records["count"].sum() == 2 * sum(one != other for one, other in pairs)
    settings = json.loads((tmp_path / "s.json").read_text())["settings"]
    assert (settings["weighting"], settings["diagonal"]) == ("count", False)


def test_compare_judges_vectors_by_analogies_and_similarity(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "questions").write_text(": animals\ncat dog cow hen\ncat dog hen cow\n")
    (tmp_path / "pairs").write_text("cat\tdog\t9\ncat\tmonday\t1\nfriday\tsunday\t8\n")
    out = tmp_path / "compared"
    status = run_command(
        monkeypatch, "compare", "glove", "--corpus", corpus, "--dim", "4", "--passes", "3", "--repeats", "1",
        "--strategies", "single; hogwild", "--out", out, "--x-max", "10",
        "--analogies", tmp_path / "questions", "--similarity", tmp_path / "pairs",
    )  # fmt: skip
    printed = capfd.readouterr()
    assert status == 0, printed.err
    rows = json.loads((out / "figures.json").read_text())["strategies"]
    for row in rows:
        assert row["final"]["analogies"]["median"] in (0.0, 0.5, 1.0)
        assert -1 <= row["final"]["similarity"]["median"] <= 1
    assert "similarity" in printed.out
    assert (
        run_command(monkeypatch, "compare", "glove", "--similarity", tmp_path / "none", "--out", out / "x")
        == 2
    )
    assert "cannot be read" in capfd.readouterr().err
