"""Machines and their roles: `manyhands launch SCRIPT`, `role`, `certificates DIR` and `doctor`."""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from manyhands.cli.command_options import (
    AllowOverload,
    argument,
    check_writable,
    command_anywhere,
    from_options,
    option,
    write_json,
)
from manyhands.errors import UserError, nearest, num_of


@dataclass(frozen=True)
class _LaunchOptions:
    context: typer.Context
    script: Path = argument(..., "Training script that calls mh.join().", metavar="SCRIPT")
    arguments: list[str] | None = argument(
        None, "Arguments of the script; after -- if they look like ours.", metavar="[ARGUMENTS]..."
    )
    workers: int = option(2, "Processes that train.")
    cluster: str | None = option(
        None, "Where they are started: ray, auto or ray://HOST:PORT.", shown="this host"
    )
    strategy: str | None = option(None, "Any strategy but federated, with settings.", shown="mirrored")
    device: str | None = option(None, "cpu or cuda; with cuda, workers take the GPUs in order.", shown="cpu")
    out: Path | None = option(None, "Write the run's events to this new directory, for show and explain.")
    allow_overload: AllowOverload = False
    watchdog: float = option(60.0, "Seconds without progress until the blocking process is named; 0: never.")


@from_options
def launch_command(asked: _LaunchOptions) -> None:
    from manyhands.cli.runs import ended_by_signal, start_own_workers

    word = str(asked.script).partition("=")[0]
    if word.startswith("-"):  # options that are not ours go to the script, and this one stands before it
        ours = [name for one in asked.context.command.params for name in one.opts if name.startswith("--")]
        raise UserError(
            f"launch has no option {word}; {nearest(word, ours)}; options of the script go after its name"
        )
    start_own_workers()
    from manyhands.interop.own_loop.launch_script import launch
    from manyhands.observe.draw.time_table import end_table

    events = f"the events up to now are in {asked.out}, and " if asked.out is not None else ""
    kept = f"all workers have stopped; {events}files saved by the script are kept"
    with ended_by_signal(lambda: f"{kept}; start again with: {command_anywhere(sys.argv)}"):
        summary = launch(
            asked.script,
            asked.arguments or [],
            workers=asked.workers,
            strategy=asked.strategy,
            device=asked.device,
            watchdog_s=asked.watchdog,
            allow_overload=asked.allow_overload,
            out=asked.out,
            cluster=asked.cluster,
        )
    for note in summary["notes"]:
        print(f"manyhands: {note}", file=sys.stderr)
    if not summary["joined"]:
        print("manyhands: some workers did not call mh.join() and trained alone", file=sys.stderr)
    if any(row["steps"] for row in summary["per_worker"]):
        Console(stderr=True).print(end_table(summary))


@dataclass(frozen=True)
class _RoleOptions:
    arguments: list[str] = argument(
        ..., "After --: train and its arguments, or a script that calls mh.fit.", metavar="-- COMMAND..."
    )
    spec: Path = option(..., "Cluster specification: a TOML or JSON file with the addresses of each type.")
    role_type: str = option(..., "Type of the role: chief, worker, ps or evaluator.", "--type")
    index: int = option(0, "Number of the role within its type, from 0.")


@from_options
def role_command(asked: _RoleOptions) -> None:
    """Example: `manyhands role --spec cluster.toml --type ps --index 1 -- train digits --strategy ps`."""
    from manyhands.places.external.process_place import SpecificationPlace
    from manyhands.places.external.specification import EVALUATOR, ClusterSpec
    from manyhands.places.place import using_place

    cluster = ClusterSpec.from_file(asked.spec)
    role = cluster.role(asked.role_type, asked.index)
    word = asked.arguments[0]
    if word != "train" and not word.endswith(".py"):
        raise UserError(
            f"{word!r} cannot run as a role of a cluster; give train and a task after --, or a script that calls "
            "mh.fit or mh.join"
        )
    if role.type == "evaluator":
        print(f"manyhands: {EVALUATOR}", file=sys.stderr)
        return
    with using_place(SpecificationPlace.of(cluster, role)):
        if word == "train":
            from manyhands.cli.main import app

            status = app(asked.arguments, standalone_mode=False)
            if isinstance(status, int) and status:  # what the command left with, which click gives back
                raise typer.Exit(status)
        else:
            sys.argv = asked.arguments
            sys.path.insert(0, str(Path(word).resolve().parent))
            runpy.run_path(word, run_name="__main__")


@dataclass(frozen=True)
class _CertificateOptions:
    directory: Path = argument(..., "New folder, which gets a folder per host.", metavar="DIR")
    hosts: str = option(..., "Names or addresses of the hosts: node1,node2.")
    days: float = option(7.0, "Days of validity; must exceed the length of the run.")
    keep_authority: bool = option(False, "Keep the authority's key in DIR, to add hosts.", "--keep-authority")


@from_options
def certificates_command(asked: _CertificateOptions) -> None:
    from manyhands.transport.certificates import AUTHORITY_KEY, make_certificates

    named = [host.strip() for host in asked.hosts.split(",") if host.strip()]
    made = make_certificates(asked.directory, named, days=asked.days, keep_authority=asked.keep_authority)
    kept = asked.directory / AUTHORITY_KEY
    authority = f"the authority's key is in {kept}" if kept.exists() else "the authority's key was not stored"
    print(f"valid until {made.end:%Y-%m-%d %H:%M} UTC; {authority}")
    for host, folder in zip(named, made.folders, strict=True):
        print(f"{folder}  for {host} only: it holds a key and the run's token")
    print("start the processes of each host with --tls and its folder, or set MANYHANDS_TLS to it")


def doctor_command(
    warm: Annotated[
        bool, typer.Option("--warm", help="Compile all kernels first, so that later runs start faster.")
    ] = False,
    prove: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also train by each strategy on what is here, and write what held to FILE."
        ),
    ] = None,
) -> None:
    from manyhands.native.warming import prepare
    from manyhands.places.doctor import DoctorVerdict, examine

    check_writable(prove, "--prove")
    if warm:
        prepare("all")
    signs = {
        DoctorVerdict.GOOD: "[green]✓[/]",
        DoctorVerdict.NOTE: "[yellow]·[/]",
        DoctorVerdict.BAD: "[red]✗[/]",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    findings = examine()
    for finding in findings:
        table.add_row(signs[finding.verdict], finding.subject, finding.found, f"[dim]{finding.advice}[/]")
    Console().print(table)
    if any(finding.verdict is DoctorVerdict.BAD for finding in findings):
        raise typer.Exit(1)
    if prove is not None and not _prove(prove):
        raise typer.Exit(1)


def _prove(path: Path) -> bool:
    """Whether no proof failed; shows each as it is done, and writes all to `path`."""
    from manyhands.cli.runs import start_own_workers
    from manyhands.lab.proof import EqualityProof, ProofVerdict, prove

    def show(proof: EqualityProof) -> None:
        asked = f"{proof.strategy}, {num_of(proof.workers, 'worker')} on {proof.device}"
        print(f"{proof.verdict:>8}  {asked}: {proof.found}")

    start_own_workers()
    found = prove(show)
    write_json(path, found)
    print(f"written to {path}")
    return all(proof["verdict"] != ProofVerdict.FAILED for proof in found["proofs"])
