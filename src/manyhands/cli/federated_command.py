"""`manyhands federated serve TASK` and `manyhands federated join ADDRESS`: federated rounds with real devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from manyhands.cli.command_options import (
    argument,
    command_group,
    fresh_directory,
    from_options,
    option,
    task_commands,
)
from manyhands.cli.program import spare_the_compiler
from manyhands.cli.runs import Resume
from manyhands.workloads.tasks.builtin import BuiltinTask

__all__ = ["federated_app"]

_say = partial(print, flush=True)


@dataclass(frozen=True, kw_only=True)
class _ServeOptions:
    rounds: int = option(..., "Rounds that must count.")
    strategy: str = option(
        "federated", "How: 'federated clients=20 fraction=0.5 epochs=2 secure=yes', as in simulation."
    )
    data_schema: str | None = option(
        None, "What a device's file holds, as in images=uint8:1x8x8,labels=int64.", show_default="0=…,1=…"
    )
    host: str = option("127.0.0.1", "Listen on this address.")
    port: int = option(0, "Listen on this port; 0: a free one.")
    tls: Path | None = option(
        None, "This host's folder of `manyhands certificates`.", show_default="made in the run directory"
    )
    over: float = option(1.3, "Ask so many times as many devices as are needed.")
    min_reports: int | None = option(
        None, "Reports without which a round is abandoned.", show_default="half of those needed"
    )
    deadline: float = option(600.0, "Seconds that a round waits for reports.")
    select: float = option(30.0, "Seconds to wait for more devices than the least.")
    present: float = option(60.0, "Seconds for which a silent device counts as there.")
    patience: float | None = option(
        None, "Give up after so many seconds without a round.", show_default="never"
    )
    stage: float = option(30.0, "With secure=yes, seconds for each message after the first.")
    hold: float = option(20.0, "Seconds for which a question for work is held back.")
    linger: float = option(30.0, "Seconds to wait at the end for devices to fetch the model.")
    seed: int = option(0, "Fixes weights, selection and everything random.")
    out: Path | None = option(None, "Run directory.", show_default="runs/TASK-TIME")
    resume: Resume = False


def _serve(entry: BuiltinTask[Any], task_options: dict[str, Any], asked: _ServeOptions) -> None:
    from manyhands.places.local.signals import ending
    from manyhands.strategies.federated.deployed.device_job import FederatedJob, RoundSettings
    from manyhands.strategies.federated.deployed.device_server import ServingPlace, serve_devices

    settings = RoundSettings(
        rounds=asked.rounds,
        over=asked.over,
        min_reports=asked.min_reports,
        deadline_s=asked.deadline,
        select_s=asked.select,
        present_s=asked.present,
        patience_s=math.inf if asked.patience is None else asked.patience,
        stage_s=asked.stage,
        hold_s=asked.hold,
    )
    task = entry.build(**task_options)
    job = FederatedJob.make(task, asked.strategy, settings, seed=asked.seed, schema=asked.data_schema)
    place = ServingPlace(
        out=asked.out or fresh_directory(entry.name),
        resume=asked.resume,
        host=asked.host,
        port=asked.port,
        tls=asked.tls,
        linger_s=asked.linger,
    )
    with ending():
        serve_devices(job, place, _say)


@dataclass(frozen=True, kw_only=True)
class _JoinOptions:
    address: str = argument(..., "The server, as https://HOST:PORT.")
    data: Path = option(..., "This device's own data: a .safetensors file, or what the task reads.")
    out: Path = option(Path("device"), "The device's folder: its key, its number, and the current model.")
    enrol: str | None = option(None, "The token to enrol with, the first time.", envvar="MANYHANDS_ENROL")
    ca: Path | None = option(
        None, "The server's ca.pem, by which it is known.", show_default="this host's authorities"
    )
    patience: float = option(86400.0, "Give up after so many seconds in which the server was not reached.")
    max_pause: float = option(30.0, "The longest pause between two tries, in seconds.")


def _join(asked: _JoinOptions) -> None:
    """Be a device: train on your own data whenever the server asks, and keep the current model."""
    from manyhands.places.local.signals import ending
    from manyhands.strategies.federated.deployed.device_client import JoiningDevice, join_rounds

    spare_the_compiler()
    device = JoiningDevice(
        address=asked.address,
        data=asked.data,
        out=asked.out,
        token=asked.enrol,
        authority=asked.ca,
        patience_s=asked.patience,
        most_pause_s=asked.max_pause,
    )
    with ending():
        rounds = join_rounds(device, _say)
    print(f"the run is done: {asked.out} has the model after {rounds} rounds")


federated_app = command_group()
federated_app.command("join")(from_options(_join))
federated_app.add_typer(
    task_commands(
        _serve, "Serve {help}.", help="Be the server: devices come, train, report, and get the model."
    ),
    name="serve",
)
