"""Frames per second of CartPole-v1: environments alone, and with learning, beside Stable-Baselines3 and Sample Factory.

    python benchmarks/rl_speed.py simulation [--json FILE]
    python benchmarks/rl_speed.py learning --sb3 PYTHON --sample-factory PYTHON [--rounds 1] [--json FILE]
    python benchmarks/rl_speed.py learning --only IMPALA --observations images --device cuda [--json FILE]
    python benchmarks/rl_speed.py both --only IMPALA --observations pong --environments 128 --device cuda [--json FILE]

A frame is one step of one environment. *Simulation* takes random actions, in one process: our environments, those of
gymnasium as a vector, and a loop over gymnasium.make. *Learning* is the rate of frames that were learned from, without
the start: 64 environments, 20 steps of each in a batch, separate networks of 64-64 tanh for policy and value, one
update a batch, for PPO four passes over four parts. IMPALA has about one actor a core, which computes its actions or
has them from central inference; `--device` is where ours learn, and infer centrally. `--observations images` is an
environment that shows stored images (4, 84, 84) and costs next to nothing, with IMPALA's shallow network; `pong` is the
game, whose simulation is ale-py's own vector of games with a thread a core. Contenders take turns within a round; the
median over rounds counts. Each is a process of its own and uses the cores as it does by
default. `--json FILE` adds the rounds to those of the file. PYTHON is of a virtual environment with the peer, see
`rl_peers.py`; what is not named is left out.
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
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch

import manyhands as mh
from manyhands.workloads.rl.environments import open_environments

RESULTS = Path(__file__).resolve().parent / "results" / "rl-speed.json"
LENGTH = 20
PONG = "ALE/Pong-v5"
COUNTS = (8, 64, 256)
SETTLING = 0.2  # of the steps, which do not count
CORES = len(os.sched_getaffinity(0))
ACTORS = 1 << min(16, CORES).bit_length() - 1
OURS: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "ours, A2C, single": (mh.rl.A2C(), "single", 1, {}),
    **{
        f"ours, {name}, {workers} workers": (algorithm, "mirrored", workers, {})
        for name, algorithm in (("A2C", mh.rl.A2C()), ("PPO", mh.rl.PPO()))
        for workers in (2, 4, 8)
        if workers <= CORES
    },
    "ours, IMPALA": (mh.rl.Impala(), "single", 1, {"actors": ACTORS}),
    "ours, IMPALA, central inference": (
        *(mh.rl.Impala(), "single", 1),
        {"actors": ACTORS, "inference": "central"},
    ),
}
PEERS = ("sb3-a2c", "sb3-ppo", "sample-factory")
DEADLINE_S = 90

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


def simulated_games(count: int, seconds: float) -> float:
    import ale_py  # noqa: F401 - it tells gymnasium of its games

    games = gymnasium.make_vec(PONG, count, vectorization_mode="vector_entry_point", num_threads=CORES)
    games.reset(seed=0)
    return rate_of(games.step, count, seconds)


def simulated(count: int, seconds: float) -> dict[str, float]:
    ours = open_environments("CartPole-v1", count)
    ours.reset(range(count))
    vector = gymnasium.make_vec("CartPole-v1", count, vectorization_mode="vector_entry_point")
    vector.reset(seed=0)
    synchronous = gymnasium.make_vec("CartPole-v1", count, vectorization_mode="sync")
    synchronous.reset(seed=0)
    steps = {"ours": ours.step, "vector": vector.step, "sync": synchronous.step, "loop": looped(count)}
    return {name: rate_of(step, count, seconds) for name, step in steps.items()}


class Images:
    """Shows stored images as an Atari game would, in episodes of a hundred steps."""

    observation_space = SimpleNamespace(shape=(4, 84, 84), dtype=np.dtype(np.uint8))
    action_space = SimpleNamespace(n=6)

    def __init__(self) -> None:
        self.images = np.random.default_rng(0).integers(0, 256, (16, 4, 84, 84), np.uint8)

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.taken = 0 if seed is None else seed % 100
        return self.images[0], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.taken += 1
        return self.images[self.taken % 16], float(action == 0), self.taken >= 100, False, {}

    def close(self) -> None: ...


def learned(name: str, frames: int, environments: int, observations: str, device: str) -> dict[str, float]:
    """One of ours, in this process."""
    algorithm, strategy, workers, actors = OURS[name]
    images = observations != "numbers"
    environment = {"numbers": "CartPole-v1", "images": Images, "pong": PONG}[observations]
    task = mh.rl.task(
        policy=partial(mh.rl.ActorCritic, *(((4, 84, 84), 6) if images else ((4,), 2))),
        algorithm=algorithm,
        environment=environment,
        environments=environments,
        length=LENGTH,
        episodes=1,
        **actors,
    )
    updates = algorithm.updates
    batches = frames // (environments * LENGTH)
    run = mh.fit(
        *(task, strategy),
        workers=workers,
        steps=batches * updates,
        device=device,
        options=mh.Options(progress="none", allow_overload=True, compile=False),
    )
    rows = run.history.steps
    first = int(len(rows) * SETTLING) // updates * updates
    counted = (len(rows) - first) // updates * environments * LENGTH
    seconds = rows[-1]["at_s"] - rows[first - 1]["at_s"]
    return {"frames": counted, "seconds": seconds, "rate": counted / seconds}


def asked(command: list[str]) -> float | None:
    """The rate that a contender's process prints in its last line; None where it has none in time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"{' '.join(command)} took more than {DEADLINE_S} s", flush=True)
        return None
    lines = [one for one in done.stdout.splitlines() if one.startswith('{"frames"')]
    if done.returncode or not lines:
        print(f"{' '.join(command)} failed: {done.stderr[-2000:]}", flush=True)
        return None
    return float(json.loads(lines[-1])["rate"])


