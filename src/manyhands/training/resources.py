"""What a worker may ask for to exchange with the others of its host, whoever started it: by name, when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from manyhands.group.shared import SharedGroup
from manyhands.link.base import Link

__all__ = ["Resources"]


@dataclass(frozen=True, kw_only=True)
class Resources:
    """One worker's among those of one host; whoever asks for the group closes it."""

    rank: int
    world: int
    timeout_s: float
    group: Callable[[], SharedGroup]
    """Memory that all of them share, with barriers."""

    links: Callable[[], Mapping[int, Link]]
    """A link to each of the others; only where the strategy `uses_links`."""

    seed: int = 0
    """Of the run."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009 - a value, never changed
    """Where this worker computes."""
