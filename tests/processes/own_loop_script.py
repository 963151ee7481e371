"""A training script as a user writes it: the same alone, under `manyhands launch` and under torchrun.

own_loop_script.py WEIGHTS    writes what it ends with
"""

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import manyhands as mh


class Shuffled(IterableDataset):
    """Rows that can only be iterated, in an order that is drawn as they are read."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rows = list(self._x)
        while rows:
            row = rows.pop(int(torch.randint(len(rows), ())))
            yield row, row.sum(0, keepdim=True)


def main(path: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(48, 6, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    statistics = nn.BatchNorm1d(6, affine=False).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=13, shuffle=True)
    asked = os.environ.get("OWN_LOOP_STRATEGY")
    with mh.join(strategy=asked, out=os.environ.get("OWN_LOOP_OUT")) as group:
        torch.rand(group.rank)  # whose random numbers now differ from the others'
        model, statistics, optimizer, loader = group.prepare(model, statistics, optimizer, loader)
        for _ in range(3):
            for number, (a, b) in enumerate(loader):
                whole = number % 2 == 1
                with nullcontext() if whole else group.no_sync():
                    statistics(a)
                    (nn.functional.mse_loss(model(a), b) / 2).backward()
                if whole:
                    group.clip_grad_norm_(0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
        stream = group.prepare(DataLoader(Shuffled(x[:11]), batch_size=4))
        for _ in range(2):
            for a, b in stream:
                nn.functional.mse_loss(model(a), b).backward()
                optimizer.step()
                optimizer.zero_grad()
        means = group.gather(statistics.running_mean[None])
        assert len(means) == group.world
        assert all(torch.equal(mean, means[0]) for mean in means), "batch norm's statistics drifted apart"
        group.print(f"{group.strategy} on {group.world}")
        if group.is_main:
            torch.save(model.state_dict(), path)


if __name__ == "__main__":
    main(sys.argv[1])
