"""A trained model outside of its run: loaded into a module, or exported in fewer bits with what that costs.

model = mh.load("runs/digits-1")            a run's directory, or a file of `manyhands export`
manyhands export runs/digits-1 --precision int8
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from manyhands.data.file_reader import read_text
from manyhands.data.randomness import preserved, seed_all
from manyhands.data.store.rundir import RunDirectory
from manyhands.data.store.tensorfile import Exported, check_precision, read_exported, write_exported
from manyhands.engine.computing import Computer, TrainingPlan
from manyhands.engine.training import last_kept
from manyhands.errors import UserError
from manyhands.strategy import Strategy
from manyhands.task import Task
from manyhands.workloads.registry import find
from manyhands.workloads.registry import load as load_text

Model = TypeVar("Model")
AnyPath = str | Path
_KEPT = "file:"  # before the name of a file of the task, in the header of an exported file


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportAsked:
    """What `manyhands export` asks a workload for."""

    run: Path
    out: Path | None = None  # the file to write; None: one in the run's directory
    precision: str = "fp32"
    test: Path | None = None  # examples to measure on, for a workload that has no evaluation data of its own
    task: Task | None = None  # the user's own, where it is not built in

    def own(self, name: str) -> Path:
        """The file `name` of the run, or the file that was named in the place of a run."""
        return self.run / name if self.run.is_dir() else self.run

    def target(self, name: str) -> Path:
        return self.out if self.out is not None else self.own(name).with_name(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What was exported, and what its fewer bits cost."""

    path: Path
    precision: str
    steps: int  # how many steps the weights have seen
    num_bytes: int  # of the file
    full_bytes: int  # of the same weights in single precision
    before: dict[str, float] = field(default_factory=dict)
    """Metrics on the task's evaluation data with the weights as they were trained; empty where it has none."""
    after: dict[str, float] = field(default_factory=dict)  # the same with the weights of the file
    largest_difference: float | None = None
    """Between what the file's program computes and what the module does, where it is one that was compared."""


def load(path: str | Path, task: Task | None = None) -> nn.Module:
    """The module of a run with its newest weights, or of a file of `manyhands export`; in evaluation mode, on the CPU.

    Of a run with `restore_best` they are those of its best evaluation. `task` is needed for a Task of your own, whose
    model only you can build. Nothing in the files is executed, and the data that it was trained on need not be there.
    """
    place = Path(path)
    if place.is_dir():
        config, built = _task_of(place, task, with_data=False)
        return _filled(built, _newest(place, config, built)[1])
    exported = read_exported(place)
    if task is None:
        task = _builtin(exported.about.get("task", ""), _options(exported, place), place, with_data=False)
        _check_shapes(task, exported.weights, place)
    return _filled(task, exported.weights)


def recorded_options(path: str | Path) -> Mapping[str, Any]:
    """Of the task that a run, or a file of `manyhands export`, is of."""
    place = Path(path)
    if place.is_dir():
        return _config(place).get("task_options") or {}
    return _options(read_exported(place), place)


def kept_file(path: str | Path, name: str) -> str | None:
    """A text that a run's task keeps, from the run or a file of `manyhands export`; None where there is none."""
    place = Path(path)
    if not place.is_dir():
        return read_exported(place).about.get(_KEPT + name)
    file = place / name
    return read_text(file) if file.is_file() else None


def trained_steps(path: str | Path, task: Task | None = None) -> int:
    """How many steps the newest weights of a run, or those of a file of `manyhands export`, have seen."""
    place = Path(path)
    if place.is_dir():
        config, built = _task_of(place, task, with_data=False)
        return _newest(place, config, built)[0]
    steps = read_exported(place).about.get("steps", "")
    return int(steps) if steps.isdecimal() and len(steps) < 19 else 0


def read_model_file(
    path: Path | str,
    name: str,
    kind: tuple[str, str],
    made: Callable[[dict[str, str], dict[str, Tensor]], Model],
) -> Model:
    """What is `made` of the header and the tensors of a safetensors file, or of `name` in the directory of a run.

    `kind` is the format that the header must name, and what such a file is in words. UserError says what is wrong.
    """
    file = Path(path) / name if Path(path).is_dir() else Path(path)
    try:
        with safe_open(file, framework="pt") as opened:
            header: dict[str, str] = opened.metadata() or {}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except OSError as error:
        raise UserError(f"model {file} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:  # of numpy: more dimensions than it knows
        raise UserError(f"model {file} is not a safetensors file: {error}") from error
    try:
        if header.get("format") != kind[0]:
            raise ValueError(f"its format is {header.get('format', 'not named')!r}, not {kind[0]!r}")
        return made(header, tensors)
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"model {file} is not a {kind[1]}: {error}") from error


def export_weights(asked: ExportAsked) -> Export:
    if asked.test is not None:
        raise UserError("--test: this task is measured on its evaluation data; leave it out for this run")
    return export_run(asked.run, asked.out, asked.precision, asked.task)


