"""What the documents say about federated runs, from the committed results."""

from __future__ import annotations

import math
import statistics

from results_read import load, markdown

NAMES = {"iid": ("dealt at random", 20), "shards": ("two shards of one label each", 229)}


def federated_mnist() -> str:
    """Rounds to 99 % on MNIST for each way of splitting it, beside the paper's."""
    result = load("federated-mnist")
    rows = [["samples are", "rounds to 99 %", "of each seed", "in the paper", "learning rate", "clients/s"]]
    for split, runs in result["runs"].items():
        name, paper = NAMES[split]
        counts = [one["rounds"] or math.inf for one in runs.values()]
        told = ", ".join("not in 30" if math.isinf(count) else str(count) for count in counts)
        first = next(iter(runs.values()))
        speed = statistics.median(one["clients_per_s"] for one in runs.values())
        rows.append(
            [name, str(statistics.median(counts)), told, str(paper), f"{first['rate']:g}", f"{speed:.0f}"]
        )
    return f"**{result['machine']}**, torch {result['torch']}\n\n{markdown(rows)}"


def federated_gpu() -> str:
    """How many simulated clients train in a second on a GPU."""
    result = load("federated-gpu")
    rows = [["model and clients", "clients in a round", "clients/s"]]
    for one in result["settings"].values():
        rows.append([one["about"], str(one["each_round"]), f"{one['manyhands']['clients_per_s']:,.0f}"])
    return f"**{result['machine']}**\n\n{markdown(rows)}"
