"""How the cores of this host are shared out among processes."""

from __future__ import annotations

import os

__all__ = ["threads_per_role"]


def threads_per_role(num_roles: int) -> int:
    """How many threads torch gets in each of `num_roles` processes: an equal share of the cores, or 1."""
    return max(1, len(os.sched_getaffinity(0)) // num_roles)
