"""`manyhands federated serve TASK` and `manyhands federated join ADDRESS`: federated rounds with real devices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.cli import command_options
from manyhands.cli.command_options import argument, command_group, from_options, option, task_commands
from manyhands.cli.program import spare_the_compiler
from manyhands.cli.runs import Resume
from manyhands.workloads.builtin_task import BuiltinTask
from manyhands.workloads.task_options import narrowed

if TYPE_CHECKING:
    from manyhands.task import Task

_say = partial(print, flush=True)


@dataclass(frozen=True, kw_only=True)
class _ServeOptions:
    rounds: int = option(..., "Rounds to complete.")
    strategy: str = option("federated", "Strategy, such as 'federated clients=20 fraction=0.5 secure=yes'.")
    data_schema: str | None = option(
        None, "Fields of a device's file, such as images=uint8:1x8x8,labels=int64.", shown="0=…,1=…"
    )
    host: str = option("127.0.0.1", "Listen on this address.")
    port: int = option(0, "Listen on this port; 0: any free port.")
    tls: Path | None = option(None, "Folder from `manyhands certificates`.", shown="made in --out")
    over: float = option(1.3, "Devices to select, as a multiple of those needed.")
    min_reports: int | None = option(
        None, "Minimum reports for a round to count.", shown="half of those needed"
    )
    deadline_s: float = option(600.0, "Seconds a round waits for reports.", "--deadline")
    select_s: float = option(30.0, "Seconds to wait for more than the minimum of devices.", "--select")
    present_s: float = option(60.0, "Seconds after which a silent device counts as gone.", "--present")
    patience_s: float = option(
        math.inf, "Give up after this many seconds without a round.", "--patience", shown="never"
    )
    stage_s: float = option(30.0, "With secure=yes: seconds for each message after the first.", "--stage")
    hold_s: float = option(20.0, "Seconds to hold a device's request when there is no work.", "--hold")
    linger_s: float = option(30.0, "Seconds to wait at the end for devices to fetch the model.", "--linger")
    seed: int = option(0, "Fixes weights, selection and all other randomness.")
    out: Path | None = option(None, "Run directory.", shown="runs/TASK-TIME")
    resume: Resume = False


@dataclass(frozen=True, kw_only=True)
class _OwnOptions(_ServeOptions):
    task: str = argument(..., "Where your Task is, such as my_module:task.", metavar="MODULE:NAME")


def _serve(entry: BuiltinTask[Any], task_options: dict[str, Any], asked: _ServeOptions) -> None:
    _serve_task(entry.build(**task_options), asked)


def _serve_own(asked: _OwnOptions) -> None:
    """Serve a Task of your own; devices have its module, too, and name it with --task."""
    from manyhands.workloads.own_task import own_task

    spare_the_compiler()
    _serve_task(own_task(asked.task), asked)


def _serve_task(task: Task, asked: _ServeOptions) -> None:
    from manyhands.places.local.signals import ending
    from manyhands.strategies.federated.deployed.device_job import FederatedJob, RoundSettings
    from manyhands.strategies.federated.deployed.device_server import ServingPlace, serve_devices

    settings = narrowed(RoundSettings, asked)
    job = FederatedJob.make(task, asked.strategy, settings, seed=asked.seed, schema=asked.data_schema)
    out = asked.out or command_options.fresh_directory(task.name)
    place = narrowed(ServingPlace, replace(asked, out=out))
    with ending():
        serve_devices(job, place, _say)


@dataclass(frozen=True, kw_only=True)
class _JoinOptions:
    address: str = argument(..., "Address of the server: https://HOST:PORT.")
    data: Path = option(..., "This device's data: a .safetensors file, or data that the task reads.")
    out: Path = option(Path("device"), "Folder for the device's key, its number and the current model.")
    token: str | None = option(
        None, "Enrolment token, needed the first time.", "--enrol", envvar="MANYHANDS_ENROL"
    )
    authority: Path | None = option(None, "The server's ca.pem.", "--ca", shown="this host's authorities")
    patience_s: float = option(86400.0, "Give up after this many seconds without the server.", "--patience")
    most_pause_s: float = option(30.0, "Longest pause between two attempts, in seconds.", "--max-pause")
    task: str | None = option(
        None, "Your own Task, where the server trains one.", metavar="MODULE:NAME", shown=False
    )


def _join(asked: _JoinOptions) -> None:
    """Run a device: train on its own data when the server asks, and keep the current model."""
    from manyhands.places.local.signals import ending
    from manyhands.strategies.federated.deployed.device_client import JoiningDevice, join_rounds
    from manyhands.workloads.own_task import own_task

    spare_the_compiler()
    device = replace(narrowed(JoiningDevice, asked), task=own_task(asked.task) if asked.task else None)
    with ending():
        rounds = join_rounds(device, _say)
    print(f"the run is done: {asked.out} has the model after {rounds} rounds")


federated_app = command_group()
federated_app.command("join")(from_options(_join))
_serve_app = task_commands(
    _serve, "Serve {help}.", help="Run the server: devices connect, train, report and fetch the model."
)
_serve_app.command("own")(from_options(_serve_own))
federated_app.add_typer(_serve_app, name="serve")
