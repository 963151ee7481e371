"""What each algorithm has learned after so many frames: ten seeds, the interquartile mean and its 95 % interval.

    python benchmarks/rl_learning.py [--only A2C,PPO] [--env CartPole-v1] [--seeds 10] [--minutes 20] [--json FILE]
    python benchmarks/rl_learning.py --only lags --rate 3e-3 --parallel 12 --minutes 4 --json FILE

The settings are those of `manyhands train rl --algorithm NAME`; none was chosen by what these seeds gave. The score of
a seed is the mean return of 20 whole episodes at the end of its run, always with the best action. The interquartile
mean leaves out the lowest and the highest quarter of the seeds; its interval is by the percentile bootstrap over seeds
(Agarwal et al., 2021). All seeds count. A3C is A2C under `hogwild`; V-trace "off" learns from the same old rollouts as
if they were new. Runs that FILE has already are not repeated. `--parallel` processes make the runs one after another,
each on its share of the cores; after so many minutes those that are unfinished are ended and do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import manyhands as mh
from manyhands.workloads.rl.environments import open_environments
from manyhands.workloads.rl.rl_task import DEFAULTS, RL, RLDefaults
from manyhands.workloads.rl.run_tickets import audit_run_tickets

RESULTS = Path(__file__).resolve().parent / "results" / "rl-learning.json"
POINTS, EPISODES, SAMPLES = 4, 20, 10_000


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An algorithm with its settings, the strategy that trains it, and its actors."""

    algorithm: str
    strategy: str = "single"
    workers: int = 1
    actors: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(
        default_factory=dict
    )  # of the algorithm, where they are not the usual ones
    learning_rate: float = 1e-3
    steps: int = RL.steps or 0

    @property
    def usual(self) -> RLDefaults:
        usual = DEFAULTS[self.algorithm]
        return replace(usual, algorithm=replace(usual.algorithm, **self.settings))

    def task(self, env: str) -> mh.Task:
        usual = self.usual
        environments = open_environments(env, 1)
        environments.close()
        return mh.rl.task(
            policy=partial(mh.rl.ActorCritic, environments.observation_shape, environments.actions),
            algorithm=usual.algorithm,
            environment=env,
            environments=usual.environments,
            length=usual.length,
            optimizer=partial(torch.optim.Adam, lr=self.learning_rate, eps=1e-5),
            decay=self.steps,
            clip_norm=usual.clip_norm,
            episodes=EPISODES,
            **self.actors,
        )

    @property
    def frames(self) -> int:
        usual = self.usual
        return self.steps // usual.algorithm.updates * usual.environments * usual.length


CONTENDERS = {
    "A2C": Contender(algorithm="a2c", strategy="mirrored", workers=2),
    "A3C": Contender(algorithm="a2c", strategy="hogwild", workers=2),
    "IMPALA": Contender(algorithm="impala", actors={"actors": 2, "lag": 1}),
    "PPO": Contender(algorithm="ppo", strategy="mirrored", workers=2),
}
LAGS = {
    f"lag {lag} {'with' if corrects else 'without'} V-trace": Contender(
        algorithm="impala", actors={"actors": 2, "lag": lag}, settings={"corrects": corrects}
    )
    for lag in (0, 4, 16, 64)
    for corrects in (True, False)
}
NAMED = {**CONTENDERS, **LAGS}


