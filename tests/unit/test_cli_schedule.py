"""`manyhands schedule`: both kinds are listed, drawn and costed; what makes no sense is refused in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from manyhands.cli.main import app
from manyhands.cli.schedule_command import RATES
from manyhands.errors import UserError
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.collective_drawing import EXAMPLE, as_text, watch
from manyhands.strategies.common.collectives.schedule_proof import cost
from manyhands.strategies.pipeline import schedule_drawing
from manyhands.strategies.pipeline.schedules import SCHEDULES, interleaved


def shown(*words: str) -> str:
    done = CliRunner().invoke(app, ["schedule", *words], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_the_list_has_both_kinds_with_a_line_each() -> None:
    lines = shown().splitlines()
    for name in (*SCHEDULES, *ALGORITHMS):
        (line,) = (line for line in lines if line.startswith(f"  {name} "))
        assert line.endswith(".")
        assert len(line) <= 120
    assert not SCHEDULES.keys() & ALGORITHMS.keys()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_pipeline_is_drawn_and_costed(name: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    output = shown(name, "--stages", "2", "--microbatches", "6", "--svg", str(picture))
    schedule = SCHEDULES[name](2, 6)
    assert schedule_drawing.as_text(schedule) in output
    assert "all  " in output
    assert f"picture in {picture}" in output
    assert picture.read_text() == schedule_drawing.as_svg(schedule)


def test_what_a_pipeline_costs_is_said() -> None:
    output = shown("1f1b", "--stages", "4", "--microbatches", "8", "--size", "2MiB")
    assert (
        "all       27.3%    4 at most        48  96.0 MiB" in output
    )  # (p-1)/(m+p-1) = 3/11, 2 * 3 * 8 messages
    assert "The step takes 33 units." in output
    assert output == shown("1f1b", "--size", "2MiB")


def test_chunks_of_interleaved() -> None:
    output = shown("interleaved", "--stages", "2", "--microbatches", "4", "--chunks", "3")
    assert schedule_drawing.as_text(interleaved(2, 4, 3)) in output
    assert "one of the 3 parts of the stage" in output


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_all_reduce_is_drawn_with_the_worked_example(name: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    output = shown(name, "--workers", "4", "--svg", str(picture))
    assert as_text(watch(ALGORITHMS[name], EXAMPLE)) in output
    assert ALGORITHMS[name].source in output
    ElementTree.parse(picture)


def test_an_all_reduce_against_the_number_of_workers() -> None:
    worlds = [2, 4, 8, 16, 32, 64]
    output = shown("ring", "--workers", "2,4,8,16,32,64", "--size", "64MiB")
    rows = [line.split() for line in output.splitlines() if line[:1].isdigit()]
    assert [int(row[0]) for row in rows] == worlds
    for row, world in zip(rows, worlds, strict=True):
        assert int(row[1]) == 2 * (world - 1)
        assert int(row[2]) == 2 * (world - 1) * world
        assert float(row[3]) == pytest.approx(2 * (world - 1) / world * 64, abs=0.06)
        seconds = cost(ALGORITHMS["ring"], world, 64 << 20).time(*RATES)
        assert float(row[-2]) == pytest.approx(1e3 * seconds, abs=0.006)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("1f1c", "there is no schedule '1f1c'; allowed: naive, .*did you mean '1f1b'"),
        ("rign", "did you mean 'ring'"),
        ("interleaved --stages 4 --microbatches 6", "microbatches=6 does not fit stages=4.*fit: 4 and 8"),
        ("1f1b --workers 3", "--workers does not go with 1f1b, which is a pipeline schedule"),
        ("ring --stages 3", "--stages does not go with ring, which is an all-reduce schedule"),
        ("ring --microbatches 3", "--microbatches does not go with ring"),
        ("gpipe --chunks 2", "--chunks does not go with gpipe.*`interleaved` has several"),
        ("gpipe --stages 0", "--stages 0 is not allowed; 1 to 64"),
        ("gpipe --microbatches 1000", "--microbatches 1000 is not allowed; 1 to 256"),
        ("interleaved --chunks -1", "--chunks -1 is not allowed; 1 to 8"),
        ("ring --workers 2,x", "--workers 2,x: 'x' is not a number of workers"),
        ("ring --workers 2,", "'nothing' is not a number of workers"),
        ("ring --workers=", "'nothing' is not a number of workers"),
        ("ring --workers 0", "'0' is not a number of workers"),
        ("ring --workers 1000", "'1000' is not a number of workers; 1 to 256"),
        ("ring --workers 64", "--workers 64 is too many for a drawing, which has 16 at most"),
        ("ring --workers 2,4 --svg x.svg", "--svg needs one number of workers, not 2,4"),
        ("ring --size many", "size 'many' is not a number of bytes"),
        ("1f1b --svg no-such-folder/x.svg", "--svg no-such-folder/x.svg: there is no folder"),
        ("--stages 4", "options need a schedule"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_printed(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=said) as raised:
        app(["schedule", *words.split()], standalone_mode=False)
    assert "\n" not in str(raised.value)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_colours_and_lines_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os, pty, sys\n"
        "os.environ.update(COLUMNS='60', TERM='xterm-256color')\n"
        "sys.exit(os.waitstatus_to_exitcode(pty.spawn([sys.executable, '-m', 'manyhands', 'schedule', 'zb-h1'])))\n"
    )
    monkeypatch.delenv("NO_COLOR", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b[1;34mF0\x1b[0m" in done.stdout
    assert "\x1b[1;33mW7\x1b[0m" in done.stdout
    assert done.stdout.count("stage 3  ") == 3  # two blocks of ticks, and the table


def test_it_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from manyhands.cli.main import app; app(['schedule', '1f1b'], standalone_mode=False);"
        "assert 'torch' not in sys.modules; assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, capture_output=True)
