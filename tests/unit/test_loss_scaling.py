"""The scale of a loss by torch's own rule."""

from __future__ import annotations

import random

import pytest
import torch

from manyhands.engine.loss_scaling import LossScale, left_out


@pytest.mark.parametrize("seed", range(5))
def test_the_scale_goes_as_torchs_own(seed: int) -> None:
    ours = LossScale(growth_interval=3)
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    draw = random.Random(seed)
    for _ in range(60):
        finite = draw.random() < 0.8
        ours.update(finite=finite)
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(not finite)), 2.0, 0.5, 3)
        assert ours.scale == float(scale)
        other = LossScale(growth_interval=3)
        other.restore(ours.state())
        assert other.state() == ours.state() == {"scale": float(scale), "finite": int(tracker)}


def test_a_step_that_is_left_out_changes_nothing_and_the_next_one_does() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the step
    parameter.grad = torch.ones(3)
    with left_out(optimizer):
        optimizer.step()
    assert parameter.tolist() == [1.0] * 3
    assert not optimizer.state
    optimizer.step()
    schedule.step()
    assert parameter[0] < 1
