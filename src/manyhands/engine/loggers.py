"""Loggers: callbacks that write a run's history where people look at it: a CSV file, Weights & Biases, MLflow.

The packages of the last two are imported when a logger is made, and are no dependency of this one. Each logger has a
parameter for the module, so that another of the same shape can be given.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from manyhands.data.store.atomic import WriteFailed, reason, write_atomically
from manyhands.engine.callbacks import Beginning, Callback
from manyhands.engine.run import Run
from manyhands.errors import UserError

_log = logging.getLogger("manyhands")
_FIRST_COLUMNS = ("step", "at_s", "loss", "seconds")
_MLFLOW_VALUE_LENGTH = 250  # of a parameter, in the oldest servers


class _RowLogger(Callback):
    """Base of the loggers: receives a run's rows, every so many steps and every evaluation."""

    def __init__(self, every: int = 1) -> None:
        if not isinstance(every, int) or every < 1:
            raise UserError(f"{type(self).__name__}: every is {every!r}; it must be an integer of at least 1")
        self._every = every

    def on_step(self, row: Mapping[str, Any]) -> bool | None:
        if row["step"] % self._every == 0:
            self._take(_flat(row))
        return None

    def on_evaluate(self, row: Mapping[str, Any]) -> bool | None:
        self._take(_flat(row))
        return None

    def _take(self, row: dict[str, Any]) -> None:
        raise NotImplementedError


class CsvLogger(_RowLogger):
    """Writes one line per step and evaluation to a CSV file: step, at_s, loss, seconds, and a column per metric.

    A metric that was not there before gets a column: the file is then written anew, with that cell empty in the lines
    above. A resumed run begins with the lines of the history that it goes on with, so that the file of a run that was
    interrupted is that of one that was not. A file that is there already is only replaced by a resumed run, or if
    `overwrite` says so.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        super().__init__()
        self._path, self._overwrite = Path(path), overwrite
        self._columns: list[str] = []
        self._file: TextIO | None = None

    def on_begin(self, beginning: Beginning) -> None:
        """Write the header, and the lines of a run that goes on; UserError where that cannot be."""
        if self._path.exists() and not (beginning.resumed or self._overwrite):
            raise UserError(
                f"CsvLogger: {self._path} already exists; choose another path, resume its run, or give overwrite=True"
            )
        rows = [_flat(row) for row in beginning.history]
        columns = dict.fromkeys((*_FIRST_COLUMNS, *(name for row in rows for name in row)))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._write_anew([*columns], rows)
        except (OSError, WriteFailed) as error:
            raise UserError(f"CsvLogger: {self._path} cannot be written: {_why(error)}") from error

    def on_end(self, run: Run | None, error: BaseException | None) -> None:
        del run, error
        if self._file is not None:
            self._file.close()
            self._file = None

    def _take(self, row: dict[str, Any]) -> None:
        """Write a line; a full disk costs the file and not the run."""
        if self._file is None:
            return
        new = [name for name in row if name not in self._columns]
        try:
            if new:
                with self._path.open(newline="", encoding="utf-8") as file:
                    written = list(csv.DictReader(file))
                self._write_anew([*self._columns, *new], [*written, row])
            else:
                self._file.write(_lines(self._columns, [row]))
                self._file.flush()
        except (OSError, WriteFailed) as error:
            with suppress(OSError):  # it says once more what is said here
                self._file.close()
            self._file = None
            _log.warning(
                f"CsvLogger: {self._path} cannot be written: {_why(error)}; the run continues without it"
            )

    def _write_anew(self, columns: list[str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace the whole file atomically: a reader sees the old file or the new one."""
        lines = _lines(columns, [dict(zip(columns, columns, strict=True)), *rows])
        write_atomically(self._path, [lines.encode()])
        if self._file is not None:
            self._file.close()
        self._file, self._columns = self._path.open("a", newline="", encoding="utf-8"), columns


