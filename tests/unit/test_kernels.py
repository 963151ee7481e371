"""The compiled reductions against torch, which nobody here wrote: every type, operation, world and awkward value."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit, types

from manyhands.native.group import reduction_kernels
from manyhands.native.group.shared_group import slice_of

KINDS = {
    torch.float32: reduction_kernels.FLOAT32,
    torch.float64: reduction_kernels.FLOAT64,
    torch.bfloat16: reduction_kernels.BFLOAT16,
    torch.float16: reduction_kernels.FLOAT16,
}
OPERATIONS = {"sum": reduction_kernels.SUM, "mean": reduction_kernels.MEAN, "max": reduction_kernels.MAX}
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
AWKWARD = [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 6e-8, -6e-8, 1e-40, 65504.0, 3e38]


@njit
def call(address: int, table: int, world: int, count: int, operation: int, target: int, scratch: int) -> None:
    reduction_kernels.call_reducer(address, table, world, count, operation, target, scratch)


def reduce(parts: list[torch.Tensor], operation: int, target: int = reduction_kernels.ALL) -> None:
    table = np.array([part.data_ptr() for part in parts], np.int64)
    scratch = np.empty(reduction_kernels.SCRATCH_BYTES, np.uint8)
    address = reduction_kernels.reducer_address(KINDS[parts[0].dtype])
    count = parts[0].numel()
    call(address, table.ctypes.data, len(parts), count, operation, target, scratch.ctypes.data)


def expected(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """One rank after the other; 16-bit types in float32 with one rounding at the end."""
    dtype = parts[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = torch.maximum(total, part.to(wide)) if op == "max" else total + part.to(wide)
    return (total / len(parts) if op == "mean" else total).to(dtype)


def assert_same(actual: torch.Tensor, wanted: torch.Tensor, *, signed_zero: bool = True) -> None:
    """Bit for bit, except that any NaN is as good as another."""
    assert torch.equal(actual.isnan(), wanted.isnan())
    number = ~wanted.isnan()
    if signed_zero:
        bits = BITS[actual.element_size()]
        assert torch.equal(actual.view(bits)[number], wanted.view(bits)[number])
    else:
        assert torch.equal(actual[number], wanted[number])


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("world", range(1, 9))
def test_every_size_equals_torch_in_rank_order(world: int, dtype: torch.dtype, op: str) -> None:
    generator = torch.Generator().manual_seed(world)
    for count in (0, 1, 7, 1023, 1024, 1025, 5000):
        scales = torch.randint(-8, 9, (world, count), generator=generator)
        values = torch.randn(world, count, generator=generator, dtype=torch.float64) * torch.exp2(scales)
        parts = list(values.to(dtype))
        wanted = expected(parts, op)
        reduce(parts, OPERATIONS[op])
        for part in parts:
            assert_same(part, wanted)


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_nan_infinity_zero_and_subnormals(world: int, dtype: torch.dtype, op: str) -> None:
    combinations = torch.tensor(list(itertools.product(AWKWARD, repeat=world)), dtype=torch.float64).T
    parts = [row.to(dtype).contiguous() for row in combinations]
    wanted = expected(parts, op)
    reduce(parts, OPERATIONS[op])
    for part in parts:
        assert_same(part, wanted, signed_zero=op != "max")


def test_the_maximum_of_two_zeros_is_that_of_the_higher_rank() -> None:
    for zeros in itertools.product((0.0, -0.0), repeat=3):
        parts = [torch.tensor([zero]) for zero in zeros]
        reduce(parts, reduction_kernels.MAX)
        assert [part.signbit().item() for part in parts] == [math.copysign(1.0, zeros[-1]) < 0] * 3


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_copy_moves_every_byte_of_the_root(world: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for count, root in itertools.product((0, 1, 4099), range(world)):
        num_bytes = count * dtype.itemsize
        noise = torch.randint(0, 256, (world, num_bytes), generator=generator, dtype=torch.uint8)
        parts = [row.clone().view(dtype) for row in noise]
        reduce(parts, reduction_kernels.COPY + root)
        for part in parts:
            assert torch.equal(part.view(torch.uint8), noise[root])


def test_neighbours_of_a_slice_stay_untouched() -> None:
    for world in (2, 3):
        whole = [torch.full((300,), float(rank)) for rank in range(world)]
        reduce([part[32:133] for part in whole], reduction_kernels.SUM)
        for rank, part in enumerate(whole):
            assert part[32:133].eq(sum(range(world))).all()
            assert part[:32].eq(rank).all()
            assert part[133:].eq(rank).all()


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("world", range(1, 6))
def test_a_result_for_one_part_leaves_the_others_as_they_were(
    world: int, dtype: torch.dtype, op: str
) -> None:
    generator = torch.Generator().manual_seed(world)
    for count, target in itertools.product((0, 1, 1025, 3000), range(world)):
        before = list(torch.randn(world, count, generator=generator).to(dtype))
        parts = [part.clone() for part in before]
        reduce(parts, OPERATIONS[op], target)
        for rank, part in enumerate(parts):
            assert_same(part, expected(before, op) if rank == target else before[rank])


@njit
def widen_all(bits: np.ndarray, out: np.ndarray) -> None:
    for i in range(bits.size):
        out[i] = reduction_kernels._widen_half_by_bits(bits[i])


@njit
def narrow_all(values: np.ndarray, out: np.ndarray) -> None:
    for i in range(values.size):
        out[i] = reduction_kernels._narrow_half_by_bits(values[i])


def test_half_without_hardware_widens_all_65536_values_as_numpy_does() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    out = np.empty(bits.size, np.float32)
    widen_all(bits, out)
    with np.errstate(invalid="ignore"):  # signalling NaNs are among them, of which some processors tell
        wanted = bits.view(np.float16).astype(np.float32)
    number = ~np.isnan(wanted)
    assert np.array_equal(out.view(np.uint32)[number], wanted.view(np.uint32)[number])
    assert np.isnan(out[~number]).all()


def test_half_without_hardware_rounds_as_numpy_does() -> None:
    halves = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    exact = halves[np.isfinite(halves)].astype(np.float32)
    between = (np.sort(exact)[1:] + np.sort(exact)[:-1]) / 2  # ties
    near = np.concatenate([np.nextafter(between, np.float32(s)) for s in (-np.inf, np.inf)])
    special = np.array([np.nan, np.inf, -np.inf, 65519.0, 65520.0, 3e38, 1e-45, -1e-45], np.float32)
    values = np.concatenate([exact, between, near, special]).astype(np.float32)
    out = np.empty(values.size, np.uint16)
    narrow_all(values, out)
    with np.errstate(over="ignore"):
        wanted = values.astype(np.float16)
    number = ~np.isnan(wanted)
    assert np.array_equal(out[number], wanted.view(np.uint16)[number])
    assert np.isnan(out.view(np.float16)[~number]).all()


@pytest.mark.parametrize("reducer", [reduction_kernels._reduce_float, reduction_kernels._reduce_bfloat])
def test_reductions_are_vectorised(reducer: Any) -> None:
    signature = (types.int64[::1], types.int64, types.int64, types.int64, types.int64)
    reducer.compile(signature)
    assembly = reducer.inspect_asm(signature)
    assert re.search(r"v?addps|fadd\s+v\d+\.[24]s", assembly)


@pytest.mark.parametrize("item_bytes", [2, 4, 8])
def test_slices_cover_everything_once_in_whole_lines(item_bytes: int) -> None:
    for world, count in itertools.product(range(1, 17), (0, 1, 31, 32, 33, 1000, 4096)):
        slices = [slice_of(count, item_bytes, rank, world) for rank in range(world)]
        assert [i for mine in slices for i in mine] == list(range(count))
        assert all(mine.start * item_bytes % 128 == 0 for mine in slices if mine)
        lines = [-(-len(mine) * item_bytes // 128) for mine in slices]
        assert max(lines) - min(lines) <= 1


def test_no_two_types_have_compiled_code_of_one_name() -> None:
    """In the cache, the number that tells such names apart is each process's own."""
    reducers = (
        reduction_kernels._reduce_float,
        reduction_kernels._reduce_double,
        reduction_kernels._reduce_bfloat,
        reduction_kernels._reduce_half,
    )
    names = [
        inner.py_func.__qualname__
        for reducer in reducers
        for inner in (reducer, *(cell.cell_contents for cell in reducer.py_func.__closure__))
        if hasattr(inner, "py_func")
    ]
    assert len(names) == 4 * 7
    assert len(set(names)) == len(names)
