"""Atari games by the vector environment of ale-py: an action for 4 frames, the last 4 of them gray in 84 × 84.

Learning sees the sign of each reward, and an end where a life is lost (Mnih et al., 2015). What is recorded and
reported are whole games and their scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from manyhands.errors import UserError, first_line
from manyhands.workloads.rl.stepping import Array, Columns, Environments, Stepped

__all__ = ["AtariGames", "open_atari"]


class AtariGames(Environments):
    """Games side by side, in one thread of this process."""

    def __init__(self, games: Any, *, clips: bool, ends_with_lives: bool) -> None:
        """`games` is an `AtariVectorEnv` with rewards as they are and no end where a life is lost."""
        super().__init__(games.num_envs, games.single_observation_space, games.single_action_space)
        self._games, self._clips, self._ends_with_lives = games, clips, ends_with_lives
        self._lives = np.zeros(self.count, np.int64)
        self._seen = np.zeros(0, np.uint8)

    def reset(self, seeds: Sequence[int]) -> Array:
        self._check_seeds(seeds)
        self._seen, info = self._games.reset(seed=np.asarray(seeds, np.int64))
        self._lives = info["lives"]
        return self._seen

    def step(self, actions: Array) -> Stepped:
        self._seen, scores, over, truncated, info = self._games.step(actions)
        games = Columns(scores.astype(float), over, truncated, np.ones(self.count, bool))
        lost = (info["lives"] < self._lives) & ~(over | truncated)
        self._lives = info["lives"]
        columns = games._replace(
            rewards=np.sign(games.rewards) if self._clips else games.rewards,
            terminated=over | lost if self._ends_with_lives else over,
        )
        finals = {int(game): info["final_obs"][game] for game in np.flatnonzero(truncated & ~over)}
        return Stepped(self._seen, *columns, finals, self.recorder.step(*games))

    def close(self) -> None:
        self._games.close()

    def picture(self, index: int) -> Array:
        picture: Array = self._seen[index, -1]
        return picture


def open_atari(name: str, count: int, options: dict[str, Any]) -> AtariGames:
    """The options are those of `ale_py.vector_env.AtariVectorEnv`."""
    try:
        import ale_py  # noqa: F401 - it tells gymnasium of its games
        import gymnasium
    except ImportError:
        raise UserError(
            f"environment {name!r} needs ale-py, which is not installed: pip install 'manyhands[atari]'"
        ) from None
    options.pop("render_mode", None)  # what is seen is shown
    clips, ends_with_lives = (options.pop(one, True) for one in ("reward_clipping", "life_loss_info"))
    given = {"num_threads": 1, **options, "reward_clipping": False, "autoreset_mode": "SameStep"}
    try:
        games = gymnasium.make_vec(name, count, vectorization_mode="vector_entry_point", **given)
    except TypeError as error:
        raise UserError(f"environment {name!r} cannot be made: {first_line(error)}") from error
    return AtariGames(games, clips=clips, ends_with_lives=ends_with_lives)
