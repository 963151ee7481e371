"""All-reduce with helpers beside its formula: `python benchmarks/helpers.py [--rate 100mbit] [--rounds 3]`; needs root.

Played through: every schedule in the model of ports (`strategies.common.collectives.schedule_proof`), for 4 and 8
workers and 0 to as many helpers, beside the formula and a ring. Live: every process in a network namespace of its
own, all on one switch, each with a cable that a token bucket holds to the rate in both directions. The same
perceptron is trained with and without helpers: what a step takes, and what the busiest cable carries, as the switch
counts it. `--simulated` leaves the live part out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyhands as mh
from cables import inside, places, run_ranks, switched_hosts
from manyhands.strategies.allreduce.helpers import helped, segments_for, split_load
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.schedule_proof import cost
from netlink import quantity

RESULT = Path(__file__).parent / "results" / "helpers.json"
WIDTH, LAYERS, BATCH, STEPS, WARM = 512, 4, 32, 9, 3
LIVE = {4: (0, 1, 2, 4), 8: (0, 2, 4, 8)}
"""By workers: how many helpers; 0 is a ring without any."""
ADDRESS, SWITCH = "10.231.80.", "MANYHANDS_SWITCH"
ALPHA_S = 50e-6
LIMIT_S = 600.0
SIMULATED_BYTES = 64 << 20


def build() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def ring_share(workers: int) -> float:
    """What each worker of a ring sends, as a multiple of the gradient."""
    return 2 * (workers - 1) / workers


def simulated(rate: str) -> list[dict[str, Any]]:
    """One all-reduce of 64 MiB in the model of ports, at the given rate and 50 µs a message."""
    beta, rows = 1 / quantity(rate), []
    for workers in LIVE:
        ring = cost(ALGORITHMS["ring"], workers, SIMULATED_BYTES, 4).time(ALPHA_S, beta, 0.0)
        for helpers in range(workers + 1):
            way = helped(workers, helpers, segments_for(SIMULATED_BYTES))
            played = cost(way, workers + helpers, SIMULATED_BYTES, 4)
            share = float(split_load(workers, helpers).busiest)
            rows.append(
                {
                    "workers": workers,
                    "helpers": helpers,
                    "formula_share": share,
                    "played_share": max(played.bytes_sent) / SIMULATED_BYTES,
                    "formula_s": share * SIMULATED_BYTES * beta,
                    "played_s": played.time(ALPHA_S, beta, 0.0),
                    "ring_s": ring,
                }
            )
    return rows


class Meter:
    """Reads all cables once a step, as the switch counts them; only in the process that measures."""

    def __init__(self) -> None:
        self._file = Path(f"/proc/{os.environ[SWITCH]}/net/dev")
        self.readings: list[dict[str, int]] = []

    def read(self) -> None:
        lines = (line.split(":") for line in self._file.read_text().splitlines() if "port" in line)
        self.readings.append(
            {
                f"{name.strip()} {way}": int(numbers.split()[column])
                for name, numbers in lines
                for way, column in (("in", 0), ("out", 8))
            }
        )

    def busiest(self) -> float:
        """Bytes of a step on the busiest cable, in its busier direction."""
        first, last = self.readings[WARM - STEPS], self.readings[-1]  # not those of the trial of the loss
        return max(last[name] - first[name] for name in first) / (STEPS - 1 - WARM)


def work(strategy: str, result: Path) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    leads = os.environ["RANK"] == "0"
    meter = Meter()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, WIDTH, generator=generator)

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if leads:
            meter.read()
        return (model(batch[0]) - batch[1]).square().mean()

    task = mh.Task(
        model=build,
        loss=loss,
        data=(x, x.roll(1, 1)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        batch_size=BATCH,
    )
    options = mh.Options(insecure=True, progress="none", timeout_s=120.0, check_every=0)
    run = mh.fit(task, strategy, steps=STEPS, options=options)
    if leads:
        at = [row["at_s"] for row in run.history.steps]
        took = [late - early for early, late in pairwise(at)][WARM - 1 :]
        result.write_text(json.dumps({"took": took, "busiest": meter.busiest()}))


@contextmanager
def hosts(count: int, rate: str) -> Iterator[tuple[list[str], int]]:
    """So many hosts; the last gives a process inside the switch, whose counters all can read."""
    bucket = ["burst", "64kb", "latency", "200ms"]
    with switched_hosts(count, ADDRESS, rate, bucket) as (*names, switch), ExitStack() as stack:
        sleeper = subprocess.Popen([*inside(switch), "sleep", "86400"])
        stack.callback(sleeper.wait)
        stack.callback(sleeper.kill)
        yield names, sleeper.pid


def measure(strategy: str, world: int, rate: str, port: int) -> dict[str, Any]:
    with hosts(world, rate) as (names, switch), tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "took"
        own = [sys.executable, __file__, "--work", strategy, str(result)]
        environments = [{**places(ADDRESS, port, rank, world), SWITCH: str(switch)} for rank in range(world)]
        run_ranks([[*inside(name), *own] for name in names], environments, LIMIT_S)
        measured = json.loads(result.read_text())
    return {"step_s": statistics.median(measured["took"]), "busiest": measured["busiest"]}


def live(rate: str, rounds: int, cases: list[tuple[int, int]]) -> list[dict[str, Any]]:
    num_bytes = sum(parameter.nbytes for parameter in build().parameters())
    load = os.getloadavg()[0]
    found: dict[tuple[int, int], list[dict[str, Any]]] = {case: [] for case in cases}
    for number in range(rounds):
        for place, (count, helpers) in enumerate(cases):
            strategy = f"allreduce helpers={helpers}" if helpers else "allreduce algorithm=ring"
            port = 29600 + number * len(cases) + place
            found[count, helpers].append(measure(strategy, count + helpers, rate, port))
    rows = []
    for (count, helpers), measured in found.items():
        share = float(split_load(count, helpers).busiest) if helpers else ring_share(count)
        rows.append(
            {
                "workers": count,
                "helpers": helpers,
                "formula_bytes": share * num_bytes,
                "busiest_bytes": statistics.median(one["busiest"] for one in measured),
                "formula_s": share * num_bytes / quantity(rate),
                "step_s": statistics.median(one["step_s"] for one in measured),
                "step_s_rounds": [one["step_s"] for one in measured],
                "load_before": load,
            }
        )
    return rows


def show(result: dict[str, Any]) -> None:
    print("played through: seconds of an all-reduce of 64 MiB at", result["rate"])
    for row in result["simulated"]:
        print(
            f"{row['workers']} workers, {row['helpers']} helpers: busiest sends {row['played_share']:.3f} "
            f"(formula {row['formula_share']:.3f}) times the gradient; {row['played_s']:.2f} s "
            f"(formula {row['formula_s']:.2f} s, ring {row['ring_s']:.2f} s)"
        )
    for row in result["live"]:
        print(
            f"{row['workers']} workers, {row['helpers'] or 'ring, no'} helpers: busiest cable "
            f"{row['busiest_bytes'] / 1e6:.2f} MB (formula {row['formula_bytes'] / 1e6:.2f} MB); step "
            f"{row['step_s']:.3f} s (formula {row['formula_s']:.3f} s)"
        )


def main() -> None:
    """Play through, measure, print and keep."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--rate", default="100mbit")
    reader.add_argument("--rounds", type=int, default=3)
    reader.add_argument("--workers", type=int, choices=LIVE, action="append", help="only with so many")
    reader.add_argument("--helpers", type=int, action="append", help="only with so many; 0: the ring")
    reader.add_argument("--simulated", action="store_true", help="leave the live part out")
    reader.add_argument("--json", type=Path, default=RESULT)
    reader.add_argument("--work", nargs=2, metavar=("STRATEGY", "FILE"), help=argparse.SUPPRESS)
    asked = reader.parse_args()
    if asked.work:
        work(asked.work[0], Path(asked.work[1]))
        return
    cases = [
        (workers, helpers)
        for workers in asked.workers or LIVE
        for helpers in LIVE[workers]
        if asked.helpers is None or helpers in asked.helpers
    ]
    result = {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rate": asked.rate,
        "steps": STEPS - WARM,
        "gradient_bytes": sum(parameter.nbytes for parameter in build().parameters()),
        "simulated": simulated(asked.rate),
        "live": [] if asked.simulated else live(asked.rate, asked.rounds, cases),
    }
    if (asked.workers or asked.helpers) and asked.json.exists():  # what was measured of other cases stays
        kept = json.loads(asked.json.read_text())
        others = [row for row in kept["live"] if (row["workers"], row["helpers"]) not in cases]
        result["live"] = sorted([*result["live"], *others], key=lambda row: (row["workers"], row["helpers"]))
    asked.json.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


if __name__ == "__main__":
    main()
