"""The list of commands: it is shown without waiting for torch, and says what the commands say of themselves."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli.command_options import print_next
from manyhands.cli.lazy_commands import forks_workers, usual_workers
from manyhands.cli.main import COMMANDS, GROUPS, app, main
from manyhands.cli.train_command import train_app
from manyhands.errors import UserError
from manyhands.strategy import Strategy
from manyhands.workloads.registry import WORKLOADS


def test_the_list_of_commands_waits_for_nothing_heavy() -> None:
    code = "import sys, manyhands.cli.main; print([name for name in sys.argv[1:] if name in sys.modules])"
    heavy = ["torch", "numpy", "numba", "sklearn", "starlette", "multiprocessing"]
    done = subprocess.run(
        [sys.executable, "-c", code, *heavy, "typer"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "['typer']\n"


_REFUSE = """
import sys
from manyhands.cli.main import app
from manyhands.errors import UserError
for line in sys.stdin.read().splitlines():
    try:
        app(line.split("|"), standalone_mode=False)
    except UserError as error:
        heavy = [name for name in ("torch", "numpy", "numba", "manyhands.places.local.template") if name in sys.modules]
        print(f"{error} {heavy}")
"""


def test_mistakes_that_words_alone_show_are_refused_before_anything_heavy_is_imported() -> None:
    cases = {
        "train|digits|--workers|0": "workers=0 must be an integer of at least 1",
        "train|digits|--workers=-3": "workers=-3 must be an integer of at least 1",
        "train|digits|--workers|two": "workers='two' must be an integer of at least 1",
        "train|digits|--steps|-1": "steps=-1 must be an integer of at least 1",
        "train|gbdt|--workers|0": "workers=0 must be an integer of at least 1",
        "train|gpt|--epochs|0": "epochs=0 must be an integer of at least 1",
        "train|digits|--strategy|federated|--rounds|0": "rounds=0 must be an integer of at least 1",
        "train|digitz": "there is no task 'digitz'; ",
        "train|digits|--strategy|mirored": "unknown strategy 'mirored'; ",
        "train|digits|--strategy|ps serv=2": "ps has no setting 'serv'",
        "train|digits|--strategy|single|--workers|2": "workers=2: single runs one process",
        "train|digits|--strategy|pipeline stages=3|--workers|2": "workers=2",
        "compare|digits|--workers|0": "workers=0 must be an integer of at least 1",
        "simulate|digits|--steps|0": "steps=0 must be an integer of at least 1",
        "memory|digits|--workers|0": "workers=0 must be an integer of at least 1",
        "graph|digits|--workers|0": "workers=0 must be an integer of at least 1",
        "scaling|digits|--steps|0": "steps=0 must be an integer of at least 1",
    }
    done = subprocess.run(
        [sys.executable, "-c", _REFUSE],
        input="\n".join(cases),
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    report = done.stdout.splitlines()
    assert len(report) == len(cases)
    for line, sentence in zip(report, cases.values(), strict=True):
        assert line.startswith(sentence)
        assert line.endswith(" []"), "nothing heavy is imported"


def test_every_task_that_can_be_trained_passes_the_early_check_and_no_other() -> None:
    assert sorted(WORKLOADS) == sorted(str(command.name) for command in train_app.registered_commands)


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("single", 1),
        ("mirrored", 2),
        ("ps servers=3", 2),
        ("pipeline", 2),
        ("pipeline stages=3", 3),
        ("pipeline stages=2 data=2", 4),
        ("tensor slices=4", 4),
        ("pipeline stages=200", 2),
    ],
)
def test_where_nobody_says_how_many_workers_a_strategy_gets_what_it_takes(
    strategy: str, workers: int
) -> None:
    assert usual_workers(Strategy.parse(strategy)) == workers


def test_one_process_is_trained_without_saying_so(tmp_path: Path) -> None:
    words = ["train", "line", "--strategy", "single", "--steps", "1", "--progress", "none"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "run")], catch_exceptions=False)
    assert done.exit_code == 0
    assert "line · single · 1 worker · 1 step in" in done.output


def test_commands_are_listed_by_what_one_wants_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["manyhands"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    shown = capsys.readouterr().out
    headings = [line[:-1] for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options", *GROUPS]
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "named"),
    [("--steps 1:2", "--steps"), ("--as file --steps 1:2", "--steps"), ("--as page --out a", "--out")],
)
def test_what_a_form_cannot_use_is_rejected_by_name(words: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=named):
        CliRunner().invoke(app, ["show", str(tmp_path), *words.split()], catch_exceptions=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_command_says_of_itself(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"], terminal_width=200).output
    assert COMMANDS[name].help in " ".join(shown.split())


@pytest.mark.parametrize(
    "words", [["train", "digits"], ["train", "glove"], ["bench", "step"], ["compare", "digits"]]
)
def test_help_shows_flags_as_flags(words: list[str]) -> None:
    shown = CliRunner().invoke(app, [*words, "--help"], terminal_width=120).output.lower()
    assert "--allow-overload" in shown
    assert "bool" not in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("digits", True),
        ("digits --workers 2 --strategy ps", True),
        ("digits --strategy=single", False),
        ("digits --strategy no-such", False),
        ("digits --strategy", False),
        ("digits --help", False),
        ("digits --cluster=ray", False),
        ("", False),
        ("glove", False),
        ("glove --strategy hogwild", False),
        ("glove --strategy allreduce", True),
        ("logreg --train f --strategy ps", True),
        ("gbdt --train f", False),
        ("gbdt --train f --strategy allreduce", True),
    ],
)
def test_a_template_is_started_early_only_where_workers_are_forked_from_it(
    words: str, expected: bool
) -> None:
    assert forks_workers(words.split()) is expected


def test_hands_that_are_processes_are_forked() -> None:
    assert forks_workers(["glove", "--strategy", "hogwild hands=processes"])
    assert forks_workers(["digits", "--strategy", "hogwild"])


def test_what_to_do_next_can_be_typed_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("predict", Path("my runs/glove"), "|")
    print_next(the_nearest_words=words)
    head, line = capsys.readouterr().out.splitlines()
    assert head == "next"
    assert shlex.split(line, comments=True) == ["manyhands", *map(str, words)]
