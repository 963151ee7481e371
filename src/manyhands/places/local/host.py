"""Which host a process is on, as far as shared memory is concerned.

Two processes may share memory when one can hand the other a descriptor. Descriptors travel over Unix sockets with
abstract names, and such names are visible within one network namespace of one running kernel. So that is the
identity: the kernel's boot id and the inode of the network namespace. Host names would be wrong both ways: containers
of one machine can share a name and not a namespace, or the other way round.
"""

from __future__ import annotations

import os
from pathlib import Path

from manyhands.errors import ManyhandsError

__all__ = ["host_identity", "threads_per_role"]


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
