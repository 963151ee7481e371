"""Every item of every parameter has exactly one owner, and the owners have equally much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.strategies.central.shared_parameters import Ownership, cut, keep_whole
from manyhands.strategies.common.sharding.sliced_optimizer import Piece
from manyhands.wire.flat_layout import BucketLayout, lay_out

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
WAYS = {"cut": cut, "keep_whole": keep_whole}
Way = Callable[[Sequence[BucketLayout], int], Ownership]

models = st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(DTYPES)), min_size=1, max_size=20)
worlds = st.integers(1, 9)


def bytes_of(pieces: Sequence[Piece], parameters: Sequence[tuple[int, torch.dtype]]) -> int:
    return sum((p.end - p.begin) * parameters[p.parameter][1].itemsize for p in pieces)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@given(parameters=models, world=worlds, cap=st.sampled_from([64, 1000, 10_000]))
def test_every_item_has_one_owner(
    way: Way, parameters: list[tuple[int, torch.dtype]], world: int, cap: int
) -> None:
    owned = way(lay_out(parameters, cap, first_bytes=cap), world)
    assert len(owned.pieces) == world
    items = [(p.parameter, item) for pieces in owned.pieces for p in pieces for item in range(p.begin, p.end)]
    assert len(items) == len(set(items)) == sum(count for count, _ in parameters)
    for pieces in owned.pieces:  # at most one piece of each, in order
        numbers = [piece.parameter for piece in pieces]
        assert numbers == sorted(set(numbers))
    owners = {piece.parameter for pieces in owned.pieces for piece in pieces}
    assert owners == set(range(len(parameters))), "a parameter without items has an owner too"


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@given(parameters=models, world=worlds)
def test_a_workers_pieces_are_its_ranges_of_the_buckets(
    way: Way, parameters: list[tuple[int, torch.dtype]], world: int
) -> None:
    owned = way(lay_out(parameters, 4096, first_bytes=4096), world)
    place = {
        slot.parameter: (number, slot.offset)
        for number, layout in enumerate(owned.layouts)
        for slot in layout.slots
    }
    for layout, ranges in zip(owned.layouts, owned.ranges, strict=True):
        assert [item for mine in ranges for item in mine] == list(range(layout.count))
        line_items = 64 // layout.dtype.itemsize  # nobody writes a line that another writes
        assert all(mine.start % line_items == 0 for mine in ranges if mine)
        ends = sorted((slot.offset, slot.offset + slot.count) for slot in layout.slots)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))
    for rank, pieces in enumerate(owned.pieces):
        for piece in pieces:
            bucket, offset = place[piece.parameter]
            mine = owned.ranges[bucket][rank]
            if piece.begin < piece.end:
                assert mine.start <= offset + piece.begin
                assert offset + piece.end <= mine.stop


@given(parameters=models, world=worlds)
def test_cut_anywhere_the_owners_differ_by_a_line_per_bucket(
    parameters: list[tuple[int, torch.dtype]], world: int
) -> None:
    owned = cut(lay_out(parameters, 4096, first_bytes=4096), world)
    for layout, ranges in zip(owned.layouts, owned.ranges, strict=True):
        sizes = [len(mine) * layout.dtype.itemsize for mine in ranges]
        assert max(sizes) - min(sizes) <= 2 * 128


@given(parameters=models, world=worlds)
def test_kept_whole_the_owners_differ_by_at_most_one_tensor(
    parameters: list[tuple[int, torch.dtype]], world: int
) -> None:
    owned = keep_whole(lay_out(parameters, 4096, first_bytes=4096), world)
    loads = [bytes_of(pieces, parameters) for pieces in owned.pieces]
    largest = max(count * dtype.itemsize for count, dtype in parameters)
    assert max(loads) - min(loads) <= largest
    assert all(p.end - p.begin == parameters[p.parameter][0] for pieces in owned.pieces for p in pieces)


@given(parameters=models, sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_kept_whole_on_hosts_of_any_size_the_buckets_lie_alike(
    parameters: list[tuple[int, torch.dtype]], sizes: list[int]
) -> None:
    layouts = lay_out(parameters, 4096, first_bytes=4096)
    hosts = [keep_whole(layouts, world, max(sizes)) for world in sizes]
    for world, owned in zip(sizes, hosts, strict=True):
        assert owned.layouts == hosts[0].layouts
        whole = [piece for pieces in owned.pieces for piece in pieces]
        assert len(owned.pieces) == world
        assert sorted(piece.parameter for piece in whole) == list(range(len(parameters)))
        assert all(piece.end - piece.begin == parameters[piece.parameter][0] for piece in whole)
        for layout, ranges in zip(owned.layouts, owned.ranges, strict=True):
            assert [item for mine in ranges for item in mine] == list(range(layout.count))
    assert hosts[sizes.index(max(sizes))] == keep_whole(layouts, max(sizes))


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_transformer_is_balanced_within_three_per_cent(way: Way, world: int) -> None:
    width = 64
    layer = (3 * width * width, 3 * width, width * width, width, 4 * width * width, 4 * width * width, width)
    parameters = [(count, torch.float32) for count in (500 * width, *12 * layer)]
    owned = way(lay_out(parameters, 1 << 20), world)
    loads = [bytes_of(pieces, parameters) for pieces in owned.pieces]
    assert max(loads) < 1.03 * sum(loads) / world


def test_the_picture_of_the_module() -> None:
    unit = 32  # items in a cache line of float32
    d, c, b, a = range(4)  # backward reaches the last one first
    layouts = lay_out([(size * unit, torch.float32) for size in (1, 3, 2, 4)], 1 << 20)
    assert [slot.parameter for slot in layouts[0].slots] == [a, b, c, d]
    assert cut(layouts, 2).pieces == (
        (Piece(b, 0, unit), Piece(a, 0, 4 * unit)),
        (Piece(d, 0, unit), Piece(c, 0, 3 * unit), Piece(b, unit, 2 * unit)),
    )
    whole = keep_whole(layouts, 2)
    assert [slot.parameter for slot in whole.layouts[0].slots] == [a, d, b, c]
    assert whole.pieces == (
        (Piece(d, 0, unit), Piece(a, 0, 4 * unit)),
        (Piece(c, 0, 3 * unit), Piece(b, 0, 2 * unit)),
    )
