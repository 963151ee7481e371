"""Simulated stragglers: `worker=1,factor=5` slows a worker always.

`probability=0.1` slows it at random steps only, `from=400` from that global batch on.

Whether a step is slow is a function of (seed, step, worker), so the same run is slow in the same places every time.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.data.randomness import mix
from manyhands.errors import UserError, nearest

__all__ = ["Slowdown"]

_FIELDS = ("worker", "factor", "probability", "from")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    """Worker `worker` takes `factor` times as long to compute, at each step from `from_step` on with `probability`."""

    worker: int
    """Which one, from 0."""
    factor: float
    """How many times as long it computes."""
    probability: float = 1.0
    """How likely each step is to be slow."""
    from_step: int = 0
    """The first step that may be."""

    def __post_init__(self) -> None:
        if self.worker < 0:
            raise UserError(f"slow: worker={self.worker} must not be negative")
        if not self.factor >= 1:
            raise UserError(f"slow: factor={self.factor} must be at least 1 (5 means five times as long)")
        if not 0 < self.probability <= 1:
            raise UserError(f"slow: probability={self.probability} must be above 0 and at most 1")
        if self.from_step < 0:
            raise UserError(f"slow: from={self.from_step} must not be negative; steps count from 0")

    @classmethod
    def parse(cls, text: str) -> Slowdown:
        """Read `worker=1,factor=5[,probability=0.1][,from=400]`."""
        values: dict[str, str] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            if name not in _FIELDS or not equals:
                raise UserError(f"slow: {part.strip()!r} is not a setting; {nearest(name, _FIELDS)}")
            values[name] = value
        if not {"worker", "factor"} <= values.keys():
            raise UserError(f"slow: {text!r} must name worker and factor, as in worker=1,factor=5")
        try:
            return cls(
                worker=int(values["worker"]),
                factor=float(values["factor"]),
                probability=float(values.get("probability", "1")),
                from_step=int(values.get("from", "0")),
            )
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"slow: {text!r} has a value that is no number ({error})") from error

    def extra_s(self, *, seed: int, step: int, worker_rank: int, compute_s: float) -> float:
        """How much longer this worker's step must take, having taken `compute_s`."""
        if worker_rank != self.worker or step < self.from_step:
            return 0.0
        draw = mix(seed, step, worker_rank, 0x510) / 2**64
        return (self.factor - 1) * compute_s if draw < self.probability else 0.0
