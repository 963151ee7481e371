"""Fewer exchanges: traffic, loss and time of `local` and its relatives, beside every step together.

    python benchmarks/local_steps.py [--only losses|times] [--rounds 3] [--fresh]

The same windows of text in the same order for all, split over 2 workers; losses follow from the seed, whatever else the
machine does. Times are of steps as they are, with delays that come and go, and over TCP held to 100 Mbit/s, for which
it starts itself again in a network namespace (needs root or user namespaces); medians of rounds, in which
the ways take turns. What the result has already is not measured again, unless --fresh.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import manyhands as mh
from manyhands.lab.compare.bandwidth import Rate, shaped_command
from manyhands.workloads.language.gpt import GPTOptions, gpt
from manyhands.workloads.language.next_token import next_byte_loss
from results_read import data_file

RESULT = Path(__file__).parent / "results" / "local-steps.json"
WORKERS, STEPS, EVERY, TIMED = 2, 1500, 50, 150
SIZES = {"layers": 2, "width": 64, "context": 32, "batch_size": 32}
TEXT = "tinyshakespeare.txt.gz"
RATE = "100Mbit"
DELAY_S, DELAYED = 0.05, 10  # in one of so many steps of each worker, at random
FIRST = 150
WAYS = {
    "every step": "mirrored",
    "averages": f"local steps={EVERY}",
    "post-local": f"local steps={EVERY} first={FIRST}",
    "DiLoCo": f"local steps={EVERY} outer=nesterov",
    "DiLoCo, other rates": f"local steps={EVERY} outer=nesterov:0.9:0.7",
    "DiLoCo, post-local": f"local steps={EVERY} first={FIRST} outer=nesterov",
    "elastic": f"local steps={EVERY} outer=elastic",
    "gossip": f"local steps={EVERY} gossip=yes",
}
TIMED_WAYS = ("every step", "averages", "DiLoCo", "elastic", "gossip")  # others take as long as one of these
CONDITIONS = ("plain", "delays", "network")


def task(*, delays: bool = False) -> mh.Task:
    made = gpt(GPTOptions(path=data_file(TEXT), **SIZES))
    return replace(made, loss=_late) if delays else made


def _late(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The loss, after a while where the batch has it so: each worker at steps of its own, the same in every run."""
    if model.training and int(batch.long().sum()) % DELAYED == 0:
        time.sleep(DELAY_S)
    return next_byte_loss(model, batch)


def exchanges(way: str) -> int:
    """How often all workers meet in the whole run."""
    if way == "every step":
        return STEPS
    first = FIRST if "post-local" in way else 0
    return first + math.ceil((STEPS - first) / EVERY)


def loss_of(way: str) -> dict[str, Any]:
    """A whole run: what is left of the loss, and what the busiest worker sent for it."""
    options = mh.Options(evaluate_every=STEPS, progress="none")
    run = mh.fit(task(), WAYS[way], workers=WORKERS, steps=STEPS, options=options)
    return {
        "strategy": WAYS[way],
        "exchanges": exchanges(way),
        "busiest_bytes": max(worker["bytes_sent"] for worker in run.summary["per_worker"]),
        "evaluation_loss": run.history.evaluations[-1]["metrics"]["evaluation_loss"],
    }


def time_of(way: str, condition: str) -> float:
    """Seconds of a step, averages included: the mean over some steps between two averages."""
    strategy = WAYS[way]
    if condition == "network":
        strategy = "allreduce link=tcp" if way == "every step" else f"{strategy} link=tcp"
    options = mh.Options(evaluate_every=TIMED, progress="none", check_every=0)
    run = mh.fit(task(delays=condition == "delays"), strategy, workers=WORKERS, steps=TIMED, options=options)
    return statistics.fmean(row["seconds"] for row in run.history.steps[EVERY:])


def network_times(ways: list[str]) -> dict[str, float]:
    """The same in a namespace whose loopback is shaped, by this program again."""
    inside = [sys.executable, __file__, "--inside", *ways]
    command = shaped_command(Rate.parse(RATE), inside, as_root=os.geteuid() == 0)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def time_round() -> dict[str, Any]:
    """Seconds of a step by each way, under each condition, and how busy the machine was before."""
    load = os.getloadavg()[0]
    steps = {
        condition: network_times(list(TIMED_WAYS))
        if condition == "network"
        else {way: time_of(way, condition) for way in TIMED_WAYS}
        for condition in CONDITIONS
    }
    return {"load_before": load, "step_s": steps}


def keep(result: Mapping[str, Any]) -> None:
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Measure what is missing, and keep it after each."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--only", choices=("losses", "times"))
    reader.add_argument("--fresh", action="store_true")
    reader.add_argument("--rounds", type=int, default=3, help="how often each way is timed")
    reader.add_argument("--inside", nargs="*", help=argparse.SUPPRESS)
    asked = reader.parse_args()
    if asked.inside:
        print(json.dumps({way: time_of(way, "network") for way in asked.inside}))
        return
    known = json.loads(RESULT.read_text()) if RESULT.exists() and not asked.fresh else {}
    result = {
        "benchmark": "local steps",
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "text": TEXT if data_file(TEXT) is not None else "Python's standard library",
        "workers": WORKERS,
        "steps": STEPS,
        "every": EVERY,
        "sizes": SIZES,
        "rate": RATE,
        "delays": {"seconds": DELAY_S, "one_in": DELAYED},
        "ways": known.get("ways", {}),
        "times": known.get("times", []),
    }
    for way in WAYS if asked.only != "times" else ():
        if way not in result["ways"]:
            result["ways"][way] = loss_of(way)
            keep(result)
            print(f"{way:26s} {result['ways'][way]}", flush=True)
    while len(result["times"]) < asked.rounds and asked.only != "losses":
        result["times"].append(time_round())
        keep(result)
        print(json.dumps(result["times"][-1]), flush=True)


if __name__ == "__main__":
    main()
