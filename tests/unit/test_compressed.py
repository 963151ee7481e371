"""Compressed all-reduce: both forms are what one process computes from the same codecs, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from manyhands.errors import ManyhandsError
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.collective import kept_by_codecs
from manyhands.strategies.common.collectives.compressed import Compressor, gathers
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.strategies.common.collectives.schedule import chunk_bounds
from manyhands.strategies.common.collectives.schedule_collective import ScheduleCollective
from manyhands.transport.link.simulated_network import SimulatedNetwork
from manyhands.wire.codec import ParcelCodec, as_memory, codec_named
from manyhands.wire.parcels import Matrix, Parcel

pytestmark = pytest.mark.usefixtures("one_core")

STEPS = 3
COUNT = 1500
GATHERED = {
    "topk:0.01": 4,
    "topk:0.01,sampled+int8": 3,
    "sign": 5,
    "sign:vote": 3,
    "int8": 3,
    "randomk:0.1": 4,
    "dgc:0.02": 3,
    "dgc:0.001,warmup=64": 8,
}
IN_TWO_PHASES = {
    "int8": 9,
    "fp8": 8,
    "qsgd:127": 8,
    "topk:0.5": 8,
    "dgc:0.5": 8,
    "dgc:0.001,warmup=64": 24,
    "ternary": 41,
}
"""At these numbers of workers; the second is where c is not below 2 / P."""


def named(text: str, worker: int, *, sums: bool = False) -> ParcelCodec:
    codec = codec_named(text, seed=5, worker=worker, sums=sums)
    assert codec is not None
    return codec


@cache
def values_of(rank: int, step: int, count: int = COUNT) -> torch.Tensor:
    """Not to be written to."""
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * step + rank))


def run(
    text: str,
    world: int,
    parcel: Parcel,
    break_it: Callable[[int, Compressor], None] = lambda *_: None,
    steps: range = range(STEPS),
) -> tuple[list[list[torch.Tensor]], list[int]]:
    """Every rank's sums, step by step, and the bytes that it sent in the last one."""
    network = SimulatedNetwork()

    def role(rank: int) -> Callable[[], tuple[list[torch.Tensor], int]]:
        links = {peer: network.link(str(rank), str(peer)) for peer in range(world) if peer != rank}
        compressor = Compressor(text, feedback=True, seed=5, rank=rank, world=world)
        break_it(rank, compressor)
        executor = ScheduleExecutor(ALGORITHMS["direct"], rank, world, links, 20.0, codec=compressor)

        def work() -> tuple[list[torch.Tensor], int]:
            sums, sent = [], 0
            for step in steps:
                executor.at(step)
                vector = values_of(rank, step, parcel.count).clone()
                before = executor.mailbox.bytes_sent
                executor.all_reduce(vector, parcel=parcel)
                sent = executor.mailbox.bytes_sent - before
                sums.append(vector)
            return sums, sent

        return work

    found = network.run({str(rank): role(rank) for rank in range(world)})
    return [found[str(rank)][0] for rank in range(world)], [found[str(rank)][1] for rank in range(world)]


def steps_of(world: int) -> range:
    """What is left over from a step is in the next one; among dozens of ranks that is shown by two."""
    return range(STEPS if world < 20 else 2)


@cache
def run_whole(text: str, world: int) -> tuple[list[list[torch.Tensor]], list[int]]:
    """`run` of one parcel that is all there is; several tests look at the same runs, which nobody writes to."""
    return run(text, world, Parcel.whole(0, COUNT, torch.float32), steps=steps_of(world))


def coded(codec: ParcelCodec, parcel: Parcel, values: torch.Tensor, step: int) -> torch.Tensor:
    codec.at(step)
    room = torch.empty(codec.size(parcel), dtype=torch.uint8)
    got = torch.empty_like(values)
    codec.decode(parcel, room[: codec.encode(parcel, values, room)], got)
    return got


@pytest.mark.parametrize("text", GATHERED)
def test_gathering_adds_up_what_every_worker_sent(text: str) -> None:
    world, parcel = GATHERED[text], Parcel.whole(0, COUNT, torch.float32)
    codecs = [named(text, rank) for rank in range(world)]
    assert gathers(codecs[0], parcel, world)
    results, sent = run_whole(text, world)
    for step in range(STEPS):
        expected = torch.zeros(COUNT)
        for rank, codec in enumerate(codecs):
            expected += coded(codec, parcel, values_of(rank, step), step)
        codecs[0].finalize(parcel, expected)
        assert all(torch.equal(result[step], expected) for result in results), step
    if "sampled" not in text:
        assert sent == [(world - 1) * codecs[0].size(parcel)] * world


