"""One peer learns CartPole-v1 for some seconds and prints how many frames it learned from: for `rl_speed.py`.

    PYTHON benchmarks/rl_peers.py PEER --environments 64 --length 20 --seconds 10

PYTHON is of a virtual environment that has the peer: stable-baselines3, or sample-factory (which needs gymnasium < 1).
Frames count from the third second of learning on, without the start of processes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time

import gymnasium

SETTLING_S = 2.0
HIDDEN = 64


class Clock:
    """Frames and seconds between the first look after `SETTLING_S` and the last."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.begun = seconds, 0.0
        self.first: tuple[float, int] | None = None
        self.last = (0.0, 0)

    def look(self, frames: int) -> bool:
        """Whether there is time left."""
        now = time.perf_counter()
        self.begun = self.begun or now
        if self.first is None and now - self.begun >= SETTLING_S:
            self.first = now, frames
        self.last = now, frames
        return self.first is None or now - self.first[0] < self.seconds

    def report(self) -> None:
        assert self.first is not None
        seconds, frames = (last - first for last, first in zip(self.last, self.first, strict=True))
        print(json.dumps({"frames": frames, "seconds": seconds, "rate": frames / seconds}))


def stable_baselines(algorithm: str, environments: int, length: int, seconds: float) -> None:
    import torch
    from stable_baselines3 import A2C, PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    clock = Clock(seconds)

    class Timed(BaseCallback):
        time_left = True

        def _on_rollout_start(self) -> None:  # and after what was learned from the last one
            self.time_left = clock.look(self.num_timesteps)

        def _on_step(self) -> bool:
            return self.time_left

    torch.set_num_threads(1)  # faster than two with so small a network
    network = {"net_arch": {"pi": [HIDDEN, HIDDEN], "vf": [HIDDEN, HIDDEN]}}
    made = make_vec_env("CartPole-v1", n_envs=environments, seed=0)
    if algorithm == "a2c":
        model = A2C("MlpPolicy", made, n_steps=length, policy_kwargs=network, device="cpu")
    else:
        model = PPO(
            "MlpPolicy",
            made,
            n_steps=length,
            n_epochs=4,
            batch_size=environments * length // 4,
            policy_kwargs=network,
            device="cpu",
        )
    model.learn(10**9, callback=Timed())
    clock.report()


def make_single(name: str, *_: object, render_mode: str | None = None) -> gymnasium.Env:
    return gymnasium.make(name, render_mode=render_mode)


def sample_factory(environments: int, length: int, seconds: float) -> None:
    from sample_factory.algo.runners.runner import AlgoObserver
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    clock = Clock(seconds)

    class Timed(AlgoObserver):
        def on_training_step(self, runner: object, _: int) -> None:
            if not clock.look(runner.total_env_steps_since_resume or 0):
                runner._should_end_training = lambda: True

    register_env("CartPole-v1", make_single)
    workers = min(len(os.sched_getaffinity(0)), environments // 2)  # each with two halves that take turns
    with tempfile.TemporaryDirectory() as folder:
        given = [
            "--env=CartPole-v1",
            "--algo=APPO",
            "--device=cpu",
            f"--train_dir={folder}",
            "--experiment=speed",
            f"--num_workers={workers}",
            f"--num_envs_per_worker={environments // workers}",
            "--worker_num_splits=2",
            f"--rollout={length}",
            f"--batch_size={environments * length}",
            "--num_epochs=1",
            "--use_rnn=False",
            "--recurrence=1",
            "--with_vtrace=False",  # which it has for recurrent policies only
            "--encoder_mlp_layers",
            str(HIDDEN),
            str(HIDDEN),
            "--nonlinearity=tanh",
            "--actor_critic_share_weights=False",
            "--normalize_input=False",
            "--decorrelate_experience_max_seconds=0",  # a phase at the start, which is not measured
            "--save_every_sec=10000",
            "--log_to_file=False",
        ]
        parser, _ = parse_sf_args(given)
        _, runner = make_runner(parse_full_cfg(parser, given))
        runner.register_observer(Timed())
        runner.init()
        runner.run()
    clock.report()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=["sb3-a2c", "sb3-ppo", "sample-factory"])
    parser.add_argument("--environments", type=int, default=64)
    parser.add_argument("--length", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10)
    asked = parser.parse_args()
    if asked.peer == "sample-factory":
        sample_factory(asked.environments, asked.length, asked.seconds)
    else:
        stable_baselines(asked.peer[4:], asked.environments, asked.length, asked.seconds)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
