"""What each algorithm has learned after so many frames: ten seeds, the interquartile mean and its 95 % interval.

    python benchmarks/rl_learning.py [--seeds 10] [--only a2c,ppo] [--env CartPole-v1] [--json FILE] [--minutes 20]

The settings are those of `manyhands train rl --algorithm NAME`; none was chosen by what these seeds gave. The score of
a seed is the mean return of 20 whole episodes at the end of its run, always with the best action. The interquartile
mean leaves out the lowest and the highest quarter of the seeds; its interval is by the percentile bootstrap over seeds
(Agarwal et al., 2021). All seeds count. A3C is A2C under `hogwild`; V-trace "off" learns from the same old rollouts as
if they were new. Runs that FILE has already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import manyhands as mh
from manyhands.workloads.rl.environments import open_environments
from manyhands.workloads.rl.rl_task import DEFAULTS, RL

RESULTS = Path(__file__).resolve().parent / "results" / "rl-learning.json"
STEPS, POINTS, EPISODES, SAMPLES = RL.steps or 0, 4, 20, 10_000


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An algorithm with its usual settings, the strategy that trains it, and its actors."""

    algorithm: str
    strategy: str = "single"
    workers: int = 1
    actors: dict[str, int] = field(default_factory=dict)
    corrects: bool = True

    def task(self, env: str) -> mh.Task:
        usual = DEFAULTS[self.algorithm]
        algorithm = usual.algorithm if self.corrects else replace(usual.algorithm, corrects=False)  # type: ignore[call-arg]
        environments = open_environments(env, 1)
        environments.close()
        return mh.rl.task(
            policy=partial(mh.rl.ActorCritic, environments.observation_shape, environments.actions),
            algorithm=algorithm,
            environment=env,
            environments=usual.environments,
            length=usual.length,
            optimizer=partial(torch.optim.Adam, lr=1e-3, eps=1e-5),
            decay=STEPS,
            clip_norm=usual.clip_norm,
            episodes=EPISODES,
            **self.actors,
        )

    @property
    def frames(self) -> int:
        usual = DEFAULTS[self.algorithm]
        return STEPS // usual.algorithm.updates * usual.environments * usual.length


CONTENDERS = {
    "A2C": Contender(algorithm="a2c", strategy="mirrored", workers=2),
    "A3C": Contender(algorithm="a2c", strategy="hogwild", workers=2),
    "IMPALA": Contender(algorithm="impala", actors={"actors": 2, "lag": 1}),
    "PPO": Contender(algorithm="ppo", strategy="mirrored", workers=2),
}
LAGS = {
    f"lag {lag}, V-trace {'on' if corrects else 'off'}": Contender(
        algorithm="impala", actors={"actors": 2, "lag": lag}, corrects=corrects
    )
    for lag in (0, 4, 16, 64)
    for corrects in (True, False)
}


def score(contender: Contender, env: str, seed: int) -> dict[str, Any]:
    """One run: its returns at each evaluation, its seconds, and how far behind its rollouts were."""
    begun = time.monotonic()
    run = mh.fit(
        contender.task(env),
        contender.strategy,
        workers=contender.workers,
        steps=STEPS,
        seed=seed,
        options=mh.Options(progress="none", allow_overload=True, evaluate_every=STEPS // POINTS),
    )
    lags = [row["policy_lag"] for row in run.history if "policy_lag" in row]
    assert max(lags, default=0) <= contender.actors.get("lag", 0), "the bound on the lag was not kept"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--only", default=",".join(CONTENDERS), help="names; `lags` for those with V-trace on and off"
    )
    parser.add_argument("--env", default="CartPole-v1", metavar="NAME")
    parser.add_argument("--minutes", type=float, default=20, help="begin no run after so long")
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", "hogwild on a dense model")
    named = {**CONTENDERS, **LAGS}
    names = list(LAGS) if asked.only == "lags" else asked.only.split(",")
    end = time.monotonic() + 60 * asked.minutes
    found = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    found["machine"] = {"cores": os.cpu_count(), "processor": platform.machine(), "torch": torch.__version__}
    known = found.setdefault(asked.env, {})
    runs = {name: known.get(name, {}).get("runs", []) for name in names}
    for seed in range(asked.seeds):
        for name in names:
            if len(runs[name]) > seed or time.monotonic() > end:
                continue
            runs[name].append(score(named[name], asked.env, seed))
            one = known[name] = summary(named[name], runs[name])
            asked.json.write_text(json.dumps(found, indent=1) + "\n")
            print(
                f"{asked.env} {name}: {one['seeds']} seeds, {one['interquartile_mean']:.1f} "
                f"[{one['low']:.1f}, {one['high']:.1f}], least {one['least']:.1f}, {one['frames']:,} frames, "
                f"{one['seconds']:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
