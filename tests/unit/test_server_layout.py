"""Every item of every trainable parameter has one shard, and the shards have equally many bytes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

from manyhands.errors import UserError
from manyhands.strategies.ps.shard_layout import FlatLayout

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
models = st.lists(st.tuples(st.integers(0, 700), st.sampled_from(DTYPES)), min_size=1, max_size=12)


class Whole(optim.SGD):
    """Looks across the items of a tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for one in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            one.grad.div_(one.grad.norm() + 1)
        return super().step(closure)


KINDS: dict[str, type[optim.SGD]] = {"cut": optim.SGD, "whole": Whole}


def model_of(sizes: list[tuple[int, torch.dtype]]) -> nn.Module:
    model = nn.Module()
    for number, (size, dtype) in enumerate(sizes):
        model.register_parameter(f"p{number}", nn.Parameter(torch.rand(size).to(dtype)))
    return model


def lay_out(model: nn.Module, shards: int, kind: str = "cut", sparse: tuple[str, ...] = ()) -> FlatLayout:
    return FlatLayout.of(model, KINDS[kind](model.parameters(), lr=0.1), shards, sparse)


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=models, shards=st.integers(1, 6))
@settings(deadline=None)  # torch loads half of itself with the first optimizer
def test_every_item_is_in_one_shard(kind: str, sizes: list[tuple[int, torch.dtype]], shards: int) -> None:
    layout = lay_out(model_of(sizes), shards, kind)
    items = [
        (p.parameter, item) for pieces in layout.pieces for p in pieces for item in range(p.begin, p.end)
    ]
    assert len(items) == len(set(items)) == sum(size for size, _ in sizes)
    assert layout.bounds[0][0] == 0
    assert all(one[1] == two[0] for one, two in pairwise(layout.bounds))
    assert all(bound % 64 == 0 for bounds in layout.bounds for bound in bounds)
    assert {p.parameter for pieces in layout.pieces for p in pieces} == set(range(len(sizes)))
    for pieces in layout.pieces:
        numbers = [piece.parameter for piece in pieces]
        assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=models, shards=st.integers(1, 6))
@settings(deadline=None)
def test_views_and_ranges_are_the_same_memory(
    kind: str, sizes: list[tuple[int, torch.dtype]], shards: int
) -> None:
    model = model_of(sizes)
    layout = lay_out(model, shards, kind)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    views = layout.views(buffer)
    assert list(views) == [name for name, _ in model.named_parameters()]
    assert all(entry.offset % 64 == 0 for entry in layout.entries)
    for name, parameter in model.named_parameters():
        assert (views[name].shape, views[name].dtype) == (parameter.shape, parameter.dtype)
        views[name].copy_(parameter.detach())
    for shard in range(shards):
        part = layout.part(buffer, shard)
        assert sum(run.nbytes for run in part.runs) == (part.memory.nbytes if part.runs else 0)
        for piece, tensor in zip(layout.pieces[shard], part.pieces, strict=True):
            whole = dict(model.named_parameters())[layout.entries[piece.parameter].name].detach()
            assert torch.equal(tensor.reshape(-1), whole.reshape(-1)[piece.begin : piece.end])
        for run in part.runs:
            run.fill_(1)
    for view in views.values():
        assert bool((view == 1).all()), "runs cover every item with its own type"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", [2, 3, 4, 8])
def test_a_transformer_is_balanced_within_five_per_cent(kind: str, shards: int) -> None:
    width = 64
    layer = (3 * width * width, 3 * width, width * width, width, 4 * width * width, 4 * width * width, width)
    layout = lay_out(model_of([(count, torch.float32) for count in (500 * width, *12 * layer)]), shards, kind)
    sizes = [layout.range_bytes(shard) for shard in range(shards)]
    assert max(sizes) <= 1.05 * sum(sizes) / shards
    assert min(sizes) >= 0.95 * sum(sizes) / shards


def test_the_picture_of_the_module() -> None:
    line = 16  # items of float32
    model = model_of([(lines * line, torch.float32) for lines in (4, 2, 3, 1)])
    cut, whole = lay_out(model, 2), lay_out(model, 2, "whole")
    assert [[(p.parameter, p.begin, p.end) for p in pieces] for pieces in cut.pieces] == [
        [(0, 0, 4 * line), (1, 0, line)],
        [(1, line, 2 * line), (2, 0, 3 * line), (3, 0, line)],
    ]
    assert [[(p.parameter, p.begin, p.end) for p in pieces] for pieces in whole.pieces] == [
        [(0, 0, 4 * line), (3, 0, line)],
        [(1, 0, 2 * line), (2, 0, 3 * line)],
    ]
    assert [entry.offset for entry in whole.entries] == [0, 64 * 5, 64 * 7, 64 * 4]


