"""Places where the processes of a run exist already (torchrun's, a cluster specification's), and one process's there.

A launcher gives a process its rank and a store where it finds the others: `manyhands launch` passes the store as an
inherited memory file; torchrun's is a server named in the environment. Code that starts processes in another way makes
a `ProcessPlace` for each.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Self

from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore

from manyhands.errors import ManyhandsError, UserError, first_line
from manyhands.native.version import __version__
from manyhands.places.external.specification import ClusterRole, ClusterSpec, check_hosts
from manyhands.places.local.control import RoleContext
from manyhands.places.place import LAUNCHER_VARIABLE, TF_CONFIG, Place, PlacedRun, find_place, is_worker
from manyhands.strategy import Strategy

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(slots=True)
class Launched:
    """What `manyhands launch` gives the script that it runs in this process."""

    context: RoleContext
    strategy: Strategy | None = None
    device: str | None = None
    joins: int = 0  # how many groups the script has joined
    role: tuple[str, int] | None = None  # where servers are among the processes: worker or ps, and its number
    world: int = 0  # then, how many processes there are
    replays: Callable[..., Any] | None = None  # opens the end of a recorded loop that is executed again
    counts: dict[str, Any] = field(default_factory=dict)  # what the process reports at its end


launched: Launched | None = None  # set while a launched script runs in this process


def _no_store(_timeout_s: float) -> Store:
    raise UserError("this process has no store for the rendezvous")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlace:
    """This process's rank, and how it finds the other processes."""

    rank: int
    world: int
    kind: str = "alone"  # what started the processes: a name in `PLACES`, `launch` or `alone`
    role: str = "worker"  # the role of this process: worker, ps, chief or evaluator
    index: int | None = None  # its index among the processes of its role; None: its rank
    host: str = field(default_factory=socket.gethostname)  # the name of the host it is on
    open_store: Callable[[float], Store] = _no_store
    """Opens the store in which the processes find each other; called with a deadline in seconds."""
    leader: str | None = None
    """`HOST:PORT` of the leader, if it is fixed in advance; None: the store has the address."""
    cluster: ClusterSpec | None = None  # the cluster, if a specification describes it
    later: int = 0  # how many of the last ranks may be missing when the run begins, or forever
    leaves: bool = False
    """Whether it only finishes the pending work of its slot and takes no further part in the run."""
    launched: Launched | None = None
    strategy: Strategy | None = None  # what its launcher asks for, in a loop of the user's own
    device: str | None = None
    has_chief: bool = False  # whether rank 0 of processes without a specification only leads
    master: str | None = None
    """The address of torchrun's store, used to choose the network interface that leads there."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise UserError(f"rank={self.rank} must be at least 0 and less than world={self.world}")

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def roles(self) -> dict[str, int]:
        """How many processes each role has, where a specification says so."""
        return {kind: len(listed) for kind, listed in self.cluster.addresses.items()} if self.cluster else {}

    @property
    def name(self) -> str:
        return f"{self.role} {self.rank if self.index is None else self.index} on {self.host}"


def joining_place(environment: Mapping[str, str] = os.environ) -> ProcessPlace:
    """The place of a process that joins with a training loop of its own; UserError if it cannot join from here."""
    version = environment.get(LAUNCHER_VARIABLE)
    if version is not None and version != __version__:
        raise UserError(
            f"this script was started by manyhands {version} but imports manyhands {__version__}; use the "
            "`manyhands` command of the script's environment"
        )
    if launched is not None:
        context = launched.context
        role, rank = launched.role or ("worker", context.rank)
        return ProcessPlace(
            rank=rank,
            world=launched.world or context.world,
            kind="launch",
            role=role,
            open_store=lambda _: FileStore(f"/proc/self/fd/{context.descriptor('store')}", context.world),
            launched=launched,
            strategy=launched.strategy,
            device=launched.device,
        )
    if version is not None:
        raise UserError(
            "a worker of `manyhands launch` started this process; call join in the launched script"
        )
    if is_worker():
        raise UserError("this process is a worker of fit, which has its own loop; join is for scripts")
    declared = find_place(environment={})
    if isinstance(declared, ExternalPlace):
        return declared.joining()
    specified = SpecificationPlace.found(environment) if TF_CONFIG in environment else None
    if specified is not None:
        return specified.joining()
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return under_torchrun(environment)
    return ProcessPlace(rank=0, world=1, open_store=lambda _: HashStore())


def under_torchrun(environment: Mapping[str, str]) -> ProcessPlace:
    """The place of a process of torchrun; UserError if the environment describes it incompletely."""
    missing = [name for name in _TORCHRUN if not environment.get(name)]
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE are set, but not {', '.join(missing)}; start the script with torchrun, which sets "
            f"{', '.join(_TORCHRUN)}, or unset them to run it alone"
        )
    texts = [environment[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    rank, world, port = (int(text) if text.isascii() and text.isdecimal() else -1 for text in texts)
    if not 0 <= rank < world:
        raise UserError(
            f"RANK={environment['RANK']} and WORLD_SIZE={environment['WORLD_SIZE']} do not match: RANK must be "
            "from 0 to WORLD_SIZE - 1"
        )
    if not 0 < port < 1 << 16:
        raise UserError(f"MASTER_PORT={texts[2]} must be a number from 1 to 65535")
    host = environment["MASTER_ADDR"]
    hosted = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return ProcessPlace(
        rank=rank,
        world=world,
        kind="torchrun",
        open_store=lambda timeout_s: _open_tcp_store(host, port, timeout_s, hosted=hosted),
        master=host,
    )


_stores: dict[tuple[str, int], Store] = {}
"""Open for the life of the process: after a group's end others may read the store, or the next group."""


