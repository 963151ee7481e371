"""What the processes of a run cost: so many of each kind, for so long, at a price per hour."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from manyhands.errors import UserError, nearest
from manyhands.strategy import Strategy

__all__ = ["KINDS", "Prices"]

KINDS: Final = ("worker", "helper", "server")
"""The processes that strategies start."""

_HOUR_S: Final = 3600.0
_EXAMPLE: Final = "write it as worker=10,helper=1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Of one process for an hour, by its kind, in any currency."""

    per_hour: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Prices:
        """Read `worker=10,helper=1`; a UserError names the part that is wrong."""
        prices: dict[str, float] = {}
        for part in text.split(","):
            kind, _, value = part.strip().partition("=")
            if kind not in KINDS:
                raise UserError(
                    f"--price {text!r}: no process is called {kind!r}; {nearest(kind, KINDS)}; {_EXAMPLE}"
                )
            if kind in prices:
                raise UserError(f"--price {text!r}: {kind} has two prices; {_EXAMPLE}")
            try:
                price = float(value)
            except ValueError:
                price = math.nan
            if not 0 <= price < math.inf:
                raise UserError(
                    f"--price {text!r}: {value!r} is no price of a {kind} for an hour; {_EXAMPLE}"
                )
            prices[kind] = price
        return cls(per_hour=prices)

    def of(self, strategy: Strategy, workers: int) -> float:
        """What all processes of a run cost in an hour; UserError where one has no price."""
        processes = strategy.processes(workers)
        unpriced = next(
            (kind for kind, count in processes.items() if count and kind not in self.per_hour), None
        )
        if unpriced is not None:
            raise UserError(
                f"--price: {strategy} starts a {unpriced}, which has no price; add {unpriced}=1, or another price"
            )
        return sum(count * self.per_hour[kind] for kind, count in processes.items() if count)

    @staticmethod
    def for_seconds(per_hour: float, seconds: float) -> float:
        """What so many seconds cost."""
        return per_hour * seconds / _HOUR_S

    def __str__(self) -> str:
        return ", ".join(f"{price:g} for a {kind}" for kind, price in self.per_hour.items())