def export_run(
    run: AnyPath, out: AnyPath | None = None, precision: str = "fp32", task: Task | None = None
) -> Export:
    """Write the newest weights of a run as one safetensors file, and measure what the fewer bits cost.

    Into `out`, or RUN/model-PRECISION.safetensors.
    """
    check_precision(precision)
    place = Path(run)
    config, built = _task_of(place, task)
    steps, weights = _newest(place, config, built)
    file = Path(out) if out is not None else place / f"model-{precision}.safetensors"
    about = {
        "task": str(config["task"]),
        "options": json.dumps(config.get("task_options", {})),
        "steps": str(steps),
        "manyhands_version": str(config.get("versions", {}).get("manyhands", "")),
    }
    write_exported(
        file, weights, precision, about | {_KEPT + name: text for name, text in built.files.items()}
    )
    sizes = (4 * one.numel() if one.is_floating_point() else one.nbytes for one in weights.values())
    return Export(
        path=file,
        precision=precision,
        steps=steps,
        num_bytes=file.stat().st_size,
        full_bytes=sum(sizes),
        before=_measured(built, _filled(built, weights)),
        after=_measured(built, _filled(built, read_exported(file).weights)),
    )


def _task_of(place: Path, task: Task | None, *, with_data: bool = True) -> tuple[Mapping[str, Any], Task]:
    if not (place / "config.json").is_file():
        raise UserError(f"{place} is not a run directory (no config.json); give one such as runs/digits")
    config = _config(place)
    options = config.get("task_options") or {}
    return config, task or _builtin(str(config["task"]), options, place, with_data=with_data)


def _config(place: Path) -> Mapping[str, Any]:
    directory = RunDirectory.open(place, lock=False)
    directory.close()
    return directory.config


def _options(exported: Exported, place: Path) -> Mapping[str, Any]:
    """Those that the header of a file has; it is not trusted."""
    options, text = None, exported.about.get("options", "{}")
    with suppress(ValueError):
        options = json.loads(text)
    if not isinstance(options, dict):
        raise UserError(
            f"model {place} was not written by `manyhands export`: its options are {text[:80]!r}; give the task "
            "it was trained with: mh.load(path, task=...)"
        )
    return options


def _builtin(name: str, options: Mapping[str, Any], place: Path, *, with_data: bool) -> Task:
    workload = find(name)
    if workload is None or not workload.task:
        raise UserError(
            f"{place} belongs to task {name!r}, which is not built in; give the task it was trained with: "
            "mh.load(path, task=...)"
        )
    entry = load_text(workload.task)
    made: Task = entry.build(**options) if with_data else entry.without_data(**options)
    return made


def _check_shapes(task: Task, weights: Mapping[str, Tensor], place: Path) -> None:
    """Before memory is taken for a model by a file's header: its weights must be those of the file."""
    with preserved(), torch.device("meta"):
        model = task.model()
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    for name, value in weights.items():
        if name in wanted and value.shape != wanted[name]:
            raise UserError(
                f"model {place} was not written by `manyhands export`: {name} has shape {tuple(value.shape)}, but "
                f"its options give {tuple(wanted[name])}"
            )
    lacking = next((name for name, _ in model.named_parameters() if name not in weights), None)
    if lacking is not None:
        raise UserError(f"model {place} was not written by `manyhands export`: it has no {lacking}")


def _newest(place: Path, config: Mapping[str, Any], task: Task) -> tuple[int, dict[str, Tensor]]:
    try:
        kept = last_kept(place, task, Strategy.parse(str(config["strategy"])))
    except KeyError as error:  # parts of weights are put together by the names in the task's model
        raise UserError(
            f"the weights do not fit the task's model: {error} is missing; give the task they were trained with"
        ) from error
    if kept is None:
        raise UserError(f"{place} has no checkpoint yet; wait, or train with a lower checkpoint_every")
    return kept.steps, dict(kept.values)


def _filled(task: Task, weights: Mapping[str, Tensor]) -> nn.Module:
    with preserved():
        seed_all(0)
        model = task.model()
    try:
        missing, unexpected = model.load_state_dict(dict(weights), strict=False)
    except RuntimeError as error:
        raise UserError(f"the weights do not fit the task's model: {error}") from error
    parameters = {name for name, _ in model.named_parameters()}
    lacking = [name for name in missing if name in parameters]
    if lacking or unexpected:
        raise UserError(
            f"the weights do not fit the task's model: {len(lacking)} are missing and {len(unexpected)} unexpected, "
            f"such as {[*lacking, *unexpected][0]!r}; give the task they were trained with"
        )
    return model.eval()


def _measured(task: Task, model: nn.Module) -> dict[str, float]:
    with preserved():
        found = Computer(TrainingPlan(task=task, steps=1, seed=0, evaluate_every=1, checkpoint_every=0), 0)
        measured = found.evaluate(model)
    return dict(measured[0]) if measured is not None else {}
