"""One seed fixes everything random: the state at each step is a function of (seed, step, worker).

Nothing is carried from step to step. So a resumed run needs no saved generator states, a replayed update draws what it
drew, and a caller's own generators are as they were when `fit` returns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import numpy as np
import torch

_MASK = (1 << 64) - 1
_first: Final = iter((True,))  # of the seeds of this process

# The generators of a process, Python's, numpy's and torch's: how to take the state of each, and how to put one
GENERATORS: Final[tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...]] = (
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
)


def mix(seed: int, *numbers: int) -> int:
    """A 64-bit number that depends on all of these (SplitMix64's finaliser, chained)."""
    state = seed & _MASK
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + (number & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_all(seed: int) -> None:
    """Seed torch, numpy's global generator and Python's `random`.

    A GPU that nothing has used so far begins with the first of these seeds when something does.
    """
    kind = _accelerator()
    # Where CUDA is there and unused, torch would keep every seed until it is used, with a traceback: that is a matter
    # of milliseconds, and once is enough.
    is_used = kind is not None and (kind != "cuda" or bool(torch.cuda.is_initialized()))  # type: ignore[no-untyped-call]
    if is_used or (kind == "cuda" and next(_first, False)):
        torch.manual_seed(seed & (_MASK >> 1))  # looks for devices, which takes a quarter of a millisecond
    seed_host(seed)


def seed_host(seed: int) -> None:
    torch.default_generator.manual_seed(seed & (_MASK >> 1))
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@cache
def _accelerator() -> str | None:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else None


@contextmanager
def preserved() -> Iterator[None]:
    """Give the caller's generators back as they were."""
    states = [take() for take, _ in GENERATORS]
    try:
        yield
    finally:
        for (_, put), state in zip(GENERATORS, states, strict=True):
            put(state)


@contextmanager
def drawn_apart(seed: int) -> Iterator[None]:
    """Within, what the host draws follows from `seed` alone; afterwards its generators are as they were."""
    with preserved():
        seed_host(seed)
        yield
