"""Every collective on our backend beside the same call on Gloo, or beside a closed form where Gloo has none."""

from __future__ import annotations

import warnings
from itertools import product

import torch
import torch.distributed as dist

from processes.c10d_worker import Ranks

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64)
MOVED = (*FLOATS, *WHOLE, torch.int16, torch.bool, torch.complex64)
COUNTS = (0, 1, 7, 1000)
LARGE = 200_003  # several rounds, and no multiple of anything

ARITHMETIC = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
BITS = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


def operations(dtype: torch.dtype) -> tuple[dist.ReduceOp.RedOpType, ...]:
    return (*ARITHMETIC, *BITS) if dtype in WHOLE else ARITHMETIC


def same(ours: torch.Tensor, wanted: torch.Tensor, *what: object) -> None:
    assert torch.equal(ours, wanted), (what, ours, wanted)


def check_all_reduce(ranks: Ranks) -> None:
    for dtype, count in product((*FLOATS, *WHOLE), COUNTS):
        for op in operations(dtype):
            ours, wanted = ranks.values(count, dtype), ranks.values(count, dtype)
            dist.all_reduce(ours, op)
            dist.all_reduce(wanted, op, group=ranks.gloo)
            same(ours, wanted, dtype, count, op)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        ours, wanted = ranks.values(LARGE, dtype), ranks.values(LARGE, dtype)
        dist.all_reduce(ours)
        dist.all_reduce(wanted, group=ranks.gloo)
        same(ours, wanted, dtype, LARGE)


def check_all_reduce_is_in_rank_order_and_has_the_same_bits_everywhere(ranks: Ranks) -> None:
    for count in (3, 77_777):
        parts = [torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(ranks.world)]
        wanted = parts[0].clone()
        for part in parts[1:]:
            wanted += part
        ours = parts[ranks.rank].clone()
        dist.all_reduce(ours)
        same(ours, wanted, count)


def check_mean(ranks: Ranks) -> None:
    for dtype, count in product((torch.float32, torch.float64), (1, 7, LARGE)):
        ours, wanted = ranks.values(count, dtype), ranks.values(count, dtype)
        dist.all_reduce(ours, dist.ReduceOp.AVG)
        dist.all_reduce(wanted, group=ranks.gloo)
        same(ours, wanted / ranks.world, dtype, count)


def check_shapes_strides_and_autograd(ranks: Ranks) -> None:
    base = ranks.values(60, torch.float32).view(6, 10)
    for view in (base.t(), base[:, ::2], base[1:3], base.view(3, 2, 10)[1]):
        ours, wanted = view.clone(), view.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(ours)
        dist.all_reduce(wanted, group=ranks.gloo)
        same(ours, wanted, view.stride())
    strided = base.clone()
    dist.broadcast(strided[:, ::2], 0)
    same(strided[:, ::2], ranks.values(60, torch.float32, rank=0).view(6, 10)[:, ::2])
    same(strided[:, 1::2], base[:, 1::2])
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf)
    same(leaf.detach(), torch.full((3,), float(ranks.world)))
    complex_ours = ranks.values(5, torch.complex64) * 1j
    complex_wanted = complex_ours.clone()
    dist.all_reduce(complex_ours)
    dist.all_reduce(complex_wanted, group=ranks.gloo)
    same(complex_ours, complex_wanted)


def check_reduce(ranks: Ranks) -> None:
    for root, dtype, count in product(
        range(ranks.world), (torch.float32, torch.bfloat16, torch.int64), (0, 5, 80_001)
    ):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            before = ranks.values(count, dtype)
            ours, wanted = before.clone(), before.clone()
            dist.reduce(ours, root, op)
            dist.all_reduce(wanted, op, group=ranks.gloo)
            same(ours, wanted if ranks.rank == root else before, root, dtype, count, op)


def check_broadcast(ranks: Ranks) -> None:
    for root, dtype, count in product(range(ranks.world), MOVED, (*COUNTS, LARGE)):
        ours = ranks.values(count, dtype)
        dist.broadcast(ours, root)
        same(ours, ranks.values(count, dtype, rank=root), root, dtype, count)


