"""Reinforcement learning: actors turn a policy and environments into rollouts, which every strategy learns from.

import manyhands as mh

task = mh.rl.task(policy=MyPolicy, algorithm=mh.rl.A2C(), environment="CartPole-v1")
run = mh.fit(task, "mirrored", workers=2, steps=1000)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyhands.workloads.rl.policies import ActorCritic
    from manyhands.workloads.rl.policy_gradients import A2C, PPO, Impala
    from manyhands.workloads.rl.rl_task import task

__all__ = ["A2C", "PPO", "ActorCritic", "Impala", "task"]

_MODULE_OF = {
    "A2C": "policy_gradients",
    "PPO": "policy_gradients",
    "Impala": "policy_gradients",
    "ActorCritic": "policies",
    "task": "rl_task",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'manyhands.rl' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
