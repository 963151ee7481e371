"""What comparing the workers' parameters costs: one hash over all of them, and one small sum over workers.

Run: `python benchmarks/desync.py [--workers 2] [--rounds 30]`. Workers are threads with real shared memory between
them. The parameters are hashed on every worker, so the share of a step is that of one check divided by `check_every`,
which is 100 unless a run says otherwise. The step beside it is forward, backward and optimizer of the same model.
Prints a table and writes benchmarks/results/desync.json.
"""

import argparse
import json
import os
import statistics
import threading
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from manyhands.engine.desync_check import Agreement, parameter_hashes
from manyhands.engine.exchange import LocalStep
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles
from manyhands.strategies.allreduce.exchange import AllReduceExchange
from manyhands.strategies.common.collectives.collective import SharedCollective

RESULT = Path(__file__).parent / "results" / "desync.json"
WIDTHS = (64, 512, 2048)
EVERY = 100
WITHIN_S = 300


def model_of(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def measure(width: int, workers: int, rounds: int) -> dict[str, float]:
    """Medians in milliseconds, as worker 0 sees them."""
    found: dict[str, float] = {}
    with SharedGroupFiles.create(workers) as files:

        def work(rank: int) -> None:
            torch.manual_seed(0)
            model = model_of(width)
            optimizer = torch.optim.AdamW(model.parameters())
            group = SharedGroup(
                control=os.dup(files.control),
                arena=os.dup(files.arena),
                rank=rank,
                world=workers,
                timeout_s=60,
            )
            exchange = AllReduceExchange(SharedCollective(group), 25 << 20)
            exchange.attach(model, optimizer)
            agreement = Agreement(model, rank=rank, world=workers, total=exchange.total)
            inputs = torch.randn(64, width)
            steps, checks, hashes = [], [], []
            for step in range(rounds):
                begin = time.perf_counter()
                exchange.backward(model(inputs).square().mean(), 1 / workers)
                exchange.agree(LocalStep(loss=0.0, share=1 / workers))
                exchange.apply()
                stepped = time.perf_counter()
                agreement.check(step + 1)
                checked = time.perf_counter()
                parameter_hashes(model)
                steps.append(stepped - begin)
                checks.append(checked - stepped)
                hashes.append(time.perf_counter() - checked)
            if rank == 0:
                found["MiB"] = sum(p.nbytes for p in model.parameters()) / 2**20
                for name, times in (("step", steps), ("check", checks), ("hashing", hashes)):
                    found[name] = statistics.median(times[rounds // 5 :]) * 1e3
            exchange.close()

        threads = [
            threading.Thread(target=work, args=(rank,), name=f"worker {rank}", daemon=True)
            for rank in range(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
            if thread.is_alive():
                raise SystemExit(f"{thread.name} did not end within {WITHIN_S} s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title=f"comparing parameters, {arguments.workers} workers, every {EVERY} steps")
    for column in ("parameters", "step", "one check", "of it hashing", "share of a step"):
        table.add_column(column, justify="right")
    rows = []
    for width in WIDTHS:
        found = measure(width, arguments.workers, arguments.rounds)
        found["percent"] = 100 * found["check"] / EVERY / found["step"]
        rows.append({name: round(value, 4) for name, value in found.items()})
        table.add_row(
            f"{found['MiB']:.2f} MiB",
            f"{found['step']:.2f} ms",
            f"{found['check']:.3f} ms",
            f"{found['hashing']:.3f} ms",
            f"{found['percent']:.3f} %",
        )
    Console().print(table)
    about = {"cores": os.cpu_count(), "workers": arguments.workers, "every": EVERY}
    RESULT.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
