"""Every workload by its name: where its task or training, its kernels and its predictor are. One entry each.

Also where all other kernels are, for native/warming.py. What is named is imported when it is first used, so that a
command line is read, a run is opened and kernels are compiled without importing all of them. A package of a user offers
a workload by an entry point that names a `Workload`:

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
from typing import Any, Final

from manyhands.errors import UserError, first_line, nearest

GROUP = "manyhands.workloads"  # of entry points


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Where the parts of a workload are: each text is `module:name`. It has a `task` or a `training`."""

    task: str = ""  # a `BuiltinTask` (workloads/builtin_task.py): PyTorch, trained by every strategy
    training: str = ""
    """A `CompiledWorkload` (workloads/compiled_workload.py): compiled steps, and a training of its own."""
    forks_workers: bool = True
    """Whether the strategy that it is trained by unless another is named has its workers in processes."""
    kernels: tuple[str, ...] = ()
    """What compiles its kernels: functions, each in a process of its own; see native/warming.py."""
    rare_kernels: tuple[str, ...] = ()
    """Those that few runs need: they are compiled by `manyhands doctor --warm`, or where they are first called."""
    uses: tuple[str, ...] = ()  # kernels of others that it needs, by the names of their `JOBS`
    predictor: str = ""
    """(path: Path) -> Predictor, of a run's directory or a file of its model; see `workloads.predictor`."""
    exporter: str = "manyhands.workloads.exporting:export_weights"
    """(ExportAsked) -> Export: the model as one file, in as few bits as wanted."""
    begins: bytes = b""
    """What a file of its model begins with, where that tells it from all others; safetensors files name their task."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """Kernels that one process compiles: modules to import, and functions `module:name` to call."""

    calls: tuple[str, ...]
    after: str | None = None
    """The job whose kernels are compiled into these: its code is loaded once it is there, instead of made twice."""


_C10D = ("manyhands.transport.hub.arenas", "manyhands.interop.c10d.compiled_calls")
JOBS: Final = {
    "waiting": CompileJob(("manyhands.native.waiting",)),
    "reductions": CompileJob(("manyhands.native.group.reduction_kernels:warm",)),
    "reductions_double": CompileJob(("manyhands.native.group.reduction_kernels:warm_double",)),
    "group": CompileJob(("manyhands.native.group.shared_group",), after="waiting"),
    "records": CompileJob(
        (
            "manyhands.observe.record.event_ring:warm",
            "manyhands.transport.link.byte_ring",
            "manyhands.transport.link.byte_socket",
            "manyhands.transport.heartbeats",
            "manyhands.places.local.status",
            "manyhands.native.counters",
        ),
        after="waiting",
    ),
    "libsvm": CompileJob(("manyhands.data.row_files:warm_libsvm",)),
    "vowpal": CompileJob(("manyhands.data.row_files:warm_vowpal",)),
    "codecs": CompileJob(("manyhands.wire.quantize_kernels", "manyhands.wire.sparse_kernels")),
    "hashing": CompileJob(("manyhands.native.hashing:warm",)),
    "c10d": CompileJob(_C10D, after="group"),
    "environments": CompileJob(("manyhands.workloads.rl.cart_pole:warm",)),
}
"""The kernels that are of no workload."""

_CORE = ("waiting", "group", "records")

FAMILIES: Final = {
    "fit": (*_CORE, "reductions", "reductions_double", "hashing"),
    "codecs": ("codecs",),
    "libsvm": ("libsvm",),
    "vowpal": ("vowpal",),
}
"""The jobs that each kind of run needs besides those of its workload."""

_TASKS, _LANGUAGE = "manyhands.workloads.tasks", "manyhands.workloads.language"
_OPENED, _TEXT = "manyhands.serving.torch_predictors", "manyhands.serving.text_generator"

WORKLOADS: dict[str, Workload] = {
    "digits": Workload(task=f"{_TASKS}.digits:DIGITS", predictor=f"{_OPENED}:open_images"),
    "mnist": Workload(task=f"{_TASKS}.mnist:MNIST", predictor=f"{_OPENED}:open_images"),
    "gpt": Workload(task=f"{_LANGUAGE}.gpt:GPT_TASK", predictor=f"{_TEXT}:open_text"),
    "bert": Workload(
        task=f"{_LANGUAGE}.bert_tasks:BERT_TASK", predictor="manyhands.serving.text_labels:open_bert"
    ),
    "recurrent": Workload(task=f"{_LANGUAGE}.recurrent:RECURRENT", predictor=f"{_TEXT}:open_text"),
    "rl": Workload(
        task="manyhands.workloads.rl.rl_task:RL",
        kernels=("manyhands.workloads.rl.rl_kernels:warm", "manyhands.workloads.rl.inference_requests"),
        predictor="manyhands.serving.policy_predictor:open_policy",
    ),
    "line": Workload(task=f"{_TASKS}.line:LINE", predictor=f"{_OPENED}:open_numbers"),
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
        predictor="manyhands.workloads.glove.vector_files:open_vectors",
        exporter="manyhands.workloads.glove.vector_files:export_vectors",
    ),
    "logreg": Workload(
        training="manyhands.workloads.logreg.command:LOGREG",
        forks_workers=False,
        kernels=("manyhands.workloads.logreg.logreg_kernels:warm",),
        uses=(*_CORE, "libsvm"),
        predictor="manyhands.workloads.logreg.model:open_logreg",
        exporter="manyhands.workloads.logreg.model:export_logreg",
    ),
    "svd": Workload(
        training="manyhands.workloads.svd.command:SVD",
        kernels=("manyhands.workloads.svd.product_kernels:warm",),
        uses=(*_CORE, "reductions_double", "libsvm"),
        predictor="manyhands.workloads.svd.model:open_svd",
        exporter="manyhands.workloads.svd.model:export_svd",
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
        predictor="manyhands.workloads.gbdt.text_format:open_gbdt",
        exporter="manyhands.workloads.gbdt.text_format:export_gbdt",
        begins=b"tree\nversion=",
    ),
}


TASK_NAMES = tuple(name for name, workload in WORKLOADS.items() if workload.task)
"""The built-in workloads that every strategy trains."""


@cache
def load(text: str) -> Any:
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
        raise UserError(f"{whose} has the name of a built-in workload; rename its entry point, or remove it")
    try:
        found = point.load()
    except Exception as error:
        raise UserError(f"{whose} cannot be loaded: {first_line(error)}") from error
    if not isinstance(found, Workload):
        raise UserError(f"{whose} is an instance of {type(found).__name__}; it must be a Workload")
    return found


def names() -> list[str]:
    return [*WORKLOADS, *(name for name in _installed() if name not in WORKLOADS)]


def offered(part: str) -> Iterator[Any]:
    """The `task` or the `training` of every workload that has one; an installed one that fails is said on stderr."""
    for name in names():
        try:
            text = getattr(WORKLOADS.get(name) or find(name), part)
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
