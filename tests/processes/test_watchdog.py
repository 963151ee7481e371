"""Deadlocks made on purpose, in real processes: one page names the worker and the call, and nobody is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
import warm
from manyhands.errors import Hang
from manyhands.strategies.registry import STRATEGIES

MANYHANDS = str(Path(sys.executable).parent / "manyhands")
SCRIPT = Path(__file__).with_name("hang_script.py")


def launch(how: str, *options: str) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [MANYHANDS, "launch", "--watchdog", "3", *options, str(SCRIPT), how],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_worker_that_never_comes_is_named_with_its_line_and_the_others_call(tmp_path: Path) -> None:
    done = launch("sleeps", "--out", str(tmp_path / "run"))
    assert done.returncode == 1
    first, _, page = done.stderr.partition("\n\n")
    assert "worker 1 holds up the run" in first
    assert "in time.sleep(1e9) (hang_script.py:14) at step 6" in first
    assert "worker 0 in model(torch.ones(2, 4)).sum().backward() (hang_script.py:" in first
    assert page.startswith("No progress for")
    assert "  worker 0  exchanging step 6    has waited " in page
    assert "> worker 1  computing step 6     does not wait" in page
    assert "hang_script.py:14 in go_astray:  time.sleep(1e9)" in page
    assert "Its last events" in page
    assert page.strip() in (tmp_path / "run" / "hang.txt").read_text()


@pytest.mark.soak
def test_a_worker_in_another_collective_is_named_without_waiting() -> None:
    done = launch("other call")
    assert done.returncode == 2
    assert "worker 0 is in backward(), worker 1 is in barrier()" in done.stderr


@pytest.mark.soak
def test_a_worker_that_never_joins_is_named() -> None:
    done = launch("never joins")
    assert done.returncode == 1
    assert "worker 1 holds up the run" in done.stderr
    assert " s for worker 1" in done.stderr
    assert "mh.join()" in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["central", "allreduce algorithm=ring"])
def test_every_strategy_of_an_own_loop_names_it(strategy: str) -> None:
    done = launch("sleeps", "--strategy", strategy, "--workers", "3")
    assert done.returncode == 1
    assert "worker 1 holds up the run" in done.stderr
    assert " s for worker 1" in done.stderr


def blocking_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    blocking_loss.calls += torch.is_grad_enabled()  # type: ignore[attr-defined]
    if sys.orig_argv[-1] == "worker 1" and blocking_loss.calls == 4:  # type: ignore[attr-defined]
        time.sleep(1e9)
    return nn.functional.mse_loss(model(inputs), targets)


blocking_loss.calls = 0  # type: ignore[attr-defined]


def blocking_task() -> mh.Task:
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),
        loss=blocking_loss,
        data=(torch.ones(64, 4), torch.ones(64, 2)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
    )


def require_named(text: str, path: Path) -> tuple[str, str]:
    """The first line of the error, and what follows its page."""
    strategy = mh.Strategy.parse(text)
    # So many that worker 1 has a fourth one, where each takes the next that is left.
    length = {"rounds": 200} if strategy.facts.counts_rounds else {"steps": 200}
    options = mh.Options(watchdog_s=3, checkpoint_every=1)
    with pytest.raises(Hang) as caught:
        mh.fit(blocking_task(), strategy, workers=2, out=path, options=options, **length)
    first = str(caught.value).splitlines()[0]
    assert caught.value.worker_rank == 1
    assert "worker 1 holds up the run" in first
    assert "in time.sleep(1e9) (test_watchdog.py:" in first
    _, _, other = first.rpartition(": ")  # who waits, and in which call: the user's, or the strategy's
    package = STRATEGIES[strategy.word].package
    assert re.fullmatch(rf"(worker|server) 0 in .* \((test_watchdog|{package}/[a-z_/]+)\.py:\d+\)", other)
    kept = (path / "hang.txt").read_text()
    page, _, how = str(caught.value).partition("\n\nstep ")
    assert kept.startswith(page)
    assert "── worker 0 (pid" in kept
    return first, how


def test_a_loss_that_blocks_on_one_worker_ends_fit_with_its_line(tmp_path: Path) -> None:
    first, how = require_named("mirrored", tmp_path / "run")
    assert "at step 4" in first
    assert "worker 0 in agree() (strategies/allreduce/exchange.py:" in first
    assert "is kept in" in how, "how to go on from the last checkpoint"


def toiling_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    blocking_loss.calls += torch.is_grad_enabled()  # type: ignore[attr-defined]
    if sys.orig_argv[-1] == "worker 1" and blocking_loss.calls == 4:  # type: ignore[attr-defined]
        until = time.process_time() + 8  # as a compiler would
        while time.process_time() < until:
            pass
    return nn.functional.mse_loss(model(inputs), targets)


@pytest.mark.soak
def test_a_worker_that_computes_for_longer_than_the_deadline_is_left_alone() -> None:
    task = replace(blocking_task(), loss=toiling_loss)
    run = mh.fit(task, "mirrored", workers=2, steps=8, options=mh.Options(watchdog_s=3))
    assert run.summary["steps"] == 8


@pytest.mark.parametrize(
    "strategy",
    [
        *(word for word in STRATEGIES if mh.Strategy.parse(word).most_workers != 1 and word != "mirrored"),
        *(
            pytest.param(text, marks=pytest.mark.soak)
            for text in ("allreduce algorithm=tree", "hogwild order=turns", "ps servers=2", "ps link=tcp")
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:hogwild on a dense model")
def test_every_strategy_of_processes_names_it(strategy: str, tmp_path: Path) -> None:
    """All of the registry that have more than one worker; `mirrored` is above."""
    require_named(strategy, tmp_path / "run")
