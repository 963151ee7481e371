"""A run as a line and as HTML: well-formed, escaped, and of the run's own numbers."""

from __future__ import annotations

import base64
from pathlib import Path
from xml.etree import ElementTree

import pytest
from torch import nn

import manyhands as mh
from equality import OPTIMIZERS, make_task
from manyhands.engine.run import History, Run
from manyhands.observe.analyse.totals import WorkerTotals

SVG = "{http://www.w3.org/2000/svg}"


def worker(rank: int, waits_s: tuple[float, ...]) -> dict[str, object]:
    totals = WorkerTotals(
        worker=rank,
        steps=3,
        samples=9,
        compute_s=1.0,
        exchange_s=0.0,
        wait_s=sum(waits_s),
        wait_for_s=waits_s,
        bytes_sent=0,
        messages_sent=0,
    )
    return totals.to_dict()


def run_of(losses: list[float | None], **changes: object) -> Run:
    summary = {
        "task": "digits",
        "strategy": "mirrored",
        "workers": 2,
        "steps": 3,
        "steps_asked": 3,
        "seconds": 12.34,
        "samples_per_s": 12345.6,
        "final": {"loss": 0.1, "accuracy": 0.987},
        "per_worker": [worker(0, (0.0, 1.0)), worker(1, (0.0, 0.0))],
        **changes,
    }
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    return Run(model=nn.Linear(1, 1), history=History(rows), summary=summary, path=Path("runs/x"))


def table(run: Run) -> dict[str, str]:
    root = ElementTree.fromstring(run._repr_html_())
    return {row[0].text or "": row[1].text or "" for row in root.iter("tr")}


def test_a_run_in_one_line() -> None:
    assert repr(run_of([2.3, 1.0, 0.1])) == str(run_of([2.3, 1.0, 0.1]))
    assert repr(run_of([2.3, 1.0, 0.1])) == (
        "Run(digits · mirrored · 2 workers · 3 steps · loss 2.3 → 0.1 · accuracy 0.987 · 12.3 s · 12,346 samples/s · "
        "waiting worker 0 50 % of its time, mostly for 1 · runs/x)"
    )


def test_a_run_in_a_notebook() -> None:
    run = run_of([2.3, None, 0.1], steps=2)
    assert table(run) == {
        "task": "digits",
        "strategy": "mirrored",
        "workers": "2",
        "steps": "2 of 3",
        "loss": "2.3 → 0.1",
        "accuracy": "0.987",
        "time": "12.3 s",
        "speed": "12,346 samples/s",
        "waiting": "worker 0 50 % of its time, mostly for 1",
        "directory": "runs/x",
    }
    image = ElementTree.fromstring(run._repr_html_()).find("img")
    assert image is not None
    assert image.get("alt") == "loss over steps, from 2.3 to 0.1"
    kind, _, data = image.get("src", "").partition(",")
    assert kind == "data:image/svg+xml;base64"
    picture = ElementTree.fromstring(base64.b64decode(data))
    assert picture.tag == f"{SVG}svg"
    spots = [title.text for title in picture.iter(f"{SVG}title")]
    assert "loss: loss 2.3 at step 1" in spots
    assert "loss: loss 0.1 at step 3" in spots


def test_what_a_task_is_called_is_text() -> None:
    run = run_of([1.0], task="</td><script>alert(1)</script>&\udc80", final={"<b>": 1.0})
    shown = table(run)
    assert shown["task"] == "</td><script>alert(1)</script>&\\udc80"
    assert shown["<b>"] == "1"


@pytest.mark.parametrize("summary", [{}, {"strategy": "single", "per_worker": []}])
def test_a_run_without_steps_shows_what_it_has(summary: dict[str, object]) -> None:
    run = Run(model=nn.Linear(1, 1), history=History(), summary=summary)
    assert "<img" not in run._repr_html_()
    assert repr(run) == f"Run({summary.get('strategy', '')})"


def test_numbers_are_those_of_the_run() -> None:
    run = mh.fit(make_task(OPTIMIZERS["sgd"]), "single", steps=4)
    first, last = (f"{loss:.3g}" for loss in (run.history.loss[0], run.history.loss[-1]))
    assert table(run)["loss"] == f"{first} → {last}"
    assert table(run)["time"] == f"{run.summary['seconds']:.1f} s"
    assert "waiting" not in table(run), "alone there is nobody to wait for"