def learning_rounds(args: argparse.Namespace, result: dict[str, Any]) -> None:
    here = Path(__file__).resolve()
    pythons = {"sb3-a2c": args.sb3, "sb3-ppo": args.sb3, "sample-factory": args.sample_factory}
    given = [
        "--environments",
        str(args.environments),
        "--length",
        str(LENGTH),
        "--seconds",
        str(args.seconds),
    ]
    commands = {
        peer: [pythons[peer], str(here.with_name("rl_peers.py")), peer, *given]
        for peer in PEERS
        if pythons[peer]
    }
    for name in OURS:
        if args.only in name:
            commands[name] = [
                *(sys.executable, str(here), "one", "--name", name, "--frames", str(args.frames)),
                *("--environments", str(args.environments)),
                *("--observations", args.observations, "--device", args.device),
            ]
    for _ in range(args.rounds):
        # those with the fewest rounds first, so that a measurement that was ended early can be continued
        for name in sorted(commands, key=lambda one: len(result["learning"].get(one, []))):
            if time.monotonic() > args.end or (rate := asked(commands[name])) is None:
                continue
            result["learning"].setdefault(name, []).append(rate)
            keep(args.json, result)
            print(f"{name}: {rate:,.0f} frames/s", flush=True)


def simulation_rounds(args: argparse.Namespace, result: dict[str, Any]) -> None:
    for _ in range(args.rounds):
        for count in [args.environments] if args.observations == "pong" else COUNTS:
            kept = result["simulation"].setdefault(str(count), {})
            if args.observations == "pong":
                found = {"ale-py": simulated_games(count, args.seconds)}
            else:
                found = simulated(count, args.seconds)
            for name, rate in found.items():
                kept.setdefault(name, []).append(rate)
    for count, found in result["simulation"].items():
        shown = ", ".join(f"{name} {statistics.median(rates):,.0f}" for name, rates in found.items())
        print(f"{count} environments: {shown} frames/s", flush=True)


def keep(path: Path | None, result: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["simulation", "learning", "both", "one"])
    parser.add_argument("--name", choices=list(OURS))
    parser.add_argument("--frames", type=int, default=500_000, help="that ours learn from")
    parser.add_argument("--only", default="", help="those of ours whose names have this")
    parser.add_argument("--environments", type=int, default=64)
    parser.add_argument("--observations", choices=["numbers", "images", "pong"], default="numbers")
    parser.add_argument("--device", default="cpu", help="where ours learn: cpu or cuda")
    parser.add_argument(
        "--seconds", type=float, default=8, help="that a peer learns, or an environment steps"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=20, help="begin no measurement after so long")
    parser.add_argument("--sb3", metavar="PYTHON")
    parser.add_argument("--sample-factory", metavar="PYTHON")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.what == "one":
        found = learned(args.name, args.frames, args.environments, args.observations, args.device)
        print(json.dumps(found))
        return
    args.end = time.monotonic() + 60 * args.minutes
    result: dict[str, Any] = {"simulation": {}, "learning": {}}
    if args.json and args.json.exists():
        result = json.loads(args.json.read_text())
    result |= {
        "cores": CORES,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "gymnasium": gymnasium.__version__,
        "environments": args.environments,
        "length": LENGTH,
        "actors": ACTORS,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "observations": args.observations,
    }
    if args.what != "learning":
        simulation_rounds(args, result)
        keep(args.json, result)
    if args.what != "simulation":
        learning_rounds(args, result)


if __name__ == "__main__":
    main()