@pytest.mark.parametrize("text", IN_TWO_PHASES)
def test_two_phases_encode_the_sum_of_each_chunk_once_more(text: str) -> None:
    world, parcel = IN_TWO_PHASES[text], Parcel.whole(0, COUNT, torch.float32)
    given = [named(text, rank) for rank in range(world)]
    sums = [named(text, (1 << 20) + rank, sums=True) for rank in range(world)]
    assert not gathers(given[0], parcel, world)
    results, sent = run_whole(text, world)
    for step in steps_of(world):
        expected = torch.zeros(COUNT)
        for owner in range(world):
            begin, end = chunk_bounds(COUNT, world, owner)
            part, total = parcel.part(begin, end), torch.zeros(end - begin)
            for rank, codec in enumerate(given):
                total += coded(codec, part, values_of(rank, step)[begin:end], step)
            expected[begin:end] = coded(sums[owner], part, total, step)
        assert all(torch.equal(result[step], expected) for result in results), step
    sizes = [given[0].size(parcel.part(*chunk_bounds(COUNT, world, rank))) for rank in range(world)]
    again = [sums[0].size(parcel.part(*chunk_bounds(COUNT, world, rank))) for rank in range(world)]
    assert sent == [sum(sizes) - sizes[rank] + (world - 1) * again[rank] for rank in range(world)]


@pytest.mark.parametrize(("world", "share"), [(7, 0.8), (8, 0.8), (24, 0.25)])
def test_the_first_steps_of_a_warm_up_give_many_items_a_sum_in_either_form(world: int, share: float) -> None:
    results, _ = run_whole("dgc:0.001,warmup=64", world)
    for step in steps_of(world):
        assert float((results[0][step] != 0).float().mean()) >= share


def test_where_each_form_is_taken() -> None:
    parcel = Parcel.whole(0, 100_000, torch.float32)
    for text, most in (
        ("topk:0.01", 157),
        ("int8", 7),
        ("sign", 62),
        ("sign:vote", 1000),
        ("dgc:0.01", 157),
        ("dgc:0.001,warmup=64", 21),
    ):  # c < 2 / P, where c is the mean over a warm-up
        codec = named(text, 0)
        assert gathers(codec, parcel, most)
        assert gathers(codec, parcel, most + 1) == codec.sums_vote


def test_factors_are_summed_and_every_rank_has_the_product() -> None:
    parcel = replace(Parcel.whole(0, 30 * 20 + 7, torch.float32), matrices=(Matrix(0, 30, 20),))
    results, sent = run("powersgd:2", 3, parcel)
    codec = named("powersgd:2", 0)
    owed = [torch.zeros(parcel.count) for _ in range(3)]
    for step in range(STEPS):
        for rank in range(3):
            owed[rank] += values_of(rank, step, parcel.count)
        whole = sum(owed[1:], owed[0])
        expected = torch.empty_like(whole)
        room = torch.empty(codec.size(parcel), dtype=torch.uint8)
        inner = codec.inner  # type: ignore[attr-defined]
        inner.decode(parcel, room[: inner.encode(parcel, whole, room)], expected)
        for rank in range(3):
            assert torch.equal(results[rank][step], results[0][step])
            left = results[0][step][: 30 * 20].view(30, 20)
            basis = torch.linalg.qr(left)[0][:, :2]
            part = owed[rank][: 30 * 20].view(30, 20)
            owed[rank][: 30 * 20] -= (basis @ (basis.T @ part)).reshape(-1)
            owed[rank][30 * 20 :] = 0
        assert torch.allclose(results[0][step], expected, atol=1e-3), step
        assert torch.linalg.matrix_rank(results[0][step][: 30 * 20].view(30, 20), rtol=1e-4) == 2
    assert all(num_bytes < 2 * 2 * 4 * (2 * (30 + 20) + 7 + 6) for num_bytes in sent)


