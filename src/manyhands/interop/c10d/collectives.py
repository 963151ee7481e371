"""The collectives of torch.distributed on CPU tensors, each as one or two calls of the stage.

Sums, means and maxima of floats are reduced by compiled code in rank order, halves in float32. Every other reduction
is an exchange of slices, torch's own operation on them in rank order, and an exchange of the results. So a result has
the same bits on every rank and in every run, and does not depend on how large the message is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from manyhands.errors import UserError
from manyhands.interop.c10d.collective_calls import CallKind, CollectiveCall, Reduction, call_of
from manyhands.interop.c10d.compiled_calls import Chunk, Read, RoundReducer
from manyhands.interop.c10d.shared_stage import CollectiveStage, ReductionPlan, StageReason
from manyhands.native.dtypes import HALVES, SUMMED
from manyhands.native.group import reduction_kernels
from manyhands.strategies.common.collectives.executor import Op, ScheduleExecutor

_OPERATIONS: Final = {
    Reduction.SUM: reduction_kernels.SUM,
    Reduction.AVG: reduction_kernels.MEAN,
    Reduction.MAX: reduction_kernels.MAX,
}
_BY_TORCH: Final[dict[Reduction, Callable[[Tensor, Tensor], Tensor]]] = {
    Reduction.SUM: torch.add,
    Reduction.AVG: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
    Reduction.BAND: torch.bitwise_and,
    Reduction.BOR: torch.bitwise_or,
    Reduction.BXOR: torch.bitwise_xor,
}
_BITWISE: Final = (Reduction.BAND, Reduction.BOR, Reduction.BXOR)


@cache
def compiled_reducer(dtype: torch.dtype, reduction: Reduction) -> RoundReducer | None:
    """The compiled reduction, compiled when it is first asked for; None where torch must do it."""
    kind, operation = SUMMED.get(dtype), _OPERATIONS.get(reduction)
    if kind is None or operation is None:
        return None
    return RoundReducer(reduction_kernels.reducer_address(kind), operation, dtype.itemsize)


@cache
def check_reduction(dtype: torch.dtype, reduction: Reduction) -> None:
    """UserError where a reduction cannot be done; asked of torch itself, on tensors of one item."""
    reason = ""
    if reduction in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        reason = "bitwise reductions need integers"
    elif reduction is Reduction.AVG and dtype is torch.bool:
        reason = "booleans have no mean; sum them as int64"
    elif compiled_reducer(dtype, reduction) is None:
        try:
            combine([torch.zeros(1, dtype=dtype)] * 2, reduction)
        except RuntimeError as error:
            reason = f"torch does not support it on the CPU ({str(error).splitlines()[0]})"
    if reason:
        raise UserError(f"reduction {reduction.name} of {dtype}: {reason}")


def combine(parts: Sequence[Tensor], reduction: Reduction) -> Tensor:
    """The parts of all ranks, combined in rank order; a mean of integers is truncated towards zero."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in HALVES else dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total = _BY_TORCH[reduction](total, part.to(wide))
    if reduction is Reduction.AVG:
        fractions = dtype.is_floating_point or dtype.is_complex
        total = torch.div(total, len(parts), rounding_mode=None if fractions else "trunc")
    return total.to(dtype)


_BY_SCHEDULE: Final[dict[Reduction, Op]] = {Reduction.SUM: "sum", Reduction.AVG: "mean", Reduction.MAX: "max"}
_MOST_PLANS: Final = 1024
_Tensors = Sequence[Tensor]


