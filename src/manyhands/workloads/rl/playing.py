"""Playing: what a policy earns in whole episodes, without learning; and an episode as a moving picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from manyhands.errors import UserError
from manyhands.workloads.rl.environments import Source, open_environments
from manyhands.workloads.rl.episodes import Episode
from manyhands.workloads.rl.policies import choose, scorer
from manyhands.workloads.rl.stepping import Array, Environments

__all__ = ["film", "play"]

_MOST_STEPS = 100_000  # of an episode: Pong has up to 27,000
_MS_PER_PICTURE = 30
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
) -> float:
    """One greedy episode as an animated GIF at `path`; what it earned.

    An environment that a function makes must be made with render_mode="rgb_array".
    """
    try:
        from PIL import Image
    except ImportError:
        raise UserError(
            "a film of an episode needs Pillow, which is not installed: pip install 'manyhands[images]'"
        ) from None
    drawn = {"render_mode": "rgb_array"} if isinstance(source, str) else {}
    environments = open_environments(source, 1, options={**(options or {}), **drawn})
    pictures = []
    try:
        for episodes in _steps(policy, environments, [seed], True, most_steps):
            if episodes:
                break
            pictures.append(Image.fromarray(environments.picture(0)))
        total = episodes[0].total if episodes else float(environments.recorder.totals[0])
    finally:
        environments.close()
    if not pictures:
        raise UserError(
            f"the episode with seed {seed} ended with its first step, so there is nothing to show"
        )
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=_MS_PER_PICTURE, loop=0)
    return total


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