@pytest.mark.parametrize(
    ("text", "world"), [("topk:0.01", 2), ("dgc:0.02,warmup=8+qsgd:7", 2), ("int8", 9), ("dgc:0.5", 8)]
)
def test_memory_and_another_rank_make_the_sums_that_would_have_been(text: str, world: int) -> None:
    parcel = Parcel.whole(0, COUNT, torch.float32)
    assert gathers(named(text, 0), parcel, world) == (world == 2)
    whole, _ = run(text, world, parcel, steps=range(2 * STEPS))
    kept: list[Compressor] = []
    first, _ = run(text, world, parcel, lambda _rank, one: kept.append(one))
    memory = {one.rank: {name: value.clone() for name, value in one.memory().items()} for one in kept}
    assert all(memory[rank] for rank in range(world))
    rest, _ = run(
        text,
        world,
        parcel,
        lambda rank, one: one.remember(memory[rank]),
        steps=range(STEPS, 2 * STEPS),
    )
    afresh, _ = run(text, world, parcel, steps=range(STEPS, 2 * STEPS))
    for rank in range(world):
        for step in range(2 * STEPS):
            assert torch.equal(whole[rank][step], [*first[rank], *rest[rank]][step]), step
        assert not torch.equal(rest[rank][0], afresh[rank][0])


class Boasting(ScheduleCollective):
    """A worker that says it keeps another number of bytes than it does."""

    def broadcast(self, index: int, root: int = 0) -> None:
        if root == self.rank:
            self._buckets[index].view(torch.int64)[0] = said_to_keep[self.rank]
        super().broadcast(index, root)


said_to_keep: dict[int, int] = {}


def kept_of(kinds: Sequence[type[ScheduleCollective]]) -> tuple[list[dict[str, torch.Tensor]], list[Any]]:
    """What each worker keeps after one sum, and what `kept_by_codecs` finds on each."""
    network, world = SimulatedNetwork(), len(kinds)
    parcels = [Parcel.whole(0, COUNT, torch.float32), Parcel.whole(1, 64, torch.float64, exact=True)]

    def role(rank: int) -> Callable[[], tuple[dict[str, torch.Tensor], Any]]:
        links = {peer: network.link(str(rank), str(peer)) for peer in range(world) if peer != rank}
        compressor = Compressor("topk:0.01", feedback=True, seed=5, rank=rank, world=world)
        executor = ScheduleExecutor(ALGORITHMS["direct"], rank, world, links, 20.0, codec=compressor)

        def work() -> tuple[dict[str, torch.Tensor], Any]:
            collective = kinds[rank](executor, links, codec="topk:0.01")
            values, status = collective.allocate(parcels)
            values.copy_(values_of(rank, 0))
            collective.launch(0)
            collective.finish()
            return collective.memory(), kept_by_codecs(collective, 1, status)

        return work

    found = network.run({str(rank): role(rank) for rank in range(world)})
    return [found[str(rank)][0] for rank in range(world)], [found[str(rank)][1] for rank in range(world)]


def test_what_all_codecs_keep_is_on_worker_0_alone() -> None:
    memories, (first, *others) = kept_of([ScheduleCollective] * 3)
    assert others == [{}, {}]
    for memory, bytes_of_it in zip(memories, first["codec"]["workers"], strict=True):
        came = as_memory(bytes_of_it)
        assert came.keys() == memory.keys()
        assert all(torch.equal(came[name], one) for name, one in memory.items())


@pytest.mark.parametrize("count", [-1, 2**24, 2**62])
def test_a_worker_that_says_it_keeps_what_it_cannot_is_named(count: int) -> None:
    said_to_keep[1] = count
    with pytest.raises(
        ManyhandsError, match=rf"worker 1 reports {count} bytes of its own state; at most \d+ "
    ):
        kept_of([ScheduleCollective, Boasting])


def test_bytes_that_make_no_sense_name_the_rank_they_came_from() -> None:
    def lie(rank: int, compressor: Compressor) -> None:
        if rank == 1:
            codec = compressor._given
            plain = codec.encode
            codec.encode = lambda parcel, values, into: plain(parcel, values, into) - 1  # type: ignore[method-assign]

    parcel = Parcel.whole(0, COUNT, torch.float32)
    with pytest.raises(
        ManyhandsError, match=r"compressed all-reduce, call 0, round 1: from rank 1: received 1523 bytes"
    ):
        run("int8", 2, parcel, lie)
