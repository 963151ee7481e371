"""Two workers that share one GPU, or the cores of a host: what the exchange of a GPT's gradients costs them.

    python benchmarks/two_workers.py --device cuda --json benchmarks/results/two-workers-gpu.json
    python benchmarks/two_workers.py --json benchmarks/results/two-workers-16.json
    python benchmarks/two_workers.py --size tiny --steps 5

`one` is a single worker that computes the whole batch; `two` are two with half of it each, under allreduce; `apart` are
the same two without an exchange (`local steps=inf`). What `two` takes longer than `apart` is what is left to wait for.
The exchange by itself is the same difference where there is next to nothing to hide it behind: with batches of one
row a worker. On a GPU a single worker compiles by itself, and workers where `compile=True` asks for it: they are
measured both ways. All take turns until `--limit`; a turn's steps are counted from the fourth to the last but one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import manyhands as mh
from language_loops import WARM_UP
from language_work import CLIP, SEED, SMALL, TINY, WORKS, Work, adamw

WORKERS = 2
WAYS = {"one": "single", "two": "allreduce", "apart": "local steps=inf"}
ON_GPU = ("one", "compiled two", "compiled apart", "two", "apart", "bare two", "bare apart")
SIZES: dict[str, dict[str, int]] = {"full": {"batch": 384}, "small": SMALL, "tiny": TINY}


def step_s(work: Work, name: str, asked: argparse.Namespace) -> float:
    """The mean step of one run; its micro-batches have `work.micro` rows, however many workers there are."""
    kind, _, way = name.rpartition(" ")
    work = replace(work, batch=WORKERS, micro=1) if kind == "bare" else work
    workers, compiled = 1 if way == "one" else WORKERS, None if way == "one" else kind == "compiled"
    task = mh.Task(
        model=work.model,
        loss=work.loss,
        data=work.data(),
        optimizer=adamw,
        batch_size=work.batch,
        microbatches=work.batch // (workers * work.micro),
        clip_norm=CLIP,
    )
    on_gpu = asked.device != "cpu"
    options = mh.Options(autocast=on_gpu, compile=compiled, progress="none", checkpoint_every=10**9)
    run = mh.fit(
        task, WAYS[way], workers=workers, steps=asked.steps, seed=SEED, device=asked.device, options=options
    )
    ends = [row["at_s"] for row in run.history if "loss" in row]
    del run
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return float((ends[-2] - ends[WARM_UP - 1]) / (len(ends) - 1 - WARM_UP))


def summary(turns: dict[str, list[float]]) -> dict[str, float]:
    """The medians in seconds, and what follows of them."""
    found = {name: statistics.median(values) for name, values in turns.items() if values}
    if len(found) < len(turns):
        return found
    found["exchange_s"] = found["bare two"] - found["bare apart"]
    for kind in ("", "compiled ") if "compiled two" in found else ("",):
        two, apart = found[f"{kind}two"], found[f"{kind}apart"]
        found[f"{kind}hidden"] = 1 - (two - apart) / found["exchange_s"]
        found[f"{kind}times_one"] = found["one"] / two
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--size", choices=tuple(SIZES), help="full on a GPU, small on a CPU, tiny to try this"
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no turn begins")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.steps < WARM_UP + 2:
        parser.error(f"--steps must be at least {WARM_UP + 2}")
    size = asked.size or ("small" if asked.device == "cpu" else "full")
    work = replace(WORKS["gpt"], **SIZES[size])
    with torch.device("meta"):
        parameters = sum(one.numel() for one in work.model().parameters())
    names = [name for name in ON_GPU if asked.device != "cpu" or not name.startswith("compiled")]
    turns: dict[str, list[float]] = {name: [] for name in names}
    began = time.monotonic()
    for _ in range(asked.turns):
        for name, values in turns.items():
            if time.monotonic() - began > asked.limit:
                break
            values.append(step_s(work, name, asked))
            spent_s = time.monotonic() - began
            print(f"{spent_s:6.1f} s  {name:<14} {1e3 * values[-1]:9.1f} ms a step", flush=True)
            result: dict[str, Any] = {
                "device": torch.cuda.get_device_name() if asked.device != "cpu" else "cpu",
                "cores": len(os.sched_getaffinity(0)),
                "torch": torch.__version__,
                "parameters": parameters,
                "work": vars(work),
                "steps": asked.steps,
                "turns": turns,
                "medians": summary(turns),
            }
            if asked.json is not None:
                asked.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["medians"], indent=1))


if __name__ == "__main__":
    main()
