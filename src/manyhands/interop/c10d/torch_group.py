"""The process group that torch.distributed calls: each of its methods becomes calls on shared memory.

torch calls some of the methods from Python and some from C++ (the reducer of DDP, functional collectives), and has
renamed several between the releases we support: each is available by all its names. What shared memory does not take
(CUDA and sparse tensors, ranks on several hosts) goes to the fallback backends unchanged.
"""

# ruff: noqa: N802 - names that torch's C++ looks up

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from manyhands.errors import UserError, nearest
from manyhands.interop.c10d.collective_calls import Reduction
from manyhands.interop.c10d.collectives import Collectives
from manyhands.interop.c10d.point_to_point import PointToPoint
from manyhands.interop.c10d.shared_stage import CollectiveStage, StageReason, create_segment
from manyhands.interop.c10d.works import Conductor
from manyhands.places.local.rendezvous import Rendezvous, meet
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.transport.link.mesh import SharedMesh
from manyhands.transport.link.torch_p2p import gloo_backend, nccl_backend

BACKEND: Final = "manyhands"

_REDUCTIONS: Final = {int(one) - 1: one for one in Reduction if one is not Reduction.NONE}
_Tensors = list[Tensor]
Work = c10d.Work
_Base: Any = dist.ProcessGroup  # its stubs demand overloads that torch.distributed never calls


