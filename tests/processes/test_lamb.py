"""LAMB: under every strategy the steps of one process, where a tensor's norm is that of the whole tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import manyhands as mh
from manyhands.errors import UserError
from manyhands.optim import LAMB
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.next_token import next_byte_loss

STEPS = 5


class Written(Optimizer):
    """LAMB by hand, item by item of the formula, in one process."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, decay = self.state[p], group["weight_decay"]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["t"] += 1
                state["m"] = 0.9 * state["m"] + 0.1 * p.grad
                state["v"] = 0.999 * state["v"] + 0.001 * p.grad**2
                m, v = state["m"] / (1 - 0.9 ** state["t"]), state["v"] / (1 - 0.999 ** state["t"])
                u = m / (v**0.5 + 1e-6) + decay * p
                size, length = p.pow(2).sum().sqrt().item(), u.pow(2).sum().sqrt().item()
                rate = size / length if decay and size and length else 1.0
                p -= group["lr"] * rate * u


def _grouped(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """As BERT is trained: biases and layer norms without weight decay."""
    listed = list(parameters)
    return [
        {"params": [one for one in listed if one.dim() > 1], "weight_decay": 0.01},
        {"params": [one for one in listed if one.dim() < 2], "weight_decay": 0.0},
    ]


def _model() -> nn.Module:
    model = GPT(context=6, layers=2, width=8, heads=2, vocabulary=12).double()
    nn.init.zeros_(model.get_parameter("transformer.h.0.mlp.c_proj.weight"))  # a norm of 0
    return model


def _task() -> mh.Task:
    draw = torch.Generator().manual_seed(5)
    return mh.Task(
        model=_model,
        loss=next_byte_loss,
        data=torch.randint(0, 12, (24, 7), generator=draw),
        optimizer=lambda parameters: LAMB(_grouped(parameters), lr=0.02),
        batch_size=8,
        clip_norm=1.0,
    )


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("single", 1),
        ("mirrored", 2),
        ("central", 2),
        ("sharded", 2),
        ("tensor", 2),
        ("pipeline", 2),
        ("pipeline stages=1 tensor=2", 2),
    ],
)
def test_every_strategy_takes_the_steps_of_one_process(strategy: str, workers: int) -> None:
    task = _task()
    written = mh.fit(
        replace(task, optimizer=lambda parameters: Written(_grouped(parameters))), "single", steps=STEPS
    )
    run = mh.fit(task, strategy, workers=workers, steps=STEPS)
    for name, value in written.model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=0, atol=1e-12)


def test_a_tensor_without_decay_or_norm_moves_by_the_rate_alone() -> None:
    parameters = [nn.Parameter(torch.full((3,), value, dtype=torch.float64)) for value in (0.0, 2.0, 2.0)]
    groups = [
        {"params": parameters[:1]},
        {"params": parameters[1:2], "weight_decay": 0.0},
        {"params": parameters[2:], "weight_decay": 0.0, "always_adapt": True},
    ]
    optimizer = LAMB(groups, lr=0.1, eps=1e-30)
    for one in parameters:
        one.grad = torch.ones_like(one)
    optimizer.step()  # the first step of Adam is the sign of the gradient
    for one, expected in zip(parameters, (-0.1, 1.9, 1.8), strict=True):
        torch.testing.assert_close(one.detach(), torch.full_like(one, expected), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0; it must be a number above 0"),
        ({"betas": (0.9, 1.0)}, "betas are (0.9, 1.0); both must be at least 0 and below 1"),
        ({"eps": 0.0}, "eps is 0.0; it must be a number above 0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; it must be a number of at least 0"),
    ],
)
def test_a_setting_that_is_wrong_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        LAMB([nn.Parameter(torch.ones(2))], **wrong)
    assert str(caught.value) == message
