"""Secure rounds of up to two hundred clients, with leavers at every stage."""

from __future__ import annotations

import pytest

from manyhands.strategies.federated.secure.secure_protocol import SecureStage
from securely import Party

STAGES = [stage for stage in SecureStage if stage < SecureStage.DONE]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("clients", [50, 100, 200])
@pytest.mark.parametrize("leaving", [0, 10, 30])
def test_the_sum_is_exact_at_every_stage(clients: int, leaving: int) -> None:
    for stage in STAGES if leaving else STAGES[:1]:
        party = Party(clients, items=50, seed=clients + leaving + stage)
        gone = list(party.roster)[::3][: clients * leaving // 100]
        party.play(SecureStage.DONE, dict.fromkeys(gone, stage))
        expected = tuple(k for k in party.roster if k not in gone or stage > SecureStage.MASK)
        assert party.server.lists.survivors == expected
        items, weight = party.terms.fixed.decode(party.server.result())
        assert [*items.tolist(), weight] == party.plain_sum(expected)
