"""The random generators of a process, as something that can be sent to another and lent to whoever draws.

A dataset that shuffles or augments as it goes draws from torch, from Python's `random` or from numpy. Lent the same
states, it gives the same samples in every worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from manyhands.data.randomness import GENERATORS

__all__ = ["Draws"]

_WORDS: Final = 625  # of Python's generator: 624 and a position
_KEYS: Final = 624  # of numpy's

_State = Any


class Draws:
    """States of the three global generators, at some point of their sequences."""

    def __init__(self) -> None:
        """Those of this process, as they are now."""
        self._states = [take() for take, _ in GENERATORS]
        self._first = list(self._states)
        self._lent = list(range(len(GENERATORS)))

    @classmethod
    def from_content(cls, content: torch.Tensor) -> Draws:
        """What `content` of other draws gave."""
        draws = cls()
        draws._states = _decoded(content)
        draws._first = list(draws._states)
        return draws

    def content(self) -> torch.Tensor:
        """As bytes: flat, uint8, of one length in all processes."""
        return _encoded(self._states)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Whoever draws inside goes on from here; afterwards the process has its own states back."""
        own = [(index, GENERATORS[index][0]()) for index in self._lent]
        for index in self._lent:
            GENERATORS[index][1](self._states[index])
        try:
            yield
        finally:
            for index, state in own:
                take, put = GENERATORS[index]
                self._states[index] = take()
                put(state)

    def leave_out_unused(self) -> None:
        """From now on lend only what has been drawn from: taking a state and putting it back costs time."""
        self._lent = [
            index for index in self._lent if not _are_equal(self._states[index], self._first[index])
        ]

    def keep(self) -> None:
        """Go on from here in this process, which they are of, with each generator that it has not used meanwhile.

        As if whoever was lent them had drawn from the process's own.
        """
        for (take, put), first, state in zip(GENERATORS, self._first, self._states, strict=True):
            if _are_equal(take(), first):
                put(state)


def _are_equal(one: _State, other: _State) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def _encoded(states: Sequence[_State]) -> torch.Tensor:
    (_, words, next_gauss), (_, keys, position, has_gauss, gauss), of_torch = states
    numbers = np.array([np.nan if next_gauss is None else next_gauss, position, has_gauss, gauss], np.float64)
    raw = np.array(words, np.uint32).tobytes() + np.asarray(keys, np.uint32).tobytes() + numbers.tobytes()
    return torch.cat([torch.frombuffer(bytearray(raw), dtype=torch.uint8), of_torch])


def _decoded(content: torch.Tensor) -> list[_State]:
    raw = content.numpy().tobytes()
    words = np.frombuffer(raw, np.uint32, _WORDS)
    keys = np.frombuffer(raw, np.uint32, _KEYS, offset=4 * _WORDS)
    after = 4 * (_WORDS + _KEYS)
    next_gauss, position, has_gauss, gauss = np.frombuffer(raw, np.float64, 4, offset=after).tolist()
    of_python = (3, tuple(words.tolist()), None if np.isnan(next_gauss) else next_gauss)
    return [of_python, ("MT19937", keys, int(position), int(has_gauss), gauss), content[after + 32 :].clone()]
