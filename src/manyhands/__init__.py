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

from manyhands.version import __version__

if TYPE_CHECKING:
    from manyhands.allreduce.strategy import AllReduce, Mirrored
    from manyhands.callbacks import Callback
    from manyhands.central.strategy import Central
    from manyhands.cluster.template import warm
    from manyhands.data.loading import Loading
    from manyhands.data.own import Files, PerWorker
    from manyhands.data.parties import Parties
    from manyhands.errors import ManyhandsError, UserError
    from manyhands.exporting import load
    from manyhands.federated.strategy import Federated
    from manyhands.fitting import fit
    from manyhands.hogwild.strategy import Hogwild
    from manyhands.hosts.specification import ClusterSpec
    from manyhands.kernel import KernelTask
    from manyhands.loggers import CsvLogger, MlflowLogger, WandbLogger
    from manyhands.loop.join import join
    from manyhands.onray.cluster import RayCluster
    from manyhands.pipeline.strategy import Pipeline
    from manyhands.placement.placed import place
    from manyhands.registry import Home
    from manyhands.run import History, Run
    from manyhands.running import Running, start
    from manyhands.server.replay import Replayed, replay
    from manyhands.server.strategy import Ps
    from manyhands.sharded.strategy import Sharded
    from manyhands.single.strategy import Single
    from manyhands.slowdown import Slowdown
    from manyhands.stopping import EarlyStopping
    from manyhands.strategy import Strategy
    from manyhands.task import Task
    from manyhands.training.options import Options

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
    "Callback": "callbacks",
    "ClusterSpec": "hosts.specification",
    "CsvLogger": "loggers",
    "EarlyStopping": "stopping",
    "Files": "data.own",
    "History": "run",
    "KernelTask": "kernel",
    "Loading": "data.loading",
    "ManyhandsError": "errors",
    "MlflowLogger": "loggers",
    "Options": "training.options",
    "Parties": "data.parties",
    "PerWorker": "data.own",
    "RayCluster": "onray.cluster",
    "Replayed": "server.replay",
    "Run": "run",
    "Running": "running",
    "Slowdown": "slowdown",
    "Strategy": "strategy",
    "Task": "task",
    "UserError": "errors",
    "WandbLogger": "loggers",
    "fit": "fitting",
    "join": "loop.join",
    "load": "exporting",
    "place": "placement.placed",
    "replay": "server.replay",
    "start": "running",
    "warm": "cluster.template",
}


_STARTING = ("fit", "join", "start", "warm")


def __getattr__(name: str) -> object:
    if name in _STARTING:
        _compile_before()
    if name in _HOMES:
        return getattr(import_module(f"manyhands.{_HOMES[name]}"), name)
    found = _strategies().get(name)
    if found is None:
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
    return found.load_value()


def _compile_before() -> None:
    """Compile what is missing in several processes, before modules are imported that would compile it in this one."""
    if "manyhands.memory.waiting" not in sys.modules:
        import_module("manyhands.compiled.warming").prepare("fit")


def __dir__() -> list[str]:
    return sorted({*__all__, *_strategies()})


def _strategies() -> dict[str, Home]:
    """By the name of its class: every strategy of the registry."""
    from manyhands.registry import STRATEGIES

    return {home.value.partition(":")[2]: home for home in STRATEGIES.values()}
