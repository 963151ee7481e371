"""Callbacks under every strategy: a stop that they ask for is one step for all workers, saved, and can be resumed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.engine.run import Run
from manyhands.errors import Aborted

pytestmark = [
    pytest.mark.filterwarnings("ignore:hogwild on a dense model"),
]

ONES = torch.ones(16, 1, dtype=torch.float64)
STRATEGIES = [("single", 1), ("mirrored", 2), ("local steps=2", 2), ("hogwild order=turns", 2)]
MANY = 1_000_000  # more than anybody waits for


class Slope(nn.Module):
    """One weight, from 0; training brings it to 2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def task() -> mh.Task:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        error: Tensor = model(batch[0]) - batch[1]
        return error.square().mean()

    return mh.Task(
        model=Slope,
        loss=loss,
        data=(ONES, 2 * ONES),
        evaluation=(ONES, ONES),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        batch_size=8,
    )


def weight_after(steps: int) -> float:
    """By hand: every step goes the same part of the way."""
    return 2 - 2 * (1 - 2e-4) ** steps


class Watcher(mh.Callback):
    """Notes what it hears, and asks to stop once `step` steps are done."""

    def __init__(self, step: int | None = None, raises_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.evaluated: list[int] = []
        self.saved: list[tuple[int, bool]] = []
        self.ended: list[Any] = []
        self._step, self._raises_at = step, raises_at

    def on_step(self, row: Mapping[str, Any]) -> bool | None:
        self.steps.append(row["step"])
        if row["step"] == self._raises_at:
            raise ZeroDivisionError("a mistake of the user's")
        return self._step is not None and row["step"] >= self._step

    def on_evaluate(self, row: Mapping[str, Any]) -> bool | None:
        self.evaluated.append(row["step"])
        return None

    def on_checkpoint(self, step: int, path: Path) -> bool | None:
        self.saved.append((step, path.is_dir()))
        return None

    def on_end(self, run: Run | None, error: BaseException | None) -> None:
        self.ended.append((run, error))


@pytest.mark.parametrize(("strategy", "workers"), STRATEGIES)
def test_a_stop_ends_all_workers_after_one_step_and_the_run_goes_on_from_it(
    strategy: str, workers: int, tmp_path: Path
) -> None:
    out, watcher = tmp_path / "run", Watcher(step=10)
    often = {"evaluate_every": MANY, "checkpoint_every": MANY}
    run = mh.fit(
        task(),
        strategy,
        workers=workers,
        steps=MANY,
        out=out,
        options=mh.Options(callbacks=[watcher], **often),  # type: ignore[arg-type]
    )
    end = run.summary["steps"]
    assert 10 <= end < MANY
    assert run.summary["stopped_early"]
    assert f"stopped after step {end}: Watcher asked for it" in run.summary["notes"]
    assert watcher.steps == list(range(1, end + 1))
    assert watcher.evaluated == [end]
    assert watcher.saved == [(end, True)]
    assert watcher.ended == [(run, None)]
    assert abs(run.model.state_dict()["weight"].item() - weight_after(end)) < 1e-9
    after = Watcher()
    options = mh.Options(callbacks=[after])
    more = mh.fit(task(), strategy, workers=workers, steps=end + 4, out=out, resume=True, options=options)
    assert abs(more.model.state_dict()["weight"].item() - weight_after(end + 4)) < 1e-9
    assert after.steps == list(range(end + 1, end + 5))


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("mirrored", 2), ("ps", 2)])
def test_what_a_callback_raises_ends_the_run(strategy: str, workers: int, tmp_path: Path) -> None:
    broken, other = Watcher(raises_at=3), Watcher()
    options = mh.Options(callbacks=[broken, other])
    with pytest.raises(ZeroDivisionError, match="a mistake of the user's") as raised:
        mh.fit(task(), strategy, workers=workers, steps=MANY, out=tmp_path / "run", options=options)
    assert broken.steps == [1, 2, 3]
    assert broken.ended == other.ended == [(None, raised.value)]
    report = (tmp_path / "run" / "members.jsonl").read_text()
    assert "Watcher, a callback, raised ZeroDivisionError: a mistake of the user's" in report


def test_ps_hears_everything_and_a_stop_ends_it_at_once(tmp_path: Path) -> None:
    watcher = Watcher()
    run = mh.fit(
        task(), "ps", workers=2, steps=6, out=tmp_path / "a", options=mh.Options(callbacks=[watcher])
    )
    assert sorted(watcher.steps) == [1, 2, 3, 4, 5, 6]
    assert watcher.saved == [(6, True)]
    assert watcher.ended == [(run, None)]
    with pytest.raises(Aborted, match=r"Watcher asked to stop after step \d+: the servers of ps assign work"):
        mh.fit(
            task(),
            "ps",
            workers=2,
            steps=MANY,
            out=tmp_path / "b",
            options=mh.Options(callbacks=[Watcher(step=2)]),
        )


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("mirrored", 2)])
def test_whoever_started_a_run_in_the_background_may_stop_it(strategy: str, workers: int) -> None:
    begun = threading.Event()

    class Begun(mh.Callback):
        def on_step(self, row: Mapping[str, Any]) -> bool | None:
            del row
            begun.set()
            return None

    options = mh.Options(callbacks=[Begun()])
    with mh.start(task(), strategy, workers=workers, steps=MANY, options=options) as running:
        assert begun.wait(240)
        running.stop()
        run = running.result()
    assert run.summary["stopped_early"]
    end = run.summary["steps"]
    assert f"stopped after step {end}: Running.stop asked for it" in run.summary["notes"]
    assert abs(run.model.state_dict()["weight"].item() - weight_after(end)) < 1e-9
