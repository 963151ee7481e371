"""The resources that one rank holds for one process group, from joining it to leaving it, and its options."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from manyhands.errors import UserError, nearest
from manyhands.interop.c10d.collectives import Collectives
from manyhands.interop.c10d.point_to_point import PointToPoint
from manyhands.interop.c10d.shared_stage import CollectiveStage, StageReason, create_segment
from manyhands.interop.c10d.works import Conductor
from manyhands.places.local.rendezvous import Rendezvous, meet
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.transport.link.mesh import SharedMesh
from manyhands.transport.link.torch_p2p import gloo_backend, nccl_backend

__all__ = ["SHARED", "Options", "Session", "SessionPlace", "open_session"]

SHARED = "shared"  # the default: all-reduce in shared memory, without messages
_PATIENCE_S: Final = 5.0  # calls under way when a group is closed may take this long to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one group, for `pg_options` of `init_process_group` and `new_group`; the same on every rank.

    `algorithm` says how floats are all-reduced: `shared` (directly in shared memory, the fastest), or one of the
    schedules of `manyhands.strategies.allreduce`, which send messages over links and serve to study them.
    """

    algorithm: str = SHARED

    def __post_init__(self) -> None:
        allowed = (SHARED, *ALGORITHMS)
        if self.algorithm not in allowed:
            raise UserError(f"algorithm={self.algorithm!r}: {nearest(str(self.algorithm), allowed)}")


