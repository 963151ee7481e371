"""Language models at the speed of the hardware: GPT-2 124M and BERT-large on one GPU, ours beside three named loops.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/language.py --nanogpt nanoGPT --turns 3 --steps 30 --json benchmarks/results/language-gpu.json
    python benchmarks/language.py --size small --device cpu --loops ours,two --json benchmarks/results/language-16.json
    python benchmarks/language.py --size tiny --device cpu --turns 1 --steps 5

The loops (`language_loops.py`) take turns on the same machine, each turn in a process of its own, so that every one
compiles for itself and none finds another's memory; torch's cache of compiled kernels on disk serves the later turns.
Speed is that of the steps after the first three. MFU = tokens/s × (6·N + 12·layers·width·context) ÷ peak, where N
counts all parameters but the positions, and the tied embedding once. In BERT the head is applied to the masked tokens
alone by `ours` and `plain`, and to all by transformers' model: the formula is the same for all. `fp8` has no MFU, for
its products have two peaks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from language_loops import LOOPS, WARM_UP, Unavailable, traced
from language_work import SMALL, TINY, WORKS, Work

SIZES = {"full": {}, "small": SMALL, "tiny": TINY}
PEAK = 989e12  # of dense bfloat16 products on H100 and H200, by their data sheet


def measured(work: Work, loop: str, asked: argparse.Namespace) -> dict[str, Any]:
    """One turn, in this process."""
    if loop == "trace":
        return traced(work, asked.device)
    more = {"source": asked.nanogpt} if loop == "usual" else {}
    course = LOOPS[loop](work, asked.device, asked.steps, **more)
    ends = course.ends
    step_s = (ends[-1] - ends[WARM_UP - 1]) / (len(ends) - WARM_UP)
    with torch.device("meta"):
        flops = work.flops(work.model())
    tokens_s = work.batch * work.context / step_s
    return {
        "step_s": step_s,
        "tokens_per_s": tokens_s,
        "sequences_per_s": work.batch / step_s,
        "mfu": tokens_s * flops / asked.peak if loop != "fp8" else None,  # the peak is another
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30
        if asked.device != "cpu" and loop != "two"
        else None,
        "compile_s": ends[0] - step_s,  # what the first step took longer
        "losses": course.losses[:: max(1, len(course.losses) // 8)],
    }


def turn(name: str, loop: str, asked: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """One turn in a process of its own; what went wrong instead, where something did."""
    command = [sys.executable, __file__, "--only", name, "--turn", loop, "--steps", str(asked.steps)]
    command += ["--device", asked.device, "--peak", str(asked.peak), "--size", asked.size]
    command += ["--micro", str(asked.micro)] if asked.micro else []
    command += ["--nanogpt", str(asked.nanogpt)] if asked.nanogpt else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
    except subprocess.TimeoutExpired:
        return {"why": f"it was not done after {left_s:.0f} s"}
    if done.returncode:
        return {"why": (done.stderr.strip().splitlines() or ["it ended without a word"])[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The median turn of a loop, with the least and the most; `why` it has none."""
    good = sorted((one for one in turns if "step_s" in one), key=lambda one: one["step_s"])
    if not good:
        return {"why": turns[-1]["why"] if turns else "there was no time left"}
    speeds = [one["tokens_per_s"] for one in good]
    first = next(one for one in turns if "step_s" in one)
    return {
        **good[len(good) // 2],
        "tokens_per_s": statistics.median(speeds),
        "least": min(speeds),
        "most": max(speeds),
        "turns": len(good),
        "compile_s": first["compile_s"],
    }


def show(name: str, rows: dict[str, Any], trace: dict[str, Any]) -> None:
    unit = "sequences_per_s" if name == "bert" else "tokens_per_s"
    for loop, row in rows.items():
        if "why" in row:
            print(f"{name} {loop:8} left out: {row['why']}")
            continue
        share = f"MFU {row['mfu']:.1%}  " if row["mfu"] is not None else ""
        memory = f"{row['peak_memory_gib']:.1f} GiB" if row["peak_memory_gib"] is not None else "-"
        print(
            f"{name} {loop:8} {row[unit]:12,.0f} {unit.replace('_per_s', '/s')} (of tokens {row['least']:,.0f} to "
            f"{row['most']:,.0f} in {row['turns']})  {share}{memory}  "
            f"compiled in {row['compile_s']:.0f} s"
        )
    if "idle" in trace:
        groups = ", ".join(f"{group} {share:.1%}" for group, share in trace["groups"].items())
        print(f"{name} ours: the GPU idles {trace['idle']:.1%}; of its work: {groups}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=tuple(WORKS), help="one of the models")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=30, help=f"of each turn; the first {WARM_UP} are not counted"
    )
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--micro", type=int, help="samples of a micro-batch")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT, for the loop `usual`")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peak", type=float, default=PEAK, help="FLOP/s of the device")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no turn begins")
    parser.add_argument(
        "--size", choices=tuple(SIZES), default="full", help="small is for CPUs, tiny to try this"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.steps <= WARM_UP:
        parser.error(f"--steps must be above {WARM_UP}, the steps that are not counted")
    loops = asked.loops.split(",")
    if unknown := [one for one in loops if one not in LOOPS]:
        parser.error(f"--loops: {unknown[0]!r} is none of {', '.join(LOOPS)}")
    works = {name: replace(work, **SIZES[asked.size]) for name, work in WORKS.items()}
    if asked.micro:
        works = {name: replace(work, micro=asked.micro) for name, work in works.items()}
    if wrong := [one for one in works.values() if one.batch % one.micro]:
        parser.error(f"--micro must divide the batch of {wrong[0].batch}")
    if asked.turn:
        try:
            print(json.dumps(measured(works[asked.only], asked.turn, asked)))
        except Unavailable as error:
            sys.exit(str(error))
        return
    began, found = time.monotonic(), {}
    for name in [asked.only] if asked.only else list(works):
        turns: dict[str, list[dict[str, Any]]] = {loop: [] for loop in loops}
        trace: dict[str, Any] = {}
        for number in range(asked.turns):
            for loop in loops:
                left_s = asked.limit - (time.monotonic() - began)
                if left_s > 0 and not (number and "why" in turns[loop][-1]):
                    turns[loop].append(turn(name, loop, asked, left_s))
                    print(name, loop, json.dumps(turns[loop][-1]), file=sys.stderr, flush=True)
            left_s = asked.limit - (time.monotonic() - began)
            if "ours" in loops and not trace and left_s > 0:
                trace = turn(name, "trace", asked, left_s)
        rows = {loop: summary(one) for loop, one in turns.items()}
        show(name, rows, trace)
        found[name] = {"work": asdict(works[name]), "steps": asked.steps, "loops": rows, "trace": trace}
        if asked.json:
            facts = {"torch": torch.__version__, "cores": os.cpu_count(), "python": platform.python_version()}
            gpu = torch.cuda.get_device_name() if asked.device != "cpu" else "cpu"
            about = {**facts, "device": gpu, "peak": asked.peak}
            asked.json.write_text(json.dumps({**about, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
