"""A loop with all that loops have: a schedule, clipping, accumulation, an evaluation and a resume.

free_loop_script.py FOLDER    writes what it ends with to FOLDER/weights.pt; FREE_LOOP changes what it does
"""

import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh

ASKED = {
    "epochs": 4,
    "until": 4,  # the epoch after which the script ends early, as if it had been stopped
    "optimizer": "AdamW",
    "clip": 0.5,
    "accumulate": 2,
    "pause_s": 0.0,
    "slow": -1,  # the worker whose steps take ten times the pause
    "kill": None,  # [rank, epoch, batch]: the process of this rank is killed when a worker has had that batch; once
    **json.loads(os.environ.get("FREE_LOOP", "{}")),
}


def made():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(52, 6, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    settings = {"lr": 0.05, "momentum": 0.9} if ASKED["optimizer"] == "SGD" else {"lr": 0.02}
    optimizer = getattr(torch.optim, ASKED["optimizer"])(model.parameters(), **settings)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return model, optimizer, scheduler, DataLoader(data, batch_size=13, shuffle=True), data


def kill(folder: Path, group, epoch: int, number: int) -> None:
    """Kill a process when it is time; servers have the ranks after those of the workers."""
    asked = ASKED["kill"]
    if asked is None or [epoch, number] != asked[1:] or group.rank not in (asked[0], 0):
        return
    if group.rank == asked[0] or asked[0] >= group.world:
        try:
            (folder / "killed").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(int((folder / f"process-{asked[0]}").read_text()), signal.SIGKILL)


def evaluated(group, model, loader):
    model.eval()
    total, samples = torch.zeros(1, dtype=torch.float64), torch.zeros(1)
    with torch.no_grad():
        for a, b in loader:
            parts = group.gather((model(a) - b).square().sum(1))
            total, samples = total + parts.sum(), samples + len(parts)
    model.train()
    return float(total / samples)


def main(folder: Path) -> None:
    model, optimizer, scheduler, loader, data = made()
    with mh.join(timeout_s=60) as group:
        (folder / f"process-{group.rank}").write_text(str(os.getpid()))
        held_out = group.prepare(DataLoader(data, batch_size=20))
        model, optimizer, scheduler, loader = group.prepare(model, optimizer, scheduler, loader)
        resumed = group.load(folder / "checkpoints")
        if resumed is not None:
            scheduler.load_state_dict(resumed.extra["schedule"])
        scores, every = [], ASKED["accumulate"]
        for epoch in range(resumed.extra["epoch"] if resumed else 0, min(ASKED["epochs"], ASKED["until"])):
            torch.manual_seed(epoch)
            for number, (a, b) in enumerate(loader):
                whole = number % every == every - 1
                with nullcontext() if whole else group.no_sync():
                    (nn.functional.mse_loss(model(a), b) / every).backward()
                if whole:
                    if ASKED["clip"]:
                        group.clip_grad_norm_(ASKED["clip"])
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                time.sleep(ASKED["pause_s"] * (10 if group.rank == ASKED["slow"] else 1))
                kill(folder, group, epoch, number)
            scores.append(evaluated(group, model, held_out))
            extra = {"epoch": epoch + 1, "schedule": scheduler.state_dict()}
            group.save(folder / "checkpoints", step=(epoch + 1) * len(loader), extra=extra)
    state = {"scores": scores, "weights": model.state_dict()}
    torch.save(state, folder / f"weights-{group.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
