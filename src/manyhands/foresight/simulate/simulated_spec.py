"""Specification of a simulated run: a frozen value, validated on construction."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from manyhands.engine.options import Slowdown
from manyhands.errors import UserError
from manyhands.foresight.simulate.faults import Fault
from manyhands.foresight.simulate.models import Ledger, Model
from manyhands.strategies.common.consistency import Policy, parse_consistency
from manyhands.strategies.ps.ps_messages import Work
from manyhands.transport.liveness import SILENT_AFTER_S

__all__ = ["ComputeModel", "NetworkModel", "SimulatedConditions", "SimulationSpec", "Timing"]


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise UserError(f"{name}={value}: must be positive and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkModel:
    """The wires: all alike. `jitter_s` is the most that is added to a latency; what one member sends another keeps
    its order all the same.
    """

    latency_s: float = 1e-4
    jitter_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        for name, value in (("latency_s", self.latency_s), ("jitter_s", self.jitter_s)):
            if not 0 <= value < math.inf:
                raise UserError(f"{name}={value}: must be finite and not negative")
        if not self.bandwidth_bytes_per_s > 0:
            raise UserError(f"bandwidth_bytes_per_s={self.bandwidth_bytes_per_s}: must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeModel:
    """How long a worker computes: `step_s` for a whole batch, and in proportion for a part of one.

    `factors` makes slots slower or faster for good (a permanent straggler), `slow` does as `--slow`. Each computation
    is `delay_factor` times as long with probability `delay_probability` (a passing delay), longer or shorter by up to
    the share `spread`.
    """

    step_s: float = 0.1
    factors: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    slow: tuple[Slowdown, ...] = ()
    delay_probability: float = 0.0
    delay_factor: float = 5.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        _positive("step_s", self.step_s)
        _positive("delay_factor", self.delay_factor)
        for slot, factor in self.factors.items():
            _positive(f"factors[{slot}]", factor)
        for name, value in (("delay_probability", self.delay_probability), ("spread", self.spread)):
            if not 0 <= value <= 1:
                raise UserError(f"{name}={value}: must be between 0 and 1")

    def seconds(self, slot: int, work: Work, draw: random.Random, seed: int = 0) -> float:
        seconds = self.step_s * self.factors.get(slot, 1.0) / work.parts
        for slow in self.slow:
            seconds += slow.extra_s(seed=seed, step=work.batch, worker_rank=slot, compute_s=seconds)
        if self.delay_probability and draw.random() < self.delay_probability:
            seconds *= self.delay_factor
        if self.spread:
            seconds *= 1.0 + self.spread * (2.0 * draw.random() - 1.0)
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The durations of everything else, in seconds."""

    apply_s: float = 0.0  # one optimizer step of one shard on its server
    start_s: float = 1.0  # A new process, from being asked for until it has joined
    death_noticed_s: float = 0.01  # from the end of a process until its launcher knows
    silent_after_s: float = SILENT_AFTER_S  # from a process's last heartbeat until its launcher acts
    leave_s: float = 0.02  # A server, at the end, for leaving its shards where they are wanted
    retry_s: float = 0.005  # until a worker asks a server again that did not know yet what it serves
    snapshot_every_s: float = 10.0  # from one snapshot of a shard to the next
    limit_s: float = 1e6  # A run that has not ended by then never will

    def __post_init__(self) -> None:
        if not 0 <= self.apply_s < math.inf:
            raise UserError(f"apply_s={self.apply_s}: must be finite and not negative")
        for one in fields(self):
            if one.name != "apply_s":
                _positive(one.name, getattr(self, one.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSpec:
    """A run: `workers` workers and `shards` shards train `steps` global batches under `consistency`.

    `gradient_bytes` is the size of all parameters, which counts where the network has a bandwidth. With `one_at_a_time`
    a kill, or a pause of a server, waits until what the one before it took has been recovered. With `can_restore`
    off, a shard of which no copy is left ends the run. `per_host` slots after each other are on one host, whose workers
    push as one where steps are in lockstep.
    """

    workers: int
    steps: int
    consistency: str | Policy = "sync"
    shards: int = 1
    replicas: int = 0
    seed: int = 0
    compute: ComputeModel = field(default_factory=ComputeModel)
    network: NetworkModel = field(default_factory=NetworkModel)
    timing: Timing = field(default_factory=Timing)
    faults: tuple[Fault, ...] = ()
    one_at_a_time: bool = False
    can_restore: bool = True
    gradient_bytes: int = 0
    model: Model = field(default_factory=Ledger)
    per_host: int = 1

    def __post_init__(self) -> None:
        for name in ("workers", "steps", "shards", "per_host"):
            value = getattr(self, name)
            if value < 1:
                raise UserError(f"{name}={value}: must be at least 1")
        if self.replicas not in (0, 1):
            raise UserError(f"replicas={self.replicas}: allowed are 0 and 1")
        if self.gradient_bytes < 0:
            raise UserError(f"gradient_bytes={self.gradient_bytes}: must not be negative")
        _ = self.policy

    @property
    def policy(self) -> Policy:
        if isinstance(self.consistency, str):
            return parse_consistency(self.consistency)
        return self.consistency


@dataclass(frozen=True, kw_only=True)
class SimulatedConditions:
    """The machines of a simulated run of a task."""

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
        Timing(apply_s=self.apply_s)

    def compute(self, measured_s: float) -> ComputeModel:
        """Return the compute model, where a whole batch takes `measured_s` unless set otherwise."""
        step_s = measured_s if self.step_s is None else self.step_s
        return ComputeModel(step_s=step_s, slow=self.slow, spread=self.spread)

    def to_dict(self) -> dict[str, Any]:
        network, rate = self.network, self.network.bandwidth_bytes_per_s
        return {
            "step_s": self.step_s,
            "slow": [{name: getattr(one, name) for name in one.__slots__} for one in self.slow],
            "spread": self.spread,
            "latency_s": network.latency_s,
            "jitter_s": network.jitter_s,
            "bandwidth_bytes_per_s": rate if rate < float("inf") else None,
            "apply_s": self.apply_s,
        }