def check_all_gather(ranks: Ranks) -> None:
    for dtype, count in product(MOVED, (*COUNTS, LARGE)):
        mine = ranks.values(count, dtype)
        wanted = [ranks.values(count, dtype, rank=rank) for rank in range(ranks.world)]
        outputs = [torch.empty(count, dtype=dtype) for _ in wanted]
        dist.all_gather(outputs, mine)
        for got, want in zip(outputs, wanted, strict=True):
            same(got, want, dtype, count)
        joined, stacked = (
            torch.empty(count * ranks.world, dtype=dtype),
            torch.empty(ranks.world, count, dtype=dtype),
        )
        dist.all_gather_into_tensor(joined, mine)
        same(joined, torch.cat(wanted), dtype, count)
        dist.all_gather_into_tensor(stacked, mine)
        same(stacked, torch.stack(wanted), dtype, count)
    in_place = torch.zeros(ranks.world, 3)
    in_place[ranks.rank] = float(ranks.rank)
    dist.all_gather_into_tensor(in_place.view(-1), in_place[ranks.rank])
    same(in_place[:, 1], torch.arange(float(ranks.world)))


def check_uneven_all_gather(ranks: Ranks) -> None:
    counts = [3 + 100_000 * rank for rank in range(ranks.world)]
    outputs = [torch.empty(count) for count in counts]
    dist.all_gather(outputs, ranks.values(counts[ranks.rank], torch.float32))
    for rank, (output, count) in enumerate(zip(outputs, counts, strict=True)):
        same(output, ranks.values(count, torch.float32, rank=rank))


def check_gather_and_scatter(ranks: Ranks) -> None:
    for root, dtype, count in product(
        range(ranks.world), (torch.float32, torch.int64, torch.bool), (0, 5, LARGE)
    ):
        here = ranks.rank == root
        everyones = [ranks.values(count, dtype, rank=rank) for rank in range(ranks.world)]
        outputs = [torch.empty(count, dtype=dtype) for _ in everyones] if here else None
        dist.gather(everyones[ranks.rank], outputs, root)
        for got, want in zip(outputs or [], everyones if here else [], strict=True):
            same(got, want, root, dtype, count)
        output = torch.empty(count, dtype=dtype)
        dist.scatter(output, everyones if here else None, root)
        same(output, everyones[ranks.rank], root, dtype, count)


def check_reduce_scatter(ranks: Ranks) -> None:
    for dtype, count in product((torch.float32, torch.bfloat16, torch.int64), (0, 1, 5, 80_001)):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            mine = ranks.values(count * ranks.world, dtype, most=3)
            wanted = mine.clone()
            dist.all_reduce(wanted, op, group=ranks.gloo)
            wanted = wanted[count * ranks.rank : count * (ranks.rank + 1)]
            before = mine.clone()
            output = torch.empty(count, dtype=dtype)
            dist.reduce_scatter_tensor(output, mine, op)
            same(output, wanted, dtype, count, op)
            parts = [mine[count * rank : count * (rank + 1)] for rank in range(ranks.world)]
            output = torch.empty(count, dtype=dtype)
            dist.reduce_scatter(output, parts, op)
            same(output, wanted, dtype, count, op)
            same(mine, before, "the input must stay")
    output = torch.empty(ranks.rank + 1)
    dist.reduce_scatter(
        output, [torch.full((rank + 1,), 2.0) for rank in range(ranks.world)], dist.ReduceOp.AVG
    )
    same(output, torch.full((ranks.rank + 1,), 2.0))


def check_all_to_all(ranks: Ranks) -> None:
    world, rank = ranks.world, ranks.rank
    for dtype, rows in product((torch.float32, torch.int64, torch.bool), (0, 1, 30_001)):
        mine = ranks.values(rows * world, dtype)
        output = torch.empty(rows * world, dtype=dtype)
        dist.all_to_all_single(output, mine)
        theirs = [ranks.values(rows * world, dtype, rank=other) for other in range(world)]
        same(output, torch.cat([one[rows * rank : rows * (rank + 1)] for one in theirs]), dtype, rows)
    # rank i has i + j + 1 rows of width 2 for rank j
    sizes = [[(i + j + 1) * (1 if i else 20_000) for j in range(world)] for i in range(world)]
    outgoing = [torch.full((sizes[rank][j], 2), float(10 * rank + j)) for j in range(world)]
    wanted = [torch.full((sizes[i][rank], 2), float(10 * i + rank)) for i in range(world)]
    output = torch.empty(sum(one[rank] for one in sizes), 2)
    dist.all_to_all_single(output, torch.cat(outgoing), [one[rank] for one in sizes], sizes[rank])
    same(output, torch.cat(wanted))
    outputs = [torch.empty_like(one) for one in wanted]
    dist.all_to_all(outputs, outgoing)
    for got, want in zip(outputs, wanted, strict=True):
        same(got, want)