class WandbLogger(_RowLogger):
    """Sends a run's history to Weights & Biases.

    `run` is one that `wandb.init` gave you, which stays yours to finish; without it one is made by
    `wandb.init(project=project, config=…, **settings)` and finished at the end. Steps are sent every so many (`every`),
    evaluations always.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        run: Any | None = None,
        every: int = 1,
        wandb: Any | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(every)
        self._project, self._run, self._settings = project, run, settings
        self._owns_run = run is None
        self._wandb = wandb if wandb is not None or run is not None else _import("WandbLogger", "wandb")

    def on_begin(self, beginning: Beginning) -> None:
        config = dict(beginning.config)
        if self._run is None:
            assert self._wandb is not None, "what has no run makes one"
            self._run = self._wandb.init(project=self._project, config=config, **self._settings)
        else:
            self._run.config.update(config, allow_val_change=True)
        # Its own count of steps only goes forward, and drops what comes behind it: steps of ps, and of a resumed run.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_end(self, run: Run | None, error: BaseException | None) -> None:
        if self._run is None:
            return
        if run is not None:
            self._run.summary.update({f"final/{name}": value for name, value in run.summary["final"].items()})
        if self._owns_run:
            self._run.finish(exit_code=0 if error is None else 1)
            self._run = None

    def _take(self, row: dict[str, Any]) -> None:
        assert self._run is not None, "a run begins before it has rows"
        self._run.log({"step": row["step"], **_values(row)})


class MlflowLogger(_RowLogger):
    """Sends a run's history to MLflow: the configuration as parameters, steps and evaluations as metrics.

    `experiment` and `tracking_uri` are those of `mlflow.set_experiment` and `mlflow.set_tracking_uri`; `settings` go to
    `mlflow.start_run`, as `run_id=…` to go on with one. Steps are sent every so many (`every`), evaluations always.
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        tracking_uri: str | None = None,
        every: int = 1,
        mlflow: Any | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(every)
        self._experiment, self._uri, self._settings = experiment, tracking_uri, settings
        self._mlflow = mlflow if mlflow is not None else _import("MlflowLogger", "mlflow")
        self._run_id: str | None = None

    def on_begin(self, beginning: Beginning) -> None:
        if self._uri is not None:
            self._mlflow.set_tracking_uri(self._uri)
        if self._experiment is not None:
            self._mlflow.set_experiment(self._experiment)
        self._run_id = self._mlflow.start_run(**self._settings).info.run_id
        if not beginning.resumed:  # parameters cannot be changed, and steps may be more than they were
            flat = {name: value for name, value in beginning.config.items() if name != "parameters"}
            versions, options = flat.pop("versions", {}), flat.pop("task_options", None) or {}
            flat |= {f"version/{name}": value for name, value in versions.items()}
            flat |= {f"task/{name}": value for name, value in options.items()}
            short = {name: str(value)[:_MLFLOW_VALUE_LENGTH] for name, value in flat.items()}
            self._mlflow.log_params(short)

    def on_end(self, run: Run | None, error: BaseException | None) -> None:
        del run
        if self._run_id is None:
            return
        self._run_id = None
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        self._mlflow.end_run("FINISHED" if error is None else "KILLED" if stopped else "FAILED")

    def _take(self, row: dict[str, Any]) -> None:
        self._mlflow.log_metrics(_values(row), step=row["step"])


def _why(error: OSError | WriteFailed) -> str:
    """The system's message without the path, which is named already."""
    cause = error.__cause__ if isinstance(error, WriteFailed) else error
    return reason(cause) if isinstance(cause, OSError) else str(error)


def _import(logger: str, name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(
            f"{logger} needs the package {name}, which cannot be imported ({error}); pip install {name}"
        ) from error


def _values(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a flat row by name, without its step; a loss that is not reported is left out."""
    names = [name for name, value in row.items() if isinstance(value, int | float)]
    return {name: row[name] for name in names if name not in ("step", "at_s")}


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the history with its metrics as columns; lists and tables are left out."""
    plain = {name: value for name, value in row.items() if not isinstance(value, list | Mapping)}
    return {**plain, **row.get("metrics", {})}


def _lines(columns: list[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    # NaN is an empty cell, as readers of tables expect; it is the one value that is not itself.
    writer.writerows({name: value if value == value else "" for name, value in row.items()} for row in rows)
    return text.getvalue()
