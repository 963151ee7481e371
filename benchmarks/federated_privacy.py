"""ε asked and ε spent: `epsilon=` alone for three settings, counted by dp-accounting's own accountants.

    python benchmarks/federated_privacy.py [--json FILE]

A softmax regression on the digits of scikit-learn, over 200 clients. Each run is told ε, and computes its noise. What
it has spent is then counted from noise, sampling and rounds alone: by the Rényi accountant, which the run uses, too,
and by the one of privacy loss distributions, which is nearly exact and has no part in the run. Nothing is a time.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from torch import Tensor, nn

import manyhands as mh
from manyhands.workloads.tasks.digits import digits

RESULT = Path(__file__).parent / "results" / "federated-privacy.json"
COMMON = "federated clients=200 batch=all epochs=5"
SETTINGS = {
    "a tenth of the clients, secretly drawn": ("fraction=0.1", 8.0, 60),
    "all clients": ("fraction=1", 4.0, 30),
    "a tenth, with secure sums and noise by the clients": (
        "fraction=0.1 secure=yes noise_by=clients clip=1",
        20.0,
        20,
    ),
}


class SoftmaxRegression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.flatten(1).float() / 16)


def count(strategy: mh.Federated, rounds: int) -> dict[str, float]:
    """ε of so many rounds of a client, by each accountant."""
    event: DpEvent = GaussianDpEvent(strategy.noise)
    if strategy.fraction < 1 and not strategy.secure:
        event = PoissonSampledDpEvent(strategy.fraction, event)
    found = {}
    for name, accountant in (("rdp", RdpAccountant()), ("pld", PLDAccountant())):
        accountant.compose(event, rounds)
        found[name] = float(accountant.get_epsilon(strategy.delta))
    return found


def measure(words: str, asked: float, rounds: int) -> dict[str, Any]:
    run = mh.fit(
        replace(digits(), model=SoftmaxRegression, optimizer=partial(torch.optim.SGD, lr=1.0)),
        f"{COMMON} {words} epsilon={asked:g}",
        rounds=rounds,
        options=mh.Options(evaluate_every=rounds, progress="none"),
    )
    strategy, privacy = mh.Strategy.parse(run.summary["strategy"]), run.summary["privacy"]
    assert isinstance(strategy, mh.Federated)
    return {
        "strategy": str(strategy),
        "rounds": run.summary["steps"],
        "rounds_of_a_client": privacy["rounds"],
        "asked": asked,
        "delta": privacy["delta"],
        "noise": privacy["noise"],
        "told": privacy["epsilon"],
        "spent": count(strategy, privacy["rounds"]),
        "accuracy": run.summary["final"]["accuracy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULT)
    path = parser.parse_args().json
    settings = {name: measure(*setting) for name, setting in SETTINGS.items()}
    for name, one in settings.items():
        print(
            f"{name}: asked {one['asked']:g}, spent {one['spent']['rdp']:.3f}, accuracy {one['accuracy']:.1%}"
        )
    about = {"torch": torch.__version__, "dp_accounting": version("dp-accounting")}
    path.write_text(json.dumps({**about, "settings": settings}, indent=1) + "\n")


if __name__ == "__main__":
    main()