def check_coalesced(ranks: Ranks) -> None:
    def tensors() -> list[torch.Tensor]:
        return [
            ranks.values(n, dtype) for n, dtype in ((5, torch.float32), (3, torch.int64), (9, torch.float32))
        ]

    wanted = tensors()
    for tensor in wanted:
        dist.all_reduce(tensor, group=ranks.gloo)
    ours = tensors()
    ranks.ours.allreduce_coalesced(ours).wait()
    with dist._coalescing_manager(ranks.ours, device=torch.device("cpu")):
        managed = tensors()
        for tensor in managed:
            dist.all_reduce(tensor)
    for one in (ours, managed):
        for got, want in zip(one, wanted, strict=True):
            same(got, want)

    mine = ranks.values(4, torch.float32)
    everyones = torch.cat([ranks.values(4, torch.float32, rank=rank) for rank in range(ranks.world)])
    outputs = [torch.empty(4 * ranks.world) for _ in range(2)]
    with dist._coalescing_manager(ranks.ours, device=torch.device("cpu")):
        for output in outputs:
            dist.all_gather_into_tensor(output, mine)
    parts = [torch.empty(4) for _ in range(2)]
    with dist._coalescing_manager(ranks.ours, device=torch.device("cpu")):
        for part in parts:
            dist.reduce_scatter_tensor(part, everyones)
    for output, part in zip(outputs, parts, strict=True):
        same(output, everyones)
        same(part, ranks.world * mine)
    lists = [[torch.empty(4), torch.empty(4)] for _ in range(ranks.world)]
    ranks.ours.allgather_coalesced(lists, [mine, 2 * mine]).wait()
    for rank, (one, twice) in enumerate(lists):
        same(one, ranks.values(4, torch.float32, rank=rank))
        same(twice, 2 * one)


def check_objects(ranks: Ranks) -> None:
    mine = {"rank": ranks.rank, "text": "é" * (1 + 50_000 * ranks.rank)}
    everyones = [{"rank": rank, "text": "é" * (1 + 50_000 * rank)} for rank in range(ranks.world)]
    got: list[object] = [None] * ranks.world
    dist.all_gather_object(got, mine)
    assert got == everyones
    last = ranks.world - 1
    spoken = [mine, ranks.rank]
    dist.broadcast_object_list(spoken, last)
    assert spoken == [everyones[last], last]
    collected: list[object] | None = [None] * ranks.world if ranks.rank == last else None
    dist.gather_object(mine, collected, last)
    assert collected is None or collected == everyones
    handed: list[object] = [None]
    dist.scatter_object_list(handed, everyones if ranks.rank == last else None, last)
    assert handed == [mine]


def check_functional_collectives(ranks: Ranks) -> None:
    from torch.distributed import _functional_collectives as functional

    mine, name = ranks.values(6, torch.float32), ranks.ours.group_name
    total = mine.clone()
    dist.all_reduce(total, group=ranks.gloo)
    same(functional.all_reduce(mine, "sum", name) + 0, total)
    everyones = torch.cat([ranks.values(6, torch.float32, rank=rank) for rank in range(ranks.world)])
    same(functional.all_gather_tensor(mine, 0, name) + 0, everyones)
    same(functional.reduce_scatter_tensor(everyones, "sum", 0, name) + 0, ranks.world * mine)
    same(functional.broadcast(mine, 0, name) + 0, ranks.values(6, torch.float32, rank=0))
    wide = torch.arange(2.0 * ranks.world) + 100 * ranks.rank
    wanted = torch.cat([torch.arange(2.0) + 2 * ranks.rank + 100 * rank for rank in range(ranks.world)])
    same(functional.all_to_all_single(wide, None, None, name) + 0, wanted)


def check_sparse_tensors_go_to_gloo(ranks: Ranks) -> None:
    def sparse() -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that their indices are not checked
            return torch.sparse_coo_tensor(torch.tensor([[ranks.rank, 5]]), torch.tensor([1.0, 2.0]), (9,))

    ours, wanted = sparse(), sparse()
    dist.all_reduce(ours)
    dist.all_reduce(wanted, group=ranks.gloo)
    same(ours.to_dense(), wanted.to_dense())
