"""A simulated round's sum by the protocol: exactly that of integers, and the mean to half a step."""

from __future__ import annotations

import pytest
import torch

from manyhands.errors import NonFinite, UserError
from manyhands.strategies.federated.algorithms.algorithm import ClientUpdate
from manyhands.strategies.federated.secure.fixedpoint import FixedPoint
from manyhands.strategies.federated.update_tally import SecureTally, hash_of

WEIGHTS = [torch.zeros(2, 3), torch.zeros(4, dtype=torch.float64)]
FIXED = FixedPoint(clip=1.0, bits=12)


def updates(clients: list[int]) -> list[ClientUpdate]:
    generator = torch.Generator().manual_seed(0)
    return [
        ClientUpdate(
            client=client,
            change=[
                torch.rand(one.shape, generator=generator, dtype=one.dtype) * 2.2 - 1.1 for one in WEIGHTS
            ],
            samples=3 + client,
            steps=1,
            loss=0.75 * client - 2,
        )
        for client in clients
    ]


def test_a_tally_is_the_sum_of_integers_exactly() -> None:
    clients = [2, 3, 5, 8, 13]
    tally = SecureTally(FIXED, clients, WEIGHTS)
    whole, weighed, exact = [0] * 10, 0, torch.zeros(10, dtype=torch.float64)
    for one in updates(clients)[1:]:  # the first leaves before it masks
        tally.add(one, one.samples)
        flat = torch.cat([change.double().flatten() for change in one.change]).clamp(-1, 1)
        whole = [a + one.samples * round(x * 2047) for a, x in zip(whole, flat.tolist(), strict=True)]
        exact += one.samples * flat
        weighed += one.samples
    found = tally.total()
    sums = torch.cat([one.flatten() for one in found.sums])
    assert (sums * 2047).round().long().tolist() == whole
    assert torch.equal(sums, torch.tensor(whole, dtype=torch.float64) * FIXED.step)
    assert found.weight == weighed
    assert (sums / found.weight - exact / weighed).abs().max() <= FIXED.step / 2
    loss = sum(one.samples * one.loss for one in updates(clients)[1:])
    assert found.loss == pytest.approx(loss, abs=weighed / 2047 / 2)
    assert found.messages_sent == 5 * 5 - 3, "who left had advertised and shared"


def test_too_few_inputs_abandon_the_round() -> None:
    tally = SecureTally(FIXED, [0, 1, 2], WEIGHTS, number=6)
    for one in updates([0, 1]):
        tally.add(one, 1)
    with pytest.raises(NonFinite, match=r"round 7 was abandoned, .* 2 of 3 clients were left at MASK"):
        tally.total()


def test_weights_that_are_not_integers_are_refused() -> None:
    [one] = updates([1])
    for weight in (0.5, 0.0):
        with pytest.raises(UserError, match=f"client 1 weighs {weight:g}; only integers"):
            SecureTally(FIXED, [0, 1, 2], WEIGHTS).add(one, weight)


def test_the_hash_of_a_model_sees_values_shapes_and_types() -> None:
    models = [
        WEIGHTS,
        [WEIGHTS[0] + 1, WEIGHTS[1]],
        [WEIGHTS[0].view(3, 2), WEIGHTS[1]],
        [WEIGHTS[0], WEIGHTS[1].view(torch.int64)],
        [WEIGHTS[0].bfloat16(), WEIGHTS[1]],
    ]
    assert len({hash_of(one) for one in models}) == len(models)
    assert hash_of(WEIGHTS) == hash_of([one.clone() for one in WEIGHTS])
