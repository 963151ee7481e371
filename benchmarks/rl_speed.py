"""Frames per second of CartPole-v1: environments alone, and with learning, beside Stable-Baselines3 and Sample Factory.

    python benchmarks/rl_speed.py simulation [--json FILE]
    python benchmarks/rl_speed.py learning --sb3 PYTHON --sample-factory PYTHON [--rounds 1] [--json FILE]

A frame is one step of one environment. *Simulation* takes random actions, in one process: our environments, those of
gymnasium as a vector, and a loop over gymnasium.make. *Learning* is the rate of frames that were learned from, without
the start: 64 environments, 20 steps of each in a batch, separate networks of 64-64 tanh for policy and value, one
update a batch, for PPO four passes over four parts. Contenders take turns within a round; the median over rounds
counts. Each is a process of its own and uses the cores as it does by default. `--json FILE` adds the rounds to those
of the file. PYTHON is of a virtual environment with the peer, see `rl_peers.py`; what is not named is left out.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

import manyhands as mh
from manyhands.workloads.rl.environments import open_environments

RESULTS = Path(__file__).resolve().parent / "results" / "rl-speed.json"
ENVIRONMENTS, LENGTH = 64, 20
COUNTS = (8, 64, 256)
SETTLING = 0.2  # of the steps, which do not count
OURS = {
    "ours, A2C, single": (mh.rl.A2C(), "single", 1),
    "ours, A2C, 2 workers": (mh.rl.A2C(), "mirrored", 2),
    "ours, PPO, 2 workers": (mh.rl.PPO(), "mirrored", 2),
}
PEERS = ("sb3-a2c", "sb3-ppo", "sample-factory")
DEADLINE_S = 100

Step = Callable[[np.ndarray], Any]


def rate_of(step: Step, count: int, seconds: float) -> float:
    actions = np.random.default_rng(0).integers(0, 2, (64, count))
    for row in actions:
        step(row)
    steps, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for row in actions:
            step(row)
        steps += len(actions)
    return steps * count / (time.perf_counter() - begun)


def looped(count: int) -> Step:
    """As a newcomer would write it."""
    environments = [gymnasium.make("CartPole-v1") for _ in range(count)]
    for seed, one in enumerate(environments):
        one.reset(seed=seed)

    def step(actions: np.ndarray) -> None:
        for environment, action in zip(environments, actions.tolist(), strict=True):
            _, _, terminated, truncated, _ = environment.step(action)
            if terminated or truncated:
                environment.reset()

    return step


def simulated(count: int, seconds: float) -> dict[str, float]:
    ours = open_environments("CartPole-v1", count)
    ours.reset(range(count))
    vector = gymnasium.make_vec("CartPole-v1", count, vectorization_mode="vector_entry_point")
    vector.reset(seed=0)
    synchronous = gymnasium.make_vec("CartPole-v1", count, vectorization_mode="sync")
    synchronous.reset(seed=0)
    steps = {"ours": ours.step, "vector": vector.step, "sync": synchronous.step, "loop": looped(count)}
    return {name: rate_of(step, count, seconds) for name, step in steps.items()}


def learned(name: str, frames: int) -> dict[str, float]:
    """One of ours, in this process."""
    algorithm, strategy, workers = OURS[name]
    task = mh.rl.task(
        policy=partial(mh.rl.ActorCritic, (4,), 2),
        algorithm=algorithm,
        environment="CartPole-v1",
        environments=ENVIRONMENTS,
        length=LENGTH,
        episodes=1,
    )
    updates = algorithm.updates
    batches = frames // (ENVIRONMENTS * LENGTH)
    run = mh.fit(task, strategy, workers=workers, steps=batches * updates)
    rows = run.history.steps
    first = int(len(rows) * SETTLING) // updates * updates
    counted = (len(rows) - first) // updates * ENVIRONMENTS * LENGTH
    seconds = rows[-1]["at_s"] - rows[first - 1]["at_s"]
    return {"frames": counted, "seconds": seconds, "rate": counted / seconds}


def asked(command: list[str]) -> float:
    """The rate that a contender's process prints in its last line."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    lines = [one for one in done.stdout.splitlines() if one.startswith('{"frames"')]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return float(json.loads(lines[-1])["rate"])


def learning_rounds(args: argparse.Namespace, result: dict[str, Any]) -> None:
    here = Path(__file__).resolve()
    pythons = {"sb3-a2c": args.sb3, "sb3-ppo": args.sb3, "sample-factory": args.sample_factory}
    commands = {
        name: [sys.executable, str(here), "one", "--name", name, "--frames", str(args.frames)]
        for name in OURS
    }
    given = ["--environments", str(ENVIRONMENTS), "--length", str(LENGTH), "--seconds", str(args.seconds)]
    for peer in PEERS:
        if pythons[peer]:
            commands[peer] = [pythons[peer], str(here.with_name("rl_peers.py")), peer, *given]
    for _ in range(args.rounds):
        # those with the fewest rounds first, so that a measurement that was ended early can be continued
        for name in sorted(commands, key=lambda one: len(result["learning"].get(one, []))):
            rate = asked(commands[name])
            result["learning"].setdefault(name, []).append(rate)
            keep(args.json, result)
            print(f"{name}: {rate:,.0f} frames/s", flush=True)


def keep(path: Path | None, result: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["simulation", "learning", "one"])
    parser.add_argument("--name", choices=list(OURS))
    parser.add_argument("--frames", type=int, default=500_000, help="that ours learn from")
    parser.add_argument(
        "--seconds", type=float, default=8, help="that a peer learns, or an environment steps"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sb3", metavar="PYTHON")
    parser.add_argument("--sample-factory", metavar="PYTHON")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.what == "one":
        print(json.dumps(learned(args.name, args.frames)))
        return
    result: dict[str, Any] = {"simulation": {}, "learning": {}}
    if args.json and args.json.exists():
        result = json.loads(args.json.read_text())
    result |= {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "gymnasium": gymnasium.__version__,
        "environments": ENVIRONMENTS,
        "length": LENGTH,
    }
    if args.what == "learning":
        learning_rounds(args, result)
    else:
        for _ in range(args.rounds):
            for count in COUNTS:
                kept = result["simulation"].setdefault(str(count), {})
                for name, rate in simulated(count, args.seconds).items():
                    kept.setdefault(name, []).append(rate)
        for count, found in result["simulation"].items():
            shown = ", ".join(f"{name} {statistics.median(rates):,.0f}" for name, rates in found.items())
            print(f"{count} environments: {shown} frames/s")
        keep(args.json, result)


if __name__ == "__main__":
    main()
