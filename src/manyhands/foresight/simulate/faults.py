"""Faults of a simulated run and their times: values that a test writes down or draws from a seed.

A fault names its victim by `pick`: the (pick mod n)-th of the n members of that role present at the time, by number,
so that a drawn plan is valid whatever happened before.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from manyhands.errors import UserError

__all__ = [
    *("Fault", "FaultRole", "Kill", "Pause", "SlowLink", "WorkerComes", "WorkerGoes"),
    *("draw_faults", "draw_storm"),
]


class FaultRole(Enum):
    """The role that a fault strikes."""

    WORKER = "worker"
    SERVER = "server"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    at_s: float

    def __post_init__(self) -> None:
        for name in ("at_s", "seconds", "factor"):
            value = getattr(self, name, 0.0)
            if not 0 <= value < math.inf:
                raise UserError(f"{name}={value}: must be finite and not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(_Planned):
    """A process ends abruptly (kill -9)."""

    role: FaultRole
    pick: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(_Planned):
    """A process is stopped (SIGSTOP) and later continues; messages to it wait meanwhile."""

    seconds: float
    role: FaultRole
    pick: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink(_Planned):
    """For a while every message to and from a process takes `factor` times as long."""

    seconds: float
    factor: float
    role: FaultRole
    pick: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerComes(_Planned):
    """The user adds a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGoes(_Planned):
    """The user removes a slot; never the last one."""

    pick: int


Fault = Kill | Pause | SlowLink | WorkerComes | WorkerGoes


def draw_faults(seed: int, count: int, until_s: float, *, resize: bool = False) -> tuple[Fault, ...]:
    """Draw `count` faults before `until_s`, in time order; with `resize` workers also join and leave.

    The meaning of a seed never changes, here and in `draw_storm`: seeds that failed once are kept as tests.
    """
    draw = random.Random(f"faults {seed}")
    kinds: list[type[Fault]] = [Kill, Kill, Pause, SlowLink, *([WorkerComes, WorkerGoes] if resize else [])]
    faults: list[Fault] = []
    for at_s in sorted(draw.uniform(0, until_s) for _ in range(count)):
        kind, role, pick = draw.choice(kinds), draw.choice(list(FaultRole)), draw.randrange(2**16)
        seconds = draw.choice([0.02, 0.2, 1.0]) * until_s * draw.random()
        factor = draw.choice([3.0, 30.0, 300.0]) if kind is SlowLink else 1.0
        faults.append(_made(kind, at_s=at_s, role=role, pick=pick, seconds=seconds, factor=factor))
    return tuple(faults)


def _made(kind: type[Fault], **drawn: Any) -> Fault:
    return kind(**{one.name: drawn[one.name] for one in fields(kind)})


def draw_storm(seed: int, until_s: float, *, resize: bool = True) -> tuple[Fault, ...]:
    """Draw up to fourteen faults before `until_s`, worse than those of `draw_faults`, in time order.

    Each plan has a bias (mostly kills, mostly stops, mostly links slowed up to 300 times; with `resize` mostly joins
    and leaves), and faults come in bursts: the next strikes while the last is being detected or recovered.
    """
    draw = random.Random(f"storm {seed}")
    kinds: list[type[Fault]] = [Kill, Pause, SlowLink, *([WorkerComes, WorkerGoes] if resize else [])]
    weights = [draw.choice([0.0, 1.0, 1.0, 4.0]) for _ in kinds]
    if not any(weights):
        weights[0] = 1.0
    faults: list[Fault] = []
    at_s = 0.0
    for _ in range(draw.randint(1, 14)):
        if faults and draw.random() < 0.4:  # in a burst
            at_s += draw.choice([0.002, 0.02, 0.2]) * draw.random()
        else:
            at_s = draw.uniform(0, until_s)
        kind = draw.choices(kinds, weights)[0]
        role, pick = draw.choice(list(FaultRole)), draw.randrange(2**16)
        seconds = until_s * 10 ** draw.uniform(-2.5, 0.3)
        factor = 300 ** draw.random() if kind is SlowLink else 1.0
        faults.append(_made(kind, at_s=at_s, role=role, pick=pick, seconds=seconds, factor=factor))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
