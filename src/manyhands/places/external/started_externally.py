"""Whether this process was started externally, as one of several; light to import, because `fit` asks it first."""

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
"""The variable in TensorFlow's format: the roles of the cluster, and which of them this process is."""

LAUNCHER_VARIABLE = "MANYHANDS_LAUNCHER"
"""Set by `manyhands launch` to its version, in the environment of its workers."""

_standing: object = None  # a `process_place.ProcessPlace`, whose module is not light
_alone = False

P = TypeVar("P")


@contextmanager
def standing(place: P) -> Iterator[P]:
    """While open, `process_place.current` returns this place, in every thread of this process."""
    global _standing
    before, _standing = _standing, place
    try:
        yield place
    finally:
        _standing = before


def stands_at() -> object:
    """The place that was declared with `standing`, or None."""
    return _standing


def stand_alone() -> None:
    """From now on this process starts workers of its own, whatever its environment says."""
    global _alone
    _alone = True


def may_be_started_externally(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `process_place.current` is worth calling: a place was declared, or the environment may describe one."""
    by_torchrun = "RANK" in environment and "WORLD_SIZE" in environment
    return _standing is not None or (not _alone and (by_torchrun or bool(environment.get(TF_CONFIG))))
