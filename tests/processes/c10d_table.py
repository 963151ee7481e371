"""A table over collective, reduction, dtype and shape: every row is called on Gloo and on our backend, and compared.

Where Gloo gives a result, ours is the same: bit for bit with two ranks; with more, floats are added in another order,
and agree to rounding. Where Gloo refuses, so do we, unless we do more, which `does_more` says; the reference is then
made of what Gloo does take. Where Gloo misreads memory (`is_misread`), the reference is Gloo on a copy without gaps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from processes.c10d_worker import Ranks

Tensors = list[torch.Tensor]

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2),
)
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
ROUNDING = {
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.float32: 1e-6,
    torch.float64: 1e-12,
    torch.complex64: 1e-6,
    torch.complex128: 1e-12,
}

STAND_INS = {
    torch.int16: torch.int64,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.float8_e5m2: torch.float32,
}
"""For dtypes that Gloo does not take: one that it does, and that holds all their values."""


class Row(NamedTuple):
    """One line of the table."""

    collective: str
    reduction: str
    dtype: torch.dtype
    shape: str

    def __str__(self) -> str:
        return f"{self.collective} {self.reduction} {self.dtype} {self.shape}"


class Call(NamedTuple):
    """What a row is made of: the ranks, the group it goes to, and what each rank brings."""

    ranks: Ranks
    group: Any
    row: Row
    dtype: torch.dtype

    @property
    def op(self) -> Any:
        return getattr(dist.ReduceOp, self.row.reduction or "SUM")

    @property
    def last(self) -> int:
        return self.ranks.world - 1

    def values(self, number: int = 0, rank: int | None = None) -> torch.Tensor:
        """What a rank brings, of the row's shape; `number` tells several of one rank apart."""
        given = values(
            self.row.dtype, SHAPES[self.row.shape], self.ranks.rank if rank is None else rank, number
        )
        return laid_out(given.to(self.dtype), self.row.shape)

    def room(self) -> torch.Tensor:
        """A place for a result."""
        return laid_out(torch.zeros(SHAPES[self.row.shape], dtype=self.dtype), self.row.shape)

    def rooms(self) -> Tensors:
        return [self.room() for _ in range(self.ranks.world)]

    def parts(self) -> Tensors:
        """Something for each rank."""
        return [self.values(number) for number in range(self.ranks.world)]


SHAPES: dict[str, tuple[int, ...]] = {
    "vector": (5,),
    "scalar": (),
    "empty": (0,),
    "matrix": (3, 2),
    "transposed": (3, 4),
    "strided": (6,),
    "vector of six": (6,),
}


def values(dtype: torch.dtype, shape: tuple[int, ...], rank: int, number: int) -> torch.Tensor:
    """Fractions of both signs for floats; integers whose products fit; the same in every process."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    whole = torch.randint(1, 6, shape, generator=generator)
    if dtype is torch.float8_e5m2:
        return whole.to(torch.float32).to(dtype)
    if dtype.is_complex:
        return torch.complex(*(torch.randn(shape, generator=generator) for _ in range(2))).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype is torch.bool:
        return whole > 3
    return (whole - 3 if dtype.is_signed else whole).to(dtype)


def laid_out(tensor: torch.Tensor, shape: str) -> torch.Tensor:
    """The same values with the strides that the shape's name promises."""
    if shape == "transposed":
        return tensor.t().contiguous().t()
    if shape == "strided":
        return torch.stack([tensor, tensor], 1).view(-1)[::2]
    return tensor


def all_reduce(call: Call) -> Tensors:
    tensor = call.values()
    dist.all_reduce(tensor, call.op, group=call.group)
    return [tensor]


def all_reduce_coalesced(call: Call) -> Tensors:
    tensors = [call.values(0), call.values(1)]
    dist.all_reduce_coalesced(tensors, call.op, group=call.group)
    return tensors


def reduce(call: Call) -> Tensors:
    tensor = call.values()
    dist.reduce(tensor, call.last, call.op, group=call.group)
    return [tensor] if call.ranks.rank == call.last else []  # elsewhere Gloo leaves what it likes


