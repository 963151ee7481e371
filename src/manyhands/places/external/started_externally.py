"""Whether this process is one of several that somebody else started; light to import, as `fit` asks it first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeVar

__all__ = [
    "LAUNCHER_VARIABLE",
    "TF_CONFIG",
    "may_be_started_externally",
    "stand_alone",
    "standing",
    "stands_at",
]

TF_CONFIG: Final = "TF_CONFIG"
"""In TensorFlow's format: which roles there are, and which of them this process is."""

LAUNCHER_VARIABLE = "MANYHANDS_LAUNCHER"
"""Set by `manyhands launch` to its version, in the environment of its workers."""

_standing: object = None  # a `place.Place`, which is not light
_alone = False

P = TypeVar("P")


@contextmanager
def standing(place: P) -> Iterator[P]:
    """While this is open, `place.current` is this place, in every thread of this process."""
    global _standing
    before, _standing = _standing, place
    try:
        yield place
    finally:
        _standing = before


def stands_at() -> object:
    """The place that was said by `standing`, or None."""
    return _standing


def stand_alone() -> None:
    """From now on this process starts workers of its own, whatever its environment says."""
    global _alone
    _alone = True


def may_be_started_externally(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `place.current` is worth asking: somebody has said where this process stands."""
    by_torchrun = "RANK" in environment and "WORLD_SIZE" in environment
    return _standing is not None or (not _alone and (by_torchrun or bool(environment.get(TF_CONFIG))))
