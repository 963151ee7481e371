"""The table of the paper on FedAvg: rounds to 99 % on MNIST, samples dealt at random and in two shards of one label.

    python benchmarks/federated_mnist.py [--device cuda] [--data DIR] [--sweep] [--only iid|shards] [--fresh]

100 clients of 600 images, 10 of them in a round, 5 epochs of batches of 10, the paper's network of two convolutions
(McMahan et al., AISTATS 2017, table 2: 20 rounds, and 229). Plain SGD, one rate for all rounds: that of RATES, or with
--sweep the best of SWEPT on a seed of its own, for each split, as the paper chose one for each cell of its table.
A run ends at the first evaluation of 99 %, or after the last round that the claim allows. The result is written after
each run, and what it has already is not run again, unless --fresh. With --runs DIR, a run that was cut goes on from its
last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.workloads.tasks.mnist import MnistOptions, mnist
from results_read import ROOT, data_file

RESULT = Path(__file__).parent / "results" / "federated-mnist.json"
CLIENTS, FRACTION, EPOCHS, BATCH = 100, 0.1, 5, 10
TARGET = 0.99
SPLITS = {"iid": "iid", "shards": "shards:2"}
ROUNDS = {"iid": 30, "shards": 300}
PAPER = {"iid": 20, "shards": 229}
RATES = {"iid": 0.1, "shards": 0.05}
SWEPT, SWEEP_ROUNDS, SWEEP_SEED = (0.03, 0.06, 0.1, 0.17), {"iid": 10, "shards": 50}, 9
SEEDS = (0, 1, 2)


class PaperNetwork(nn.Module):
    """Convolutions of 5×5, 32 and 64 channels, each before a pool of 2×2; 512 hidden units; 1 663 370 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(7 * 7 * 64, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the ten digits for images of bytes."""
        scores: Tensor = self.layers(images.float() / 255)
        return scores


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def a_task(folder: Path, rate: float) -> mh.Task:
    """The paper's, with the built-in reader of the files."""
    read = mnist(MnistOptions(path=folder))
    return mh.Task(
        name="mnist of FedAvg",
        model=PaperNetwork,
        loss=loss,
        data=read.data,
        optimizer=partial(torch.optim.SGD, lr=rate),
        batch_size=1000,  # of the evaluation: a client's is the strategy's
        evaluation=read.evaluation,
        metrics={"accuracy": accuracy},
    )


def words(split: str, together: str = "auto") -> str:
    return (
        f"federated clients={CLIENTS} fraction={FRACTION} epochs={EPOCHS} batch={BATCH} partition={SPLITS[split]}"
        f" together={together}"
    )


class AtTarget(mh.Callback):
    """Ends a run that has come to its target."""

    def on_evaluate(self, row: Mapping[str, Any]) -> bool | None:
        print(f"  round {row['step']}: {row['metrics']['accuracy']:.4f}", flush=True)
        return bool(row["metrics"]["accuracy"] >= TARGET)


def swept(split: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The rate with the best accuracy so far after a few rounds, on a seed that is not among those of the table."""
    found = {}
    for rate in SWEPT:
        print(f"{split}, rate {rate:g}", flush=True)
        run = one_run(split, SWEEP_SEED, rate, SWEEP_ROUNDS[split], arguments)
        last = run["curve"][-5:]
        found[rate] = sum(last) / len(last)  # where a split is skewed, one round may be lucky
    return {"rate": max(found, key=lambda rate: found[rate]), "accuracy": found}


def one_run(split: str, seed: int, rate: float, rounds: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """From nothing to the target: the curve, the round it was reached in, and how fast that was."""
    out = arguments.runs / f"{split}-{seed}-{rate:g}" if arguments.runs else None
    run = mh.fit(
        a_task(arguments.data, rate),
        words(split),
        rounds=rounds,
        workers=arguments.workers,
        seed=seed,
        device=arguments.device,
        out=out,
        resume=out is not None and out.exists(),
        options=mh.Options(
            evaluate_every=1,
            progress="none",
            callbacks=[AtTarget()],
            watchdog_s=0,
            timeout_s=3600,
        ),
    )
    curve = [(row["step"], round(row["metrics"]["accuracy"], 4)) for row in run.history.evaluations]
    reached = next((step for step, found in curve if found >= TARGET), None)
    seconds = [row["seconds"] for row in run.history.steps]
    return {
        "rounds": reached,
        "best": max(found for _, found in curve),
        "rate": rate,
        "clients_per_s": round(FRACTION * CLIENTS / statistics.median(seconds), 2),
        "played": [note for note in run.summary.get("notes", []) if "clients" in note],
        "curve": [found for _, found in curve],
    }


def rendered(result: Mapping[str, Any]) -> str:
    """The table as text."""
    lines = []
    for split, title in (("iid", "IID"), ("shards", "two shards each")):
        runs = result["runs"].get(split, {})
        reached = [one["rounds"] for one in runs.values()]
        if not reached:
            continue
        found = [rounds if rounds is not None else float("inf") for rounds in reached]
        lines.append(
            f"{title}: 99 % in {statistics.median(found):g} rounds (median of {sorted(found)}; paper {PAPER[split]}), "
            f"rate {next(iter(runs.values()))['rate']:g}, "
            f"{statistics.median(one['clients_per_s'] for one in runs.values()):.1f} clients/s"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    default = data_file("mnist") or ROOT / "shared" / "data" / "mnist"
    parser.add_argument("--data", type=Path, default=default, help="directory of the four idx files")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", choices=list(SPLITS))
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--rounds", type=int, help="at most so many, to try something")
    parser.add_argument("--rate", type=float, help="another learning rate, to try something")
    parser.add_argument("--sweep", action="store_true", help="choose the rates first")
    parser.add_argument("--runs", type=Path, help="keep checkpoints here, and go on from them")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--fresh", action="store_true")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"runs": {}}
    if arguments.result.exists() and not arguments.fresh:
        result = json.loads(arguments.result.read_text())
    gpu = torch.cuda.get_device_name(0) if arguments.device.startswith("cuda") else None
    for split in [arguments.only] if arguments.only else SPLITS:
        if arguments.sweep and split not in result.setdefault("swept", {}):
            result["swept"][split] = swept(split, arguments)
            print(result["swept"][split], flush=True)
        rate = arguments.rate or result.get("swept", {}).get(split, {}).get("rate", RATES[split])
        for seed in arguments.seeds:
            runs = result["runs"].setdefault(split, {})
            if str(seed) in runs:
                continue
            print(f"{split}, seed {seed}", flush=True)
            rounds = arguments.rounds or ROUNDS[split]
            runs[str(seed)] = one_run(split, seed, rate, rounds, arguments)
            result |= {
                "machine": f"{platform.machine()}, {os.cpu_count()} cores" + (f", {gpu}" if gpu else ""),
                "torch": torch.__version__,
                "device": arguments.device,
                "workers": arguments.workers,
                "strategy": {name: words(name) for name in SPLITS},
            }
            arguments.result.parent.mkdir(parents=True, exist_ok=True)
            arguments.result.write_text(json.dumps(result, indent=1) + "\n")
            print(f"  {runs[str(seed)]['clients_per_s']} clients/s; {runs[str(seed)]['played']}", flush=True)
    print(rendered(result))


if __name__ == "__main__":
    main()
