"""Where this process stands: alone, or one of several that a launcher, torchrun or a specification started.

Each process of a run has a `Place`. The launchers give a process its rank and a store where it finds the others: ours
hands the store over as an inherited memory file, torchrun's is a server that the environment names. Who starts
processes in another way makes a `Place` and says so with `standing.standing`.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore

from manyhands.errors import ManyhandsError, UserError, first_line, nearest
from manyhands.native.version import __version__
from manyhands.places.external.specification import ClusterRole, ClusterSpec
from manyhands.places.external.started_externally import LAUNCHER_VARIABLE, TF_CONFIG, stands_at
from manyhands.places.local import entry
from manyhands.places.local.context import RoleContext
from manyhands.strategy import Strategy

__all__ = [
    "KINDS",
    "Launched",
    "Place",
    "current",
    "find_place",
    "launched",
    "place_from",
    "place_of",
]

KINDS = ("alone", "launch", "torchrun", "specification", "ray")
"""Who started the processes of a run."""

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


def _no_store(timeout_s: float) -> Store:
    del timeout_s
    raise UserError("this process was given no store to find the others in")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This process's rank, and how it finds the others."""

    rank: int
    world: int
    kind: str = "alone"
    """Who started the processes: one of `KINDS`."""

    role: str = "worker"
    """What this process is: a worker, a ps, a chief, an evaluator."""

    index: int | None = None
    """Its number among those of its role; None: its rank."""

    host: str = field(default_factory=socket.gethostname)
    """The name of the host it is on."""

    open_store: Callable[[float], Store] = _no_store
    """Opens the store in which the processes find each other; called with a deadline in seconds."""

    leader: str | None = None
    """`HOST:PORT` at which the leader listens, where that is known to all beforehand; None: its store tells."""

    cluster: ClusterSpec | None = None
    """Who there is and where, where a specification says it."""

    later: int = 0
    """How many of the last ranks need not be there when the run begins, and may never come."""

    leaves: bool = False
    """Whether it only finishes what its slot owes, and leaves the others to their run."""

    launched: Launched | None = None
    master: str | None = None
    """Where torchrun's store is, for those who look for the network that leads there."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"kind={self.kind!r} of a place: {nearest(self.kind, KINDS)}")
        if not 0 <= self.rank < self.world:
            raise UserError(f"rank={self.rank} must be at least 0 and less than world={self.world}")

    @property
    def leads(self) -> bool:
        """Whether this process keeps the run: its directory, its terminal, its page."""
        return self.rank == 0

    @property
    def is_one_of_many(self) -> bool:
        """Whether somebody else starts the processes of a run, so that `fit` takes part instead of starting any."""
        return self.kind not in ("alone", "launch")

    @property
    def name(self) -> str:
        """`worker 1 on hostB`."""
        return f"{self.role} {self.rank if self.index is None else self.index} on {self.host}"


def current(environment: Mapping[str, str] = os.environ) -> Place:
    """Where a process stands that calls `fit`; UserError where the environment says it by halves.

    Inside a script of `manyhands launch`, and in a worker of another run, `fit` starts workers of its own.
    """
    said = stands_at()
    if isinstance(said, Place):
        return said
    if launched is not None or LAUNCHER_VARIABLE in environment or _is_worker():
        return Place(rank=0, world=1)
    specified = place_from(environment)
    if specified is not None:
        return specified
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _under_torchrun(environment)
    return Place(rank=0, world=1)


def place_of(spec: ClusterSpec, role: ClusterRole) -> Place:
    """The place of one role of a specification; UserError for an evaluator, which has none."""
    return Place(
        rank=spec.rank(role),
        world=len(spec.ranked),
        kind="specification",
        role=role.type,
        index=role.index,
        leader=spec.address(spec.leader),
        cluster=spec,
    )


def place_from(environment: Mapping[str, str] = os.environ) -> Place | None:
    """What TF_CONFIG says of this process; None where it is not set, or says of no cluster."""
    text = environment.get(TF_CONFIG, "").strip()
    if not text or text == "{}":
        return None
    return place_of(*ClusterSpec.from_tf_config(text))


def find_place(environment: Mapping[str, str] = os.environ) -> Place:
    """Where a process stands that joins a loop of its own; UserError where it cannot join from here."""
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
            kind="launch",
            open_store=lambda _: _inherited(context),
            launched=launched,
        )
    if version is not None:
        raise UserError(
            "this process was started by a worker of `manyhands launch`, not by the launcher; join in the script itself"
        )
    if _is_worker():
        raise UserError("this process is a worker of fit, which has a loop of its own; join is for scripts")
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _under_torchrun(environment)
    return Place(rank=0, world=1, open_store=lambda _: HashStore())


def _is_worker() -> bool:
    return getattr(sys.modules.get("__main__"), "__file__", None) == entry.__file__


def _inherited(context: RoleContext) -> Store:
    return FileStore(f"/proc/self/fd/{context.descriptor('store')}", context.world)


def _under_torchrun(environment: Mapping[str, str]) -> Place:
    missing = [name for name in _TORCHRUN if not environment.get(name)]
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE are set, but not {', '.join(missing)}: start the script with torchrun, which sets "
            f"{', '.join(_TORCHRUN)}, or unset them to run it alone"
        )
    rank, world = _number(environment["RANK"]), _number(environment["WORLD_SIZE"])
    if rank is None or world is None or not 0 <= rank < world:
        raise UserError(
            f"RANK={environment['RANK']} and WORLD_SIZE={environment['WORLD_SIZE']} are set: RANK must be a number "
            "from 0 to WORLD_SIZE - 1"
        )
    host, text = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    port = _number(text)
    if port is None or not 0 < port < 1 << 16:
        raise UserError(f"MASTER_PORT={text}: must be a number from 1 to 65535")
    hosted = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return Place(
        rank=rank,
        world=world,
        kind="torchrun",
        open_store=lambda timeout_s: _open_tcp_store(host, port, timeout_s, hosted=hosted),
        master=host,
    )


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


_stores: dict[tuple[str, int], Store] = {}
"""One for the life of this process: others may still read in it, or come for the next group, when a group has ended."""


def _open_tcp_store(host: str, port: int, timeout_s: float, *, hosted: bool) -> Store:
    """The store of torchrun's agent, or one that rank 0 hosts at that address; waits for nobody but its server."""
    if (host, port) not in _stores:
        _stores[host, port] = _connected_store(host, port, timeout_s, hosted=hosted)
    return _stores[host, port]


def _connected_store(host: str, port: int, timeout_s: float, *, hosted: bool) -> Store:
    try:
        return TCPStore(
            host,
            port,
            is_master=hosted,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=hosted,
        )
    except (RuntimeError, ValueError) as error:
        what = "cannot be opened" if hosted else "cannot be reached"
        raise ManyhandsError(
            f"the store at MASTER_ADDR={host}, MASTER_PORT={port} {what} within {timeout_s:.0f} s: "
            f"{first_line(error)}; {'give another MASTER_PORT' if hosted else 'see whether rank 0 was started'}"
        ) from error
