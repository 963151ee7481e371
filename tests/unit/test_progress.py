"""The live view and the table, as a terminal of a given size would show them."""

import io
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from torch import nn

import manyhands as mh
from manyhands.engine.request import Options
from manyhands.errors import UserError
from manyhands.observe.analyse.slow_workers import Straggler
from manyhands.observe.analyse.totals import TimeSplit, TotalsSnapshot, WorkerTotals
from manyhands.observe.draw.bars import LivePicture, RunPicture, split_bar
from manyhands.observe.draw.showing import Here, Lines, Notebook, Showing, chosen, look_around
from manyhands.observe.draw.time_table import end_table
from manyhands.workloads.tasks import build


def worker(rank: int, compute_s: float, exchange_s: float, wait_for_s: tuple[float, ...]) -> WorkerTotals:
    return WorkerTotals(
        worker=rank,
        steps=120,
        samples=3840,
        compute_s=compute_s,
        exchange_s=exchange_s,
        wait_s=sum(wait_for_s),
        wait_for_s=wait_for_s,
        bytes_sent=1000,
        messages_sent=240,
    )


SLOW = Straggler(worker=1, ratio=2.22, since_step=40, until_step=None, from_the_start=False, others_wait=0.5)
SLOWED = (worker(0, 4.1, 0.9, (0.0, 5.0)), worker(1, 9.1, 0.9, (0.0, 0.0)))


def snapshot(workers: tuple[WorkerTotals, ...] = SLOWED, **changes: float | None) -> TotalsSnapshot:
    values = {"step": 120, "loss": 0.21343, "samples_per_s": 12345.0, "steps_per_s": 12.0} | changes
    return TotalsSnapshot(workers=workers, slow=(SLOW,) if workers is SLOWED else (), **values)  # type: ignore[arg-type]


def drawn(picture: object, width: int = 80, height: int = 24, encoding: str = "utf-8") -> list[str]:
    """The lines on the screen, without colours."""
    screen = io.BytesIO()
    file = io.TextIOWrapper(screen, encoding=encoding)
    console = Console(file=file, force_terminal=True, width=width, height=height, color_system=None)
    console.print(picture)
    file.flush()
    return [line.rstrip() for line in screen.getvalue().decode(encoding).splitlines()]


def test_picture_of_a_run_in_80_columns() -> None:
    assert drawn(RunPicture(snapshot(), 500)) == [
        "━━━━━╸                    step 120/500  loss 0.2134  12,345 samples/s  0:32 left",
        "worker 0  ███████▓░░░░░░░░  compute  41 %  exchange   9 %  waiting  50 % for 1",
        "worker 1  ███████████████▓  compute  91 %  exchange   9 %  waiting   0 %",
        "worker 1 is 2.2 times slower than the median of the others since step 40: the",
        "others wait 50 % of their time",
    ]


def test_picture_before_the_first_event() -> None:
    idle = WorkerTotals.from_dict(
        SLOWED[0].to_dict()
        | dict.fromkeys(("compute_s", "exchange_s", "wait_s"), 0.0)
        | {"wait_for_s": [0.0, 0.0], "steps": 0}
    )
    lines = drawn(RunPicture(snapshot((idle,), step=0, loss=None, samples_per_s=0.0, steps_per_s=0.0), 500))
    assert lines[0].strip() == "step 0/500  loss -"
    assert lines[1] == "worker 0" + " " * 20 + "compute   0 %  exchange   0 %  waiting   0 %"
    assert len(lines) == 2


def test_picture_of_the_end_says_how_it_went() -> None:
    assert drawn(RunPicture(snapshot(step=500, loss=float("nan")), 500))[0].endswith(
        "step 500/500  loss nan  12,345 samples/s  0:00 left"
    )


@pytest.mark.parametrize("width", [200, 80, 79, 60, 41, 40, 20, 10, 5, 1])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn(RunPicture(snapshot(), 500), width)
    assert max(len(line) for line in lines) <= width
    assert len(lines) <= 6
    assert lines[0].replace("━", "").replace("╸", "").strip()[: min(width, 4)] == "step"[:width]


def test_narrow_terminals_lose_what_matters_least() -> None:
    def label(width: int) -> str:
        return drawn(RunPicture(snapshot(), 500), width)[0].lstrip("━╸╺ ")

    assert label(80) == "step 120/500  loss 0.2134  12,345 samples/s  0:32 left"
    assert label(60) == "step 120/500  loss 0.2134  0:32 left"
    assert label(40) == "step 120/500  loss 0.2134"
    assert label(25) == "step 120/500"
    assert drawn(RunPicture(snapshot(), 500), 40)[1] == "worker 0  ███████▓░░░░░░░░"


def test_terminal_without_unicode_gets_ascii() -> None:
    lines = drawn(RunPicture(snapshot(), 500), encoding="ascii")
    assert lines[0].startswith("-----")
    assert lines[1].startswith("worker 0  #######=........  compute  41 %")


