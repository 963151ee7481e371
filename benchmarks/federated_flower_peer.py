"""Flower's side of `federated_flower.py`: FedAvg in its simulation, by the interpreter that has it.

Imported without Flower, it has the models that both sides train.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["MODELS"]


def softmax() -> nn.Module:
    return nn.Linear(784, 10)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
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


MODELS = {"softmax": softmax, "2nn": two_layers, "cnn": convolutions}


@cache
def held(file: str) -> dict[str, Any]:
    """The data, read once in each process."""
    found = np.load(file)
    return {
        "images": torch.from_numpy(found["images"]).float() / 255,
        "labels": torch.from_numpy(found["labels"]),
        "held_out": torch.from_numpy(found["held_out"]).float() / 255,
        "true": torch.from_numpy(found["true"]),
        "split": found["split"],
    }


def train(model: nn.Module, images: Tensor, labels: Tensor, said: dict[str, Any]) -> float:
    """A client's epochs; the mean loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=said["rate"])
    total, steps = 0.0, 0
    for _ in range(said["epochs"]):
        for batch in torch.randperm(len(labels)).split(said["batch"]):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            total, steps = total + float(loss.detach()), steps + 1
    return total / steps


def main(said: dict[str, Any]) -> None:
    """Run the rounds; write when each ended and how good the last model is."""
    import flwr
    from flwr.simulation import run_simulation

    course = Course()
    run_simulation(
        server_app=server_app(said, course),
        client_app=client_app(said),
        num_supernodes=said["clients"],
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": os.cpu_count(), "address": "local"},
        },
    )
    if len(course.trained) < said["rounds"]:
        raise SystemExit(
            f"clients answered in {len(course.trained)} of {said['rounds']} rounds; see what Flower printed"
        )
    seconds = [after - before for before, after in pairwise(course.ended)]
    found = {"seconds": seconds, "accuracy": course.accuracy[-1], "flwr": flwr.__version__}
    Path(said["out"]).write_text(json.dumps(found))


def client_app(said: dict[str, Any]) -> Any:
    """What every client does with the model that it is sent."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def on_train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        data = held(said["file"])
        samples = data["split"][int(context.node_config["partition-id"])]
        model = MODELS[said["model"]]()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        mean = train(model, data["images"][samples], data["labels"][samples], said)
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"train_loss": mean, "num-examples": len(samples)}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app


@dataclass
class Course:
    """How the rounds went, as the server sees it."""

    ended: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    """The rounds in which clients answered."""


def server_app(said: dict[str, Any], course: Course) -> Any:
    """FedAvg, whose evaluations tell when each round ended; the last measures the model."""
    from flwr.app import ArrayRecord, Context, MetricRecord
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        course.ended.append(time.perf_counter())
        if number < said["rounds"]:
            return MetricRecord({})
        data, model = held(said["file"]), MODELS[said["model"]]()
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            found = (model(data["held_out"]).argmax(1) == data["true"]).float().mean()
        course.accuracy.append(float(found))
        return MetricRecord({"accuracy": float(found)})

    app = ServerApp()

    @app.main()
    def on_main(grid: Grid, context: Context) -> None:
        del context
        torch.manual_seed(0)
        strategy = FedAvg(
            fraction_train=said["fraction"],
            fraction_evaluate=0.0,
            min_train_nodes=round(said["fraction"] * said["clients"]),
            min_available_nodes=said["clients"],
        )
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(MODELS[said["model"]]().state_dict()),
            num_rounds=said["rounds"],
            evaluate_fn=evaluate,
        )
        course.trained.extend(result.train_metrics_clientapp)

    return app


if __name__ == "__main__":
    import federated_flower_peer  # under its own name, by which actors find its functions

    federated_flower_peer.main(json.loads(sys.argv[1]))
