"""Simulated clients per second beside Flower's simulation: the same models, samples, clients and settings, in one run.

    python benchmarks/federated_flower.py --flower PYTHON [--only softmax …] [--data DIR] [--rounds 12] [--fresh]
    python benchmarks/federated_flower.py --device cuda     # our side alone

PYTHON is an interpreter that has torch, numpy and `flwr[simulation]`; it runs `federated_flower_peer.py`. Both sides
get the same file with images, labels and which of them each client has, and take the same steps; Flower gets as many
actors as there are cores, each with one, and no loader of batches but tensors in memory. A round lasts from model to
model, without evaluation; the first rounds do not count. The two take turns, three each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import manyhands as mh
from federated_flower_peer import MODELS
from manyhands.strategies.federated.client_data import Partition
from manyhands.workloads.tasks.mnist import MnistOptions, mnist
from results_read import ROOT, data_file

RESULT = Path(__file__).parent / "results" / "federated-flower.json"
FIRST = 2  # rounds that do not count
TURNS = 3


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One comparison."""

    about: str
    clients: int
    fraction: float
    epochs: int
    batch: int
    rate: float


SETTINGS = {
    "softmax": Setting(
        about="softmax regression, 1000 clients of 60 images",
        clients=1000,
        fraction=0.1,
        epochs=1,
        batch=10,
        rate=0.05,
    ),
    "2nn": Setting(
        about="two hidden layers of 200, 1000 clients of 60 images",
        clients=1000,
        fraction=0.1,
        epochs=1,
        batch=10,
        rate=0.1,
    ),
    "cnn": Setting(
        about="the network of FedAvg's paper, 1000 clients of 60 images",
        clients=1000,
        fraction=0.02,
        epochs=1,
        batch=10,
        rate=0.1,
    ),
}


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def files(folder: Path, data: Path, setting: Setting) -> Path:
    """What both sides read."""
    read = mnist(MnistOptions(path=data))
    images, labels = read.data
    held_out, true = read.evaluation
    split = Partition.parse("iid").split(read.data, len(labels), setting.clients, 0)
    path = folder / "data.npz"
    np.savez(
        path,
        images=images.numpy().reshape(len(images), -1),
        labels=labels.numpy(),
        held_out=held_out.numpy().reshape(len(held_out), -1),
        true=true.numpy(),
        split=np.stack(split),
    )
    return path


def ours(name: str, file: Path, rounds: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Some rounds of ours."""
    setting = SETTINGS[name]
    held = np.load(file)
    images, labels = (
        torch.from_numpy(held["images"]).float() / 255,
        torch.from_numpy(held["labels"]),
    )
    parties = {
        str(client): (images[samples], labels[samples]) for client, samples in enumerate(held["split"])
    }
    task = mh.Task(
        name=name,
        model=MODELS[name],
        loss=loss,
        data=mh.Parties(parties),
        optimizer=partial(torch.optim.SGD, lr=setting.rate),
        batch_size=1000,
        evaluation=(torch.from_numpy(held["held_out"]).float() / 255, torch.from_numpy(held["true"])),
        metrics={"accuracy": accuracy},
    )
    strategy = (
        f"federated fraction={setting.fraction:g} epochs={setting.epochs} batch={setting.batch} "
        "partition=natural"
    )
    run = mh.fit(
        task,
        strategy,
        rounds=rounds,
        workers=arguments.workers if arguments.device == "cpu" else 1,
        device=arguments.device,
        options=mh.Options(evaluate_every=rounds, progress="none", watchdog_s=0),
    )
    return {
        "seconds": [row["seconds"] for row in run.history.steps][FIRST:],
        "accuracy": run.history.evaluations[-1]["metrics"]["accuracy"],
        "played": [note for note in run.summary["notes"] if "clients" in note],
    }


def flowers(name: str, file: Path, rounds: int, python: str) -> dict[str, Any]:
    """Some rounds of Flower's."""
    setting = SETTINGS[name]
    out = file.parent / "flower.json"
    said = {**setting.__dict__, "model": name, "rounds": rounds, "file": str(file), "out": str(out)}
    peer = Path(__file__).parent / "federated_flower_peer.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    environment["PYTHONPATH"] = str(peer.parent)
    subprocess.run([python, str(peer), json.dumps(said)], check=True, env=environment, timeout=3600)
    found = json.loads(out.read_text())
    return {"seconds": found["seconds"][FIRST:], "accuracy": found["accuracy"], "flwr": found["flwr"]}


def compared(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both, in turns; the last turn's accuracy, after the same number of rounds."""
    setting = SETTINGS[name]
    each_round = round(setting.fraction * setting.clients)
    sides: dict[str, list[dict[str, Any]]] = {"manyhands": []}
    if arguments.flower:
        sides["flower"] = []
    with tempfile.TemporaryDirectory() as folder:
        file = files(Path(folder), arguments.data, setting)
        for _ in range(TURNS):
            sides["manyhands"].append(ours(name, file, arguments.rounds, arguments))
            if arguments.flower:
                sides["flower"].append(flowers(name, file, arguments.rounds, arguments.flower))
    result: dict[str, Any] = {"about": setting.about, "each_round": each_round, "rounds": arguments.rounds}
    for side, turns in sides.items():
        seconds = statistics.median(second for turn in turns for second in turn["seconds"])
        result[side] = {**turns[-1], "clients_per_s": each_round / seconds}
        del result[side]["seconds"]
    if arguments.flower:
        result["ratio"] = result["manyhands"]["clients_per_s"] / result["flower"]["clients_per_s"]
    return result


def rendered(result: Mapping[str, Any]) -> str:
    """The table as text."""
    lines = []
    for one in result["settings"].values():
        line = f"{one['about']}: {one['manyhands']['clients_per_s']:.0f} clients/s, {one['manyhands']['accuracy']:.1%}"
        if "flower" in one:
            theirs = one["flower"]
            line += f"; Flower {theirs['clients_per_s']:.1f}, {theirs['accuracy']:.1%}: {one['ratio']:.1f}×"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    default = data_file("mnist") or ROOT / "shared" / "data" / "mnist"
    parser.add_argument("--flower", help="an interpreter that has flwr[simulation]")
    parser.add_argument("--data", type=Path, default=default, help="directory of MNIST's four idx files")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", choices=list(SETTINGS), nargs="*")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--fresh", action="store_true")
    arguments = parser.parse_args()
    on_gpu = arguments.device != "cpu"
    path = arguments.result or (RESULT.with_name("federated-gpu.json") if on_gpu else RESULT)
    result: dict[str, Any] = {"settings": {}}
    if path.exists() and not arguments.fresh:
        result = json.loads(path.read_text())
    for name in arguments.only or SETTINGS:
        if name in result["settings"]:
            continue
        result["settings"][name] = compared(name, arguments)
        result |= {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores"
            + (f", {torch.cuda.get_device_name(0)}" if on_gpu else ""),
            "torch": torch.__version__,
            "workers": 1 if on_gpu else arguments.workers,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(rendered(result))


if __name__ == "__main__":
    main()