def test_more_shards_than_lines_leaves_some_empty() -> None:
    layout = lay_out(model_of([(3, torch.float32)]), 5)
    assert sorted(layout.range_bytes(shard) for shard in range(5)) == [0, 0, 0, 0, 64]
    for shard in range(5):
        part = layout.part(torch.zeros(layout.num_bytes, dtype=torch.uint8), shard)
        assert len(part.pieces) == (layout.range_bytes(shard) > 0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 10)
        self.out.weight = self.embed.weight


def test_tied_weights_are_one_entry_and_frozen_ones_none() -> None:
    layout = lay_out(Tied(), 2)
    assert [entry.name for entry in layout.entries] == [
        "embed.weight",
        "norm.weight",
        "norm.bias",
        "out.bias",
    ]
    assert layout.entries[0].aliases == ("embed.weight", "out.weight")


def test_positions_are_those_of_the_optimizer() -> None:
    model = Tied()
    optimizer = optim.SGD([{"params": [model.out.bias]}, {"params": [model.norm.weight, model.embed.weight]}])
    layout = FlatLayout.of(model, optimizer, 1)
    assert {entry.name: entry.position for entry in layout.entries} == {
        "embed.weight": 2,
        "norm.weight": 1,
        "norm.bias": None,
        "out.bias": 0,
    }


def test_tables_lie_apart_and_are_divided_by_rows() -> None:
    layout = lay_out(Tied(), 3, sparse=("out.weight",))
    assert [entry.name for entry in layout.entries] == ["norm.weight", "norm.bias", "out.bias"]
    [table] = layout.tables
    assert (table.name, table.aliases, table.width) == ("embed.weight", ("embed.weight", "out.weight"), 4)
    assert sorted(row for shard in range(3) for row in table.placed(3).rows(shard).tolist()) == list(
        range(10)
    )


def test_flags_name_the_pieces_that_a_gradient_reached() -> None:
    layout = lay_out(Tied(), 1)
    assert layout.flags(0, {"norm.weight", "out.bias"})[:5].tolist() == [0, 1, 0, 1, 0]
    assert layout.flag_bytes(0) == 64


@pytest.mark.parametrize(
    ("sparse", "message"),
    [
        (
            ("embd.weight",),
            "sparse names 'embd.weight', which is not a trainable parameter; .*'embed.weight'",
        ),
        (("frozen.weight",), "sparse names 'frozen.weight', which is not a trainable"),
        (
            ("half_table",),
            r"sparse names 'half_table', a torch\.float16 of shape \(3, 2\); a table needs rows of float32",
        ),
        (("scalar",), r"sparse names 'scalar', a torch\.float32 of shape \(\)"),
    ],
)
def test_a_table_that_is_none_is_named(sparse: tuple[str, ...], message: str) -> None:
    model = Tied()
    model.half_table = nn.Parameter(torch.zeros(3, 2, dtype=torch.float16))
    model.scalar = nn.Parameter(torch.zeros(()))
    with pytest.raises(UserError, match=message):
        lay_out(model, 2, sparse=sparse)


def test_a_table_needs_an_optimizer_that_knows_it_and_may_be_lazy() -> None:
    model = Tied()
    with pytest.raises(UserError, match=r"which optimizer RMSprop may not support; allowed: .*Adagrad.*FTRL"):
        FlatLayout.of(model, optim.RMSprop(model.parameters()), 2, ("embed.weight",))
    with pytest.raises(UserError, match="amsgrad=False"):
        FlatLayout.of(model, optim.Adam(model.parameters(), amsgrad=True), 2, ("embed.weight",))
    with pytest.raises(UserError, match=r"'embed\.weight', which the optimizer does not have"):
        FlatLayout.of(model, optim.Adam(model.norm.parameters()), 2, ("embed.weight",))


def test_what_can_not_be_laid_out_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(
        UserError,
        match=r"optimizer LBFGS would train a different model under ps servers=2 .* use strategy=mirrored",
    ):
        FlatLayout.of(model, optim.LBFGS(model.parameters()), 2)
    with pytest.raises(UserError, match="shards=0"):
        lay_out(model, 0)
    odd = nn.Module()
    odd.register_parameter("z", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(UserError, match=r"parameter 'z' is torch\.complex64"):
        lay_out(odd, 1)
    with pytest.raises(ValueError, match="the range of shard 0 needs 64 bytes"):
        lay_out(nn.Linear(1, 1, bias=False), 1).range_in(torch.zeros(3, dtype=torch.uint8), 0)
