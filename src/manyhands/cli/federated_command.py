"""`manyhands federated serve TASK` and `manyhands federated join ADDRESS`: federated rounds with real devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from manyhands.cli.command_options import add_task_command, fresh_directory
from manyhands.cli.program import spare_the_compiler
from manyhands.workloads.registry import offered
from manyhands.workloads.tasks.builtin import BuiltinTask

__all__ = ["federated_app"]

federated_app = typer.Typer(
    help="Federated rounds with real devices, over HTTPS.", no_args_is_help=True, rich_markup_mode=None
)
serve_app = typer.Typer(
    help="Be the server: devices come, train, report, and get the model.", no_args_is_help=True
)
federated_app.add_typer(serve_app, name="serve")


@dataclass(frozen=True, kw_only=True)
class _Served:
    """The options of `serve` that every task has."""

    rounds: Annotated[int, typer.Option(help="Rounds that must count.")]
    strategy: Annotated[
        str,
        typer.Option(help="How: 'federated clients=20 fraction=0.5 epochs=2 secure=yes', as in simulation."),
    ] = "federated"
    data_schema: Annotated[
        str | None,
        typer.Option(
            help="What a device's file holds, as in images=uint8:1x8x8,labels=int64.",
            show_default="0=…,1=…",
        ),
    ] = None
    host: Annotated[str, typer.Option(help="Listen on this address.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Listen on this port; 0: a free one.")] = 0
    tls: Annotated[
        Path | None,
        typer.Option(
            help="This host's folder of `manyhands certificates`.",
            show_default="made in the run directory",
        ),
    ] = None
    over: Annotated[float, typer.Option(help="Ask so many times as many devices as are needed.")] = 1.3
    min_reports: Annotated[
        int | None,
        typer.Option(help="Reports without which a round is abandoned.", show_default="half of those needed"),
    ] = None
    deadline: Annotated[float, typer.Option(help="Seconds that a round waits for reports.")] = 600.0
    select: Annotated[float, typer.Option(help="Seconds to wait for more devices than the least.")] = 30.0
    present: Annotated[float, typer.Option(help="Seconds for which a silent device counts as there.")] = 60.0
    patience: Annotated[
        float | None,
        typer.Option(help="Give up after so many seconds without a round.", show_default="never"),
    ] = None
    stage: Annotated[
        float, typer.Option(help="With secure=yes, seconds for each message after the first.")
    ] = 30.0
    hold: Annotated[float, typer.Option(help="Seconds for which a question for work is held back.")] = 20.0
    linger: Annotated[
        float, typer.Option(help="Seconds to wait at the end for devices to fetch the model.")
    ] = 30.0
    seed: Annotated[int, typer.Option(help="Fixes weights, selection and everything random.")] = 0
    out: Annotated[Path | None, typer.Option(help="Run directory.", show_default="runs/TASK-TIME")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False


def _serve(entry: BuiltinTask[Any], task_options: dict[str, Any], asked: _Served) -> None:
    # Imported here so that help texts do not wait for torch.
    import math

    from manyhands.errors import UserError
    from manyhands.places.local.signals import ending
    from manyhands.strategies.federated.deployed.device_job import FederatedJob, RoundSettings
    from manyhands.strategies.federated.deployed.device_server import ServingPlace, serve_devices

    if asked.resume and asked.out is None:
        raise UserError("--resume needs --out, the directory of the run to go on with")
    spare_the_compiler()
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


@federated_app.command("join")
def join_command(
    address: Annotated[str, typer.Argument(help="The server, as https://HOST:PORT.")],
    data: Annotated[
        Path, typer.Option(help="This device's own data: a .safetensors file, or what the task reads.")
    ],
    out: Annotated[
        Path, typer.Option(help="The device's folder: its key, its number, and the current model.")
    ] = Path("device"),
    enrol: Annotated[
        str | None, typer.Option(help="The token to enrol with, the first time.", envvar="MANYHANDS_ENROL")
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            help="The server's ca.pem, by which it is known.", show_default="this host's authorities"
        ),
    ] = None,
    patience: Annotated[
        float, typer.Option(help="Give up after so many seconds in which the server was not reached.")
    ] = 86400.0,
    max_pause: Annotated[float, typer.Option(help="The longest pause between two tries, in seconds.")] = 30.0,
) -> None:
    """Be a device: train on your own data whenever the server asks, and keep the current model."""
    # Imported here so that help texts do not wait for torch.
    from manyhands.places.local.signals import ending
    from manyhands.strategies.federated.deployed.device_client import JoiningDevice, join_rounds

    spare_the_compiler()
    asked = JoiningDevice(
        address=address,
        data=data,
        out=out,
        token=enrol,
        authority=ca,
        patience_s=patience,
        most_pause_s=max_pause,
    )
    with ending():
        rounds = join_rounds(asked, _say)
    print(f"the run is done: {out} has the model after {rounds} rounds")


def _say(sentence: str) -> None:
    print(sentence, flush=True)


for _entry in offered("task"):
    add_task_command(serve_app, _entry, _Served, _serve, f"Serve {_entry.help}.")
