"""The settings of a hub: limits, timeouts and security."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final

from manyhands.errors import UserError
from manyhands.transport.hub.frames import Limits
from manyhands.transport.link.liveness import LivenessTimes
from manyhands.transport.link.secure import Security

__all__ = ["Settings", "spin_for"]

_SPIN_S: Final = 50e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The limits, timeouts and security of a hub.

    `queue_bytes` bounds what is queued for one peer; `arena_bytes` is the capacity for payloads in shared memory,
    per direction of a Unix connection (0: none); `spin_s` is how long `poll` spins before it sleeps; `connect_s` is
    how long a member that does not answer is dialled; `security` says how TCP connections are protected, and
    whether they may leave this host.
    """

    limits: Limits = field(default_factory=Limits)
    silence: LivenessTimes = field(default_factory=LivenessTimes)
    queue_bytes: int = 64 << 20
    arena_bytes: int = 1 << 20
    spin_s: float = 0.0
    connect_s: float = 60.0
    security: Security = field(default_factory=Security.loopback)

    def __post_init__(self) -> None:
        for name in ("queue_bytes", "arena_bytes", "spin_s", "connect_s"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)}: must not be negative")


def spin_for(processes: int) -> float:
    """`spin_s` for a host where so many processes wait for each other: 0 if they must share cores."""
    return _SPIN_S if processes <= len(os.sched_getaffinity(0)) else 0.0
