"""Loggers: a CSV file as it is read back, and the calls that Weights & Biases and MLflow get."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.engine.callbacks import Beginning
from manyhands.errors import UserError

CONFIG = {
    "task": "points",
    "steps": 4,
    "parameters": {"weight": "float32 1"},
    "task_options": {"path": "x" * 1000},
    "versions": {"torch": "2"},
}
FRESH = Beginning(config=CONFIG, history=(), resumed=False, path=None)
STEPS = [{"step": step, "loss": 1 / step, "seconds": 0.5, "at_s": 0.5 * step} for step in range(1, 5)]
EVALUATION = {"step": 2, "metrics": {"evaluation_loss": 0.25, "accuracy": 0.5}, "at_s": 1.1}


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def rows_of(history: mh.History, *, timed: bool = True) -> list[dict[str, str]]:
    """The history as the file has it, by hand; where a run was resumed, times are of two lives."""
    names = list(dict.fromkeys(name for row in history.evaluations for name in row["metrics"]))
    lines = []
    for row in history:
        flat = {**row, **row.get("metrics", {})}
        columns = ["step", "at_s", "loss", "seconds", *names] if timed else ["step", "loss", *names]
        lines.append({name: str(flat[name]) if name in flat else "" for name in columns})
    return lines


def task() -> mh.Task:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(-1, 1)
    return mh.Task(
        model=lambda: nn.Linear(1, 1).double(),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(x, 2 * x),
        evaluation=(x, 2 * x),
        metrics={"worst": lambda model, batch: (model(batch[0]) - batch[1]).abs().max()},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )


def test_the_csv_file_of_a_run_is_its_history(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.csv"
    options = mh.Options(evaluate_every=3, callbacks=[mh.CsvLogger(path)])
    run = mh.fit(task(), "single", steps=7, options=options)
    assert read(path) == rows_of(run.history)
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(UserError, match="already exists; choose another path, resume its run, or give overw"):
        mh.fit(task(), "single", steps=1, options=options)
    over = mh.Options(callbacks=[mh.CsvLogger(path, overwrite=True)])
    again = mh.fit(task(), "single", steps=2, options=over)
    assert read(path) == rows_of(again.history)


def test_the_file_of_a_resumed_run_is_that_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    out, path = tmp_path / "run", tmp_path / "run.csv"
    options = mh.Options(evaluate_every=3, checkpoint_every=2, callbacks=[mh.CsvLogger(path)])

    class Breaks(mh.Callback):
        def on_step(self, row: Any) -> bool | None:
            if row["step"] == 5:
                raise InterruptedError
            return None

    broken = mh.Options(evaluate_every=3, checkpoint_every=2, callbacks=[mh.CsvLogger(path), Breaks()])
    with pytest.raises(InterruptedError):
        mh.fit(task(), "single", steps=8, out=out, options=broken)
    assert len(read(path)) >= 5
    mh.fit(task(), "single", steps=8, out=out, resume=True, options=options)
    whole = mh.fit(task(), "single", steps=8, options=mh.Options(evaluate_every=3))
    found = [{name: row[name] for name in row if name not in ("at_s", "seconds")} for row in read(path)]
    assert found == rows_of(whole.history, timed=False)


def test_a_metric_that_comes_later_gets_a_column_and_what_is_no_number_an_empty_cell(tmp_path: Path) -> None:
    logger = mh.CsvLogger(tmp_path / "run.csv")
    logger.on_begin(FRESH)
    logger.on_step(STEPS[0])
    assert list(read(tmp_path / "run.csv")[0]) == ["step", "at_s", "loss", "seconds"]
    logger.on_step({**STEPS[1], "loss": float("nan")})
    logger.on_evaluate(EVALUATION)
    logger.on_step(STEPS[2])
    logger.on_end(None, None)
    found = read(tmp_path / "run.csv")
    assert [row["accuracy"] for row in found] == ["", "", "0.5", ""]
    assert [row["loss"] for row in found] == ["1.0", "", "", str(1 / 3)]
    with pytest.raises(UserError, match="cannot be written: File exists"):
        mh.CsvLogger(tmp_path / "run.csv" / "below.csv").on_begin(FRESH)


class Full(mh.CsvLogger):
    """Its disk is full once the file is open."""

    def on_begin(self, beginning: Beginning) -> None:
        del beginning
        self._columns = ["step", "at_s", "loss", "seconds"]
        self._file = self._path.open("w")


def test_a_disk_that_takes_no_more_costs_the_file_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    options = mh.Options(callbacks=[Full(Path("/dev/full"), overwrite=True)])
    run = mh.fit(task(), "single", steps=3, options=options)
    assert run.summary["steps"] == 3
    report = [record.message for record in caplog.records if "CsvLogger" in record.message]
    assert report == [
        "CsvLogger: /dev/full cannot be written: No space left on device; the run continues without it"
    ]


class Calls:
    """Stands for a module or a run: notes every call, and has what `returns` says."""

    def __init__(self, **returns: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._returns = returns

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, arguments, named))
            return self._returns.get(name)

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(arguments, named) for called, arguments, named in self.calls if called == name]


class Board(Calls):
    """A run of Weights & Biases."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.summary = Calls(), Calls()


