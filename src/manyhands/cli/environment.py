"""What other launchers say in the environment, and that the commands which start workers themselves do not read it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import typer

from manyhands.places.external.specification import EVALUATOR, ClusterSpec
from manyhands.places.place import TF_CONFIG, stand_alone

__all__ = ["ignored_variables", "leave_if_evaluator", "start_own_workers"]

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ignored_variables(environment: Mapping[str, str]) -> list[str]:
    """One sentence for each launcher whose variables are set, with what to do instead."""
    told = []
    if environment.get(TF_CONFIG):
        told.append(
            "TF_CONFIG is set and not read: workers are started on this host alone, as many as --workers says; "
            "`manyhands train` with a task such as digits, or a script that calls mh.fit(), is the role that it names"
        )
    found = [name for name in _TORCHRUN if environment.get(name)]
    if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE"} <= set(found):
        told.append(
            f"{', '.join(found) or 'TORCHELASTIC_RUN_ID'} {'are' if len(found) > 1 else 'is'} set, as by torchrun, and "
            "not read: this command starts workers of its own; to train on the processes of torchrun, have it start "
            "`manyhands train` with a task such as digits, or a script that calls mh.fit() or mh.join()"
        )
    return told


def leave_if_evaluator() -> None:
    """End a process that TF_CONFIG makes an evaluator, with a sentence and in peace: it takes no part in a run."""
    text = os.environ.get(TF_CONFIG, "").strip()
    if text and text != "{}" and ClusterSpec.from_tf_config(text)[1].type == "evaluator":
        print(f"manyhands: {EVALUATOR}", file=sys.stderr)
        raise typer.Exit


def start_own_workers() -> None:
    """From now on `fit` starts workers of its own, whoever started this process; say on stderr what is not read."""
    for sentence in ignored_variables(os.environ):
        print(f"manyhands: {sentence}", file=sys.stderr)
    stand_alone()
