"""What `manyhands doctor --prove` compares, on models whose difference is known."""

from __future__ import annotations

import math

import pytest
import torch

from manyhands.lab.proof import TOLERANCE, largest_difference


def test_a_proof_fails_where_weights_differ() -> None:
    one, other = torch.nn.Linear(2, 2).double(), torch.nn.Linear(2, 2).double()
    other.load_state_dict(one.state_dict())
    assert largest_difference(one, other) == 0
    with torch.no_grad():
        one.bias[1] += 1e-6
    scale = max(float(tensor.detach().abs().max()) for tensor in other.parameters())
    assert largest_difference(one, other) == pytest.approx(1e-6 / scale)
    assert largest_difference(one, other) > TOLERANCE
    with torch.no_grad():
        one.weight[0, 0] = torch.nan
    assert largest_difference(one, other) == math.inf
