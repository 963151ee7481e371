"""`manyhands role`: be one role of a cluster specification, as TF_CONFIG would say it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["role_command"]


def role_command(
    arguments: Annotated[
        list[str],
        typer.Argument(
            help="After --: train, a task and its options, or a script that calls mh.fit; the same on every role.",
            metavar="-- COMMAND...",
        ),
    ],
    spec: Annotated[
        Path, typer.Option(help="The cluster: a TOML or JSON file with the addresses of each type.")
    ],
    role_type: Annotated[str, typer.Option("--type", help="chief, worker, ps or evaluator.")],
    index: Annotated[int, typer.Option(help="Which of that type, from 0.")] = 0,
) -> None:
    """Be one role of a cluster specification: a worker, a server, or the chief that leads.

    As in `manyhands role --spec cluster.toml --type ps --index 1 -- train digits --strategy ps`.
    """
    from manyhands.errors import UserError
    from manyhands.places.external.external_place import SpecificationPlace
    from manyhands.places.external.specification import EVALUATOR, ClusterSpec
    from manyhands.places.place import standing

    cluster = ClusterSpec.from_file(spec)
    role = cluster.role(role_type, index)
    word = arguments[0]
    if word != "train" and not word.endswith(".py"):
        raise UserError(
            f"{word!r} cannot be one role of a cluster; write train and a task after --, or a script that calls mh.fit"
        )
    if role.type == "evaluator":
        print(f"manyhands: {EVALUATOR}", file=sys.stderr)
        return
    with standing(SpecificationPlace.of(cluster, role)):
        if word == "train":
            from manyhands.cli.main import app

            status = app(arguments, standalone_mode=False)
            if isinstance(status, int) and status:  # what the command left with, which click gives back
                raise typer.Exit(status)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(word).resolve().parent))
            runpy.run_path(word, run_name="__main__")
