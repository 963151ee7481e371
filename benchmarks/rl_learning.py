"""What each algorithm has learned after so many frames: ten seeds, the interquartile mean and its 95 % interval.

    python benchmarks/rl_learning.py [--seeds 10] [--only a2c,ppo] [--env CartPole-v1] [--json FILE] [--minutes 20]

The score of a seed is the mean return of 20 whole episodes at the end of its run, always with the best action. The
interquartile mean leaves out the lowest and the highest quarter of the seeds; its interval is by the percentile
bootstrap over seeds (Agarwal et al., 2021). Nothing is chosen after the fact: all seeds count, with one setting.
A3C is A2C under `hogwild`; V-trace "off" learns from the same old rollouts as if they were new.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import manyhands as mh
from manyhands.workloads.rl.policies import ActorCritic

RESULTS = Path(__file__).resolve().parent / "results" / "rl-learning.json"
SIZES = {"CartPole-v1": (4, 2), "Acrobot-v1": (6, 3)}
EPISODES, SAMPLES = 20, 10_000


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An algorithm, the strategy that trains it, and its settings."""

    algorithm: Any
    strategy: str = "single"
    workers: int = 1
    steps: int = 800
    learning_rate: float = 2e-3
    rollouts: dict[str, int] = field(default_factory=lambda: {"environments": 32, "length": 16})

    @property
    def frames(self) -> int:
        batches = self.steps // self.algorithm.updates
        return batches * self.rollouts["environments"] * self.rollouts["length"]


ACTORS = {"environments": 32, "length": 16, "actors": 2}
CONTENDERS = {
    "a2c": Contender(algorithm=mh.rl.A2C(), strategy="mirrored", workers=2),
    "a3c": Contender(algorithm=mh.rl.A2C(), strategy="hogwild", workers=2),
    "impala": Contender(algorithm=mh.rl.Impala(), rollouts={**ACTORS, "lag": 1}),
    "ppo": Contender(algorithm=mh.rl.PPO(), steps=1600, rollouts={"environments": 16, "length": 64}),
}
LAGS = {
    f"impala, lag {lag}, V-trace {'on' if corrects else 'off'}": Contender(
        algorithm=mh.rl.Impala(corrects=corrects), rollouts={**ACTORS, "lag": lag}
    )
    for lag in (0, 4, 16, 64)
    for corrects in (True, False)
}


def score(contender: Contender, env: str, seed: int) -> dict[str, Any]:
    """One run: its returns at each evaluation, its seconds, and how far behind its rollouts were."""
    sizes = SIZES[env]
    task = mh.rl.task(
        policy=partial(ActorCritic, sizes[:1], sizes[1]),
        algorithm=contender.algorithm,
        environment=env,
        optimizer=partial(torch.optim.Adam, lr=contender.learning_rate, eps=1e-5),
        episodes=EPISODES,
        **contender.rollouts,
    )
    begun = time.monotonic()
    options = mh.Options(progress="none", allow_overload=True)
    run = mh.fit(
        task,
        contender.strategy,
        workers=contender.workers,
        steps=contender.steps,
        seed=seed,
        options=options,
    )
    curve = [(row["step"], row["metrics"]["return"]) for row in run.history if "metrics" in row]
    lags = [row["policy_lag"] for row in run.history if "policy_lag" in row]
    return {
        "return": run.summary["final"]["return"],
        "curve": curve,
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
    low, high = interval(returns)
    return {
        "frames": contender.frames,
        "strategy": contender.strategy,
        "workers": contender.workers,
        "seeds": len(runs),
        "interquartile_mean": float(interquartile(returns)),
        "low": low,
        "high": high,
        "least": float(returns.min()),
        "seconds": float(np.median([run["seconds"] for run in runs])),
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--only", default=",".join(CONTENDERS), help="names; `lags` for those with V-trace on and off"
    )
    parser.add_argument("--env", default="CartPole-v1", choices=list(SIZES))
    parser.add_argument("--minutes", type=float, default=20, help="begin no run after so long")
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", "hogwild on a dense model")
    named = {**CONTENDERS, **LAGS}
    names = list(LAGS) if asked.only == "lags" else asked.only.split(",")
    end = time.monotonic() + 60 * asked.minutes
    found = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    found["machine"] = {"cores": os.cpu_count(), "processor": platform.machine(), "torch": torch.__version__}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(asked.seeds):
        for name in names:
            if time.monotonic() < end:
                runs[name].append(score(named[name], asked.env, seed))
        for name in names:
            if runs[name]:
                one = found.setdefault(asked.env, {})[name] = summary(named[name], runs[name])
                print(
                    f"{asked.env} {name}: {one['seeds']} seeds, {one['interquartile_mean']:.1f} "
                    f"[{one['low']:.1f}, {one['high']:.1f}], least {one['least']:.1f}, {one['frames']:,} frames, "
                    f"{one['seconds']:.0f} s",
                    flush=True,
                )
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