class ManyhandsGroup(_Base):  # type: ignore[misc]
    """One rank's end of a group, made, used and shut down by torch; `opts` are torch's options of each call."""

    def __init__(self, session: Session, timeout: timedelta) -> None:
        super().__init__(session.place.rank, session.place.world)
        self._session, self._local = session, session.local
        self._timeout_s = timeout.total_seconds()
        self._name = session.place.name
        self._desc = "undefined"
        self._finalizer = weakref.finalize(self, session.close)

    # What the group is.

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    supports_coalescing = supports_splitting = False  # asked of the CPU's backend, which is this group

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in ("cpu", "cuda")[: 1 + self._session.fallback.has_cuda]]

    def _get_backend(self, device: torch.device) -> Any:
        device = torch.device(device)
        if device.type == "cpu" and self._local is not None:
            return self
        return self._session.fallback.for_device(device)._get_backend(device)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        self._finalizer()

    def abort(self) -> None:
        self._session.abort()

    # Reductions.

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> Work:
        args = (tensors, _reduction(opts))
        return self._route(tensors[0], "allreduce", args[:1], opts, tensors, Collectives.all_reduce, *args)

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> Work:
        name, args = "allreduce_coalesced", (tensors, _reduction(opts))
        return self._route(tensors[0], name, args[:1], opts, tensors, Collectives.all_reduce, *args)

    def reduce(self, tensors: _Tensors, opts: Any = None) -> Work:
        args = (tensors[0], _reduction(opts), _root(opts))
        return self._route(tensors[0], "reduce", (tensors,), opts, tensors, Collectives.reduce, *args)

    def reduce_scatter(self, outputs: _Tensors, inputs: list[_Tensors], opts: Any = None) -> Work:
        (output,), (parts,) = outputs, inputs
        given, args = (outputs, inputs), (output, parts, _reduction(opts))
        return self._route(output, "reduce_scatter", given, opts, outputs, Collectives.reduce_scatter, *args)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        name, given = "_reduce_scatter_base", (output, tensor)
        args = (*given, _reduction(opts))
        return self._route(output, name, given, opts, [output], Collectives.reduce_scatter_from, *args)

    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Work:
        reduction = _reduction(opts)

        def each(on: Collectives, timeout_s: float) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                on.reduce_scatter_from(output, tensor, reduction, timeout_s)

        given = (outputs, inputs)
        return self._route(outputs[0], "reduce_scatter_tensor_coalesced", given, opts, outputs, each)

    # Moves.

    def broadcast(self, tensors: _Tensors, opts: Any = None) -> Work:
        args = (tensors[0], _root(opts))
        return self._route(tensors[0], "broadcast", (tensors,), opts, tensors, Collectives.broadcast, *args)

    def allgather(self, outputs: list[_Tensors], inputs: _Tensors, opts: Any = None) -> Work:
        (rooms,), (tensor,), given = outputs, inputs, (outputs, inputs)
        return self._route(tensor, "allgather", given, opts, rooms, Collectives.all_gather, rooms, tensor)

    def allgather_coalesced(self, outputs: list[_Tensors], inputs: _Tensors, opts: Any = None) -> Work:
        def each(on: Collectives, timeout_s: float) -> None:
            for index, tensor in enumerate(inputs):
                on.all_gather([output[index] for output in outputs], tensor, timeout_s)

        rooms = [room for output in outputs for room in output]
        return self._route(inputs[0], "allgather_coalesced", (outputs, inputs), opts, rooms, each)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        name, given = "_allgather_base", (output, tensor)
        return self._route(tensor, name, given, opts, [output], Collectives.all_gather_into, *given)

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Work:
        def each(on: Collectives, timeout_s: float) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                on.all_gather_into(output, tensor, timeout_s)

        given = (outputs, inputs)
        return self._route(inputs[0], "allgather_into_tensor_coalesced", given, opts, outputs, each)

    def gather(self, outputs: list[_Tensors], inputs: _Tensors, opts: Any = None) -> Work:
        (tensor,), rooms, given = inputs, outputs[0] if outputs else [], (outputs, inputs)
        args = (rooms, tensor, _root(opts))
        return self._route(tensor, "gather", given, opts, rooms, Collectives.gather, *args)

    def scatter(self, outputs: _Tensors, inputs: list[_Tensors], opts: Any = None) -> Work:
        (output,), parts, given = outputs, inputs[0] if inputs else [], (outputs, inputs)
        args = (output, parts, _root(opts))
        return self._route(output, "scatter", given, opts, outputs, Collectives.scatter, *args)

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Work:
        given = (outputs, inputs)
        return self._route(outputs[0], "alltoall", given, opts, outputs, Collectives.all_to_all, *given)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        given, split = (output, tensor, list(output_splits), list(input_splits)), Collectives.all_to_all_split
        return self._route(tensor, "alltoall_base", given, opts, [output], split, *given)

    def barrier(self, opts: Any = None) -> Work:
        """Wait until every rank is here, and on GPUs also until the queued work of `device_ids` is done."""
        uses_gpus: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = opts.device_ids if opts is not None and uses_gpus else []
        if self._local is None:
            under = self._session.fallback.for_device(torch.device("cuda" if devices else "cpu"))
            work: Work = under.barrier(opts)
            return work
        for device in devices or []:
            torch.cuda.synchronize(device)
        return self._perform(opts, [], Collectives.barrier)

    # Names of other releases.

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    # Messages.

    def send(self, tensors: _Tensors, to: int, tag: int) -> Work:
        (tensor,) = tensors
        if self._local is not None and self._takes(tensor):
            return self._local.post.send(tensor.detach().contiguous(), to, tag, self._timeout_s)
        work: Work = self._session.fallback.for_device(tensor.device).send(tensors, to, tag)
        return work

    def recv(self, tensors: _Tensors, source: int, tag: int) -> Work:
        return self._receive(tensors, "recv", (source, tag), source, tag)

    def recv_anysource(self, tensors: _Tensors, tag: int) -> Work:
        return self._receive(tensors, "recv_anysource", (tag,), None, tag)

    def _receive(
        self, tensors: _Tensors, name: str, given: tuple[int, ...], source: int | None, tag: int
    ) -> Work:
        (tensor,) = tensors
        if self._local is not None and self._takes(tensor):
            if not tensor.is_contiguous():
                raise UserError(f"recv into a tensor with strides {tensor.stride()}: it must be contiguous")
            return self._local.post.receive(tensor.detach(), source, tag, self._timeout_s)
        under = getattr(self._session.fallback.for_device(tensor.device), name)
        work: Work = under(tensors, *given)
        return work

    # Calls that torch would collect: on the CPU each is made when it comes, and the last work is that of all.

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu" or self._local is None:
            self._session.fallback.for_device(device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Work:
        if device.type != "cpu" or self._local is None:
            return self._session.fallback.for_device(device)._end_coalescing(device)
        return self._session.conductor.perform(lambda: None, [], background=True)

    # How.

    def _route(
        self,
        tensor: Tensor,
        name: str,
        given: Sequence[Any],
        opts: Any,
        result: _Tensors,
        method: Callable[..., None],
        *args: Any,
    ) -> Work:
        """Do `method` in shared memory if that takes the tensor, else call torch's method `name` on the fallback."""
        if self._takes(tensor):
            return self._perform(opts, result, method, *args)
        under = getattr(self._session.fallback.for_device(tensor.device), name)
        work: Work = under(*given) if opts is None else under(*given, opts)
        return work

    def _perform(self, opts: Any, result: _Tensors, method: Callable[..., None], *args: Any) -> Work:
        assert self._local is not None
        given_s, background = (opts.timeout.total_seconds(), opts.asyncOp) if opts is not None else (0, True)
        timeout_s = given_s if given_s > 0 else self._timeout_s
        job = partial(method, self._local.collectives, *args, timeout_s)
        return self._session.conductor.perform(job, result, background=background)

    def _takes(self, tensor: Tensor) -> bool:
        return self._local is not None and tensor.is_cpu and tensor.layout is torch.strided


def _reduction(opts: Any) -> Reduction:
    if opts is None:
        return Reduction.SUM
    operation = opts.reduceOp.op
    reduction = _REDUCTIONS.get(int(operation))
    if reduction is None:
        allowed = ", ".join(one.name for one in _REDUCTIONS.values())
        raise UserError(f"reduction {operation.name}: allowed: {allowed}")
    return reduction


def _root(opts: Any) -> int:
    return 0 if opts is None else int(opts.rootRank)


# The resources that one rank holds for one process group, from joining it to leaving it, and its options.

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
            raise UserError(f"device={device}: the manyhands backend supports cpu and cuda")
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


class SessionPlace(NamedTuple):
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
                f"group {place.name!r}: algorithm={options.algorithm!r} needs all ranks on one host, but they are on "
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


def new_group(
    ranks: Sequence[int] | None = None, *, algorithm: str = SHARED, timeout: timedelta | None = None
) -> Any:
    """Like `torch.distributed.new_group`, for a group of this backend with its own all-reduce algorithm."""
    members, options = None if ranks is None else list(ranks), Options(algorithm=algorithm)
    return dist.new_group(members, timeout=timeout, backend=BACKEND, pg_options=options)


def _create(given: c10d._DistributedBackendOptions, options: Any) -> ManyhandsGroup:
    if options is not None and not isinstance(options, Options):
        raise UserError(f"pg_options={options!r}: must be manyhands.c10d.Options")
    ranks = tuple(given.global_ranks_in_group)
    place = SessionPlace(given.group_id, given.group_rank, given.group_size, ranks)
    session = open_session(given.store, place, options or Options(), given.timeout)
    return ManyhandsGroup(session, given.timeout)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
