"""The live page and the report as commands: what is printed, served and left behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from typer.testing import CliRunner

import warm
from manyhands.cli.main import app


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A running `manyhands ARGUMENTS`, gone after the test whatever happens."""
    process = warm.Popen(
        [sys.executable, "-m", "manyhands", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def printed_address(process: subprocess.Popen[str]) -> tuple[str, dict[str, str]]:
    """The page's address without its token, and the header that carries it."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("page  "):
            parts = urlsplit(line.split()[1])
            (token,) = parse_qs(parts.fragment)["token"]
            return f"http://{parts.netloc}", {"authorization": f"Bearer {token}"}
    raise AssertionError("no address was printed")


def follow_to_the_end(address: str, headers: dict[str, str]) -> tuple[dict[str, str], str]:
    """Every section as it was last sent, and the farewell."""
    sections: dict[str, str] = {}
    with httpx.stream("GET", f"{address}/events", headers=headers, timeout=240) as answer:
        assert answer.status_code == 200
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: ") and name == "sections":
                sections.update(json.loads(line.removeprefix("data: ")))
            elif line.startswith("data: ") and name == "end":
                return sections, json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without a farewell")


def test_a_run_with_a_page_shows_its_end_leaves_a_report_and_can_be_watched_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    asked = ("--strategy", "single", "--workers", "1", "--steps", "20", "--out", str(run), "--dashboard")
    with command("train", "digits", *asked) as training:
        sections, farewell = follow_to_the_end(*printed_address(training))
        out, err = training.communicate(timeout=240)
    assert training.returncode == 0, err
    assert "20 of 20" in sections["now"]
    assert "ended" in sections["now"]
    assert farewell == f"The run has ended; manyhands show {run} opens this page again."
    *_, report, following, _, _, last = out.splitlines()
    assert (report, following) == (f"report  {run / 'report.html'}", "next")
    assert last.split() == ["manyhands", "serve", str(run), "#", "the", "model", "over", "HTTP"]
    assert "20 of 20" in (run / "report.html").read_text()

    with command("show", str(run)) as watching:
        address, headers = printed_address(watching)
        assert "20 of 20" in httpx.get(f"{address}/report", headers=headers).text
        assert "20 of 20" not in httpx.get(address).text
        assert httpx.get(f"{address}/metrics").status_code == 401
        assert "# TYPE" in httpx.get(f"{address}/metrics", headers=headers).text
        watching.send_signal(signal.SIGINT)
        out, err = watching.communicate(timeout=240)
    assert (watching.returncode, out) == (0, "")
    assert err.splitlines()[-1] == "manyhands: the page is closed"

    reported = CliRunner().invoke(app, ["show", str(run), "--out", str(tmp_path / "own.html")])
    assert (reported.exit_code, reported.output.split()) == (0, ["report", str(tmp_path / "own.html")])


@pytest.mark.parametrize("asked", [["show"], ["show", "--as", "file"]])
def test_what_is_no_run_is_one_sentence(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from manyhands.cli.main import main

    monkeypatch.setattr(sys, "argv", ["manyhands", *asked, str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        main()
    reported = capsys.readouterr()
    assert (end.value.code, reported.out) == (2, "")
    assert reported.err.count("\n") == 1
    assert str(tmp_path) in reported.err
