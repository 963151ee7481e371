"""Where this process stands: alone, one of a `manyhands launch`, or one of a torchrun.

Both launchers give a process its rank and a store where it finds the others. Ours hands the store over as an inherited
memory file; torchrun's is a server that the environment names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import FileStore, HashStore, Store
from torch.distributed.rendezvous import rendezvous

from manyhands.cluster import entry
from manyhands.cluster.context import RoleContext
from manyhands.errors import UserError
from manyhands.strategy import Strategy
from manyhands.version import __version__

__all__ = ["LAUNCHER_VARIABLE", "Launched", "Place", "find_place", "launched"]

LAUNCHER_VARIABLE = "MANYHANDS_LAUNCHER"
"""Set by `manyhands launch` to its version, in the environment of its workers."""

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(slots=True)
class Launched:
    """What `manyhands launch` gives the script it runs in this process."""

    context: RoleContext
    strategy: Strategy | None = None
    device: str | None = None
    joins: int = 0
    """How many groups the script has joined."""


launched: Launched | None = None
"""Set while a launched script runs here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This process's rank, and how it finds the others."""

    rank: int
    world: int
    open_store: Callable[[float], Store]
    """Called with a deadline in seconds."""

    launched: Launched | None = None
    master: str | None = None
    """Where torchrun's store is, for those who look for the network that leads there."""


def find_place(environment: Mapping[str, str] = os.environ) -> Place:
    """Where this process stands; UserError where it cannot join from here."""
    version = environment.get(LAUNCHER_VARIABLE)
    if version is not None and version != __version__:
        raise UserError(
            f"this script was started by manyhands {version} and imports manyhands {__version__}; use the "
            "`manyhands` command of the environment that the script runs in"
        )
    if launched is not None:
        context = launched.context
        return Place(
            rank=context.rank,
            world=context.world,
            open_store=lambda _: _inherited(context),
            launched=launched,
        )
    if version is not None:
        raise UserError(
            "this process was started by a worker of `manyhands launch`, not by the launcher; join in the script itself"
        )
    if getattr(sys.modules.get("__main__"), "__file__", None) == entry.__file__:
        raise UserError("this process is a worker of fit, which has a loop of its own; join is for scripts")
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _under_torchrun(environment)
    return Place(rank=0, world=1, open_store=lambda _: HashStore())


def _inherited(context: RoleContext) -> Store:
    return FileStore(f"/proc/self/fd/{context.descriptor('store')}", context.world)


def _under_torchrun(environment: Mapping[str, str]) -> Place:
    missing = [name for name in _TORCHRUN if not environment.get(name)]
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE are set, but not {', '.join(missing)}: start the script with torchrun, which sets "
            f"{', '.join(_TORCHRUN)}, or unset them to run it alone"
        )
    try:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except ValueError:
        rank, world = -1, 0
    if not 0 <= rank < world:
        raise UserError(
            f"RANK={environment['RANK']} and WORLD_SIZE={environment['WORLD_SIZE']} are set: RANK must be a number "
            "from 0 to WORLD_SIZE - 1"
        )
    return Place(rank=rank, world=world, open_store=_from_environment, master=environment["MASTER_ADDR"])


def _from_environment(timeout_s: float) -> Store:
    """The store of torchrun's agent, or one that rank 0 opens at that address."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    assert isinstance(store, Store)
    return store