def test_many_workers_leave_the_bar_in_sight() -> None:
    cohort = tuple(worker(rank, 1.0, 0.1, (0.0,) * 64) for rank in range(64))
    lines = drawn(RunPicture(snapshot(cohort), 500), height=24)
    assert len(lines) <= 23
    assert lines[-1] == "and 46 more workers"
    assert len(drawn(RunPicture(snapshot(cohort), 500), height=100)) == 65


@pytest.mark.parametrize(
    ("split", "bar"),
    [
        (TimeSplit(1.0, 0.0, 0.0), "##########"),
        (TimeSplit(0.0, 0.0, 1.0), ".........."),
        (TimeSplit(0.5, 0.25, 0.25), "#####===.."),
        (TimeSplit(1 / 3, 1 / 3, 1 / 3), "###====..."),
        (TimeSplit(0.04, 0.92, 0.04), "=========="),
        (TimeSplit(0.0, 0.0, 0.0), "          "),
    ],
)
def test_bar_is_divided_as_the_shares_are(split: TimeSplit, bar: str) -> None:
    assert split_bar(split, 10, ascii_only=True).plain == bar


def test_view_draws_in_the_background_and_stops() -> None:
    asked = threading.Event()
    calls = 0

    def ask() -> TotalsSnapshot:
        nonlocal calls
        calls += 1
        if calls >= 3:
            asked.set()
        return snapshot()

    threads = set(threading.enumerate())
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=24)
    with Showing(ask, LivePicture(500, console=console), after_s=0.0, every_s=0.01):
        assert asked.wait(240), "nothing was drawn after the first picture"
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive(), "the view goes on drawing"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "step 120/500" in plain
    assert "worker 1" in plain
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1, "the cursor is back"


def test_a_run_that_is_over_before_it_is_looked_at_shows_nothing() -> None:
    def never() -> TotalsSnapshot:
        raise AssertionError("a view that shows nothing asked for a snapshot")

    file = io.StringIO()
    with Showing(never, LivePicture(500, console=Console(file=file)), after_s=60.0, every_s=60.0):
        pass
    assert file.getvalue() == ""


def test_cursor_comes_back_after_an_interrupt() -> None:
    file, drawn_once = io.StringIO(), threading.Event()

    def ask() -> TotalsSnapshot:
        drawn_once.set()
        return snapshot()

    screen = LivePicture(5, console=Console(file=file, force_terminal=True, width=80))

    def interrupted() -> None:
        with Showing(ask, screen, after_s=0.0, every_s=60.0):
            assert drawn_once.wait(240)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert file.getvalue().count("\x1b[?25h") == 1


# --- where a run shows itself


NOTEBOOK = Here(notebook=True, terminal=False, unwatched=False)
TERMINAL = Here(notebook=False, terminal=True, unwatched=False)
REDIRECTED = Here(notebook=False, terminal=False, unwatched=False)


@pytest.mark.parametrize(
    ("asked", "here", "shown"),
    [
        ("auto", NOTEBOOK, "notebook"),
        ("auto", TERMINAL, "bar"),
        ("auto", REDIRECTED, "lines"),
        *(("auto", one._replace(unwatched=True), "none") for one in (NOTEBOOK, TERMINAL, REDIRECTED)),
        ("bar", NOTEBOOK, "notebook"),
        ("bar", TERMINAL._replace(unwatched=True), "bar"),
        ("bar", REDIRECTED, "lines"),
        *(("lines", one, "lines") for one in (NOTEBOOK, TERMINAL, REDIRECTED)),
        *(("none", one, "none") for one in (NOTEBOOK, TERMINAL, REDIRECTED)),
    ],
)
def test_what_is_shown_where(asked: str, here: Here, shown: str) -> None:
    assert chosen(asked, here) == shown


def test_place_is_found_without_importing_ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert look_around() == REDIRECTED._replace(unwatched=True), "this is a test"
    assert "IPython" not in sys.modules
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert look_around() == REDIRECTED
    closed = io.StringIO()
    closed.close()
    for gone in (None, closed):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", gone)
            assert look_around().unwatched, "there is nowhere to show anything"
    found: list[Here] = []
    thread = threading.Thread(target=lambda: found.append(look_around()))
    thread.start()
    thread.join()
    assert found == [REDIRECTED._replace(unwatched=True)], "beside the main thread"
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert look_around() == NOTEBOOK
    del shell.kernel  # IPython in a terminal
    assert look_around() == REDIRECTED


