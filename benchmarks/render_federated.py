"""What the documents say about federated runs, from the committed results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from results_read import load, markdown

NAMES = {"iid": ("dealt at random", 20), "shards": ("two shards of one label each", 229)}


def federated_mnist() -> str:
    """Rounds to 99 % on MNIST for each way of splitting it, beside the paper's."""
    result = load("federated-mnist")
    rows = [["samples are", "rounds to 99 %", "of each seed", "in the paper", "learning rate", "clients/s"]]
    for split, runs in result["runs"].items():
        name, paper = NAMES[split]
        counts = [one["rounds"] or math.inf for one in runs.values()]
        report = ", ".join("not in 30" if math.isinf(count) else str(count) for count in counts)
        first = next(iter(runs.values()))
        speed = statistics.median(one["clients_per_s"] for one in runs.values())
        rows.append(
            [name, str(statistics.median(counts)), report, str(paper), f"{first['rate']:g}", f"{speed:.0f}"]
        )
    return f"**{result['machine']}**, torch {result['torch']}\n\n{markdown(rows)}"


def federated_gpu() -> str:
    """How many simulated clients train in a second on a GPU."""
    result = load("federated-gpu")
    rates = [
        f"{one['manyhands']['clients_per_s']:,.0f} clients/s of {one['about'].partition(',')[0]}"
        for one in result["settings"].values()
    ]
    return f"On {result['machine']}: {'; '.join(rates)}."


def federated_flower() -> str:
    """Simulated clients per second beside Flower's simulation."""
    result = load("federated-flower")
    rows = [["model and clients", "clients/s", "Flower", "ratio", "accuracy", "Flower's"]]
    for one in result["settings"].values():
        ours, theirs = one["manyhands"], one["flower"]
        rows.append(
            [
                one["about"],
                f"{ours['clients_per_s']:,.0f}",
                f"{theirs['clients_per_s']:,.1f}",
                f"{one['ratio']:.1f}×",
                f"{ours['accuracy']:.1%}",
                f"{theirs['accuracy']:.1%}",
            ]
        )
    version = next(iter(result["settings"].values()))["flower"]["flwr"]
    return f"**{result['machine']}**, torch {result['torch']}, Flower {version}\n\n{markdown(rows)}"


def federated_roles() -> str:
    """Rounds on the roles of Shakespeare, beside the same lines dealt at random."""
    result = load("federated-roles")
    names = {"natural": "each role its own lines", "iid": "lines dealt at random"}
    marks = [str(mark) for mark in result["marks"]]
    rows = [
        ["clients have", *(f"rounds to {float(mark):.0%}" for mark in marks), "best", "rounds run", "clients"]
    ]
    for way, one in result["runs"].items():
        rounds = [str(one["rounds"][mark] or "not reached") for mark in marks]
        rows.append([names[way], *rounds, f"{one['best']:.1%}", str(one["rounds_run"]), str(one["clients"])])
    return f"**{result['machine']}**, {result['device']}, torch {result['torch']}\n\n{markdown(rows)}"


def middle(values: Iterable[float | None]) -> str:
    """The median of rounds, of which some may never have come to the target."""
    found = statistics.median(math.inf if value is None else value for value in values)
    return "not reached" if math.isinf(found) else f"{found:.0f}"


def federated_noniid() -> str:
    """Algorithms beside each other on clients whose labels differ: medians over the seeds."""
    result = load("federated-noniid")
    seeds = result["seeds"]
    target = seeds[0]["target"]["value"]
    rows = [
        [
            "algorithm",
            f"rounds to {target:.0%}",
            "common model at the end",
            "a client's own model",
            "worst client's",
        ]
    ]
    for place, name in enumerate(row["strategy"] for row in seeds[0]["strategies"]):
        algorithm = next((word[10:] for word in name.split() if word.startswith("algorithm=")), "fedavg")
        runs = [one["strategies"][place] for one in seeds]
        rows.append(
            [
                f"`{algorithm}`",
                middle(run["target_steps"] and run["target_steps"]["median"] for run in runs),
                f"{statistics.median(run['final']['accuracy']['median'] for run in runs):.1%}",
                *own_columns(seeds, algorithm),
            ]
        )
    rows.append(["`fedavg`, then fine-tuned", "", "", *own_columns(seeds, "fedavg, fine-tuned")])
    about = (
        f"{result['clients']} clients, {result['partition']}, {result['rounds']} rounds, {len(seeds)} seeds"
    )
    return f"**{about}**, torch {result['torch']}\n\n{markdown(rows)}"


def own_columns(seeds: Iterable[Mapping[str, Any]], name: str) -> list[str]:
    """How good the models are which clients use themselves: their mean, and the worst."""
    own = [one["own"][name] for one in seeds]
    return [f"{statistics.median(one[which] for one in own):.1%}" for which in ("mean", "worst")]


def federated_privacy() -> str:
    """ε asked and ε spent, by the accountants of dp-accounting."""
    result = load("federated-privacy")
    head = [
        "of 200 clients",
        "rounds",
        "of a client",
        "noise",
        "ε asked",
        "ε spent",
        "nearly exact",
        "accuracy",
    ]
    rows = [head]
    for name, one in result["settings"].items():
        spent = one["spent"]
        rows.append(
            [
                name,
                str(one["rounds"]),
                str(one["rounds_of_a_client"]),
                f"{one['noise']:g}",
                f"{one['asked']:g}",
                f"{spent['rdp']:.3f}",
                f"{spent['pld']:.3f}",
                f"{one['accuracy']:.1%}",
            ]
        )
    return f"**dp-accounting {result['dp_accounting']}**, δ = 1e-5\n\n{markdown(rows)}"