def score(contender: Contender, env: str, seed: int) -> dict[str, Any]:
    """One run: its returns at each evaluation, its seconds, and how far behind its rollouts were, as its audit says."""
    begun = time.monotonic()
    steps = contender.steps
    with tempfile.TemporaryDirectory() as out:
        run = mh.fit(
            contender.task(env),
            contender.strategy,
            workers=contender.workers,
            steps=steps,
            seed=seed,
            out=out,
            options=mh.Options(progress="none", allow_overload=True, evaluate_every=steps // POINTS),
        )
        audited = audit_run_tickets(Path(out))
    lags = [row["policy_lag"] for row in run.history if "policy_lag" in row]
    if audited is not None:
        assert audited.verdict == "complete", audited.broken
        assert max(lags) <= contender.actors["lag"]
    return {
        "seed": seed,
        "return": run.summary["final"]["return"],
        "curve": [(row["step"], row["metrics"]["return"]) for row in run.history if "metrics" in row],
        "seconds": time.monotonic() - begun,
        "lag": {"mean": float(np.mean(lags)), "most": max(lags)} if lags else None,
    }


def interquartile(values: np.ndarray) -> np.ndarray:
    """Means along the last axis without its lowest and its highest quarter."""
    cut = values.shape[-1] // 4
    return np.sort(values)[..., cut : values.shape[-1] - cut].mean(-1)


def interval(values: np.ndarray) -> tuple[float, float]:
    drawn = np.random.default_rng(0).choice(values, (SAMPLES, len(values)))
    low, high = np.percentile(interquartile(drawn), (2.5, 97.5))
    return float(low), float(high)


def summary(contender: Contender, runs: list[dict[str, Any]]) -> dict[str, Any]:
    returns = np.array([run["return"] for run in runs])
    curves = np.array([[value for _, value in run["curve"]] for run in runs])
    low, high = interval(returns)
    return {
        "frames": contender.frames,
        "learning_rate": contender.learning_rate,
        "strategy": contender.strategy,
        "workers": contender.workers,
        "seeds": len(runs),
        "interquartile_mean": float(interquartile(returns)),
        "low": low,
        "high": high,
        "least": float(returns.min()),
        "seconds": float(np.median([run["seconds"] for run in runs])),
        "curve": [float(interquartile(values)) for values in curves.T],
        "lag": float(np.mean([run["lag"]["mean"] for run in runs])) if runs[0]["lag"] else None,
        "runs": runs,
    }


def made(
    asked: argparse.Namespace, wanted: Sequence[tuple[str, int]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Contenders and their runs as they end, so many at a time."""
    todo: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    for one in wanted:
        todo.put(one)
    ended: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = queue.SimpleQueue()
    cores = sorted(os.sched_getaffinity(0))
    end = time.monotonic() + 60 * asked.minutes
    command = [
        sys.executable,
        __file__,
        "--env",
        asked.env,
        "--rate",
        str(asked.rate),
        "--steps",
        str(asked.steps),
    ]

    def make(share: list[int]) -> None:
        with suppress(queue.Empty), runner([*command, "--makes"], share, end) as process:
            while True:
                name, seed = todo.get_nowait()
                print(json.dumps([name, seed]), file=process.stdin, flush=True)
                if not (line := process.stdout.readline()):  # type: ignore[union-attr]
                    break
                ended.put((name, json.loads(line)))
        ended.put(None)

    for number in range(asked.parallel):
        share = cores[number :: asked.parallel] or [cores[number % len(cores)]]
        threading.Thread(target=make, args=[share]).start()
    going = asked.parallel
    while going:
        if (one := ended.get()) is not None:
            yield one
        else:
            going -= 1


@contextmanager
def runner(command: list[str], cores: Sequence[int], end: float) -> Iterator[subprocess.Popen[str]]:
    """A process on these cores that lives no longer than until `end`."""
    pinned = ["taskset", "-c", ",".join(map(str, cores)), *command]
    process = subprocess.Popen(pinned, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(max(0.0, end - time.monotonic()), process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--only", default=",".join(CONTENDERS), help="names; `lags` for those with V-trace on and off"
    )
    parser.add_argument("--env", default="CartPole-v1", metavar="NAME")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate at the beginning")
    parser.add_argument("--steps", type=int, default=RL.steps, help="updates of a run")
    parser.add_argument("--minutes", type=float, default=20, help="end all runs after so long")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--makes", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", "hogwild on a dense model")

    def contender(name: str) -> Contender:
        return replace(NAMED[name], learning_rate=asked.rate, steps=asked.steps)

    if asked.makes:
        for line in sys.stdin:
            name, seed = json.loads(line)
            print(json.dumps(score(contender(name), asked.env, seed)), flush=True)
        return
    names = list(LAGS) if asked.only == "lags" else asked.only.split(",")
    found = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    cores = len(os.sched_getaffinity(0))
    found["machine"] = {"cores": cores, "processor": platform.machine(), "torch": torch.__version__}
    known = found.setdefault(asked.env, {})
    runs = {name: known.get(name, {}).get("runs", []) for name in names}
    has = {(name, run["seed"]) for name in names for run in runs[name]}
    wanted = [(name, seed) for seed in range(asked.seeds) for name in names if (name, seed) not in has]
    for name, run in made(asked, wanted):
        runs[name] = sorted([*runs[name], run], key=lambda one: one["seed"])
        one = known[name] = summary(contender(name), runs[name]) | {"at a time": asked.parallel}
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
        print(
            f"{asked.env} {name}: {one['seeds']} seeds, {one['interquartile_mean']:.1f} "
            f"[{one['low']:.1f}, {one['high']:.1f}], least {one['least']:.1f}, {one['frames']:,} frames, "
            f"{one['seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
