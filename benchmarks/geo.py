"""Two regions, 40 ms and 100 Mbit/s apart: all-reduce, local SGD, DiLoCo, and DiLoCo in fragments beside the steps.

    python benchmarks/geo.py [--only WAY] [--steps 300] [--fresh]       needs root

Two network namespaces stand for regions, a worker in each; a token bucket holds the cable to the rate, and a relay
keeps every frame for 20 ms in each direction. The same windows of text in the same order for all. What the result has
already is not measured again, unless --fresh. The target is the highest of the final losses, so that every way reaches
it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import manyhands as mh
from cables import inside, on_the_cable, places, run_ranks, two_regions
from manyhands.workloads.language.gpt import GPTOptions, gpt
from render_links import geo_rows
from results_read import data_file

RESULT = Path(__file__).parent / "results" / "geo.json"
REGIONS, STEPS, EVERY, EVALUATED = 2, 300, 20, 20
RATE, DELAY_S, BUCKET = "100mbit", 0.02, ("burst", "64kb", "latency", "60ms")
ADDRESS, PORT, LIMIT_S = "10.231.92.", 29710, 280.0
SIZES = {"layers": 2, "width": 128, "context": 32, "batch_size": 32, "evaluation_bytes": 8192}
TEXT = "tinyshakespeare.txt.gz"
DILOCO = f"local steps={EVERY} outer=nesterov"
STREAMED = f"{DILOCO} fragments=2 overlap=5"
WAYS = {
    "all-reduce, ring": "allreduce algorithm=ring",
    "all-reduce, int8": "allreduce link=tcp codec=int8",
    "local SGD": f"local steps={EVERY}",
    "DiLoCo": DILOCO,
    "DiLoCo, int8": f"{DILOCO} link=tcp codec=int8",
    "streaming DiLoCo": STREAMED,
    "streaming DiLoCo, int8": f"{STREAMED} link=tcp codec=int8",
    "streaming DiLoCo, int4": f"{STREAMED} link=tcp codec=int4",
}


def work(strategy: str, steps: int, result: Path) -> None:
    """One of the two regions."""
    torch.set_num_threads(1)
    task = gpt(GPTOptions(path=data_file(TEXT), **SIZES))
    options = mh.Options(insecure=True, progress="none", check_every=0, evaluate_every=EVALUATED)
    before = on_the_cable()[0]
    run = mh.fit(task, strategy, steps=steps, options=options)
    if os.environ["RANK"] == "0":
        first = run.history.steps[0]
        begun = first["at_s"] - first["seconds"]  # the first weights have arrived
        at = {row["step"]: row["at_s"] - begun for row in run.history.steps}
        found = {
            "strategy": strategy,
            "cable_bytes": on_the_cable()[0] - before,  # headers, first weights and evaluations included
            "sent": run.summary["sent"],
            "seconds": at[steps],
            "curve": [
                (row["step"], at[row["step"]], row["metrics"]["evaluation_loss"])
                for row in run.history.evaluations
                if row["step"]
            ],
        }
        result.write_text(json.dumps(found))


def measure(way: str, steps: int) -> dict[str, Any]:
    with two_regions(ADDRESS, RATE, BUCKET, DELAY_S) as names, tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "found"
        own = [
            sys.executable,
            "-W",
            "ignore",
            __file__,
            "--work",
            WAYS[way],
            str(result),
            "--steps",
            str(steps),
        ]
        environments = [places(ADDRESS, PORT, rank, REGIONS) for rank in range(REGIONS)]
        run_ranks([[*inside(name), *own] for name in names], environments, LIMIT_S)
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def main() -> None:
    """Measure what is missing, and keep it after each."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--only", choices=WAYS, help="this way alone")
    reader.add_argument("--fresh", action="store_true")
    reader.add_argument("--steps", type=int, default=STEPS)
    reader.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    asked = reader.parse_args()
    if asked.work:
        work(asked.work[0], asked.steps, Path(asked.work[1]))
        return
    known = json.loads(RESULT.read_text()) if RESULT.exists() and not asked.fresh else {}
    result = {
        "benchmark": "geo",
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "text": TEXT if data_file(TEXT) is not None else "Python's standard library",
        "regions": REGIONS,
        "rate": RATE,
        "delay_s": DELAY_S,
        "steps": asked.steps,
        "sizes": SIZES,
        "ways": known.get("ways", {}),
    }
    for way in [asked.only] if asked.only else WAYS:
        if way not in result["ways"]:
            result["ways"][way] = measure(way, asked.steps)
            RESULT.write_text(json.dumps(result, indent=1) + "\n")
    result["ways"] = {way: result["ways"][way] for way in WAYS if way in result["ways"]}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for row in geo_rows(result):
        print(" | ".join(row))


if __name__ == "__main__":
    main()
