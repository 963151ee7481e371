"""One script for every strategy, with accumulation, clipping, a schedule, evaluations and a resume inside.

every_strategy_script.py FOLDER EPOCHS    continues to EPOCHS from what is in FOLDER, and writes `weights.pt` there
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def main(folder: Path, epochs: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(52, 6, dtype=torch.float64)
    data = TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    loader = DataLoader(data, batch_size=13, shuffle=True)
    with mh.join() as group:
        torch.rand(group.rank)  # whose random numbers now differ from the others'
        prepared = group.prepare(model, optimizer, loader, DataLoader(data, batch_size=20))
        model, optimizer, loader, evaluation = prepared
        resumed = group.load(folder / "checkpoints")
        if resumed is not None:
            scheduler.load_state_dict(resumed.extra["scheduler"])
        for epoch in range(resumed.extra["epoch"] if resumed else 0, epochs):
            for number, batch in enumerate(loader):
                takes_step = number % 2 == 1
                with nullcontext() if takes_step else group.no_sync():
                    group.step(batch, loss)
                if takes_step:
                    group.clip_grad_norm_(0.5)
                    optimizer.step()
                    optimizer.zero_grad()
            scheduler.step()
            model.eval()
            with torch.no_grad():
                errors = [group.step(batch, loss) for batch in evaluation]
            model.train()
            extra = {"epoch": epoch + 1, "scheduler": scheduler.state_dict()}
            group.save(folder / "checkpoints", step=epoch + 1, extra=extra)
        state = model.state_dict()
        group.print(f"{group.strategy} on {group.world}: {torch.stack(errors).tolist()}")
        if group.is_main:
            torch.save({**state, "errors": torch.stack(errors)}, folder / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
