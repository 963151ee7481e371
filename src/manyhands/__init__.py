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
    from manyhands.data.loading import Loading
    from manyhands.data.own import Files, PerWorker
    from manyhands.data.parties import Parties
    from manyhands.engine.background_run import Running, start
    from manyhands.engine.callbacks import Callback
    from manyhands.engine.fitting import fit
    from manyhands.engine.kernel_task import KernelTask
    from manyhands.engine.loggers import CsvLogger, MlflowLogger, WandbLogger
    from manyhands.engine.options import EarlyStopping, Options, Slowdown
    from manyhands.engine.placement.placed import place
    from manyhands.engine.run import History, Run
    from manyhands.errors import ManyhandsError, UserError
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
    "UserError",
    "WandbLogger",
    "__version__",
    "fit",
    "join",
    "load",
    "place",
    "replay",
    "start",
    "warm",
]

_HOMES = {
    "Callback": "engine.callbacks",
    "ClusterSpec": "places.external.specification",
    "CsvLogger": "engine.loggers",
    "EarlyStopping": "engine.options",
    "Files": "data.own",
    "History": "engine.run",
    "KernelTask": "engine.kernel_task",
    "Loading": "data.loading",
    "ManyhandsError": "errors",
    "MlflowLogger": "engine.loggers",
    "Options": "engine.options",
    "Parties": "data.parties",
    "PerWorker": "data.own",
    "RayCluster": "places.ray.ray_place",
    "Replayed": "strategies.ps.replay",
    "Run": "engine.run",
    "Running": "engine.background_run",
    "Slowdown": "engine.options",
    "Strategy": "strategy",
    "Task": "task",
    "UserError": "errors",
    "WandbLogger": "engine.loggers",
    "fit": "engine.fitting",
    "join": "interop.own_loop.join",
    "load": "workloads.exporting",
    "place": "engine.placement.placed",
    "replay": "strategies.ps.replay",
    "start": "engine.background_run",
    "warm": "places.local.template",
}


_MODULES = {"hooks": "interop.hooks", "tasks": "workloads.tasks"}
"""Modules with a public name at the top: `mh.tasks.build("digits")`."""

_STARTING = ("fit", "join", "start", "warm")


def __getattr__(name: str) -> object:
    if name in _STARTING:
        _compile_before()
    if name in _HOMES:
        return getattr(import_module(f"manyhands.{_HOMES[name]}"), name)
    if name in _MODULES:
        return import_module(f"manyhands.{_MODULES[name]}")
    found = _strategies().get(name)
    if found is None:
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
    return found.load_value()


def _compile_before() -> None:
    """Compile what is missing in several processes, before modules are imported that would compile it in this one."""
    if "manyhands.native.waiting" not in sys.modules:
        import_module("manyhands.native.warming").prepare("fit")


def __dir__() -> list[str]:
    return sorted({*__all__, *_strategies()})


def _strategies() -> dict[str, StrategyEntry]:
    """By the name of its class: every strategy of the registry."""
    from manyhands.strategies.registry import STRATEGIES

    return {home.value.partition(":")[2]: home for home in STRATEGIES.values()}