def test_lines_say_what_is_new_and_how_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    steps = iter((120, 120, 240))
    report = threading.Event()

    def ask() -> TotalsSnapshot:
        step = next(steps, 500)
        if step == 240:
            report.set()
        return snapshot(step=step)

    with Showing(ask, Lines(500), after_s=0.0, every_s=0.01):
        assert report.wait(240)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "manyhands: step 120/500  loss 0.2134  12,345 samples/s  0:32 left"
    assert lines[1].startswith("manyhands: step 240/500"), "the second look found nothing new"
    assert lines[-1].startswith("manyhands: step 500/500")


def test_a_run_shows_that_it_evaluates_while_it_does() -> None:
    asked: list[Callable[[], TotalsSnapshot]] = []
    seen: list[TotalsSnapshot] = []

    def view(_: int, snapshot: Callable[[], TotalsSnapshot]) -> AbstractContextManager[None]:
        asked.append(snapshot)
        return nullcontext()

    def watched(model: nn.Module, batch: Any) -> torch.Tensor:
        deadline = time.monotonic() + 180  # the collector looks twenty times a second
        while not asked[0]().evaluating and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(asked[0]())
        return torch.zeros(())

    task = replace(build("line"), metrics={"watched": watched})
    mh.fit(task, "single", steps=1, options=Options(view=view))
    assert {(one.step, one.evaluating) for one in seen} == {(1, True)}
    assert not asked[0]().evaluating


def test_an_evaluation_is_one_line_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(500)
    for _ in range(5):
        lines.show(replace(snapshot(step=500), evaluating=True))
    lines.show(snapshot(step=500))
    assert capsys.readouterr().err.splitlines() == [
        "manyhands: step 500/500  loss 0.2134  12,345 samples/s  evaluating",
        "manyhands: step 500/500  loss 0.2134  12,345 samples/s  0:00 left",
    ]


def test_a_closed_stderr_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr(sys, "stderr", gone)
    asked = threading.Event()

    def ask() -> TotalsSnapshot:
        asked.set()
        return snapshot()

    with Showing(ask, Lines(500), after_s=0.0, every_s=0.01) as view:
        assert asked.wait(240)
        view._thread.join(10)
        assert not view._thread.is_alive(), "it goes on trying"


def test_a_notebook_has_one_bar_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """`display(…, display_id=True)` gives a handle, whose `update` puts another object in the same place."""
    shown: list[str] = []
    handle = SimpleNamespace(update=lambda panel: shown.append(panel._repr_html_()))

    def display(panel: object, *, display_id: bool) -> SimpleNamespace:
        assert display_id
        shown.append(f"new {panel._repr_html_()}")  # type: ignore[attr-defined]
        return handle

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    screen = Notebook(500, "<b>")
    for step in (0, 120, 500):
        screen.show(snapshot(step=step))
    assert [one.startswith("new ") for one in shown] == [True, False, False]
    root = ElementTree.fromstring(shown[1])
    bar, words = root.find("progress"), root.find("code")
    assert bar is not None
    assert (bar.get("value"), bar.get("max")) == ("120", "500")
    assert words is not None
    assert words.text == "step 120/500  loss 0.2134  12,345 samples/s  0:32 left"


def test_a_way_of_showing_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        UserError, match="progress='bars': allowed: auto, bar, lines, none; did you mean 'bar'"
    ):
        Options(progress="bars")


# --- the table at the end


def summary(notes: tuple[str, ...] = ()) -> dict[str, object]:
    return {
        "strategy": "ps servers=2",
        "per_worker": [row.to_dict() for row in SLOWED],
        "slow": [asdict(SLOW)],
        "events": {"notes": list(notes)},
    }


def test_table_shows_the_straggler_computing_and_the_other_waiting() -> None:
    assert "\n".join(drawn(end_table(summary()), 100)).strip("\n").splitlines() == [
        " worker   steps        compute       exchange        waiting   mostly for",
        " ────────────────────────────────────────────────────────────────────────",
        "      0     120   4.10 s  41 %   0.90 s   9 %   5.00 s  50 %   1 (5.00 s)",
        "      1     120   9.10 s  91 %   0.90 s   9 %   0.00 s   0 %",
        "",
        "worker 1 is 2.2 times slower than the median of the others since step 40:",
        "the others wait 50 % of their time; a bound on staleness would not hide a",
        "lasting straggler, consistency=async would",
    ]


def test_table_fits_80_columns_after_a_long_run() -> None:
    long = tuple(worker(rank, 412_345.6, 98_765.4, (0.0, 512_345.6)) for rank in range(2))
    lines = drawn(end_table({"per_worker": [row.to_dict() for row in long], "events": {"notes": []}}))
    assert max(len(line) for line in lines) <= 80
    assert any("412346 s  40 %" in line for line in lines)


def test_table_says_what_is_missing() -> None:
    note = "worker-0 recorded faster than it was read: 3 events are missing from all figures"
    assert "3 events are missing from all" in "\n".join(drawn(end_table(summary((note,))), 100))


def test_table_is_ascii_where_it_must_be() -> None:
    assert drawn(end_table(summary()), encoding="ascii")
