"""Network model: messages between two members are FIFO; across pairs any order is possible.

A message leaves when its sender's link is free, occupies it for bytes ÷ bandwidth, travels for a latency and a
jitter, and then occupies the receiver's link: many workers that push at once queue up at their server.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manyhands.errors import UserError

__all__ = ["Agenda", "Network", "NetworkModel"]


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


class Network:
    """The state of all links at a moment of virtual time."""

    def __init__(self, model: NetworkModel, seed: int) -> None:
        self._model = model
        self._draw = random.Random(f"network {seed}")
        self._leaves_s: dict[int, float] = {}
        self._enters_s: dict[int, float] = {}
        self._last_s: dict[tuple[int, int], float] = {}
        self._slow: dict[int, tuple[float, float]] = {}

    def slow_down(self, member: int, until_s: float, factor: float) -> None:
        """Multiply the duration of everything to and from `member` by `factor`."""
        self._slow[member] = (until_s, factor)

    def arrival_s(self, source: int, to: int, num_bytes: int, now_s: float) -> float:
        model = self._model
        travel_s = model.latency_s
        if model.jitter_s:
            travel_s += model.jitter_s * self._draw.random()
        if self._slow:
            travel_s *= max(self._slowness(source, now_s), self._slowness(to, now_s))
        at_s = now_s + travel_s
        if num_bytes and model.bandwidth_bytes_per_s < math.inf:
            wire_s = num_bytes / model.bandwidth_bytes_per_s
            self._leaves_s[source] = left_s = max(now_s, self._leaves_s.get(source, 0.0)) + wire_s
            at_s = max(left_s + travel_s, self._enters_s.get(to, 0.0) + wire_s)
            self._enters_s[to] = at_s
        pair = (source, to)
        last_s = self._last_s.get(pair, 0.0)
        self._last_s[pair] = at_s = at_s if at_s > last_s else last_s
        return at_s

    def _slowness(self, member: int, now_s: float) -> float:
        until_s, factor = self._slow.get(member, (0.0, 1.0))
        return factor if now_s < until_s else 1.0


class Agenda:
    """A virtual clock with scheduled calls; nothing sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_done = 0
        self._planned: list[tuple[float, int, Callable[..., None], tuple[Any, ...], bool]] = []
        self._number = 0
        self._num_in_earnest = 0

    def at(self, at_s: float, what: Callable[..., None], *arguments: Any, idly: bool = False) -> None:
        """Schedule `what(*arguments)`; an `idly` scheduled call runs only while other calls are scheduled."""
        self._number += 1
        self._num_in_earnest += not idly
        at_s = at_s if at_s > self.now_s else self.now_s
        heapq.heappush(self._planned, (at_s, self._number, what, arguments, idly))

    def after(self, seconds: float, what: Callable[..., None], *arguments: Any, idly: bool = False) -> None:
        self.at(self.now_s + seconds, what, *arguments, idly=idly)

    def next(self) -> bool:
        """Advance to the next scheduled call and run it; False if there is none."""
        if not self._num_in_earnest:
            return False
        self.now_s, _, what, arguments, idly = heapq.heappop(self._planned)
        self._num_in_earnest -= not idly
        self.num_done += 1
        what(*arguments)
        return True
