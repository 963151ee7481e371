"""Signals that end a run: counted while a cluster runs, raised around it, and told with the command to go on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import typer

from manyhands.cli.command_options import command_anywhere, command_to_resume, own_command
from manyhands.cli.runs import ended_by_signal
from manyhands.places.local.signals import as_exception, counted_signals, ending, signal_of

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_is_raised_around_a_cluster_and_only_counted_inside(number: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in ENDING]
    with ending() as end:
        with counted_signals() as received:
            os.kill(os.getpid(), number)
            assert received == [number]
            assert end.signal == number, "who is around knows it too"
        with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal_of(raised.value) == signal.SIGTERM
        assert (end.name, end.status) == (number.name, 128 + number), "the first is the one"
    assert [signal.getsignal(one) for one in ENDING] == before


def test_handlers_of_the_users_own_and_other_threads_are_left_alone() -> None:
    def own(_number: int, _frame: object) -> None: ...

    before = signal.signal(signal.SIGHUP, own)
    try:
        with ending(), counted_signals():
            assert signal.getsignal(signal.SIGHUP) is own
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with ending(), counted_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    seen = []

    def elsewhere() -> None:
        with ending(), counted_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_an_exit_of_the_programs_own_is_no_signal() -> None:
    for number in ENDING:
        assert signal_of(as_exception(number)) == number
    for other in (SystemExit(0), SystemExit(1), SystemExit("text"), SystemExit(None), ValueError()):
        assert signal_of(other) is None


def test_the_command_to_go_on_can_be_typed_as_it_is() -> None:
    given = ["/bin/manyhands", "train", "digits", "--strategy", "ps servers=2"]
    assert own_command(given) == "manyhands train digits --strategy 'ps servers=2'"
    out = Path("runs/a b")
    resumed = "manyhands train digits --strategy 'ps servers=2' --out 'runs/a b' --resume"
    assert command_to_resume(given, out) == resumed
    assert command_to_resume([*given, "--out", "x"], Path("x")).endswith(" --out x --resume")
    assert command_to_resume([*given, "--out=x", "--resume"], Path("x")).endswith(" --out=x --resume")
    elsewhere = ["manyhands", "launch", "--out", "x", "s.py", "--out=y", "--", "--out", "its own"]
    assert command_anywhere(elsewhere) == "manyhands launch s.py -- --out 'its own'"
    module = ["/lib/manyhands/__main__.py", "train"]
    assert own_command(module) == f"{sys.executable} -m manyhands train"


@pytest.mark.parametrize(
    ("stop", "name", "status"), [(KeyboardInterrupt(), "SIGINT", 130), (SystemExit(143), "SIGTERM", 143)]
)
def test_a_command_that_a_signal_ends_says_what_is_kept(
    stop: BaseException, name: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, ended_by_signal(lambda: "nothing is kept"):
        raise stop
    assert ended.value.exit_code == status
    assert capsys.readouterr().err == f"manyhands: ended by {name}; nothing is kept\n"
    with pytest.raises(typer.Exit), ended_by_signal():
        raise stop
    assert capsys.readouterr().err == ""


def test_an_exit_of_the_program_is_no_signal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, ended_by_signal(lambda: "nothing is kept"):
        raise SystemExit(3)
    assert ended.value.code == 3
    assert capsys.readouterr().err == ""


def test_the_first_of_several_signals_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def impatient() -> None:
        with ended_by_signal(lambda: "nothing is kept") as end:
            end.note(signal.SIGTERM)
            raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended:
        impatient()
    assert ended.value.exit_code == 143
    assert "ended by SIGTERM" in capsys.readouterr().err
