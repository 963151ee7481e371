"""CartPole-v1 compiled, all carts in one call: the same episodes as gymnasium's, to rounding, for the same seeds.

A. G. Barto, R. S. Sutton and C. W. Anderson, "Neuronlike adaptive elements that can solve difficult learning control
problems" (IEEE Transactions on Systems, Man, and Cybernetics, 1983); the constants are those of gymnasium. The vector
environment that gymnasium has for it draws the starts of all carts from one generator, so that what one cart does
depends on how many run beside it; here each has its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from manyhands.native.decorators import njit
from manyhands.workloads.rl.stepping import Columns, Environments, Stepped

__all__ = ["CartPoles", "warm"]

_TIME_STEP, _GRAVITY, _FORCE = 0.02, 9.8, 10.0
_POLE_MASS, _MASS, _LENGTH = 0.1, 1.1, 0.5  # of the pole, of both; half the pole's length
_FARTHEST, _STEEPEST = 2.4, 12 * 2 * math.pi / 360
_START = 0.05
_DRAWN = 16  # starts of a cart that are drawn at once
_PIXELS = 240  # in width, of a picture


class CartPoles(Environments):
    """`count` carts, each with a pole to be kept upright by pushing the cart left (0) or right (1)."""

    def __init__(self, count: int, max_episode_steps: int = 500) -> None:
        super().__init__(count, SimpleNamespace(shape=(4,), dtype=np.float32), SimpleNamespace(n=2))
        self._limit = max_episode_steps
        self._generators: list[np.random.Generator] = []
        self._states = np.zeros((count, 4))
        self._starts = np.zeros((count, _DRAWN, 4))
        self._used = np.zeros(count, np.int64)  # of the starts of each cart

    def reset(self, seeds: Sequence[int]) -> np.ndarray[Any, Any]:
        self._check_seeds(seeds)
        self._generators = [np.random.default_rng(seed) for seed in seeds]
        for cart in range(self.count):
            self._draw(cart)
        self._states[:] = self._starts[:, 0]
        self._used[:] = 1
        return self._states.astype(np.float32)

    def step(self, actions: np.ndarray[Any, Any]) -> Stepped:
        observations, lasts = np.empty((2, self.count, 4), np.float32)
        flags = np.empty((2, self.count), bool)
        done = move_carts(
            (self._states, self._starts, self._used),
            (actions, self.recorder.steps, self._limit),
            (observations, lasts, flags),
        )
        finals = {}
        if done:
            finals = {cart: lasts[cart] for cart in np.flatnonzero(flags[1] & ~flags[0]).tolist()}
            for cart in np.flatnonzero(self._used == _DRAWN).tolist():
                self._draw(cart)
        columns = Columns(np.ones(self.count), flags[0], flags[1], np.ones(self.count, bool))
        return Stepped(observations, *columns, finals, self.recorder.step(*columns))

    def close(self) -> None: ...

    def picture(self, index: int) -> np.ndarray[Any, Any]:
        place, _, angle, _ = self._states[index]
        x = np.linspace(-_FARTHEST, _FARTHEST, _PIXELS)
        y = np.linspace(1.5, -0.5, _PIXELS * 2 // 5)[:, np.newaxis]
        # along the pole and across it, from where it is fixed to the cart
        along = (x - place) * math.sin(angle) + y * math.cos(angle)
        across = (x - place) * math.cos(angle) - y * math.sin(angle)
        shown = np.full((*np.broadcast_shapes(x.shape, y.shape), 3), 255, np.uint8)
        shown[(np.abs(x - place) < 0.25) & (np.abs(y) < 0.12)] = (40, 40, 60)
        shown[(np.abs(across) < 0.04) & (along > 0) & (along < 2 * _LENGTH)] = (190, 120, 60)
        shown[np.broadcast_to(np.abs(y + 0.14) < 0.02, shown.shape[:2])] = (120, 120, 120)
        return shown

    def _draw(self, cart: int) -> None:
        self._starts[cart] = self._generators[cart].uniform(-_START, _START, (_DRAWN, 4))
        self._used[cart] = 0


@njit(cache=True, nogil=True, error_model="numpy")
def move_carts(carts: Any, given: Any, results: Any) -> int:
    """One step of each cart by Euler's method, and a start where its episode ended; how many did."""
    (states, starts, used), (actions, steps, limit), (observations, lasts, flags) = carts, given, results
    ended = 0
    for cart in range(len(states)):
        place, speed, angle, turning = states[cart]
        sine, cosine = math.sin(angle), math.cos(angle)
        force = _FORCE if actions[cart] == 1 else -_FORCE
        pushed = (force + _POLE_MASS * _LENGTH * turning * turning * sine) / _MASS
        swing = (_GRAVITY * sine - cosine * pushed) / (
            _LENGTH * (4.0 / 3.0 - _POLE_MASS * cosine * cosine / _MASS)
        )
        place += _TIME_STEP * speed
        speed += _TIME_STEP * (pushed - _POLE_MASS * _LENGTH * swing * cosine / _MASS)
        angle += _TIME_STEP * turning
        turning += _TIME_STEP * swing
        states[cart, 0], states[cart, 1], states[cart, 2], states[cart, 3] = place, speed, angle, turning
        flags[0, cart] = abs(place) > _FARTHEST or abs(angle) > _STEEPEST
        flags[1, cart] = steps[cart] + 1 >= limit
        if flags[0, cart] or flags[1, cart]:
            lasts[cart] = states[cart]
            states[cart] = starts[cart, used[cart]]
            used[cart] += 1
            ended += 1
        observations[cart] = states[cart]
    return ended


def warm() -> None:
    carts = CartPoles(1)
    carts.reset([0])
    carts.step(np.zeros(1, np.int64))
