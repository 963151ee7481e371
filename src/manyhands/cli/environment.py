"""What other launchers say in the environment, and that the commands which start workers themselves do not read it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from manyhands.hosts.standing import stand_alone

__all__ = ["ignored_variables", "start_own_workers", "tell_ignored_cluster", "tell_ignored_variables"]

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ignored_variables(environment: Mapping[str, str]) -> list[str]:
    """One sentence for each launcher whose variables are set, with what to do instead."""
    return ignored_cluster(environment) + ignored_torchrun(environment)


def ignored_cluster(environment: Mapping[str, str]) -> list[str]:
    """The sentence on TF_CONFIG, where it is set."""
    if not environment.get("TF_CONFIG"):
        return []
    return [
        "TF_CONFIG is set and not read: workers are started on this host alone, as many as --workers says"
    ]


def ignored_torchrun(environment: Mapping[str, str]) -> list[str]:
    """The sentence on torchrun's variables, where they are set."""
    told = []
    found = [name for name in _TORCHRUN if environment.get(name)]
    if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE"} <= set(found):
        told.append(
            f"{', '.join(found) or 'TORCHELASTIC_RUN_ID'} {'are' if len(found) > 1 else 'is'} set, as by torchrun, and "
            "not read: this command starts workers of its own; to train on the processes of torchrun, have it start "
            "`manyhands train` with a task such as digits, or a script that calls mh.fit() or mh.join()"
        )
    return told


def tell_ignored_variables() -> None:
    """Before a command that starts workers itself: say on stderr whose variables it does not read."""
    _tell(ignored_cluster(os.environ))
    start_own_workers()


def tell_ignored_cluster() -> None:
    """Before a command that is one worker under torchrun: say on stderr what it does not read."""
    _tell(ignored_cluster(os.environ))


def start_own_workers() -> None:
    """From now on `fit` starts workers of its own, though torchrun may have started this process; say so on stderr."""
    _tell(ignored_torchrun(os.environ))
    stand_alone()


def _tell(sentences: list[str]) -> None:
    for sentence in sentences:
        print(f"manyhands: {sentence}", file=sys.stderr)
