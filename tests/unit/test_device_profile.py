"""Profiles of devices by their data sheet: FLOPs and bytes against closed forms, and what a change of a limit does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
import torch
from torch import nn

from manyhands import Task
from manyhands.data.file_reader import VOCABULARY
from manyhands.facts import ModelFootprint
from manyhands.foresight.estimate import estimate
from manyhands.foresight.plan.described_cluster import DescribedDevice
from manyhands.foresight.plan.device_profile import count_batch, device_profile
from manyhands.workloads.language.gpt import GPTOptions, gpt

SAMPLES, WIDTHS = 32, (64, 128, 256, 16)
DEVICE = DescribedDevice(name="d", flops_per_s=1e12, efficiency=0.5, bytes_per_s=1e11)


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in pairwise(WIDTHS)))


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).sum()
    return loss


@pytest.fixture(scope="module")
def linear() -> ModelFootprint:
    data = torch.zeros(SAMPLES, WIDTHS[0])
    task = Task(model=_model, loss=_loss, data=data, optimizer=torch.optim.Adam, batch_size=SAMPLES)
    return estimate(task).footprint


def test_products_of_matrices_are_two_flops_for_each_weight_and_sample(linear: ModelFootprint) -> None:
    """Forward one product a layer; backward two, but for the first layer, whose input has no gradient."""
    assert linear.traced is not None
    found = count_batch(linear.traced, SAMPLES)
    one = [2 * SAMPLES * i * o for i, o in pairwise(WIDTHS)]
    assert [sum(x.flops for x in found.forward[unit]) for unit in range(3)] == one
    assert [sum(x.flops for x in found.backward[unit]) for unit in range(3)] == [
        one[0],
        2 * one[1],
        2 * one[2],
    ]
    assert found.output == {unit: 4 * SAMPLES * WIDTHS[unit + 1] for unit in range(3)}


def test_a_layer_takes_what_the_limit_says_that_it_meets(linear: ModelFootprint) -> None:
    """With endless bandwidth FLOPs / (peak x efficiency), with an endless peak bytes / bandwidth; nothing is faster."""
    i, o = WIDTHS[1:3]
    flops, moved = 2 * SAMPLES * i * o, 4 * (SAMPLES * i + i * o + SAMPLES * o)
    computing = device_profile(replace(DEVICE, bytes_per_s=inf), linear)
    moving = device_profile(replace(DEVICE, flops_per_s=inf), linear)
    both = device_profile(DEVICE, linear)
    assert computing.layers[1].forward.seconds(SAMPLES) == pytest.approx(flops / 0.5e12)
    assert moving.layers[1].forward.seconds(SAMPLES) == pytest.approx(moved / 1e11)
    assert both.layers[1].forward.seconds(SAMPLES) == pytest.approx(max(flops / 0.5e12, moved / 1e11))
    weights = 4 * sum(i * o for i, o in pairwise(WIDTHS))
    adam = weights * (
        1 + 1 + 2 + 1 + 2
    )  # reads weights, gradients and two moments; writes weights and moments
    assert both.optimizer_s == pytest.approx(adam / 1e11, rel=1e-3)  # a count of steps besides
    assert [layer.gradient_bytes for layer in both.layers] == [4 * i * o for i, o in pairwise(WIDTHS)]


def test_what_an_operation_takes_at_least_is_counted_for_each(linear: ModelFootprint) -> None:
    slow = device_profile(replace(DEVICE, flops_per_s=inf, bytes_per_s=inf, launch_s=1e-3), linear)
    assert [layer.forward.seconds(SAMPLES) for layer in slow.layers] == pytest.approx([1e-3] * 3)


def test_a_transformer_computes_what_is_published_for_a_token() -> None:
    """6 P + 12 L h s FLOPs for each token (Narayanan et al. 2021, without recomputing), P of all products' weights."""
    layers, width, context = 3, 64, 48
    task = gpt(GPTOptions(layers=layers, width=width, heads=4, context=context, batch_size=4))
    traced = estimate(task).footprint.traced
    assert traced is not None
    weights = 12 * layers * width**2 + VOCABULARY * width
    published = 4 * context * (6 * weights + 12 * layers * width * context)
    assert count_batch(traced, 4).flops == pytest.approx(published, rel=0.03)
