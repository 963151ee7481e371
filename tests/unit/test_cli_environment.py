"""What other launchers say in the environment is named, and not silently ignored."""

import json

import pytest

from commands import run_command
from manyhands.cli.runs import ignored_variables

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({}, []),
        ({"RANK": "0", "MASTER_PORT": "29500"}, []),
        ({"TF_CONFIG": ""}, []),
        ({"TF_CONFIG": "{}"}, [["TF_CONFIG", "--workers"]]),
        (TORCHRUN, [["RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR are set", "mh.join()"]]),
        ({"TORCHELASTIC_RUN_ID": "7"}, [["TORCHELASTIC_RUN_ID is set", "mh.join()"]]),
        ({"TF_CONFIG": "{}", **TORCHRUN}, [["TF_CONFIG"], ["WORLD_SIZE"]]),
    ],
)
def test_one_sentence_for_each_launcher(environment: dict[str, str], parts: list[list[str]]) -> None:
    report = ignored_variables(environment)
    assert len(report) == len(parts)
    for sentence, expected in zip(report, parts, strict=True):
        assert all(part in sentence for part in expected), sentence


@pytest.mark.parametrize(
    "asked",
    [
        ("compare", "digits", "--strategies", "rign"),
        ("launch", "nowhere.py"),
        ("train", "logreg", "--train", "nowhere"),
    ],
)
def test_commands_that_start_workers_say_that_it_is_not_read(
    asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    assert run_command(monkeypatch, *asked) == 2
    lines = capfd.readouterr().err.splitlines()
    said = [line for line in lines if "compiling kernels" not in line]  # which a new machine says before all
    assert said[0].startswith("manyhands: TF_CONFIG is set and not read")


def test_train_is_the_role_that_it_names(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("manyhands.places.place._alone", False)  # commands before may have said otherwise
    cluster = {"worker": ["a:1", "b:1"]}
    for index, sentence in (
        (2, "TF_CONFIG: task.index=2: the cluster lists 2 of type worker"),
        (0, "workers=2: single runs one process"),
    ):
        task = {"type": "worker", "index": index}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
        assert run_command(monkeypatch, "train", "digits", "--strategy", "single") == 2
        error = capfd.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1


def test_an_evaluator_ends_in_peace(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    task = {"type": "evaluator", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1"]}, "task": task}))
    assert run_command(monkeypatch, "train", "digits") == 0
    assert capfd.readouterr().err.startswith("manyhands: an evaluator has no work here and ends")


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        (["--worker", "4", "train.py"], ["no option --worker;", "did you mean '--workers'?"]),
        (["--worker=4", "train.py"], ["no option --worker;", "did you mean '--workers'?"]),
        (["-n", "2", "train.py"], ["no option -n;", "--strategy"]),
    ],
)
def test_an_unknown_option_before_the_script_is_an_error(
    asked: list[str], parts: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "launch", *asked) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert all(part in error for part in [*parts, "go after its name"]), error
