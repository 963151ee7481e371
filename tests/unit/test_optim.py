"""FTRL-proximal against a plain transcription of the paper's algorithm, item by item."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn, optim

from manyhands.errors import UserError
from manyhands.facts import Stepping
from manyhands.optim import FTRL, ProximalSGD
from manyhands.strategies.common.sharding.optimizers import cannot_step


def algorithm_1(
    gradients: NDArray[np.float64], alpha: float, beta: float, l1: float, l2: float
) -> NDArray[np.float64]:
    """McMahan et al. 2013, Algorithm 1, for given gradients [steps, items]; weights start at 0."""
    steps, items = gradients.shape
    z, n, w = [0.0] * items, [0.0] * items, [0.0] * items
    for t in range(steps):
        for i in range(items):
            if abs(z[i]) <= l1:
                w[i] = 0.0
            else:
                w[i] = -1 / ((beta + math.sqrt(n[i])) / alpha + l2) * (z[i] - math.copysign(l1, z[i]))
            g = gradients[t, i]
            sigma = (math.sqrt(n[i] + g * g) - math.sqrt(n[i])) / alpha
            z[i] += g - sigma * w[i]
            n[i] += g * g
    return np.array(
        [
            0.0
            if abs(z[i]) <= l1
            else -1 / ((beta + math.sqrt(n[i])) / alpha + l2) * (z[i] - math.copysign(l1, z[i]))
            for i in range(items)
        ]
    )


@pytest.mark.parametrize(
    ("alpha", "beta", "l1", "l2"), [(0.1, 1.0, 0.0, 0.0), (0.5, 1.0, 0.3, 0.1), (1.0, 0.0, 2.0, 0.0)]
)
def test_steps_are_those_of_the_paper(alpha: float, beta: float, l1: float, l2: float) -> None:
    gradients = np.random.default_rng(1).normal(size=(30, 40))
    gradients[:, ::3] *= np.random.default_rng(2).random((30, 14)) < 0.2  # mostly absent features
    weight = nn.Parameter(torch.zeros(40, dtype=torch.float64))
    optimizer = FTRL([weight], lr=alpha, beta=beta, l1=l1, l2=l2)
    for gradient in gradients:
        weight.grad = torch.from_numpy(gradient)
        optimizer.step()
    expected = algorithm_1(gradients, alpha, beta, l1, l2)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-12, atol=1e-12)
    if l1 == 2:
        assert (expected == 0).any()
        assert (expected != 0).any()


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_without_penalties_a_step_is_gradient_descent_from_wherever_it_starts(beta: float) -> None:
    """McMahan 2011: then w moves by rate times gradient, with the rate of that step, also where α changes."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(10, generator=generator, dtype=torch.float64))
    expected, squares = weight.detach().clone(), torch.zeros(10, dtype=torch.float64)
    optimizer = FTRL([weight], lr=0.5, beta=beta)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for number in range(12):
        gradient = torch.randn(10, generator=generator, dtype=torch.float64)
        weight.grad = gradient
        squares += gradient**2
        expected -= 0.5 * 0.8**number / (beta + squares.sqrt()) * gradient
        optimizer.step()
        schedule.step()
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("l2", [0.0, 0.2])
def test_a_rate_that_changes_moves_no_item_without_gradient(beta: float, l2: float) -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64))
    optimizer = FTRL([weight], lr=0.5, beta=beta, l1=0.1, l2=l2)
    for lr in (0.5, 0.05, 3.0):
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
        optimizer.step()
        torch.testing.assert_close(weight.detach()[::2], torch.tensor([1.0, 0.0], dtype=torch.float64))


def test_the_state_is_loaded_and_a_closure_called() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = FTRL([weight], lr=0.5, l1=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 3.0
    other = nn.Parameter(weight.detach().clone())
    resumed = FTRL([other], lr=0.5, l1=0.1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    weight.grad = other.grad = torch.tensor([0.1, -0.2, 0.3])
    optimizer.step()
    resumed.step()
    assert torch.equal(weight, other)
    assert not cannot_step(optimizer, Stepping.IN_PIECES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0; it must be"),
        ({"l1": -1.0}, "l1 is -1.0"),
        ({"beta": math.nan}, "beta is nan"),
    ],
)
def test_settings_are_checked(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FTRL([nn.Parameter(torch.ones(1))], **settings)  # type: ignore[arg-type]


def test_proximal_descent_ends_at_the_minimum_of_a_quadratic_with_l1() -> None:
    """½ w'Aw - b'w + l1·|w| has its minimum where l1 bounds the gradient, with the sign of -w where w is not 0."""
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(30, 12, generator=generator, dtype=torch.float64)
    matrix, target = root.T @ root / 30, torch.randn(12, generator=generator, dtype=torch.float64)
    weight = nn.Parameter(torch.zeros(12, dtype=torch.float64))
    optimizer = ProximalSGD([weight], lr=1 / float(torch.linalg.eigvalsh(matrix)[-1]), l1=0.8)

    def closure() -> float:
        optimizer.zero_grad()
        value = weight @ matrix @ weight / 2 - target @ weight
        value.backward()
        return float(value.detach())

    for _ in range(2000):
        optimizer.step(closure)
    used, gradient = weight != 0, (matrix @ weight - target).detach()
    assert 0 < used.sum() < 12
    assert float(gradient.abs().max()) < 0.8 + 1e-9
    torch.testing.assert_close(gradient[used], -0.8 * weight.detach()[used].sign(), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"), [({"lr": -1.0}, "lr is -1.0"), ({"l1": math.nan}, "l1 is nan")]
)
def test_settings_of_proximal_descent_that_make_no_sense_are_named(
    settings: dict[str, float], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        ProximalSGD([nn.Parameter(torch.ones(1))], **settings)
