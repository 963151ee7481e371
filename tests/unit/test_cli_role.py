"""`manyhands role`: what makes no sense is one sentence, before anything starts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from commands import run_command
from manyhands.engine import fitting

TRAIN = ("--", "train", "digits", "--strategy", "ps")


def asked(folder: Path, kind: str, index: str = "0", *words: str) -> list[str | Path]:
    spec = folder / "cluster.toml"
    spec.write_text('worker = ["127.0.0.1:1", "127.0.0.1:2"]\nps = ["127.0.0.1:3"]\n')
    return ["role", "--spec", spec, "--type", kind, "--index", index, *(words or TRAIN)]


@pytest.mark.parametrize(
    ("kind", "index", "words", "sentence"),
    [
        ("worker", "2", TRAIN, "task.index=2: the cluster lists 2 of type worker, numbered from 0 to 1"),
        ("chief", "0", TRAIN, "task.type=chief: the cluster lists no chief, only worker, ps"),
        (
            "wroker",
            "0",
            TRAIN,
            "task.type='wroker' is not a type of role; allowed: chief, worker, ps, evaluator",
        ),
        ("ps", "0", ("--", "compare", "digits"), "'compare' cannot run as a role of a cluster"),
        ("ps", "0", (*TRAIN[:-1], "allreduce"), "strategy=allreduce has no parameter servers"),
        ("ps", "0", (*TRAIN[:-1], "ps servers=3"), "servers=3, but the cluster lists 1 of type ps"),
        (
            "ps",
            "0",
            (*TRAIN, "--workers", "3"),
            "workers=3: the cluster lists 3 processes, 2 of them workers",
        ),
    ],
)
def test_a_role_that_cannot_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    kind: str,
    index: str,
    words: tuple[str, ...],
    sentence: str,
) -> None:
    assert run_command(monkeypatch, *asked(tmp_path, kind, index, *words)) == 2
    error = capfd.readouterr().err
    assert error.startswith("manyhands: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_an_evaluator_says_why_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, *asked(tmp_path, "evaluator")) == 0
    assert "an evaluator has no work here and ends" in capfd.readouterr().err


def test_a_specification_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["role", "--spec", tmp_path / "no.toml", "--type", "ps", *TRAIN]
    assert run_command(monkeypatch, *words) == 2
    assert "no.toml cannot be read" in capfd.readouterr().err


def test_a_role_that_a_signal_ends_has_the_status_of_any_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "fit", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    assert run_command(monkeypatch, *asked(tmp_path, "worker", "1")) == 128 + signal.SIGTERM
