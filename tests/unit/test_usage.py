"""A command line that cannot be understood is one sentence with what to write instead, and status 2."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands import run_command


@pytest.mark.parametrize(
    ("words", "report"),
    [
        (
            "show run --svg",
            "no such option --svg; did you mean --as svg?",
        ),
        (
            "show run --step 1:3",
            "no such option --step; did you mean --steps?",
        ),
        (
            "show run --as pdf",
            "--as: 'pdf' is not one of 'page', 'file', 'trace', 'svg', 'tensorboard'",
        ),
        (
            "show run --port x",
            "--port must be an integer; got 'x'",
        ),
        (
            "sweep line --steps 1.5",
            "--steps must be an integer; got '1.5'",
        ),
        (
            "sweep --learning-rate 0.1,0.2",
            "no such option --learning-rate of `sweep` itself; name one of digits, mnist, gpt, bert, "
            "recurrent, rl, line before it",
        ),
        ("explain", "missing argument 'run'"),
        ("trian run", "no such command 'trian'. Did you mean 'train'?"),
        ("--bogus", "no such option --bogus"),
        ("explain empty", "empty holds no run (config.json is missing); give the directory of a run"),
        ("explain above", "above holds no run (config.json is missing); did you mean above/run?"),
        ("explain nowhere", "nowhere holds no run: there is no such directory"),
        (
            "compare line --strategies single,mirrored",
            "--strategies 'single,mirrored': separate strategies by semicolons, not commas; write "
            "'single; mirrored'",
        ),
        (
            "compare line --device gpu:1 --steps 2",
            "device='gpu:1': allowed: cpu, cuda, cuda:0, cuda:1, ...; did you mean 'cuda:1'?",
        ),
    ],
)
def test_one_sentence_with_what_to_write_instead(
    words: str,
    report: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "above/run").mkdir(parents=True)
    (tmp_path / "above/run/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert run_command(monkeypatch, *words.split()) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1, error
    assert error.startswith(f"manyhands: {report}")
    assert re.fullmatch(r"( \(see .* --help\))?\n", error.removeprefix(f"manyhands: {report}")), error


def test_a_group_without_a_command_shows_its_help(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "sweep") == 2
    assert " sweep [OPTIONS] COMMAND" in "".join(capfd.readouterr())


def test_a_sweep_of_nothing_says_what_it_varies_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letter.txt").touch()  # so that nothing is trained
    words = ("sweep", "line", "--out", tmp_path)
    said = "no option has several values, so the learning rate varies: --learning-rate 0.025,0.1,0.4; every option"
    assert run_command(monkeypatch, *words) == 2
    assert said in capfd.readouterr().err
    assert run_command(monkeypatch, *words, "--learning-rate", "0.1,0.2") == 2
    assert run_command(monkeypatch, *words, "--seed", "1,2") == 2
    assert "no option has" not in capfd.readouterr().err
