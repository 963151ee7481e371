"""The random generators of a process, as something that can be sent to another and lent to whoever draws.

A dataset that shuffles or augments as it goes draws from torch, from Python's `random` or from numpy. Lent the same
states, it gives the same samples in every worker.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

__all__ = ["Draws"]

_WORDS: Final = 625  # of Python's generator: 624 and a position
_KEYS: Final = 624  # of numpy's


class Draws:
    """States of the three global generators, at some point of their sequences."""

    def __init__(self, content: torch.Tensor) -> None:
        """Take over what `content` of other draws gave: flat, uint8, of one length in all processes."""
        self.content = content

    @classmethod
    def now(cls) -> Draws:
        """Those of this process."""
        return cls(_taken())

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Whoever draws inside goes on from here; afterwards the process has its own states back."""
        own = _taken()
        _put(self.content)
        try:
            yield
        finally:
            self.content = _taken()
            _put(own)

    def keep(self) -> None:
        """Make them those of this process."""
        _put(self.content)


def _taken() -> torch.Tensor:
    _, words, next_gauss = random.getstate()
    _, keys, position, has_gauss, gauss = np.random.get_state()
    numbers = np.array([np.nan if next_gauss is None else next_gauss, position, has_gauss, gauss], np.float64)
    raw = np.array(words, np.uint32).tobytes() + np.asarray(keys, np.uint32).tobytes() + numbers.tobytes()
    return torch.cat([torch.frombuffer(bytearray(raw), dtype=torch.uint8), torch.get_rng_state()])


def _put(content: torch.Tensor) -> None:
    raw = content.numpy().tobytes()
    words = np.frombuffer(raw, np.uint32, _WORDS)
    keys = np.frombuffer(raw, np.uint32, _KEYS, offset=4 * _WORDS)
    after = 4 * (_WORDS + _KEYS)
    next_gauss, position, has_gauss, gauss = np.frombuffer(raw, np.float64, 4, offset=after).tolist()
    random.setstate((3, tuple(words.tolist()), None if np.isnan(next_gauss) else next_gauss))
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
    torch.set_rng_state(content[after + 32 :].clone())
