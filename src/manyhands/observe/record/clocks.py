"""How far another host's clock is from ours, and how sure that is.

A reading of theirs that was taken after we looked at our clock and before we looked again lies between the
two. The narrowest of several such brackets is kept: the truth is in it, whatever the network did.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Bracket", "Offset", "clock_id", "offset_from"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """Our clock, then theirs, then ours again."""

    before_ns: int
    theirs_ns: int
    after_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """Add `ns` to our clock to get theirs; it is off by no more than `error_ns`."""

    ns: int
    error_ns: int


def offset_from(brackets: Sequence[Bracket]) -> Offset:
    """The middle of the narrowest bracket."""
    best = min(brackets, key=lambda bracket: bracket.after_ns - bracket.before_ns)
    width = best.after_ns - best.before_ns
    return Offset(ns=best.theirs_ns - best.before_ns - width // 2, error_ns=(width + 1) // 2)


@functools.cache
def clock_id() -> int:
    """A number for the clock of this machine since it was started: processes with the same one share it."""
    try:
        name = _BOOT_ID.read_bytes()
    except OSError:
        return 0
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "little")