class Collectives:
    """One rank's collective calls on its stage; with an executor, supported all-reduces use its algorithm.

    All methods are collective, run to their end in the calling thread, and are called by one thread at a time.
    """

    def __init__(self, stage: CollectiveStage, executor: ScheduleExecutor | None = None) -> None:
        self._stage, self._executor = stage, executor
        self._rank, self._world = stage.rank, stage.world
        self._others = tuple(rank for rank in range(self._world) if rank != self._rank)
        self._number = 0
        self._plans: dict[tuple[object, ...], ReductionPlan] = {}

    def barrier(self, timeout_s: float) -> None:
        self._number += 1
        self._stage.exchange(CollectiveCall(self._number, CallKind.BARRIER), (), (), timeout_s)

    def all_reduce(self, tensors: _Tensors, reduction: Reduction, timeout_s: float) -> None:
        """Each tensor becomes that of all ranks, combined; several of one dtype are reduced as one vector."""
        if len(tensors) == 1 and _is_plain(tensors[0]):
            self._all_reduce_whole(tensors[0], tensors, reduction, timeout_s)
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([_dense(tensor).view(-1) for tensor in same])
            self._all_reduce_whole(flat, same, reduction, timeout_s)
            pieces = flat.split_with_sizes([tensor.numel() for tensor in same])
            for tensor, piece in zip(same, pieces, strict=True):
                tensor.detach().copy_(piece.view(tensor.shape))

    def _all_reduce_whole(
        self, whole: Tensor, tensors: _Tensors, reduction: Reduction, timeout_s: float
    ) -> None:
        key = (whole.dtype, reduction, *[tensor.shape for tensor in tensors])
        plan = self._plans.get(key)
        if plan is not None:
            self._number += 1
            self._stage.all_reduce(plan, self._number, whole.data_ptr(), timeout_s)
            return
        check_reduction(whole.dtype, reduction)
        reducer = compiled_reducer(whole.dtype, reduction)
        call = self._call(CallKind.ALL_REDUCE, tensors, whole.numel(), reduction=reduction)
        if reducer is None:
            self._reduce_by_torch(call, whole.detach().view(-1), reduction, timeout_s)
        elif self._executor is not None:
            self._stage.exchange(call, (), (), timeout_s)  # the call is the same on all ranks, or rejected
            try:
                self._executor.all_reduce(whole.view(-1), _BY_SCHEDULE[reduction])
            except BaseException:
                self._stage.abort(self._rank, StageReason.FAILED)
                raise
        else:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = ReductionPlan(call, reducer, self._world)
            self._stage.all_reduce(plan, self._number, whole.data_ptr(), timeout_s)

    def reduce(self, tensor: Tensor, reduction: Reduction, root: int, timeout_s: float) -> None:
        check_reduction(tensor.dtype, reduction)
        flat = _dense(tensor).view(-1)
        reducer = compiled_reducer(tensor.dtype, reduction)
        here = self._rank == root
        facts = {"root": root, "extent_bytes": 0 if here else flat.nbytes, "reduction": reduction}
        call = self._call(CallKind.REDUCE, [tensor], flat.numel(), **facts)
        if reducer is None:
            self._reduce_by_torch(call, flat, reduction, timeout_s)
        else:
            chunks = [] if here else [_chunk(flat)]
            reads = _reads(self._others, 0, [flat] * self._world) if here else []
            self._stage.exchange(call, chunks, reads, timeout_s, reducer=reducer)
        if here:
            _give_back(flat, tensor)

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float) -> None:
        flat = _dense(tensor).view(-1)
        here = self._rank == root
        extent = flat.nbytes if here else 0
        call = self._call(CallKind.BROADCAST, [tensor], flat.numel(), root=root, extent_bytes=extent)
        chunks, reads = ([_chunk(flat)], []) if here else ([], _reads([root], 0, [flat] * self._world))
        self._stage.exchange(call, chunks, reads, timeout_s)
        if not here:
            _give_back(flat, tensor)

    def all_gather(self, outputs: _Tensors, tensor: Tensor, timeout_s: float) -> None:
        """Output i becomes the tensor of rank i; ranks may bring different sizes if all outputs say so."""
        self._check_list("output", outputs, tensor)
        even = all(output.numel() == tensor.numel() for output in outputs)
        source, rooms = _dense(tensor).view(-1), [_dense(output).view(-1) for output in outputs]
        items = tensor.numel() if even else -1
        call = self._call(CallKind.ALL_GATHER, [tensor], items, extent_bytes=source.nbytes)
        reads = _reads(self._others, 0, rooms)
        self._stage.exchange(call, [_chunk(source)], reads, timeout_s, even=even)
        _fill(rooms, outputs, self._rank, source)

    def all_gather_into(self, output: Tensor, tensor: Tensor, timeout_s: float) -> None:
        self._check_whole("output", output, tensor)
        room = _dense(output)
        parts = room.view(-1).chunk(self._world) if room.numel() else [room] * self._world
        self.all_gather(parts, tensor, timeout_s)
        _give_back(room, output)

    def gather(self, outputs: _Tensors, tensor: Tensor, root: int, timeout_s: float) -> None:
        here = self._rank == root
        source = _dense(tensor).view(-1)
        rooms: list[Tensor] = []
        if here:
            self._check_list("output", outputs, tensor, even=True)
            rooms = [_dense(output).view(-1) for output in outputs]
        extent = 0 if here else source.nbytes
        call = self._call(CallKind.GATHER, [tensor], tensor.numel(), root=root, extent_bytes=extent)
        reads = _reads(self._others, 0, rooms) if here else []
        self._stage.exchange(call, [] if here else [_chunk(source)], reads, timeout_s)
        if here:
            _fill(rooms, outputs, self._rank, source)

    def scatter(self, output: Tensor, tensors: _Tensors, root: int, timeout_s: float) -> None:
        here = self._rank == root
        room = _dense(output).view(-1)
        pieces: list[Tensor] = []
        if here:
            self._check_list("input", tensors, output, even=True)
            pieces = [_dense(tensor).view(-1) for tensor in tensors]
        extent = room.nbytes if here else 0
        call = self._call(CallKind.SCATTER, [output], output.numel(), root=root, extent_bytes=extent)
        reads = [] if here else _reads([root], self._rank, [room] * self._world)
        self._stage.exchange(call, _chunks(pieces, self._rank), reads, timeout_s, per_rank=True)
        if here:
            room.copy_(pieces[root])
        _give_back(room, output)

    def reduce_scatter(
        self, output: Tensor, tensors: _Tensors, reduction: Reduction, timeout_s: float
    ) -> None:
        check_reduction(output.dtype, reduction)
        self._check_list("input", tensors, output)
        pieces, room = [_dense(tensor).view(-1) for tensor in tensors], _dense(output).view(-1)
        items = sum(piece.numel() for piece in pieces)
        extent = max(piece.nbytes for piece in pieces)
        call = self._call(CallKind.REDUCE_SCATTER, tensors, items, reduction=reduction, extent_bytes=extent)
        reducer = compiled_reducer(output.dtype, reduction)
        if reducer is None:
            room.copy_(combine(self._exchange_slices(call, pieces, timeout_s), reduction))
        else:
            room.copy_(pieces[self._rank])
            reads = _reads(self._others, self._rank, [room] * self._world)
            chunks = _chunks(pieces, self._rank)
            self._stage.exchange(call, chunks, reads, timeout_s, per_rank=True, reducer=reducer)
        _give_back(room, output)

    def reduce_scatter_from(
        self, output: Tensor, tensor: Tensor, reduction: Reduction, timeout_s: float
    ) -> None:
        self._check_whole("input", tensor, output)
        flat = _dense(tensor).view(-1)
        pieces = flat.chunk(self._world) if flat.numel() else [flat] * self._world
        self.reduce_scatter(output, pieces, reduction, timeout_s)

    def all_to_all(self, outputs: _Tensors, tensors: _Tensors, timeout_s: float) -> None:
        for name, given in (("output", outputs), ("input", tensors)):
            self._check_list(name, given, (outputs if name == "input" else tensors)[self._rank])
        pieces, rooms = [_dense(one).view(-1) for one in tensors], [_dense(one).view(-1) for one in outputs]
        extent = max(piece.nbytes for piece in pieces)
        call = self._call(CallKind.ALL_TO_ALL, tensors, 0, extent_bytes=extent)
        reads, chunks = _reads(self._others, self._rank, rooms), _chunks(pieces, self._rank)
        self._stage.exchange(call, chunks, reads, timeout_s, per_rank=True, even=False)
        _fill(rooms, outputs, self._rank, pieces[self._rank])

    def all_to_all_split(
        self,
        output: Tensor,
        tensor: Tensor,
        out: Sequence[int],
        into: Sequence[int],
        timeout_s: float,
    ) -> None:
        """As `all_to_all`, of tensors cut along their first dimension; without sizes into equal parts."""
        room, pieces = _dense(output), self._cut("input", _dense(tensor), into)
        self.all_to_all(self._cut("output", room, out), pieces, timeout_s)
        _give_back(room, output)

    def _call(self, kind: CallKind, tensors: _Tensors, items: int, **facts: int) -> CollectiveCall:
        self._number += 1
        return call_of(self._number, kind, tensors, items, **facts)

    def _reduce_by_torch(
        self, call: CollectiveCall, flat: Tensor, reduction: Reduction, timeout_s: float
    ) -> None:
        """Each rank combines one slice and gives the result to all, or to the root of the call."""
        ends = [flat.numel() * rank // self._world for rank in range(self._world + 1)]
        sizes = [end - begin for begin, end in pairwise(ends)]
        pieces = flat.split_with_sizes(sizes)
        cut = call._replace(extent_bytes=max(sizes) * flat.itemsize)
        result = combine(self._exchange_slices(cut, pieces, timeout_s), reduction)
        reads: list[Read] = []
        if call.root in (-1, self._rank):
            pieces[self._rank].copy_(result)
            reads = _reads(self._others, 0, pieces)
        self._stage.exchange(call._replace(extent_bytes=result.nbytes), [_chunk(result)], reads, timeout_s)

    def _exchange_slices(self, call: CollectiveCall, pieces: _Tensors, timeout_s: float) -> list[Tensor]:
        mine = pieces[self._rank]
        parts = [mine if rank == self._rank else torch.empty_like(mine) for rank in range(self._world)]
        reads = _reads(self._others, self._rank, parts)
        self._stage.exchange(call, _chunks(pieces, self._rank), reads, timeout_s, per_rank=True)
        return parts

    def _check_list(self, name: str, tensors: _Tensors, like: Tensor, *, even: bool = False) -> None:
        if len(tensors) != self._world:
            wanted = f"there must be one for each of {self._world} ranks"
            raise UserError(f"{name} list of {len(tensors)} tensors: {wanted}")
        for rank, tensor in enumerate(tensors):
            has_size = (even or rank == self._rank) and tensor.numel() != like.numel()
            if tensor.dtype != like.dtype or has_size:
                raise UserError(
                    f"{name} {rank} is {tensor.dtype} of shape {tuple(tensor.shape)}, which does not match "
                    f"{like.dtype} of shape {tuple(like.shape)}"
                )

    def _check_whole(self, name: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != self._world * part.numel() or whole.dtype != part.dtype:
            raise UserError(
                f"{name} is {whole.dtype} of shape {tuple(whole.shape)}; it must hold {self._world} tensors of "
                f"{part.dtype} and shape {tuple(part.shape)}"
            )

    def _cut(self, name: str, tensor: Tensor, splits: Sequence[int]) -> Sequence[Tensor]:
        rows = tensor.shape[0] if tensor.dim() else 0
        if not splits:
            if rows % self._world:
                why = f"which do not divide evenly over {self._world} ranks"
                raise UserError(f"{name} has {rows} rows, {why}; give split sizes")
            splits = [rows // self._world] * self._world
        if len(splits) != self._world or sum(splits) != rows:
            wanted = f"one for each of {self._world} ranks, {rows} in total"
            raise UserError(f"{name} split sizes {list(splits)}: expected {wanted}")
        return tensor.split_with_sizes(list(splits))


def _fill(rooms: _Tensors, outputs: _Tensors, rank: int, own: Tensor) -> None:
    """What came from others is there; put this rank's own beside it, and all into the caller's tensors."""
    rooms[rank].copy_(own)
    for room, output in zip(rooms, outputs, strict=True):
        _give_back(room, output)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _dense(tensor: Tensor) -> Tensor:
    """The tensor itself, without its history, or else a copy whose bytes are its values."""
    tensor = tensor.detach()
    return tensor if _is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def _give_back(dense: Tensor, tensor: Tensor) -> None:
    if dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense.view(tensor.shape))


def _chunk(tensor: Tensor) -> Chunk:
    return tensor.data_ptr(), tensor.nbytes


def _chunks(pieces: _Tensors, rank: int) -> list[Chunk]:
    """One for each other rank; what a rank has for itself does not travel."""
    return [_chunk(piece) if number != rank else (0, 0) for number, piece in enumerate(pieces)]


def _reads(ranks: Iterable[int], chunk: int, rooms: _Tensors) -> list[Read]:
    return [(rank, chunk, *_chunk(rooms[rank])) for rank in ranks]