def reduce_scatter(call: Call) -> Tensors:
    output = call.room()
    dist.reduce_scatter(output, call.parts(), call.op, group=call.group)
    return [output]


def reduce_scatter_tensor(call: Call) -> Tensors:
    output = call.room()
    dist.reduce_scatter_tensor(output, torch.cat(call.parts()), call.op, group=call.group)
    return [output]


def broadcast(call: Call) -> Tensors:
    tensor = call.values()
    dist.broadcast(tensor, call.last, group=call.group)
    return [tensor]


def broadcast_coalesced(call: Call) -> Tensors:
    tensors = [call.values(0), call.values(1)]
    dist._broadcast_coalesced(call.group, tensors, 1 << 20, call.last)
    return tensors


def all_gather(call: Call) -> Tensors:
    outputs = call.rooms()
    dist.all_gather(outputs, call.values(), group=call.group)
    return outputs


def all_gather_coalesced(call: Call) -> Tensors:
    outputs = [[call.room(), call.room()] for _ in range(call.ranks.world)]
    dist.all_gather_coalesced(outputs, [call.values(0), call.values(1)], group=call.group)
    return [tensor for output in outputs for tensor in output]


def all_gather_into_tensor(call: Call) -> Tensors:
    output = torch.cat(call.rooms())
    dist.all_gather_into_tensor(output, call.values(), group=call.group)
    return [output]


def gather(call: Call) -> Tensors:
    outputs = call.rooms() if call.ranks.rank == call.last else None
    dist.gather(call.values(), outputs, call.last, group=call.group)
    return outputs or []


def scatter(call: Call) -> Tensors:
    output = call.room()
    dist.scatter(output, call.parts() if call.ranks.rank == call.last else None, call.last, group=call.group)
    return [output]


def all_to_all(call: Call) -> Tensors:
    outputs = call.rooms()
    dist.all_to_all(outputs, call.parts(), group=call.group)
    return outputs


def all_to_all_single(call: Call) -> Tensors:
    output = torch.stack(call.rooms())
    dist.all_to_all_single(output, torch.stack(call.parts()), group=call.group)
    return [output]


def all_to_all_single_uneven(call: Call) -> Tensors:
    """Rank i has i + 1 of them for every rank."""
    world, rank = call.ranks.world, call.ranks.rank
    sizes = [[i + 1] * world for i in range(world)]
    given = torch.stack([call.values(number) for number in range(sum(sizes[rank]))])
    output = torch.stack([call.room() for _ in range(sum(one[rank] for one in sizes))])
    dist.all_to_all_single(output, given, [one[rank] for one in sizes], sizes[rank], group=call.group)
    return [output]


def send_and_recv(call: Call) -> Tensors:
    if call.ranks.rank == 0:
        dist.send(call.values(), 1, group=call.group, tag=3)
    elif call.ranks.rank == 1:
        room = call.room()
        dist.recv(room, 0, group=call.group, tag=3)
        return [room]
    return []


def batch_isend_irecv(call: Call) -> Tensors:
    world, rank = call.ranks.world, call.ranks.rank
    room = call.room()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, call.values(), (rank + 1) % world, call.group),
            dist.P2POp(dist.irecv, room, (rank - 1) % world, call.group),
        ]
    )
    for work in works:
        work.wait()
    return [room]


Collective = Callable[[Call], Tensors]
REDUCE: dict[str, Collective] = {
    one.__name__: one
    for one in (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor, all_reduce_coalesced)
}
MOVE: dict[str, Collective] = {
    one.__name__: one
    for one in (
        *(broadcast, broadcast_coalesced, all_gather, all_gather_coalesced, all_gather_into_tensor),
        *(gather, scatter, all_to_all, all_to_all_single, all_to_all_single_uneven),
        *(send_and_recv, batch_isend_irecv),
    )
}
MESSAGES = (send_and_recv.__name__, batch_isend_irecv.__name__)
LEFT_OUT: defaultdict[str, tuple[str, ...]] = defaultdict(
    tuple,
    reduce_scatter_tensor=("scalar",),  # Gloo fails a check in C++, which ends the process
    all_gather_into_tensor=("scalar",),  # Gloo finds the sizes wrong
    **dict.fromkeys(
        MESSAGES, ("transposed", "strided")
    ),  # Gloo refuses them at the sender, we at the receiver
)


