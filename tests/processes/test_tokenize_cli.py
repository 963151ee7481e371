"""`manyhands tokenize`: the same files for any processes, and after kill -9; what is wrong in one sentence."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import warm
from kills import await_that
from manyhands.workloads.text.token_files import TokenFiles, shard_name

tokenizers = pytest.importorskip("tokenizers", reason="the extra manyhands[text] is not installed")

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "looked",
    "at",
    "12",
    "dogs,",
    "naïve",
    "ones!",
    "Ἰθάκη",
]


def text_of(count: int, seed: int = 0) -> str:
    draw = np.random.default_rng(seed)
    lines = (" ".join(draw.choice(WORDS, draw.integers(1, 30))) for _ in range(count))
    return "\n".join(lines) + "\n"


def tokenize(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "manyhands", "tokenize", *map(str, words)]
    return warm.run(command, timeout=120, capture_output=True, text=True)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_tokens_are_those_of_the_library_for_any_number_of_processes(tmp_path: Path) -> None:
    lines = text_of(3000)
    (tmp_path / "a.txt").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"body": ["one two", "three"]}).encode()))
    files = [
        tmp_path / "a.txt",
        tmp_path / "b.jsonl.gz",
        "--split",
        "line",
        "--field",
        "body",
        "--shard",
        "64KiB",
    ]
    made = tokenize(*files, "--train", "bpe", "--vocabulary", 500, "--workers", 1, "--out", tmp_path / "one",
                    "--json", tmp_path / "one.json")  # fmt: skip
    assert (made.returncode, made.stderr) == (0, "")
    given = tmp_path / "one" / "tokenizer.json"
    made = tokenize(*files, "--tokenizer", given, "--workers", 3, "--out", tmp_path / "three")
    assert (made.returncode, made.stderr) == (0, "")
    ours, others = content(tmp_path / "one"), content(tmp_path / "three")
    ours.pop("tokens.json"), others.pop("tokens.json")  # which says how the tokenizer was chosen
    assert ours == others

    files_of_tokens = TokenFiles(tmp_path / "one")
    summary = json.loads((tmp_path / "one.json").read_text())
    assert summary["documents"] == files_of_tokens.num_documents == 3002
    assert summary["tokens"] == files_of_tokens.num_tokens
    assert summary["shards"] == len(files_of_tokens.shard_tokens) > 3
    library = tokenizers.Tokenizer.from_file(str(given))
    wanted = [[*library.encode(one).ids, 0] for one in [*lines.splitlines(), "one two", "three"]]
    found = [files_of_tokens.document(at).tolist() for at in range(files_of_tokens.num_documents)]
    assert found == wanted


def test_a_document_longer_than_a_piece_and_than_a_shard(tmp_path: Path) -> None:
    text = text_of(10_000).replace("\n", "  \n ")
    (tmp_path / "a.txt").write_text(text)
    made = tokenize(tmp_path / "a.txt", "--train", "bpe", "--vocabulary", 400, "--shard", "100KiB", "--workers", 2,
                    "--out", tmp_path / "out")  # fmt: skip
    assert (made.returncode, made.stderr) == (0, "")
    files = TokenFiles(tmp_path / "out")
    assert len(files.shard_tokens) >= 3
    found = np.concatenate([files.shard(at).tokens for at in range(len(files.shard_tokens))]).tolist()
    assert found == [*files.tokenizer.library.encode(text).ids, files.tokenizer.end_id]


def test_a_document_whose_first_piece_has_no_tokens_starts_with_those_of_the_next(tmp_path: Path) -> None:
    """BERT's tokenizer drops control characters: here a piece of them, at a shard's beginning and inside of it."""
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nruns\n")
    silent = "\x01 " * 80_000
    (tmp_path / "a.txt").write_text("\n".join([silent + "the runs", "runs", silent + "the the", silent]))
    made = tokenize(tmp_path / "a.txt", "--split", "line", "--tokenizer", tmp_path / "vocab.txt",
                    "--out", tmp_path / "out")  # fmt: skip
    assert (made.returncode, made.stderr) == (0, "")
    files = TokenFiles(tmp_path / "out")
    found = [files.document(at).tolist() for at in range(files.num_documents)]
    assert found == [[5, 6], [6], [5, 5]]


def test_killed_and_continued(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text_of(60_000))
    files = [str(tmp_path / "a.txt"), "--split", "line", "--train", "wordpiece", "--vocabulary", "300",
             "--shard", "100KiB", "--workers", "2"]  # fmt: skip
    out = tmp_path / "out"
    command = [sys.executable, "-m", "manyhands", "tokenize", *files, "--out", str(out)]
    with warm.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            written, ended = (out / shard_name(4)).exists, process.poll
            await_that(lambda: written() or ended() is not None, "the fifth shard", 60)
            assert ended() is None, process.stderr and process.stderr.read()
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert "shards" not in json.loads((out / "tokens.json").read_text())
    finished = {path.name: path.stat().st_ino for path in out.glob("shard-*")}
    damaged = out / shard_name(1)
    raw = bytearray(damaged.read_bytes())
    raw[200] ^= 1
    damaged.write_bytes(raw)
    (out / shard_name(3)).unlink()

    refused = tokenize(*files, "--out", out)
    assert refused.returncode == 2
    assert "is not empty" in refused.stderr
    refused = tokenize(*files, "--out", out, "--resume", "--split", "paragraph")
    assert refused.returncode == 2
    assert (
        "was begun with split 'line', and now it is 'paragraph'; give the same, or another --out"
        in refused.stderr
    )
    made = tokenize(*files, "--out", out, "--resume")
    assert (made.returncode, made.stderr) == (0, "")
    assert f"{len(finished) - 2} files kept" in made.stdout
    now = {name: (out / name).stat().st_ino for name in finished}
    assert {name for name in finished if now[name] == finished[name]} >= {
        shard_name(0),
        shard_name(2),
        shard_name(4),
    }
    assert not list(out.glob(".*"))

    given = ["--tokenizer", str(out / "tokenizer.json")]
    files[files.index("--train") : files.index("--train") + 4] = given
    assert tokenize(*files, "--out", tmp_path / "whole").returncode == 0
    ours, whole = content(out), content(tmp_path / "whole")
    ours.pop("tokens.json"), whole.pop("tokens.json")
    assert ours == whole
    again = tokenize(*files, "--out", tmp_path / "whole", "--resume")
    assert again.returncode == 0
    assert content(tmp_path / "whole")["shard-00000.tokens"] == ours["shard-00000.tokens"]


def test_a_process_that_is_killed_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text_of(200_000))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "manyhands", "tokenize", str(tmp_path / "a.txt"), "--split", "line",
               "--train", "bpe", "--vocabulary", "300", "--train-size", "64KiB", "--shard", "256KiB", "--workers", "2",
               "--out", str(out)]  # fmt: skip
    with warm.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        await_that((out / shard_name(0)).exists, "the first shard", 60)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        names = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
        ours = [child for child, name in names.items() if b"token_worker" in name]
        assert len(ours) == 2
        os.kill(ours[1], signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.fullmatch(
        rf"manyhands: tokenizing process [01] \(process {ours[1]}\) was ended by SIGKILL; finished shards are kept: "
        r"continue with --resume\n",
        said,
    )


def test_one_sentence_for_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("hello wörld".encode("latin-1"))
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "good.txt").write_text("hello")
    train = ["--train", "bpe", "--out", tmp_path / "out"]
    for words, said in (
        (
            ["latin.txt", *train],
            "latin.txt, byte 7: not UTF-8 text: invalid start byte (0xf6); convert it",
        ),
        (["empty.txt", *train], "empty.txt: there is no text; give a file with some"),
        (["missing.txt", *train], "missing.txt cannot be read: No such file or directory"),
        (
            ["good.txt", "--out", tmp_path / "out"],
            "give --tokenizer FILE, or --train with one of bpe, wordpiece",
        ),
        (
            ["good.txt", *train, "--memory", "100MiB"],
            "memory is 100.0 MiB, but 2 workers may take 500.0 MiB; give more, or fewer workers",
        ),
    ):
        file, *rest = words
        made = tokenize(tmp_path / str(file), *rest, "--workers", "2")
        assert (made.returncode, made.stdout) == (2, ""), made.stderr
        assert made.stderr.startswith("manyhands: ")
        assert said in made.stderr
        assert made.stderr.count("\n") == 1
        for path in (tmp_path / "out").glob("*"):
            path.unlink()


def test_without_the_library_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("hello")
    (tmp_path / "hidden" / "tokenizers").mkdir(parents=True)
    (tmp_path / "hidden" / "tokenizers" / "__init__.py").write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path / "hidden"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "manyhands", "tokenize", str(tmp_path / "good.txt"), "--train", "bpe"]
    made = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        timeout=60, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert made.returncode == 2
    assert made.stderr == (
        "manyhands: tokens of text need the package tokenizers, which is not installed: pip install 'manyhands[text]'\n"
    )
