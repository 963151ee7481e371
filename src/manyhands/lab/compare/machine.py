"""The machine that a comparison was made on, as a report names it."""

from __future__ import annotations

import os
import platform

import torch

from manyhands.native.version import __version__

__all__ = ["machine"]


def machine() -> dict[str, str]:
    """Cores, system and versions, by name."""
    return {
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "processor": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "manyhands": __version__,
    }
