"""Who is put where, and how many workers a cluster has room for: decisions without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from manyhands.errors import UserError

__all__ = ["Bounds", "Seats", "room_for", "seats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """A placement group: so many equal bundles, put together or apart."""

    role: str
    count: int
    strategy: str
    """Ray's word: PACK or SPREAD."""
    bundle: Mapping[str, float]


def seats(
    roles: Mapping[str, int], ways: Mapping[str, str], cpus: int, gpus: Mapping[str, int]
) -> list[Seats]:
    """The placement groups of a run: one for each kind of role, in which each role of the kind has a bundle."""
    return [
        Seats(
            role=role,
            count=count,
            strategy=ways[role].upper(),
            bundle={"CPU": cpus, **({"GPU": gpus[role]} if gpus.get(role) else {})},
        )
        for role, count in roles.items()
        if count
    ]


def room_for(free: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How many more such bundles resources have room for, on one node."""
    return max(0, min(int(free.get(name, 0.0) // needed) for name, needed in bundle.items() if needed))


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many workers a run may have while the cluster grows and shrinks."""

    least: int
    most: int

    @classmethod
    def of(cls, workers: int, least: int | None, most: int | None) -> Bounds | None:
        """As asked for; None where the number is fixed. UserError where it makes no sense."""
        if least is None and most is None:
            return None
        least, most = least if least is not None else 1, most if most is not None else workers
        if not 1 <= least <= most:
            raise UserError(
                f"min_workers={least} and max_workers={most}: the first must be at least 1, and at most the second"
            )
        if not least <= workers <= most:
            raise UserError(f"workers={workers} must be between min_workers={least} and max_workers={most}")
        return cls(least, most)

    def change(self, now: int, room: int) -> int:
        """How many workers to add (or, below 0, to remove), of which there are `now`, with room for `room` more.

        Room below 0 says how many have lost theirs.
        """
        return min(self.most, max(self.least, now + room)) - now