def rows() -> Iterator[Row]:
    """All dtypes and shapes for sums and moves; all reductions with dtypes and a few shapes."""
    for collective, reduction, dtype, shape in product(REDUCE, REDUCTIONS, DTYPES, SHAPES):
        if (reduction == "SUM" or shape in ("vector", "transposed")) and shape not in LEFT_OUT[collective]:
            yield Row(collective, reduction, dtype, shape)
    for collective, dtype, shape in product(MOVE, DTYPES, SHAPES):
        if shape not in LEFT_OUT[collective]:
            yield Row(collective, "", dtype, shape)


def does_more(row: Row) -> bool:
    """Whether Gloo refuses a row that we take: numbers it does not know, means of whole ones, and some complex ones."""
    if row.dtype in STAND_INS:
        return has_reduction(row) if row.reduction else row.collective not in MESSAGES
    if row.dtype.is_complex:
        return row.collective == "gather" or (
            row.reduction == "PRODUCT" and "all_reduce" not in row.collective
        )
    return row.reduction == "AVG" and is_whole(row.dtype)


def has_reduction(row: Row) -> bool:
    """Whether torch can do it on the CPU, for the dtypes that Gloo does not know."""
    if row.dtype is torch.int16:
        return True
    return is_whole(row.dtype) and row.reduction in ("PRODUCT", "BAND", "BOR", "BXOR")


def is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def is_misread(row: Row) -> bool:
    """Whether Gloo takes the memory of a view with gaps as if it had none, and writes what lies between, too."""
    takers = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "scatter")
    return row.shape == "strided" and row.collective in takers


def outcome(ranks: Ranks, row: Row, group: Any, dtype: torch.dtype | None = None) -> Tensors | str:
    """What a row gives, or the first line of what it raises."""
    try:
        return {**REDUCE, **MOVE}[row.collective](Call(ranks, group, row, dtype or row.dtype))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def reference(ranks: Ranks, row: Row) -> Tensors | str:
    """What Gloo gives for a row, or should."""
    if is_misread(row):
        return reference(ranks, row._replace(shape="vector of six"))
    if not does_more(row):
        return outcome(ranks, row, ranks.gloo)
    if row.dtype.is_complex:
        return by_hand(Call(ranks, ranks.gloo, row, row.dtype))
    stand_in = STAND_INS.get(row.dtype, torch.int64)
    if row.reduction != "AVG":
        return cast(outcome(ranks, row, ranks.gloo, stand_in), row.dtype)
    sums = outcome(ranks, row._replace(reduction="SUM"), ranks.gloo, stand_in)
    assert not isinstance(sums, str), sums
    return cast([torch.div(one, ranks.world, rounding_mode="trunc") for one in sums], row.dtype)


def cast(given: Tensors | str, dtype: torch.dtype) -> Tensors:
    assert not isinstance(given, str), given
    return [one.to(dtype) for one in given]


def by_hand(call: Call) -> Tensors:
    """Complex numbers gathered, or multiplied: what Gloo cannot do for any dtype that holds them."""
    everyone = range(call.ranks.world)
    if call.row.collective == "gather":
        return [call.values(rank=rank) for rank in everyone] if call.ranks.rank == call.last else []
    mine = 0 if call.row.collective == "reduce" else call.ranks.rank
    result = call.values(mine, rank=0)
    for rank in everyone[1:]:
        result = result * call.values(mine, rank=rank)
    return [result] if call.row.collective != "reduce" or call.ranks.rank == call.last else []


def difference(ours: Tensors, wanted: Tensors, tolerance: float) -> str:
    """How results differ, or nothing."""
    for got, want in zip(ours, wanted, strict=True):
        if got.dtype != want.dtype or got.shape != want.shape:
            return (
                f"Gloo gives {want.dtype} of {tuple(want.shape)}, we give {got.dtype} of {tuple(got.shape)}"
            )
        if tolerance and got.dtype in ROUNDING:
            close = torch.allclose(got, want, rtol=tolerance, atol=tolerance)
        else:
            close = bits(got) == bits(want)
        if not close:
            return f"Gloo gives {want}, we give {got}"
    return ""


