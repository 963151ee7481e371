"""How fast workers and parameter servers are together: by `Strategy.predict` and by simulation; pure.

Updates wait for the slowest of four things: the round of a worker, the links of the servers, their optimizers, and,
where all processes share one machine, its cores. So throughput grows with the workers until one of the other three is
full; more servers raise two of these, and none of them raises the cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from manyhands.facts import ComputeTime, LayerTimes, LinkRate, Machines, TaskProfile
from manyhands.foresight.simulate.driver import simulate
from manyhands.foresight.simulate.simulated_spec import ComputeModel, NetworkModel, SimulationSpec, Timing
from manyhands.strategy import Strategy

WORTH = 0.1
"""Workers are saturated where one more brings less than this part of what the first one brings."""


@dataclass(frozen=True, kw_only=True)
class ServerModel:
    """A task on parameter servers, each process on a machine of its own whose link sends and receives at once."""

    profile: TaskProfile
    consistency: str = "async"
    link: LinkRate = LinkRate()  # noqa: RUF009 - a frozen value
    other_s: float = 0.0  # what an update costs a worker beside computing and moving its bytes
    cores: float = math.inf  # that all processes share

    def strategy(self, servers: int) -> Strategy:
        return Strategy.parse(f"ps servers={servers} consistency={self.consistency}")

    @property
    def in_step(self) -> bool:
        """Whether workers compute parts of one batch, and not batches of their own."""
        return self.strategy(1).facts.stepwise

    def batches_per_s(self, workers: int, servers: int) -> float:
        # Latency delays an update and occupies nobody, so it is counted with the worker's own time.
        beside_s = ComputeTime(fixed_s=self.other_s + 2 * self.link.latency_s)
        beside = LayerTimes(name="beside", forward=beside_s, backward=ComputeTime())
        profile = replace(self.profile, layers=(*self.profile.layers, beside), slowest=1.0)
        link = LinkRate(bytes_per_s=self.link.bytes_per_s)
        machines = Machines(hosts=workers, memory=link, inside=link, between=link)
        step = self.strategy(servers).predict(profile, machines)
        assert step is not None, "plain servers are modelled"
        seconds = step.seconds - (self._overlapping_s(workers, servers) if self.in_step else 0.0)
        return min(1 / seconds, self.cores / self.cores_s(workers))

    def _overlapping_s(self, workers: int, servers: int) -> float:
        """What of pushing happens while servers still answer: those who are answered first push first again."""
        return max(0.0, workers / servers - 1) * self.profile.model.gradients / self.link.bytes_per_s

    def cores_s(self, workers: int) -> float:
        """Seconds of a core that one global batch takes, of all processes together."""
        parts = workers if self.in_step else 1
        return parts * (self.profile.compute_s(parts) + self.other_s) + self.profile.by_owners_s

    def servers_needed(self, workers: int, enough: float = 0.9, most: int = 4096) -> int | None:
        """The fewest servers with which so many workers are nearly as fast as with any number; None: more than `most`.

        No more than one server for each worker helps a link that is as fast as theirs.
        """
        wanted = enough * self.batches_per_s(workers, most)
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.batches_per_s(workers, middle) >= wanted else (middle + 1, high)
        return low if self.batches_per_s(workers, low) >= wanted else None


def servers_by_formula(model: ServerModel, workers: int) -> int:
    """S = ceil(w W / (B T)): what w workers push then takes no longer than computing, T, which hides it.

    The servers' optimizers need S >= w a / T besides, where a step of all parameters takes a.
    """
    parts = workers if model.in_step else 1
    hidden_s, size = model.profile.compute_s(parts), model.profile.model.gradients
    by_links = workers * size / (model.link.bytes_per_s * hidden_s)
    by_steps = (1 if model.in_step else workers) * model.profile.by_owners_s / hidden_s
    return max(1, math.ceil(by_links - 1e-9), math.ceil(by_steps - 1e-9))


def saturation(rate: Callable[[int], float], most: int) -> int | None:
    """The first number of workers at which one more brings less than `WORTH` of the first; None: none up to `most`."""
    first = before = rate(1)
    for workers in range(2, most + 2):
        after = rate(workers)
        if after - before < WORTH * first:
            return workers - 1
        before = after
    return None


def saturation_of(rates: Mapping[int, float]) -> int | None:
    """The same of a few numbers of workers, where the gain from one to the next is shared by the workers between."""
    counts = sorted(rates)
    for fewer, more in pairwise(counts):
        if (rates[more] - rates[fewer]) / (more - fewer) < WORTH * rates[counts[0]] / counts[0]:
            return fewer
    return None


def simulated_rate(model: ServerModel, workers: int, servers: int, rounds: int = 8, seed: int = 0) -> float:
    """Global batches per second of the real servers' and workers' code in virtual time, without its begin and end."""
    parts = workers if model.in_step else 1

    def seconds(batches: int) -> float:
        run = simulate(
            SimulationSpec(
                workers=workers,
                steps=batches,
                consistency=model.consistency,
                shards=servers,
                compute=ComputeModel(step_s=parts * (model.profile.compute_s(parts) + model.other_s)),
                network=NetworkModel(
                    latency_s=model.link.latency_s, bandwidth_bytes_per_s=model.link.bytes_per_s
                ),
                timing=Timing(apply_s=model.profile.by_owners_s / servers),
                gradient_bytes=round(model.profile.model.gradients),
                seed=seed,
            )
        )
        return run.seconds - run.began_s

    few = rounds if model.in_step else rounds * workers
    return few / (seconds(2 * few) - seconds(few))
