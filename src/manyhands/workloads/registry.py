"""Every workload by its name: where its task or training, its kernels and its predictor are. One entry each.

What is named is imported when it is first used, so that a command line is read, a run is opened and kernels are
compiled without importing all of them. A package of a user offers a workload by an entry point that names a `Workload`:

    [project.entry-points."manyhands.workloads"]
    mine = "mypackage.offer:MINE"
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from manyhands.errors import UserError, first_line, nearest

__all__ = ["GROUP", "TASK_NAMES", "WORKLOADS", "Workload", "find", "load", "names", "offered", "require_task"]

GROUP = "manyhands.workloads"
"""The group of entry points."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Where the parts of a workload are: each text is `module:name`. It has a `task` or a `training`."""

    task: str = ""
    """A `BuiltinTask` (workloads/tasks/builtin.py): PyTorch, trained by every strategy."""

    training: str = ""
    """A `CompiledWorkload` (workloads/compiled_workload.py): compiled steps, and a training of its own."""

    forks_workers: bool = True
    """Whether the strategy that it is trained by unless another is named has its workers in processes."""

    kernels: tuple[str, ...] = ()
    """What compiles its kernels: functions, each in a process of its own; see native/warming.py."""

    rare_kernels: tuple[str, ...] = ()
    """Those that few runs need: they are compiled by `manyhands doctor --warm`, or where they are first called."""

    uses: tuple[str, ...] = ()
    """Kernels of others that it needs, by the names of their jobs in native/warming.py."""

    predictor: str = ""
    """(path: Path) -> Predictor, of a run's directory or a file of its model; see `workloads.predictor`."""

    exporter: str = "manyhands.workloads.exporting:export_weights"
    """(ExportAsked) -> Export: the model as one file, in as few bits as wanted."""

    begins: bytes = b""
    """What a file of its model begins with, where that tells it from all others; safetensors files name their task."""


_CORE = ("waiting", "group", "records")

WORKLOADS: dict[str, Workload] = {
    "digits": Workload(
        task="manyhands.workloads.tasks.digits:DIGITS",
        predictor="manyhands.serving.torch_predictors:open_images",
    ),
    "mnist": Workload(
        task="manyhands.workloads.tasks.mnist:MNIST",
        predictor="manyhands.serving.torch_predictors:open_images",
    ),
    "language": Workload(
        task="manyhands.workloads.tasks.language:LANGUAGE",
        predictor="manyhands.serving.torch_predictors:open_text",
    ),
    "recurrent": Workload(
        task="manyhands.workloads.tasks.recurrent:RECURRENT",
        predictor="manyhands.serving.torch_predictors:open_text",
    ),
    "line": Workload(
        task="manyhands.workloads.tasks.line:LINE",
        predictor="manyhands.serving.torch_predictors:open_numbers",
    ),
    "glove": Workload(
        training="manyhands.workloads.glove.command:GLOVE",
        forks_workers=False,
        kernels=(
            "manyhands.workloads.glove.word_table:warm",
            "manyhands.workloads.glove.count_kernels:warm",
            "manyhands.workloads.glove.glove_kernels:warm",
        ),
        rare_kernels=("manyhands.workloads.glove.glove_kernels:warm_in_order",),
        uses=_CORE,
        predictor="manyhands.workloads.glove.predicting:open_vectors",
        exporter="manyhands.workloads.glove.predicting:export_vectors",
    ),
    "logreg": Workload(
        training="manyhands.workloads.logreg.command:LOGREG",
        forks_workers=False,
        kernels=("manyhands.workloads.logreg.logreg_kernels:warm",),
        uses=(*_CORE, "libsvm"),
        predictor="manyhands.workloads.logreg.predicting:open_logreg",
        exporter="manyhands.workloads.logreg.predicting:export_logreg",
    ),
    "svd": Workload(
        training="manyhands.workloads.svd.command:SVD",
        kernels=("manyhands.workloads.svd.product_kernels:warm",),
        uses=(*_CORE, "reductions_double", "libsvm"),
        predictor="manyhands.workloads.svd.predicting:open_svd",
        exporter="manyhands.workloads.svd.predicting:export_svd",
    ),
    "gbdt": Workload(
        training="manyhands.workloads.gbdt.command:GBDT",
        forks_workers=False,
        kernels=(
            "manyhands.workloads.gbdt.bin_kernels:warm",
            "manyhands.workloads.gbdt.histogram_kernels:warm",
            "manyhands.workloads.gbdt.split_kernels:warm",
        ),
        uses=(*_CORE, "libsvm"),
        predictor="manyhands.workloads.gbdt.predicting:open_gbdt",
        exporter="manyhands.workloads.gbdt.predicting:export_gbdt",
        begins=b"tree\nversion=",
    ),
}


TASK_NAMES = tuple(name for name, workload in WORKLOADS.items() if workload.task)
"""The built-in workloads that every strategy trains."""


@cache
def load(text: str) -> Any:
    """What a text of a workload names."""
    module, _, name = text.partition(":")
    return getattr(import_module(module), name)


def find(name: str) -> Workload | None:
    """The workload of this name, built in or of an installed package; None where there is none.

    UserError where it is both, and where the package's cannot be loaded.
    """
    point = _installed().get(name)
    if point is None:
        return WORKLOADS.get(name)
    whose = f"workload {name!r} of the package {point.dist.name if point.dist else '?'} ({point.value})"
    if name in WORKLOADS:
        raise UserError(
            f"{whose} has the name of a built-in one; rename its entry point, or remove the package"
        )
    try:
        found = point.load()
    except Exception as error:
        raise UserError(f"{whose} cannot be loaded: {first_line(error)}") from error
    if not isinstance(found, Workload):
        raise UserError(f"{whose} is an instance of {type(found).__name__}; it must be a Workload")
    return found


def names() -> list[str]:
    """Those of all workloads, built in or installed."""
    return [*WORKLOADS, *(name for name in _installed() if name not in WORKLOADS)]


def offered(part: str) -> Iterator[Any]:
    """The `task` or the `training` of every workload that has one; an installed one that fails is said on stderr."""
    for name in names():
        try:
            workload = find(name) if name not in WORKLOADS else WORKLOADS[name]
            text = getattr(workload, part)
            if text:
                yield load(text)
        except (UserError, ImportError, AttributeError) as error:
            if name in WORKLOADS:
                raise
            _warn(str(error))


def require_task(name: str) -> Any:
    """The `BuiltinTask` of this name; UserError with the nearest one where there is none."""
    workload = find(name)
    if workload is None or not workload.task:
        raise UserError(f"there is no built-in task {name!r}; {nearest(name, TASK_NAMES)}")
    return load(workload.task)


@cache
def _warn(sentence: str) -> None:
    print(f"manyhands: {sentence}", file=sys.stderr)


@cache
def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
