"""The process group that torch.distributed calls: each of its methods becomes calls on shared memory.

torch calls some of the methods from Python and some from C++ (the reducer of DDP, functional collectives), and has
renamed several between the releases we support: each is available by all its names. What shared memory does not take
(CUDA and sparse tensors, ranks on several hosts) goes to the fallback backends unchanged.
"""

# ruff: noqa: N802 - names that torch's C++ looks up

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from manyhands.errors import UserError
from manyhands.interop.c10d.collective_calls import Reduction
from manyhands.interop.c10d.collectives import Collectives
from manyhands.interop.c10d.group_session import Session

__all__ = ["BACKEND", "ManyhandsGroup"]

BACKEND: Final = "manyhands"

_REDUCTIONS: Final = {int(one) - 1: one for one in Reduction if one is not Reduction.NONE}
_Tensors = list[torch.Tensor]
_Base: Any = dist.ProcessGroup  # its stubs demand overloads that torch.distributed never calls


class ManyhandsGroup(_Base):  # type: ignore[misc]
    """One rank's end of a group; torch creates it, uses it and shuts it down.

    `opts` are torch's options of each call: reduction, root, timeout, and whether the call is asynchronous.
    """

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

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> c10d.Work:
        args = (tensors, _reduction(opts))
        return self._route(tensors[0], "allreduce", args[:1], opts, tensors, Collectives.all_reduce, *args)

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> c10d.Work:
        name, args = "allreduce_coalesced", (tensors, _reduction(opts))
        return self._route(tensors[0], name, args[:1], opts, tensors, Collectives.all_reduce, *args)

    def reduce(self, tensors: _Tensors, opts: Any = None) -> c10d.Work:
        args = (tensors[0], _reduction(opts), _root(opts))
        return self._route(tensors[0], "reduce", (tensors,), opts, tensors, Collectives.reduce, *args)

    def reduce_scatter(self, outputs: _Tensors, inputs: list[_Tensors], opts: Any = None) -> c10d.Work:
        (output,), (parts,) = outputs, inputs
        given, args = (outputs, inputs), (output, parts, _reduction(opts))
        return self._route(output, "reduce_scatter", given, opts, outputs, Collectives.reduce_scatter, *args)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> c10d.Work:
        name, given = "_reduce_scatter_base", (output, tensor)
        args = (*given, _reduction(opts))
        return self._route(output, name, given, opts, [output], Collectives.reduce_scatter_from, *args)

    def reduce_scatter_single_coalesced(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None
    ) -> c10d.Work:
        reduction = _reduction(opts)

        def each(on: Collectives, timeout_s: float) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                on.reduce_scatter_from(output, tensor, reduction, timeout_s)

        given = (outputs, inputs)
        return self._route(outputs[0], "reduce_scatter_tensor_coalesced", given, opts, outputs, each)

    # Moves.

    def broadcast(self, tensors: _Tensors, opts: Any = None) -> c10d.Work:
        args = (tensors[0], _root(opts))
        return self._route(tensors[0], "broadcast", (tensors,), opts, tensors, Collectives.broadcast, *args)

    def allgather(self, outputs: list[_Tensors], inputs: _Tensors, opts: Any = None) -> c10d.Work:
        (rooms,), (tensor,), given = outputs, inputs, (outputs, inputs)
        return self._route(tensor, "allgather", given, opts, rooms, Collectives.all_gather, rooms, tensor)

    def allgather_coalesced(self, outputs: list[_Tensors], inputs: _Tensors, opts: Any = None) -> c10d.Work:
        def each(on: Collectives, timeout_s: float) -> None:
            for index, tensor in enumerate(inputs):
                on.all_gather([output[index] for output in outputs], tensor, timeout_s)

        rooms = [room for output in outputs for room in output]
        return self._route(inputs[0], "allgather_coalesced", (outputs, inputs), opts, rooms, each)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> c10d.Work:
        name, given = "_allgather_base", (output, tensor)
        return self._route(tensor, name, given, opts, [output], Collectives.all_gather_into, *given)

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> c10d.Work:
        def each(on: Collectives, timeout_s: float) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                on.all_gather_into(output, tensor, timeout_s)

        given = (outputs, inputs)
        return self._route(inputs[0], "allgather_into_tensor_coalesced", given, opts, outputs, each)

    def gather(self, outputs: list[_Tensors], inputs: _Tensors, opts: Any = None) -> c10d.Work:
        (tensor,), rooms, given = inputs, outputs[0] if outputs else [], (outputs, inputs)
        args = (rooms, tensor, _root(opts))
        return self._route(tensor, "gather", given, opts, rooms, Collectives.gather, *args)

    def scatter(self, outputs: _Tensors, inputs: list[_Tensors], opts: Any = None) -> c10d.Work:
        (output,), parts, given = outputs, inputs[0] if inputs else [], (outputs, inputs)
        args = (output, parts, _root(opts))
        return self._route(output, "scatter", given, opts, outputs, Collectives.scatter, *args)

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> c10d.Work:
        given = (outputs, inputs)
        return self._route(outputs[0], "alltoall", given, opts, outputs, Collectives.all_to_all, *given)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> c10d.Work:
        given, split = (output, tensor, list(output_splits), list(input_splits)), Collectives.all_to_all_split
        return self._route(tensor, "alltoall_base", given, opts, [output], split, *given)

    def barrier(self, opts: Any = None) -> c10d.Work:
        """Wait until every rank is here, and on GPUs also until the queued work of `device_ids` is done."""
        uses_gpus: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = opts.device_ids if opts is not None and uses_gpus else []
        if self._local is None:
            under = self._session.fallback.for_device(torch.device("cuda" if devices else "cpu"))
            work: c10d.Work = under.barrier(opts)
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

    def send(self, tensors: _Tensors, to: int, tag: int) -> c10d.Work:
        (tensor,) = tensors
        if self._local is not None and self._takes(tensor):
            return self._local.post.send(tensor.detach().contiguous(), to, tag, self._timeout_s)
        work: c10d.Work = self._session.fallback.for_device(tensor.device).send(tensors, to, tag)
        return work

    def recv(self, tensors: _Tensors, source: int, tag: int) -> c10d.Work:
        return self._receive(tensors, "recv", (source, tag), source, tag)

    def recv_anysource(self, tensors: _Tensors, tag: int) -> c10d.Work:
        return self._receive(tensors, "recv_anysource", (tag,), None, tag)

    def _receive(
        self, tensors: _Tensors, name: str, given: tuple[int, ...], source: int | None, tag: int
    ) -> c10d.Work:
        (tensor,) = tensors
        if self._local is not None and self._takes(tensor):
            if not tensor.is_contiguous():
                raise UserError(f"recv into a tensor of strides {tensor.stride()}: it must be contiguous")
            return self._local.post.receive(tensor.detach(), source, tag, self._timeout_s)
        under = getattr(self._session.fallback.for_device(tensor.device), name)
        work: c10d.Work = under(tensors, *given)
        return work

    # Calls that torch would collect: on the CPU each is made when it comes, and the last work is that of all.

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu" or self._local is None:
            self._session.fallback.for_device(device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> c10d.Work:
        if device.type != "cpu" or self._local is None:
            return self._session.fallback.for_device(device)._end_coalescing(device)
        return self._session.conductor.perform(lambda: None, [], background=True)

    # How.

    def _route(
        self,
        tensor: torch.Tensor,
        name: str,
        given: Sequence[Any],
        opts: Any,
        result: _Tensors,
        method: Callable[..., None],
        *args: Any,
    ) -> c10d.Work:
        """Do `method` in shared memory if that takes the tensor, else call torch's method `name` on the fallback."""
        if self._takes(tensor):
            return self._perform(opts, result, method, *args)
        under = getattr(self._session.fallback.for_device(tensor.device), name)
        work: c10d.Work = under(*given) if opts is None else under(*given, opts)
        return work

    def _perform(self, opts: Any, result: _Tensors, method: Callable[..., None], *args: Any) -> c10d.Work:
        assert self._local is not None
        given_s, background = (opts.timeout.total_seconds(), opts.asyncOp) if opts is not None else (0, True)
        timeout_s = given_s if given_s > 0 else self._timeout_s
        job = partial(method, self._local.collectives, *args, timeout_s)
        return self._session.conductor.perform(job, result, background=background)

    def _takes(self, tensor: torch.Tensor) -> bool:
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
