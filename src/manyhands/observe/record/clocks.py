"""Offset between this host's clock and another's, with an error bound.

A remote reading taken between two local readings lies between them. The narrowest of several such brackets is kept:
it contains the true offset whatever the network did.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """Three readings in order: the local clock, the remote clock, the local clock again."""

    before_ns: int
    theirs_ns: int
    after_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """Add `ns` to the local clock to get the remote one; the error is at most `error_ns`."""

    ns: int
    error_ns: int


def offset_from(brackets: Sequence[Bracket]) -> Offset:
    best = min(brackets, key=lambda bracket: bracket.after_ns - bracket.before_ns)
    width = best.after_ns - best.before_ns
    return Offset(ns=best.theirs_ns - best.before_ns - width // 2, error_ns=(width + 1) // 2)


@functools.cache
def clock_id() -> int:
    """Return an identifier of this machine's monotonic clock since boot: processes with the same one share it."""
    try:
        name = _BOOT_ID.read_bytes()
    except OSError:
        return 0
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "little")
