"""Which host a process is on, as far as shared memory is concerned.

Two processes may share memory when one can hand the other a descriptor. Descriptors travel over Unix sockets with
abstract names, and such names are visible within one network namespace of one running kernel. So that is the
identity: the kernel's boot id and the inode of the network namespace. Host names would be wrong both ways: containers
of one machine can share a name and not a namespace, or the other way round.
"""

from __future__ import annotations

import os
from pathlib import Path

from manyhands.errors import ManyhandsError, UserError

__all__ = ["check_watchdog_s", "host_identity", "threads_per_role"]


_LEAST_WATCHDOG_S = 2.0  # a wait shows itself after one second, and the stacks take another


def check_watchdog_s(watchdog_s: float) -> float:
    """The deadline of the watchdog, or UserError: checked long before anything is watched."""
    if watchdog_s != 0 and not watchdog_s >= _LEAST_WATCHDOG_S:
        raise UserError(
            f"watchdog_s={watchdog_s:g} must be at least {_LEAST_WATCHDOG_S:g} seconds, or 0 to look away"
        )
    return watchdog_s


def threads_per_role(num_roles: int) -> int:
    """How many threads torch gets in each of `num_roles` processes: an equal share of the cores, or 1."""
    return max(1, len(os.sched_getaffinity(0)) // num_roles)


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")


def host_identity() -> str:
    """The boot id and the network namespace: equal in two processes exactly when they can pass descriptors."""
    try:
        boot = _BOOT_ID.read_text().strip()
        namespace = os.stat(_NETWORK_NAMESPACE).st_ino
    except OSError as error:
        raise ManyhandsError(
            f"this host has no identity: {error.filename} cannot be read ({error.strerror}); manyhands needs Linux "
            "with /proc mounted"
        ) from error
    return f"{boot}/{namespace}"
