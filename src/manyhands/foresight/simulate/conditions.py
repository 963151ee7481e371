"""Conditions of a simulated training: compute speed of the workers, and the network between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from manyhands.engine.options import Slowdown
from manyhands.errors import UserError
from manyhands.foresight.simulate.network import NetworkModel
from manyhands.foresight.simulate.simulated_spec import ComputeModel, Timing

__all__ = ["SimulatedConditions"]


@dataclass(frozen=True, kw_only=True)
class SimulatedConditions:
    """What a simulated run of a task is told of its machines, which there are none of."""

    step_s: float | None = None
    """Seconds in which one worker computes a whole global batch; None: as long as one takes here, measured."""

    slow: tuple[Slowdown, ...] = ()  # workers that are slowed on purpose
    spread: float = 0.0  # by up to which share any computation is longer or shorter
    network: NetworkModel = field(default_factory=NetworkModel)
    apply_s: float = 0.0  # seconds of one optimizer step of one shard

    def __post_init__(self) -> None:
        self.compute(self.step_s or 1.0)
        if self.step_s == 0:
            raise UserError("step_s=0.0: must be positive and finite")
        self.timing()

    def compute(self, measured_s: float) -> ComputeModel:
        """Return the compute model, where a whole batch takes `measured_s` unless set otherwise."""
        step_s = measured_s if self.step_s is None else self.step_s
        return ComputeModel(step_s=step_s, slow=self.slow, spread=self.spread)

    def timing(self) -> Timing:
        """Return the durations of everything else."""
        return Timing(apply_s=self.apply_s)

    def require_workers(self, workers: int) -> None:
        """Raise UserError where a slowed worker does not exist."""
        for slow in self.slow:
            if slow.worker >= workers:
                raise UserError(f"slow: there is no worker {slow.worker} among {workers}; they count from 0")

    def to_dict(self) -> dict[str, Any]:
        """Return the entry in a run's configuration."""
        network = self.network
        rate = network.bandwidth_bytes_per_s
        return {
            "step_s": self.step_s,
            "slow": [{name: getattr(one, name) for name in one.__slots__} for one in self.slow],
            "spread": self.spread,
            "latency_s": network.latency_s,
            "jitter_s": network.jitter_s,
            "bandwidth_bytes_per_s": rate if rate < float("inf") else None,
            "apply_s": self.apply_s,
        }
