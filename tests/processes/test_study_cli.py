"""`manyhands study` as a program: the list, a tiny run of each study here, Ctrl-C, and what makes no sense."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manyhands.lab.compare.bandwidth import Rate, why_not
from manyhands.lab.studies.registry import STUDIES, load_study
from manyhands.lab.studies.shaped_runs import shaped_step_s

pytestmark = pytest.mark.usefixtures("compiler_imported")

COMMAND = [sys.executable, "-m", "manyhands", "study"]


def study(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """The figures of a study, and what it printed."""
    out, figures = folder / "out", folder / "figures.json"
    command = [*COMMAND, *words, "--out", str(out), "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert json.loads((out / "figures.json").read_text()) == found
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 1
    assert all(sentence.split(" ")[0] in page for sentence in found["told"])
    assert not list(folder.glob("runs"))
    return found, done.stdout


def test_the_questions_are_listed() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0
    for name in STUDIES:
        assert any(
            line.split() == [name, *load_study(name).question.split()] for line in done.stdout.splitlines()
        )


def test_servers(tmp_path: Path) -> None:
    words = ("--workers", "1,2", "--servers", "1", "--far-servers", "1,2", "--most-workers", "32")
    found, said = study(tmp_path, "servers", "--task", "line", *words, "--seconds", "0.2", "--repeats", "1")
    assert [(pair["workers"], pair["servers"]) for pair in found["live"]] == [(1, 1), (2, 1)]
    assert found["live"][0]["error"] < 1e-6  # fitted to it, where the parts that are known take no longer
    assert all(pair["rate"] > 0 for pair in found["live"])
    for closed, simulated in zip(found["closed_form"], found["simulated"], strict=True):
        rates = dict(zip(closed["workers"], closed["batches_per_s"], strict=True))
        both = {
            n: r for n, r in zip(simulated["workers"], simulated["batches_per_s"], strict=True) if n in rates
        }
        assert len(both) >= 4
        assert all(rates[n] == pytest.approx(rate, rel=0.5) for n, rate in both.items())
    assert "saturation was seen" in " ".join(said.split())


def test_consistency(tmp_path: Path) -> None:
    words = ("--spreads", "0,3", "--steps", "40", "--live", "2", "--live-steps", "40", "--repeats", "1")
    found, said = study(tmp_path, "consistency", "--task", "line", "--workers", "2", *words)
    rates = {(one["spread"], one["consistency"]): one["batches_per_s"] for one in found["times"]}
    assert rates[3.0, "sync"] < rates[0.0, "sync"]
    assert rates[3.0, "async"] > rates[3.0, "sync"]
    assert found["live"]["seen"][0] > 0
    assert "in virtual time" in " ".join(said.split())


def test_distance(tmp_path: Path) -> None:
    strategies = "allreduce link=tcp; local steps=4 link=tcp outer=nesterov"
    words = ("--steps", "60", "--check-steps", "0")
    found, said = study(tmp_path, "geo", "--task", "line", "--strategies", strategies, *words)
    first, second = found["rows"]
    assert first["link_s"] > 2 * 0.04  # two rounds of a ring
    assert first["link_s"] > 3 * second["link_s"]
    assert first["step_bytes"] > 0
    assert first["shaped_s"] is None
    assert "No run on a shaped link checked the model: it was not asked for." in " ".join(said.split())


def test_a_shaped_loopback_takes_what_its_bytes_take() -> None:
    """A gradient of `digits` is about 60 KiB from each of two workers, in 1.25 MB a second for both."""
    rate = Rate.parse("10Mbit")
    reason = why_not(rate)
    if reason is not None:
        pytest.skip(reason)
    words = ["train", "digits", "--strategy=allreduce link=tcp", "--workers=2"]
    least_s = 2 * 60 * 1024 / 1.25e6
    assert 0.9 * least_s < shaped_step_s(rate, words, 24) < 10 * least_s


def test_an_interrupted_study_says_one_sentence(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [*COMMAND, "geo", "--task", "line", "--steps", "100000", "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("training"):
                process.send_signal(signal.SIGINT)
                break
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGINT
    last = said.strip().splitlines()[-1]
    assert last.startswith("manyhands: ended by SIGINT; start again with: ")
    assert "study geo" in last
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["serverz"], "serverz"),
        (["servers", "--workers", "none"], "--workers 'none' is not an integer of at least 1"),
        (["servers", "--workers", "100000"], "--workers: workers=100000: the run needs about"),
        (["servers", "--repeats", "two"], "repeats is 'two'; it must be an integer"),
        (["consistency", "--task", "digitz"], "digitz"),
        (["geo", "--strategies", "hogwild"], "--strategies hogwild"),
        (["geo", "--json", "no/such/folder/f.json"], "--json no/such/folder/f.json"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(words: list[str], named: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path
    )
    assert done.returncode == 2
    assert named in done.stderr.strip().splitlines()[-1]
    assert not list(tmp_path.iterdir())
