"""Playing: what a policy earns in whole episodes, without learning; and an episode as a moving picture."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from manyhands.data.store.atomic import write_atomically
from manyhands.errors import UserError
from manyhands.workloads.rl.environments import Source, open_environments
from manyhands.workloads.rl.episodes import Episode
from manyhands.workloads.rl.moving_picture import moving_picture
from manyhands.workloads.rl.policies import choose, scorer
from manyhands.workloads.rl.stepping import Array, Environments

__all__ = ["film", "play"]

_MOST_STEPS = 100_000  # of an episode: Pong has up to 27,000
_MS_PER_PICTURE = 30
_MOST_PIXELS = 320  # in width, of a film
_CHOOSING = 1  # beside the seed of an environment: the random numbers of its actions


@torch.no_grad()
def play(
    policy: nn.Module,
    source: Source,
    seeds: Sequence[int],
    *,
    options: Mapping[str, Any] | None = None,
    greedy: bool = True,
    most_steps: int = _MOST_STEPS,
) -> Array:
    """The return of one episode for each seed, all side by side; after `most_steps`, what was earned so far.

    Each environment plays on until all have ended, but only its first episode counts. Unless `greedy`, actions are
    drawn from the policy, with random numbers of each seed's own.
    """
    environments = open_environments(source, len(seeds), options=options)
    returns = np.full(len(seeds), np.nan)
    try:
        for episodes in _steps(policy, environments, seeds, greedy, most_steps):
            for one in episodes:
                if one.number == 0:
                    returns[one.environment] = one.total
            if not np.isnan(returns).any():
                return returns
        return np.where(np.isnan(returns), environments.recorder.totals, returns)
    finally:
        environments.close()


@torch.no_grad()
def film(
    policy: nn.Module,
    source: Source,
    seed: int,
    path: Path,
    *,
    options: Mapping[str, Any] | None = None,
    most_steps: int = 1000,
    most_bytes: int = 1 << 19,
    within_s: float = 60.0,
) -> float:
    """One greedy episode as an animated PNG at `path`, up to `most_steps` and `within_s`; what it earned so far.

    An environment that a function makes must be made with render_mode="rgb_array". The file has at most `most_bytes`,
    for which it may show only every other step, or fewer.
    """
    drawn = {"render_mode": "rgb_array"} if isinstance(source, str) else {}
    environments = open_environments(source, 1, options={**(options or {}), **drawn})
    pictures, deadline = [], time.monotonic() + within_s
    try:
        for episodes in _steps(policy, environments, [seed], True, most_steps):
            if episodes or time.monotonic() > deadline:
                break
            pictures.append(_small(environments.picture(0)))
        total = episodes[0].total if episodes else float(environments.recorder.totals[0])
    finally:
        environments.close()
    if not pictures:
        raise UserError(
            f"the episode with seed {seed} was over with its first step, or took too long, so there is nothing to show"
        )
    write_atomically(path, [moving_picture(pictures, _MS_PER_PICTURE, most_bytes)])
    return total


def _small(picture: Array) -> Array:
    """Every other pixel, or fewer, of a large one."""
    every = max(1, math.ceil(picture.shape[1] / _MOST_PIXELS))
    return picture[::every, ::every]


def _steps(
    policy: nn.Module, environments: Environments, seeds: Sequence[int], greedy: bool, most_steps: int
) -> Iterator[Sequence[Episode]]:
    """Step by step, the episodes that ended."""
    device = next((one.device for one in policy.parameters()), torch.device("cpu"))
    generators = [] if greedy else [np.random.default_rng([seed, _CHOOSING]) for seed in seeds]
    was_training = policy.training
    policy.eval()
    try:
        observations = environments.reset(seeds)
        scores_of = scorer(policy)
        for _ in range(most_steps):
            scores = scores_of(torch.from_numpy(observations).to(device))
            if greedy:
                actions = scores.argmax(1)
            else:
                actions, _ = choose(scores, torch.tensor([one.random() for one in generators], device=device))
            stepped = environments.step(actions.cpu().numpy())
            observations = stepped.observations
            yield stepped.episodes
    finally:
        policy.train(was_training)
