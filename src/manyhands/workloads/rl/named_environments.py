"""Environments by their name in gymnasium, which is an extra and imported only here; CartPole-v1 is ours."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from manyhands.errors import UserError, first_line
from manyhands.workloads.rl.atari_games import open_atari
from manyhands.workloads.rl.cart_pole import CartPoles

__all__ = ["open_named"]


def open_named(name: str, count: int, options: dict[str, Any]) -> Any:
    """A vector environment where there is one for this name, else a list of single ones."""
    if name == "CartPole-v1" and options.keys() <= {"max_episode_steps", "render_mode"}:
        return CartPoles(count, options.get("max_episode_steps", 500))
    try:
        import gymnasium
    except ImportError:
        raise UserError(
            f"environment {name!r} needs gymnasium, which is not installed: pip install 'manyhands[rl]'"
        ) from None
    try:
        if name.startswith("ALE/"):
            return open_atari(name, count, options)
        if "render_mode" not in options and _vectorized(gymnasium, name):
            return gymnasium.make_vec(name, count, vectorization_mode="vector_entry_point", **options)
        # what the checker of gymnasium warns of is an error here, at less cost
        return [gymnasium.make(name, disable_env_checker=True, **options) for _ in range(count)]
    except gymnasium.error.UnregisteredEnv:
        raise UserError(
            f"environment {name!r} is not known to gymnasium{_nearest(name, gymnasium.registry)}"
        ) from None
    except (gymnasium.error.Error, TypeError, ImportError) as error:
        raise UserError(f"environment {name!r} cannot be made: {first_line(error)}") from error


def _vectorized(gymnasium: Any, name: str) -> bool:
    spec = gymnasium.registry.get(name)
    return spec is not None and spec.vector_entry_point is not None


def _nearest(name: str, known: Iterable[str]) -> str:
    """The nearest known name, in its newest version."""
    close = difflib.get_close_matches(name, known, n=6, cutoff=0.5)
    if not close:
        return "; a name of another package begins with its module, as in 'package:Name-v0'"
    stem = _stem(close[0])
    return f"; did you mean {max((one for one in close if _stem(one) == stem), key=_version)!r}?"


def _stem(name: str) -> str:
    return re.sub(r"-v\d+$", "", name)


def _version(name: str) -> int:
    return int(name.rpartition("-v")[2]) if name != _stem(name) else -1
