"""A loop of the user's own whose workers have batches of their own, and leave their loops at different ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

import manyhands as mh
from manyhands.errors import UserError
from own_loop import mlp, on_workers, regression, shuffled


@pytest.mark.parametrize("way", ["break", "stop"])
def test_workers_that_leave_their_loops_at_different_batches_meet_after_them(way: str) -> None:
    def body(group: Any) -> tuple[float, list[int]]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        plateau = ReduceLROnPlateau(optimizer, patience=0)
        model, optimizer, plateau = group.prepare(model, optimizer, plateau)
        loader, held_out = group.prepare(shuffled(regression(), 3), DataLoader(regression(), 20))
        for _ in range(3):
            for number, (x, y) in enumerate(loader):
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if way == "break" and number == group.rank:
                    break
                if number == 1 and group.is_main:
                    group.stop()
            model.eval()
            with torch.no_grad():
                rows = [len(group.gather(model(x))) for x, _ in held_out]
            model.train()
            plateau.step(float(group.mean(torch.tensor(1.0))))
        return float(group.mean(torch.tensor(1.0 + group.rank))), rows

    assert on_workers(2, body, strategy="hogwild") == [(1.5, [20, 20, 5])] * 2


def test_alone_too_a_strategy_that_no_loop_can_mean_is_rejected() -> None:
    with pytest.raises(UserError, match="strategy=federated does not support a loop of your own"):
        mh.join(strategy="federated")
