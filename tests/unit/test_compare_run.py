"""Whole comparisons in this process: `single` needs no other."""

from pathlib import Path

import pytest
import torch

import manyhands as mh
from manyhands.errors import UserError
from manyhands.lab.compare.comparison import Progress, Target
from manyhands.lab.compare.energy import EnergyCounter
from manyhands.lab.compare.run_comparison import CompareSettings, compare

FEATURES = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def task(
    loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), **changes: object
) -> mh.Task:
    data = (FEATURES, FEATURES.sum(1, keepdim=True))
    return mh.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=loss,
        data=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=16,
        **{"evaluation": data, **changes},
    )


class Counted:
    """A loss that does something else when it is computed for the nth time with a gradient."""

    def __init__(self, nth: int, instead) -> None:
        self._left = nth
        self._instead = instead

    def __call__(self, model: torch.nn.Module, batch) -> torch.Tensor:
        loss = (model(batch[0]) - batch[1]).square().mean()
        if torch.is_grad_enabled():
            self._left -= 1
            if self._left == 0:
                return self._instead(loss)
        return loss


def test_the_figures_are_those_of_the_runs(tmp_path: Path) -> None:
    seen: list[Progress] = []
    settings = CompareSettings(steps=20, repeats=2, target=Target.parse("evaluation_loss=0.5"))
    done = compare(task(), "single", out=tmp_path / "c", settings=settings, on_progress=seen.append)
    (row,) = done.figures.rows
    plain = mh.fit(task(), "single", steps=20, options=mh.Options(evaluate_every=2))
    first = next(one["step"] for one in plain.history.evaluations if one["metrics"]["evaluation_loss"] <= 0.5)
    assert row.target_steps is not None
    assert (row.target_steps.low, row.target_steps.high) == (first, first), "same seed, same numbers"
    assert row.final["evaluation_loss"].median == plain.summary["final"]["evaluation_loss"]
    assert [point.values["loss"] for point in row.runs[1].losses] == plain.history.loss
    assert (done.interrupted, done.failed, row.workers) == (False, False, 1)
    assert [(one.done, one.runs, one.seconds_left is None) for one in seen] == [(0, 2, True), (1, 2, False)]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["01-single-1", "01-single-2"]


def test_a_run_that_fails_is_kept_with_its_sentence(tmp_path: Path) -> None:
    broken = Counted(14, lambda loss: loss * float("nan"))
    done = compare(task(broken), "single", out=tmp_path / "c", settings=CompareSettings(steps=10, repeats=3))
    (row,) = done.figures.rows
    assert done.failed
    assert [run.repeat for run in row.runs] == [0, 2]
    assert len(row.failures) == 1
    assert "not finite" in row.failures[0] or "nan" in row.failures[0].lower()


def test_an_interrupt_keeps_what_is_done(tmp_path: Path) -> None:
    def interrupt(loss: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    done = compare(
        task(Counted(14, interrupt)),
        "single",
        out=tmp_path / "c",
        settings=CompareSettings(steps=10, repeats=3),
    )
    assert done.interrupted
    assert [run.repeat for run in done.figures.rows[0].runs] == [0]


@pytest.mark.parametrize(
    ("strategies", "settings", "part"),
    [
        ("single; sinlge", CompareSettings(), "'sinlge'"),
        ("single; pipeline stages=3", CompareSettings(), "workers=2: must be a multiple of 3"),
        ("single", CompareSettings(repeats=0), "--repeats 0"),
        ("single", CompareSettings(target=Target.parse("accuracy=0.5")), "has no such metric"),
        ("single; ps", CompareSettings(workers=0), "workers=0"),
        ("single", CompareSettings(steps=5, epochs=5), "give one of them"),
        ("single", CompareSettings(slow=mh.Slowdown.parse("worker=2,factor=2")), "no worker 2 among 2"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_runs(
    tmp_path: Path, strategies: str, settings: CompareSettings, part: str
) -> None:
    with pytest.raises(UserError, match=part):
        compare(task(), strategies, out=tmp_path / "c", settings=settings)
    assert not (tmp_path / "c").exists()


def test_a_directory_in_use_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt"):
        compare(task(), "single", out=tmp_path)


def test_a_task_without_evaluation_has_no_target(tmp_path: Path) -> None:
    done = compare(task(evaluation=None), "single", out=tmp_path / "c", settings=CompareSettings(steps=5))
    assert done.figures.target is None
    assert set(done.figures.rows[0].final) == {"loss"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_device_that_is_not_here_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    settings = CompareSettings(steps=4, devices=("cpu", "cuda"))
    done = compare(task(), "single", out=tmp_path / "c", settings=settings)
    assert [row.name for row in done.figures.rows] == ["single on cpu"]
    assert done.figures.rows[0].runs
    (sentence,) = done.left_out
    assert sentence.startswith("device=cuda: this machine has no GPU that torch can use")
    assert sentence in done.notes
    for devices in (("cuda",), ("cpu", "gpu"), ("cuda", "cuda:1")):
        with pytest.raises(UserError, match="device="):
            compare(task(), "single", out=tmp_path / "d", settings=CompareSettings(steps=4, devices=devices))
    assert not (tmp_path / "d").exists()


def test_several_devices_make_a_row_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second device is called otherwise and is the same: what is to be seen is who runs where."""
    asked: list[str] = []

    def fit(*arguments: object, device: str, **named: object) -> object:
        asked.append(device)
        return mh.fit(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("manyhands.lab.compare.run_comparison.fit", fit)
    monkeypatch.setattr("manyhands.lab.compare.run_comparison.check_device", lambda name: name)
    settings = CompareSettings(steps=4, repeats=2, devices=("cpu", "cuda"))
    done = compare(task(), "single", out=tmp_path / "c", settings=settings)
    assert asked == ["cpu", "cuda", "cpu", "cuda"]
    assert [row.name for row in done.figures.rows] == ["single on cpu", "single on cuda"]
    assert [row["device"] for row in done.figures.to_dict()["strategies"]] == ["cpu", "cuda"]
    assert [len(row.runs) for row in done.figures.rows] == [2, 2]


def test_joules_are_those_of_the_counters_around_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter(range(0, 10**9, 5_000_000))
    counters = [EnergyCounter("package-0", lambda: next(readings))]
    monkeypatch.setattr("manyhands.lab.compare.run_comparison.energy_counters", lambda _: (counters, ""))
    done = compare(task(), "single", out=tmp_path / "c", settings=CompareSettings(steps=4, repeats=2))
    assert [run.joules for run in done.figures.rows[0].runs] == [5.0, 5.0]
    assert done.figures.about_energy == ""
