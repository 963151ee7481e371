"""Many hands train one model.

    import manyhands as mh

    task = mh.Task(model=build, loss=loss, data=dataset, optimizer=make_optimizer)
    run = mh.fit(task, strategy="allreduce", workers=2, steps=50)
    run.model, run.history, run.summary

Names are loaded when they are first used, so that `manyhands --help` and a starting worker do not wait for torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from manyhands.native.version import __version__

if TYPE_CHECKING:
    from manyhands.data.own import Files, Parties, PerWorker
    from manyhands.data.reading import Loading
    from manyhands.engine.background_run import Running, start
    from manyhands.engine.callbacks import Callback
    from manyhands.engine.fitting import fit
    from manyhands.engine.kernel_task import KernelTask
    from manyhands.engine.loggers import CsvLogger, MlflowLogger, WandbLogger
    from manyhands.engine.options import EarlyStopping, Options, Slowdown
    from manyhands.engine.placement.placed import place
    from manyhands.engine.profiler import TorchProfiler
    from manyhands.engine.run import History, Run
    from manyhands.errors import ManyhandsError, UserError
    from manyhands.foresight.plan.planning import plan
    from manyhands.interop.own_loop.join import join
    from manyhands.places.external.specification import ClusterSpec
    from manyhands.places.local.template import warm
    from manyhands.places.ray.ray_place import RayCluster
    from manyhands.strategies.allreduce.strategy import AllReduce, Mirrored
    from manyhands.strategies.central.strategy import Central
    from manyhands.strategies.federated.strategy import Federated
    from manyhands.strategies.hogwild.strategy import Hogwild
    from manyhands.strategies.pipeline.strategy import Pipeline
    from manyhands.strategies.ps.replay import Replayed, replay
    from manyhands.strategies.ps.strategy import Ps
    from manyhands.strategies.registry import StrategyEntry
    from manyhands.strategies.sharded.strategy import Sharded
    from manyhands.strategies.single.strategy import Single
    from manyhands.strategy import Strategy
    from manyhands.task import Task
    from manyhands.workloads.exporting import load

__all__ = [
    "AllReduce",
    "Callback",
    "Central",
    "ClusterSpec",
    "CsvLogger",
    "EarlyStopping",
    "Federated",
    "Files",
    "History",
    "Hogwild",
    "KernelTask",
    "Loading",
    "ManyhandsError",
    "Mirrored",
    "MlflowLogger",
    "Options",
    "Parties",
    "PerWorker",
    "Pipeline",
    "Ps",
    "RayCluster",
    "Replayed",
    "Run",
    "Running",
    "Sharded",
    "Single",
    "Slowdown",
    "Strategy",
    "Task",
    "TorchProfiler",
    "UserError",
    "WandbLogger",
    "__version__",
    "fit",
    "join",
    "load",
    "place",
    "plan",
    "replay",
    "start",
    "warm",
]

_NAMES_IN = {
    "data.reading": ("Loading",),
    "data.own": ("Files", "Parties", "PerWorker"),
    "engine.background_run": ("Running", "start"),
    "engine.callbacks": ("Callback",),
    "engine.fitting": ("fit",),
    "engine.kernel_task": ("KernelTask",),
    "engine.loggers": ("CsvLogger", "MlflowLogger", "WandbLogger"),
    "engine.options": ("EarlyStopping", "Options", "Slowdown"),
    "engine.placement.placed": ("place",),
    "engine.profiler": ("TorchProfiler",),
    "engine.run": ("History", "Run"),
    "foresight.plan.planning": ("plan",),
    "errors": ("ManyhandsError", "UserError"),
    "interop.own_loop.join": ("join",),
    "places.external.specification": ("ClusterSpec",),
    "places.local.template": ("warm",),
    "places.ray.ray_place": ("RayCluster",),
    "strategies.ps.replay": ("Replayed", "replay"),
    "strategy": ("Strategy",),
    "task": ("Task",),
    "workloads.exporting": ("load",),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}
_MODULES = {
    "hooks": "interop.hooks",
    "rl": "workloads.rl",
    "sklearn": "workloads.estimators",
    "tasks": "workloads.tasks",
}
"""As in `mh.tasks.build("digits")`."""


def __getattr__(name: str) -> object:
    # What starts workers: what is missing is compiled in several processes, before modules are imported that would
    # compile it in this one.
    if name in ("fit", "join", "plan", "start", "warm") and "manyhands.native.waiting" not in sys.modules:
        import_module("manyhands.native.warming").prepare("fit")
    if name in _MODULE_OF:
        return getattr(import_module(f"manyhands.{_MODULE_OF[name]}"), name)
    if name in _MODULES:
        return import_module(f"manyhands.{_MODULES[name]}")
    found = _strategies().get(name)
    if found is None:
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
    return found.load_value()


def __dir__() -> list[str]:
    return sorted({*__all__, *_strategies()})


def _strategies() -> dict[str, StrategyEntry]:
    """By the name of its class: every strategy of the registry."""
    from manyhands.strategies.registry import STRATEGIES

    return {entry.value.partition(":")[2]: entry for entry in STRATEGIES.values()}
