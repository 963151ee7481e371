"""Records of calls and the sentences about them; where things lie in shared memory, and how calls are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import UserError
from manyhands.interop.c10d import collective_calls
from manyhands.interop.c10d.collective_calls import (
    RECORD_WORDS,
    CallKind,
    CollectiveCall,
    Reduction,
    call_of,
    describe_lateness,
    describe_mismatch,
    describe_uneven,
    dtype_code,
)
from manyhands.interop.c10d.collectives import check_reduction, combine, compiled_reducer
from manyhands.interop.c10d.point_to_point import capacity_bytes, ring_index
from manyhands.interop.c10d.torch_group import Options
from manyhands.native.dtypes import CODES
from manyhands.native.segment import CACHE_LINE, PAGE


def all_reduce(tensor: torch.Tensor, number: int = 17) -> CollectiveCall:
    return call_of(
        number, CallKind.ALL_REDUCE, [tensor], reduction=Reduction.SUM, items=tensor.numel(), extent_bytes=0
    )


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (1, 2, 3, 4, 5, 6, 7)])
def test_a_record_is_read_back(shape: tuple[int, ...]) -> None:
    call = all_reduce(torch.ones(shape))
    assert len(call.words()) == RECORD_WORDS
    assert CollectiveCall.from_words(call.words()) == call


def test_calls_read_like_calls() -> None:
    assert str(all_reduce(torch.ones(2, 3))) == "all_reduce(sum) of float32[2, 3]"
    assert str(CollectiveCall(3, CallKind.BARRIER)) == "barrier"
    reduced = call_of(
        1, CallKind.REDUCE, [torch.ones(0)], reduction=Reduction.MAX, root=2, items=0, extent_bytes=0
    )
    assert str(reduced) == "reduce(max, root 2) of float32[0]"
    many = call_of(1, CallKind.ALL_GATHER, [torch.ones(1, dtype=torch.bool)] * 3, items=1, extent_bytes=1)
    assert str(many) == "all_gather of 3 tensors, first bool[1]"
    deep = call_of(1, CallKind.BROADCAST, [torch.ones([1] * 8)], root=0, items=1, extent_bytes=4)
    assert str(deep) == "broadcast(root 0) of float32[1, 1, 1, 1, 1, 1, …]"


def test_a_mismatch_names_ranks_and_loads() -> None:
    calls = [
        all_reduce(torch.ones(4)),
        all_reduce(torch.ones(4, dtype=torch.float64)),
        all_reduce(torch.ones(4)),
    ]
    assert describe_mismatch(calls[:2]) == (
        "all_reduce(sum) #17: rank 0 passes float32[4], rank 1 passes float64[4]; all ranks must pass tensors of the "
        "same shape and dtype"
    )
    assert "ranks 0, 2 pass float32[4], rank 1 passes float64[4]" in describe_mismatch(calls)
    others = [calls[0], CollectiveCall(17, CallKind.BARRIER)]
    assert describe_mismatch(others, lambda rank: f"{rank} (global {rank + 5})") == (
        "collective #17: rank 0 (global 5) calls all_reduce(sum) of float32[4], rank 1 (global 6) calls barrier; all "
        "ranks must make the same calls in the same order"
    )


def test_only_shapes_that_differ_beyond_ones_differ() -> None:
    digests = [all_reduce(torch.ones(shape)).digest for shape in ((6,), (6, 1), (1, 6, 1), (2, 3), (3, 2))]
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests[2:])) == 3


def test_uneven_exchanges_are_named() -> None:
    text = describe_uneven("all_to_all #3", [[0, 4], [8, 0]], [[0, 8], [5, 0]])
    assert text == "all_to_all #3: rank 0 sends 4 bytes to rank 1, which expects 5"
    text = describe_uneven("all_to_all #3", [[1, 1], [1, 1]], [[2, 2], [2, 2]])
    assert text.endswith(" (and 1 more)")


def test_lateness_says_who_and_where() -> None:
    where = [(1, "has left the group"), (3, "is in no call since barrier #6")]
    assert describe_lateness(all_reduce(torch.ones(4)), 2.04, where) == (
        "all_reduce(sum) of float32[4] #17: waited 2.0 s for ranks 1, 3: rank 1 has left the group; rank 3 is in no "
        "call since barrier #6"
    )


def test_every_dtype_that_moves_has_a_code_of_its_own() -> None:
    assert len(set(CODES.values())) == len(CODES) >= 16
    assert dtype_code(torch.float32) == 1
    with pytest.raises(UserError, match=r"dtype=torch\.quint8: allowed: torch\.float32"):
        dtype_code(torch.quint8)


@given(world=st.integers(1, 70))
def test_regions_and_areas_do_not_overlap(world: int) -> None:
    where = collective_calls.layout_of(world)
    assert where.region_bytes % CACHE_LINE == 0
    assert where.region_bytes >= collective_calls.TABLES + 2 * 2 * world * 8
    assert where.areas >= collective_calls.REGIONS + world * where.region_bytes
    assert where.areas % PAGE == 0
    assert where.num_bytes == where.areas + 2 * world * collective_calls.HALF_BYTES


@given(count=st.integers(0, 10_000_000), item_bytes=st.sampled_from([1, 2, 4, 8, 16]))
def test_blocks_fit_and_cover_all_items_in_as_few_rounds_as_there_can_be(count: int, item_bytes: int) -> None:
    items = collective_calls.block_items(count, item_bytes)
    assert items >= 1
    assert items * item_bytes <= collective_calls.HALF_BYTES or count <= 1
    blocks = -(-count // items)
    assert blocks == -(-count * item_bytes // collective_calls.HALF_BYTES)
    assert blocks <= 1 or items * item_bytes % CACHE_LINE == 0


@given(chunks=st.integers(0, 500))
def test_lanes_fit_into_a_half(chunks: int) -> None:
    room = collective_calls.chunk_bytes(chunks)
    assert room % CACHE_LINE == 0
    assert 0 < room * max(chunks, 1) <= collective_calls.HALF_BYTES


@given(world=st.integers(2, 40))
def test_every_two_ranks_have_a_ring_in_each_direction(world: int) -> None:
    pairs = [(a, b) for a in range(world) for b in range(world) if a != b]
    assert sorted(ring_index(a, b, world) for a, b in pairs) == list(range(len(pairs)))
    assert capacity_bytes(world) % PAGE == 0
    assert 16 << 10 <= capacity_bytes(world) <= 1 << 20


def test_what_can_not_be_reduced_is_refused() -> None:
    with pytest.raises(UserError, match=r"AVG of torch\.bool: booleans have no mean"):
        check_reduction(torch.bool, Reduction.AVG)
    with pytest.raises(UserError, match=r"SUM of torch\.uint16: torch does not support it"):
        check_reduction(torch.uint16, Reduction.SUM)
    with pytest.raises(UserError, match=r"BOR of torch\.float32"):
        check_reduction(torch.float32, Reduction.BOR)
    assert compiled_reducer(torch.int64, Reduction.SUM) is None
    assert compiled_reducer(torch.float32, Reduction.MIN) is None


def test_torch_combines_in_rank_order_and_halves_in_float32() -> None:
    parts = [torch.tensor([3.0, -1.0]), torch.tensor([2.0, 5.0]), torch.tensor([4.0, 0.5])]
    assert combine(parts, Reduction.PRODUCT).tolist() == [24.0, -2.5]
    assert combine(parts, Reduction.MIN).tolist() == [2.0, -1.0]
    assert combine(parts, Reduction.AVG).tolist() == [3.0, 1.5]
    whole = [torch.tensor([7, -7, 2**62]), torch.tensor([0, 0, 2])]
    assert combine(whole, Reduction.AVG).tolist() == [3, -3, 2**61 + 1], "cut towards zero, and exact"
    assert parts[0].tolist() == [3.0, -1.0], "the parts stay as they are"
    small = [torch.tensor([1.0], dtype=torch.bfloat16), *[torch.tensor([2**-8], dtype=torch.bfloat16)] * 2]
    assert combine(small, Reduction.SUM).item() == 1 + 2**-7, "one rounding, not two"
    assert combine([torch.tensor([True]), torch.tensor([False])], Reduction.BXOR).item() is True


def test_options_name_what_is_allowed() -> None:
    assert Options().algorithm == "shared"
    with pytest.raises(UserError, match=r"algorithm='buterfly': allowed: shared, .*did you mean 'butterfly'"):
        Options(algorithm="buterfly")
