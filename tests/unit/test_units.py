"""A model in units, and when they are fetched and dropped: pure, without a process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhands.strategies.common.sharding.layer_units import (
    Await,
    Fetch,
    Hand,
    Release,
    UnitFlow,
    UnitMemory,
    piece_ranges,
    pieces_in,
    units_of,
)
from manyhands.strategies.common.sharding.sliced_optimizer import Piece
from manyhands.strategies.sharded.exchange import Grant, UnitRequest, Want, grant
from manyhands.wire.flat_layout import bucket_of
from manyhands.workloads.language.gpt import GPT


def small(*, tied: bool) -> GPT:
    return GPT(context=6, layers=3, width=8, heads=2, tied=tied, vocabulary=13)


def test_layers_are_units_and_what_they_share_is_the_last() -> None:
    names = [unit.name for unit in units_of(small(tied=False))]
    assert names == [
        *("transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1"),
        *("transformer.h.2", "transformer.ln_f", "lm_head"),
    ]
    units = units_of(small(tied=True))
    assert [unit.name for unit in units] == [
        "transformer.wpe",
        "transformer.h.0",
        "transformer.h.1",
        "transformer.h.2",
        "transformer.ln_f",
        "what layers share",
    ]
    assert units[-1].module is None
    assert [one.shape for one in units[-1].parameters] == [(13, 8)]


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_in_one_unit(tied: bool) -> None:
    model = small(tied=tied)
    found = [parameter for unit in units_of(model) for parameter in unit.parameters]
    assert len(found) == len(set(found))
    assert set(found) == set(model.parameters())


def test_a_child_that_holds_most_is_taken_apart_and_the_model_s_own_are_shared() -> None:
    wrapped = nn.Module()
    wrapped.net = small(tied=False)
    wrapped.own = nn.Parameter(torch.ones(3))
    names = [unit.name for unit in units_of(wrapped)]
    assert names[2:4] == ["net.transformer.h.0", "net.transformer.h.1"]
    assert names[-1] == "what layers share"


def test_memory_comes_and_goes_under_the_parameters() -> None:
    model = nn.Linear(3, 2)
    [unit] = units_of(model)
    memory = UnitMemory(unit, torch.device("cpu"))
    memory.adopt()
    memory.let_go()
    assert model.weight.shape == (2, 3)
    assert model.weight.untyped_storage().nbytes() == 0
    memory.make_room()
    memory.flats[0].fill_(7)
    assert model.weight.eq(7).all()
    assert model.bias.eq(7).all()


def test_owners_have_equal_parts_or_whole_tensors() -> None:
    layout = bucket_of(torch.float64, [(0, 16), (1, 40), (2, 3)])
    assert layout.count == 64
    assert piece_ranges(layout, 3, whole=False) == [range(22), range(22, 43), range(43, 64)]
    assert piece_ranges(layout, 3, whole=True) == [range(16), range(16, 56), range(56, 64)]
    assert [len(one) for one in piece_ranges(layout, 5, whole=True)] == [16, 0, 40, 0, 8]
    assert list(pieces_in(layout, range(10, 58))) == [
        (Piece(0, 10, 16), 0),
        (Piece(1, 0, 40), 6),
        (Piece(2, 0, 2), 46),
    ]


def step(flow: UnitFlow) -> list[object]:
    """Two layers, forward and backward."""
    flow.begin("training")
    actions: list[object] = []
    for unit in (0, 1):
        actions += [*flow.enter(unit), *flow.leave(unit)]
    flow.backward()
    for unit in (1, 0):
        actions += [*flow.touch(unit), *flow.complete(unit)]
    return [*actions, *flow.end()]


def test_units_are_fetched_when_needed_and_one_ahead_once_the_order_is_known() -> None:
    flow = UnitFlow(2)
    forward = [Fetch(0), Await(0), Release(0), Fetch(1), Await(1), Release(1)]
    backward = [Fetch(1), Await(1), Hand(1), Release(1), Fetch(0), Await(0), Hand(0), Release(0)]
    assert step(flow) == [*forward, *backward]
    ahead = [Fetch(0), Fetch(1), Await(0), Release(0), Await(1), Release(1)]
    ahead += [Fetch(1), Fetch(0), Await(1), Hand(1), Release(1), Await(0), Hand(0), Release(0)]
    assert step(flow) == ahead
    assert step(UnitFlow(2, ahead=False)) == [*forward, *backward]


def test_what_is_used_outside_of_its_layer_stays_to_the_end() -> None:
    flow = UnitFlow(2, lasting=[1])
    flow.begin("training")
    assert flow.touch(0) == [Fetch(0), Await(0)]
    assert flow.enter(0) == []
    assert flow.touch(0) == []
    assert flow.leave(0) == []
    assert flow.enter(1) == [Fetch(1), Await(1)]
    assert flow.leave(1) == []
    assert flow.touch(0) == []
    assert flow.end() == [Release(0), Release(1)]


def test_a_wrong_guess_costs_a_fetch_and_no_more() -> None:
    flow = UnitFlow(3)
    flow.begin("training")
    for unit in (0, 1):
        flow.enter(unit)
        flow.leave(unit)
    flow.end()
    flow.begin("training")
    assert flow.enter(0) == [Fetch(0), Fetch(1), Await(0)]
    flow.leave(0)
    assert flow.enter(2) == [Fetch(2), Await(2)]
    flow.leave(2)
    assert flow.end() == [Await(1), Release(1)]


def test_a_layer_that_is_computed_again_for_its_backward_stays_until_its_gradient_is_there() -> None:
    flow = UnitFlow(1)
    flow.begin("training")
    flow.enter(0)
    flow.leave(0)
    flow.backward()
    assert flow.enter(0) == [Fetch(0), Await(0)]
    assert flow.leave(0) == []
    assert flow.complete(0) == [Hand(0), Release(0)]


def test_the_first_who_wants_something_gets_it_and_with_it_who_wants_the_same() -> None:
    first, second, rendezvous = (
        UnitRequest(Want.VALUES, 1),
        UnitRequest(Want.SUM, 2),
        UnitRequest(Want.RENDEZVOUS),
    )
    assert grant([rendezvous, first, second, first]) == Grant(first, (1, 3))
    assert grant([second, first]) == Grant(second, (0,))
    assert grant([rendezvous, rendezvous]) == Grant(rendezvous, (0, 1))