ENDED: Any = SimpleNamespace(summary={"final": {"loss": 0.25}})


def hear(logger: mh.Callback, run: Any, error: BaseException | None) -> None:
    logger.on_begin(FRESH)
    for row in STEPS[:2]:
        assert logger.on_step(row) is None
    assert logger.on_evaluate(EVALUATION) is None
    logger.on_step(STEPS[2])
    logger.on_end(run, error)


def test_wandb_gets_what_its_own_loop_would_log() -> None:
    board = Board()
    module = Calls(init=board)
    hear(mh.WandbLogger("project", wandb=module, every=2, tags=["a"]), ENDED, None)
    assert module.calls == [("init", (), {"project": "project", "config": CONFIG, "tags": ["a"]})]
    assert board.of("define_metric") == [(("step",), {}), (("*",), {"step_metric": "step"})]
    assert board.of("log") == [
        (({"step": 2, "loss": 0.5, "seconds": 0.5},), {}),
        (({"step": 2, "evaluation_loss": 0.25, "accuracy": 0.5},), {}),
    ]
    assert board.summary.calls == [("update", ({"final/loss": 0.25},), {})]
    assert board.of("finish") == [((), {"exit_code": 0})]


def test_a_wandb_run_that_was_given_stays_the_givers() -> None:
    board = Board()
    hear(mh.WandbLogger(run=board), None, RuntimeError())
    assert len(board.of("log")) == 4
    assert board.config.of("update") == [((CONFIG,), {"allow_val_change": True})]
    assert not board.of("finish")


@pytest.mark.parametrize(
    ("error", "word"), [(None, "FINISHED"), (KeyboardInterrupt(), "KILLED"), (ValueError(), "FAILED")]
)
def test_mlflow_gets_parameters_metrics_and_an_end(error: BaseException | None, word: str) -> None:
    module = Calls(start_run=SimpleNamespace(info=SimpleNamespace(run_id="7")))
    hear(mh.MlflowLogger("trials", tracking_uri="file:here", mlflow=module, run_name="a"), ENDED, error)
    assert module.calls[:3] == [
        ("set_tracking_uri", ("file:here",), {}),
        ("set_experiment", ("trials",), {}),
        ("start_run", (), {"run_name": "a"}),
    ]
    ((parameters,), _) = module.of("log_params")[0]
    assert parameters == {"task": "points", "steps": "4", "version/torch": "2", "task/path": "x" * 250}
    assert module.of("log_metrics") == [
        (({"loss": 1.0, "seconds": 0.5},), {"step": 1}),
        (({"loss": 0.5, "seconds": 0.5},), {"step": 2}),
        (({"evaluation_loss": 0.25, "accuracy": 0.5},), {"step": 2}),
        (({"loss": 1 / 3, "seconds": 0.5},), {"step": 3}),
    ]
    assert module.of("end_run") == [((word,), {})]


def test_a_resumed_mlflow_run_keeps_its_parameters_and_one_that_never_began_is_not_ended() -> None:
    module = Calls(start_run=SimpleNamespace(info=SimpleNamespace(run_id="7")))
    logger = mh.MlflowLogger(mlflow=module)
    logger.on_end(None, ValueError())
    assert module.calls == []
    logger.on_begin(Beginning(config=CONFIG, history=STEPS, resumed=True, path=None))
    assert [name for name, _, _ in module.calls] == ["start_run"]


def test_a_package_that_is_missing_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(UserError, match=r"WandbLogger needs the package wandb.*; pip install wandb$"):
        mh.WandbLogger("project")
    with pytest.raises(UserError, match=r"MlflowLogger needs the package mlflow.*; pip install mlflow$"):
        mh.MlflowLogger()
    with pytest.raises(UserError, match="every is 0; it must be an integer of at least 1"):
        mh.WandbLogger(run=Board(), every=0)


def test_of_a_federated_round_the_numbers_are_logged(tmp_path: Path) -> None:
    """MLflow takes numbers alone; who took part is a list, the spread over parties a table, a private loss nothing."""
    module = Calls(start_run=SimpleNamespace(info=SimpleNamespace(run_id="7")))
    logger = mh.MlflowLogger(mlflow=module)
    file = mh.CsvLogger(tmp_path / "rounds.csv")
    for one in (logger, file):
        one.on_begin(FRESH)
        one.on_step({"step": 1, "loss": None, "seconds": 0.5, "at_s": 0.5, "clients": [3, 4]})
        one.on_evaluate({**EVALUATION, "fairness": {"accuracy": {"mean": 0.5}}})
        one.on_end(None, None)
    assert module.of("log_metrics") == [
        (({"seconds": 0.5},), {"step": 1}),
        (({"evaluation_loss": 0.25, "accuracy": 0.5},), {"step": 2}),
    ]
    assert list(read(tmp_path / "rounds.csv")[1]) == [
        "step", "at_s", "loss", "seconds", "evaluation_loss", "accuracy",
    ]  # fmt: skip
