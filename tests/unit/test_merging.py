"""What owners keep of an optimizer's state, put together again: torch's own state, cut and merged, is the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from manyhands.strategies.common.sharding.sliced_optimizer import MergedState, Part


def adam_state() -> tuple[list[nn.Parameter], dict[int, dict[str, torch.Tensor]]]:
    torch.manual_seed(1)
    parameters = [nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(7))]
    optimizer = torch.optim.Adam(parameters, amsgrad=True)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return parameters, optimizer.state_dict()["state"]


@pytest.mark.parametrize("cuts", [[0, 30], [0, 11, 30], [0, 4, 4, 29, 30]])
def test_cut_and_merged_is_the_state_itself(cuts: list[int]) -> None:
    parameters, state = adam_state()
    merged = MergedState()
    for begin, end in pairwise(cuts):
        part = Part(parameters[0].shape, slice(begin, end), end - begin)
        merged.add(0, {key: part.cut(value) for key, value in state[0].items()}, part)
    whole = Part(parameters[1].shape, slice(0, 7), 7)
    merged.add(1, state[1], whole)
    found = merged.to_dict()
    assert list(found) == [0, 1]
    for position in state:
        assert found[position].keys() == state[position].keys()
        for key, value in state[position].items():
            assert torch.equal(found[position][key], value)
    assert found[1]["exp_avg"] is state[1]["exp_avg"], "what one owner has whole is not copied"


def test_rows_that_lie_apart_are_merged_too() -> None:
    parameters, state = adam_state()
    merged = MergedState()
    for rows in (torch.tensor([0, 3, 5]), torch.tensor([1, 2, 4])):
        part = Part(parameters[0].shape, rows, 3, 5)
        merged.add(0, {key: part.cut(value) for key, value in state[0].items()}, part)
    assert all(torch.equal(merged.to_dict()[0][key], value) for key, value in state[0].items())
