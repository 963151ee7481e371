"""Opens a predictor from a path: finds the task of a run or model file, and its entry in the registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from manyhands.data.store.atomic import read_object
from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import UserError
from manyhands.serving.own_predictor import OwnPredictor
from manyhands.task import Task
from manyhands.workloads import exporting
from manyhands.workloads.predictor import Predictor
from manyhands.workloads.registry import WORKLOADS, Workload, find, load

_MODEL_FILE = "model.safetensors"
_FORMATS = "manyhands."  # as in manyhands.logreg.1


def open_predictor(path: str | Path, task: Task | None = None) -> Predictor[Any]:
    """Of a run, a model file or a directory that transformers wrote; `task` trained it where that is the user's own."""
    place = Path(path)
    if task is not None:
        return OwnPredictor(exporting.load(place, task), task)
    kind = _checkpoint_kind(place)
    if kind is None:
        name, workload = workload_of(place)
        opener = workload.predictor
    elif kind == "gpt2":
        name, opener = "gpt", "manyhands.serving.text_generator:open_gpt2"
    else:
        raise UserError(
            f"{place} has a model of type {kind!r}; of Hugging Face's, only gpt2 can be asked here"
        )
    predictor: Predictor[Any] = load(opener)(place)
    predictor.task = name
    return predictor


def _checkpoint_kind(place: Path) -> str | None:
    """The model type of a directory that transformers wrote; None of anything else."""
    file = place / "config.json"
    if not file.is_file() or "model_type" not in (config := read_object(file)):
        return None
    return str(config["model_type"])


def workload_of(place: Path) -> tuple[str, Workload]:
    name = task_name(place)
    workload = find(name)
    if workload is None or not workload.predictor:
        raise UserError(
            f"{place} belongs to task {name!r}, which is not built in; say where its Task is: --task "
            "my_module:task, or open_predictor(path, task) in Python"
        )
    return name, workload


def task_name(place: Path) -> str:
    """Return the task that trained it, from a run's configuration or from a file's header."""
    if (place / "config.json").is_file():
        directory = RunDirectory.open(place, lock=False)
        try:
            return str(directory.config["task"])
        finally:
            directory.close()
    file = place / _MODEL_FILE if place.is_dir() else place
    if place.is_dir() and not file.is_file():
        why = f"{place} is not a run directory (no config.json); give one such as runs/digits"
        raise UserError(why)
    try:
        with file.open("rb") as opened:
            start = opened.read(max(len(one.begins) for one in WORKLOADS.values()))
    except OSError as error:
        raise UserError(f"model {file} cannot be read: {error.strerror}") from error
    begun = [name for name, one in WORKLOADS.items() if one.begins and start.startswith(one.begins)]
    if begun:
        return begun[0]
    try:
        with safe_open(file, framework="pt") as opened:
            header: dict[str, str] = opened.metadata() or {}
    except OSError as error:
        raise UserError(f"model {file} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise UserError(f"model {file} is not a safetensors file: {error}") from error
    form = header.get("format", "")
    if form.startswith(_FORMATS):
        return form.removeprefix(_FORMATS).rpartition(".")[0]
    name = header.get("task", "")
    if not name:
        raise UserError(
            f"model {file} does not name its task; give a run's directory, or a file written by `manyhands export`"
        )
    return name