def bits(tensor: torch.Tensor) -> list[int]:
    if tensor.dtype is torch.bool:
        return tensor.flatten().tolist()  # a sum of three truths is a byte of 3 on Gloo
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def compared(ranks: Ranks, row: Row) -> str:
    """What is wrong with a row, or nothing."""
    exact = ranks.world == 2 and not (row.dtype.is_complex and row.reduction == "PRODUCT")
    tolerance = 0.0 if exact else ROUNDING.get(row.dtype, 0.0)
    wanted, ours = reference(ranks, row), outcome(ranks, row, ranks.ours)
    if isinstance(wanted, str) and isinstance(ours, str):
        return ""
    if isinstance(wanted, str):
        return f"{row}: Gloo refuses ({wanted}), we give {ours}"
    if isinstance(ours, str):
        return f"{row}: we refuse ({ours}), Gloo gives {wanted}"
    if row.dtype is torch.bool and any(one.clone().view(torch.uint8).gt(1).any() for one in ours):
        return f"{row}: a truth value of ours is neither 0 nor 1"
    text = difference(ours, wanted, tolerance)
    return text and f"{row}: {text}"


def check_every_row_is_as_on_gloo(ranks: Ranks) -> None:
    if ranks.world == 1:
        return
    table = list(rows())
    found: list[Any] = [
        None
    ] * ranks.world  # so that all ranks fail, and each says what any of them has found
    dist.all_gather_object(found, [text for row in table if (text := compared(ranks, row))], group=ranks.gloo)
    wrong = [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]
    assert not wrong, f"{len(wrong)} of {len(table)} rows:\n" + "\n".join(wrong)


def check_gloo_refuses_what_the_table_says_that_it_does(ranks: Ranks) -> None:
    """Else a row would be compared with a reference by hand where Gloo could be asked."""
    if ranks.world == 1:
        return
    more = dict.fromkeys(row._replace(shape="vector") for row in rows() if does_more(row))
    taken = [str(row) for row in more if not isinstance(outcome(ranks, row, ranks.gloo), str)]
    assert not taken, taken


def check_what_gloo_loses_stays(ranks: Ranks) -> None:
    """A NaN of any rank, in minima and maxima, and a view with gaps, where Gloo also writes between them."""
    for reduction, dtype in product(("MIN", "MAX"), (torch.float32, torch.float64, torch.bfloat16)):
        tensor = torch.ones(ranks.world, dtype=dtype)
        tensor[ranks.rank] = float("nan")
        dist.all_reduce(tensor, getattr(dist.ReduceOp, reduction))
        assert tensor.isnan().all(), (reduction, dtype, tensor)
    whole = torch.zeros(3, 4)
    dist.all_reduce(whole[:, :2].fill_(1.0))
    assert whole.tolist() == 3 * [[ranks.world, ranks.world, 0, 0]]


def check_objects_and_barriers_on_both(ranks: Ranks) -> None:
    if ranks.world == 1:
        return
    results = []
    for group in (ranks.gloo, ranks.ours):
        everyone: list[Any] = [None] * ranks.world
        dist.all_gather_object(
            everyone, {"rank": ranks.rank, "data": torch.arange(ranks.rank + 2)}, group=group
        )
        spoken = [ranks.rank, "é" * ranks.rank]
        dist.broadcast_object_list(spoken, 1, group=group)
        passed = [("from", ranks.rank), None]
        if ranks.rank == 0:
            dist.send_object_list(passed, 1, group=group)
        elif ranks.rank == 1:
            dist.recv_object_list(passed, 0, group=group)
        assert dist.barrier(group=group) is None
        dist.barrier(group=group, async_op=True).wait()
        dist.barrier(group=group, device_ids=[ranks.rank])  # as Accelerate does; there may be no such device
        results.append(str((everyone, spoken, passed)))
    assert results[0] == results[1], results
