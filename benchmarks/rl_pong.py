"""Pong from pixels until the mean score of the last 100 games is 18, by PPO with actors and a learner on the GPU.

    python benchmarks/rl_pong.py --device cuda --minutes 8 --json benchmarks/results/rl-pong.json

Settings are those with which CleanRL's PPO solves Pong on EnvPool within minutes (3 epochs, clip 0.2, rate 2.5e-4, and
advantages of mean 0), but for more games side by side, minibatches of 480 in the place of 256 and twice the rate; the
network is IMPALA's shallow one. A step is an action, of 4 frames of the game. The score of a game is that of the policy
as it learns, with actions drawn from it. FILE has the curve, written every few seconds; at the end also what the
policy reaches in games of its own, with the best action and with drawn ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import manyhands as mh
from manyhands.engine.callbacks import Callback
from manyhands.workloads.rl.playing import play

GAME, SHAPE, ACTIONS = "ALE/Pong-v5", (4, 84, 84), 6
SOLVED, GAMES = 18.0, 100
MOST_STEPS = 6000  # of a game at the end: a rally of two machines can go on for ever
EVERY_S = 5.0


class Curve(Callback):
    """The mean score of the last games over steps and seconds; asks to stop where that is enough, or time is over."""

    def __init__(self, path: Path, seconds: float, about: dict[str, Any]) -> None:
        self._path, self._seconds, self.found = path, seconds, about
        self._rows: list[dict[str, float]] = []
        self.found["curve"] = self._rows
        self._games: deque[float] = deque(maxlen=GAMES)
        self._begun, self._steps, self._ended, self._first = time.monotonic(), 0, 0, 0.0

    def on_step(self, row: Mapping[str, Any]) -> bool | None:
        if "frames" not in row:
            return None
        now = time.monotonic() - self._begun
        self._first = self._first or now
        self._steps += row["frames"]
        ended = row.get("episodes", 0)
        self._ended += ended
        self._games.extend(
            [row.get("episode_return", 0.0)] * min(ended, GAMES)
        )  # of one batch their mean is known
        score = statistics.fmean(self._games) if self._games else None
        is_solved = len(self._games) == GAMES and score is not None and score >= SOLVED
        is_over = now > self._seconds
        if is_solved or is_over or not self._rows or now - self._rows[-1]["seconds"] >= EVERY_S:
            self._rows.append({"seconds": now, "steps": self._steps, "games": self._ended, "score": score})
            self.found |= {"solved": is_solved, "steps": self._steps, "seconds": now}
            self.found["steps/s"] = self._steps / max(now - self._first, 1e-3)
            self._path.write_text(json.dumps(self.found, indent=1) + "\n")
            print(
                f"{now:5.0f} s  {self._steps:>10,} steps  {self._ended:>5} games  score {score}", flush=True
            )
        return is_solved or is_over


def task(asked: argparse.Namespace) -> mh.Task:
    return mh.rl.task(
        policy=partial(mh.rl.ActorCritic, SHAPE, ACTIONS),
        algorithm=mh.rl.PPO(clip=0.2, epochs=3, minibatches=asked.length // 4, normalize=True),
        environment=GAME,
        environments=asked.actors * asked.each,
        length=asked.length,
        optimizer=partial(torch.optim.Adam, lr=asked.rate, eps=1e-5),
        decay=50_000,
        clip_norm=0.5,
        actors=asked.actors,
        lag=1,
        inference=asked.inference,
        episodes=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--actors", type=int, default=15)
    parser.add_argument("--each", type=int, default=8, help="games of an actor")
    parser.add_argument("--length", type=int, default=64, help="steps of each game in a batch")
    parser.add_argument("--rate", type=float, default=5e-4, help="learning rate at the beginning")
    parser.add_argument("--inference", choices=["actor", "central"], default="actor")
    parser.add_argument("--minutes", type=float, default=8, help="of learning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--games", type=int, default=10, help="at the end, of each kind")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    is_gpu = asked.device == "cuda"
    about = {
        **{name: value for name, value in vars(asked).items() if name != "json"},
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if is_gpu else None,
        "torch": torch.__version__,
    }
    curve = Curve(asked.json, 60 * asked.minutes, about)
    options = mh.Options(progress="none", allow_overload=True, compile=False, callbacks=[curve])
    run = mh.fit(
        task(asked), "single", workers=1, steps=10**7, seed=asked.seed, device=asked.device, options=options
    )
    for kind, greedy in (("best action", True), ("drawn actions", False)):
        scores = play(
            run.model.to(asked.device), GAME, range(asked.games), greedy=greedy, most_steps=MOST_STEPS
        )
        curve.found.setdefault("afterwards", {})[kind] = scores.tolist()
        asked.json.write_text(json.dumps(curve.found, indent=1) + "\n")
        print(f"{kind}: {scores.mean():.1f} in {len(scores)} games", flush=True)


if __name__ == "__main__":
    main()