def _open_tcp_store(host: str, port: int, timeout_s: float, *, hosted: bool) -> Store:
    """The store of torchrun's agent, or one that rank 0 hosts at that address; waits only for the server."""
    if (host, port) in _stores:
        return _stores[host, port]
    timeout = timedelta(seconds=timeout_s)
    try:
        _stores[host, port] = TCPStore(
            host, port, is_master=hosted, timeout=timeout, wait_for_workers=False, multi_tenant=hosted
        )
        return _stores[host, port]
    except (RuntimeError, ValueError) as error:
        what = "could not be opened" if hosted else "could not be reached"
        raise ManyhandsError(
            f"the store at MASTER_ADDR={host}, MASTER_PORT={port} {what} within {timeout_s:.0f} s: "
            f"{first_line(error)}; {'give another MASTER_PORT' if hosted else 'check that rank 0 was started'}"
        ) from error


class ExternalPlace(Place):
    """This process is one of several, and joins a run instead of starting workers."""

    def __init__(self, process: ProcessPlace) -> None:
        self.process, self.world, self.leads = process, process.world, process.leads

    def resolve(self, strategy: Strategy, workers: int | None) -> tuple[Strategy, int]:
        """What the strategy is on the processes that there are; UserError where another number was asked for."""
        spec, world = self.process.cluster, self.process.world
        placed, count = strategy.placed(world, self.process.roles)
        if workers is not None and workers != count:
            who = "the cluster lists" if spec is not None else f"{self.kind} started"
            each = "all of them workers" if count == world else f"{count} of them workers"
            raise UserError(f"workers={workers}: {who} {world} processes, {each}; leave it out")
        return placed, count

    def joining(self) -> ProcessPlace:
        """The place of this process with a loop of its own."""
        return self.process

    def run(self, run: PlacedRun) -> Any:
        return run.take_part(self.process)


class TorchrunPlace(ExternalPlace):
    """Processes of torchrun, or of what sets the same variables."""

    kind = "torchrun"

    @classmethod
    def found(cls, environment: Mapping[str, str]) -> Self:
        return cls(under_torchrun(environment))


class SpecificationPlace(ExternalPlace):
    """Roles of a cluster specification, each of which listens at an address that all know."""

    kind = "specification"

    @classmethod
    def found(cls, environment: Mapping[str, str]) -> Self | None:
        text = environment[TF_CONFIG].strip()
        return cls.of(*ClusterSpec.from_tf_config(text)) if text and text != "{}" else None

    @classmethod
    def of(cls, spec: ClusterSpec, role: ClusterRole) -> Self:
        """The place of one role; UserError for an evaluator, which has none."""
        return cls(
            ProcessPlace(
                rank=spec.rank(role),
                world=len(spec.ranked),
                kind=cls.kind,
                role=role.type,
                index=role.index,
                leader=spec.address(spec.leader),
                cluster=spec,
            )
        )

    def joining(self) -> ProcessPlace:
        """The leader's address has the store, where the processes find all other addresses."""
        place, spec = self.process, self.process.cluster
        assert spec is not None, "a role is one of a specification"
        assert place.leader is not None, "whose addresses are known"
        if "ps" in spec.addresses and "chief" not in spec.addresses:
            raise UserError(
                "the cluster lists ps but no chief, which leads the servers of a loop of your own; add a chief"
            )
        host, _, port = place.leader.rpartition(":")
        host = host.strip("[]")
        hosted = partial(_open_tcp_store, host, int(port), hosted=place.rank == 0)
        return replace(place, open_store=hosted, master=host, leader=None)

    def run(self, run: PlacedRun) -> Any:
        spec = self.process.cluster
        assert spec is not None, "a role is one of a specification"
        if spec.ranked[1:]:
            check_hosts(spec, spec.ranked[self.process.rank])
        return super().run(run)