class FallbackGroup:
    """A plain process group of torch: NCCL for CUDA tensors, Gloo for what shared memory cannot take.

    NCCL is made when the first CUDA tensor comes, and connects ranks as they need it. Gloo connects all ranks when it
    is made, so it is made with the group where it will be needed (ranks on several hosts, or GPUs without NCCL), and
    else when all ranks first bring something that shared memory does not take, such as sparse tensors.
    """

    def __init__(self, store: c10d.Store, rank: int, world: int, timeout: timedelta) -> None:
        self._store, self._place, self._timeout = store, (rank, world), timeout
        self._lock = threading.Lock()
        self._group: dist.ProcessGroup | None = None
        self._made: set[str] = set()
        self.has_cuda = torch.cuda.is_available()

    def for_device(self, device: torch.device) -> dist.ProcessGroup:
        """The group, with a backend for `device`; collective when Gloo is needed for the first time."""
        if device.type not in ("cpu", "cuda"):
            raise UserError(f"device={device}: the manyhands backend takes tensors on cpu and cuda")
        with self._lock:
            if self._group is None:
                self._group = dist.ProcessGroup(self._store, *self._place)
                self._group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            if device.type not in self._made:
                nccl = device.type == "cuda" and dist.is_nccl_available()
                types = dist.ProcessGroup.BackendType
                kind, make = (types.NCCL, nccl_backend) if nccl else (types.GLOO, gloo_backend)
                backend = make(self._store, *self._place, self._timeout)
                self._group._register_backend(torch.device(device.type), kind, backend)
                self._made.add(device.type)
            return self._group

    def close(self) -> None:
        with self._lock:
            group, self._group = self._group, None
            self._made.clear()
        if group is not None:
            group.shutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlace:
    """A rank's place in a group; `global_ranks` is empty for the default group, where they are the same."""

    name: str
    rank: int
    world: int
    global_ranks: tuple[int, ...]

    def label(self, rank: int) -> str:
        known = rank < len(self.global_ranks) and self.global_ranks[rank] != rank
        return f"{rank} (global {self.global_ranks[rank]})" if known else str(rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSession:
    """What the ranks of one host share: memory, the collectives on it, and point-to-point messages."""

    stage: CollectiveStage
    collectives: Collectives
    post: PointToPoint


class Session:
    """One rank's end of a group; `local` is None where the ranks are on several hosts. `close` is idempotent."""

    def __init__(
        self, place: SessionPlace, local: LocalSession | None, fallback: FallbackGroup, resources: ExitStack
    ) -> None:
        self.place, self.local, self.fallback = place, local, fallback
        self.conductor = Conductor(f"process group {place.name}")
        self._resources = resources
        _open_sessions.add(self)

    def abort(self) -> None:
        if self.local is not None:
            self.local.stage.abort(self.place.rank, StageReason.ENDED)

    def close(self) -> None:
        if self.local is not None:
            self.conductor.close(self.local.stage.interrupt, _PATIENCE_S)
        self._resources.close()

    def disown(self) -> None:
        """In a forked child: the group belongs to the parent, and must not be left or used here."""
        self.conductor = Conductor(f"process group {self.place.name} of the parent process")
        self.conductor.close(lambda: None, 0)
        if self.local is not None:
            self.local.post.disown()
        self._resources.pop_all()


def _disown_all() -> None:
    for session in list(_open_sessions):
        session.disown()


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
os.register_at_fork(after_in_child=_disown_all)


def open_session(store: c10d.Store, place: SessionPlace, options: Options, timeout: timedelta) -> Session:
    timeout_s = timeout.total_seconds()
    fallback = FallbackGroup(store, place.rank, place.world, timeout)
    with ExitStack() as resources:
        prefixed = c10d.PrefixStore("rendezvous/", store)
        met = meet(prefixed, rank=place.rank, world=place.world, name=place.name, timeout_s=timeout_s)
        rendezvous = resources.enter_context(met)
        several_hosts = len(rendezvous.hosts) > 1
        if several_hosts and options.algorithm != SHARED:
            raise UserError(
                f"group {place.name!r}: algorithm={options.algorithm!r} needs all ranks on one host, and they are on "
                f"{len(rendezvous.hosts)}: {list(map(list, rendezvous.hosts))}"
            )
        resources.callback(fallback.close)
        if several_hosts:  # backends that connect all ranks must exist before they are used
            fallback.for_device(torch.device("cpu"))
        if fallback.has_cuda and not dist.is_nccl_available():
            fallback.for_device(torch.device("cuda"))
        local = None if several_hosts else _open_local(rendezvous, place, options, timeout_s, resources)
        return Session(place, local, fallback, resources.pop_all())


def _open_local(
    rendezvous: Rendezvous, place: SessionPlace, options: Options, timeout_s: float, resources: ExitStack
) -> LocalSession:
    memory, rings, *ends = _share(rendezvous, options, timeout_s)
    peers = [rank for rank in range(place.world) if rank != place.rank]
    stage = CollectiveStage(memory, place.rank, place.world, place.label)
    resources.callback(stage.close)
    executor = None
    if options.algorithm != SHARED:
        pairs = {peer: ends[2 * i : 2 * i + 2] for i, peer in enumerate(peers)}
        links = SharedMesh.attach(place.rank, pairs)
        for link in links.values():
            resources.callback(link.close)
        executor = ScheduleExecutor(ALGORITHMS[options.algorithm], place.rank, place.world, links, timeout_s)
    post = PointToPoint(rings, stage, f"process group {place.name}", place.label)
    resources.callback(post.close)
    rendezvous.watch(lambda rank, in_peace: None if in_peace else stage.abort(rank, StageReason.DIED))
    return LocalSession(stage=stage, collectives=Collectives(stage, executor), post=post)


def _share(rendezvous: Rendezvous, options: Options, timeout_s: float) -> tuple[int, ...]:
    """This rank's descriptors: memory for the stage and for messages, and two for each link, if any."""
    with ExitStack() as made:

        def make() -> Sequence[Sequence[int]]:
            memory = made.enter_context(create_segment(rendezvous.world)).descriptor
            rings = os.memfd_create("manyhands:post", os.MFD_CLOEXEC)
            made.callback(os.close, rings)
            if options.algorithm == SHARED:
                return [(memory, rings)] * rendezvous.world
            mesh = made.enter_context(SharedMesh(rendezvous.world))
            ends = [sorted(mesh.descriptors(rank).items()) for rank in range(rendezvous.world)]
            return [(memory, rings, *(end for _, pair in pairs for end in pair)) for pairs in ends]

        return rendezvous.share(f"memory for algorithm={options.algorithm}", make, timeout_s)
