"""How long each part of a task's step takes here: measured within seconds, by workers like those of a run.

`profile_run` gives the times of single steps. Medians of them make the profile: for each size of a share the time of
forward, backward and the rest; each layer has its part of that, as it was seen by the hooks of its module.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from manyhands.errors import UserError, num_of
from manyhands.facts import ComputeTime, LayerTimes, ModelFootprint, TaskProfile
from manyhands.foresight.estimate import Estimate
from manyhands.foresight.plan.profile_run import Drive, Profiling, TimedStep, profile_run
from manyhands.places.local.host import threads_per_role
from manyhands.strategies.common.sharding.layer_units import Unit, units_of
from manyhands.task import Task

__all__ = ["ProfiledTask", "TaskProfiles", "expected_slowest", "measure_profile", "profile_of_steps"]

_SECONDS = 1.0
_DRAWS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledTask:
    """A task's profile, and how much the measurements of a step of a share differed from each other."""

    profile: TaskProfile
    noise: float  # (90th - 10th percentile) / median


def measure_profile(
    task: Task,
    footprint: ModelFootprint,
    units: Sequence[Unit],
    workers: int,
    *,
    parts: Sequence[int] = (),
    device: str = "cpu",
    seconds: float = _SECONDS,
    processes: int = 0,
    drive: Drive | None = None,
) -> ProfiledTask:
    """The profile of a worker of so many that compute here at the same time, on a whole batch and on `parts` of it.

    `processes` are those that share the cores of the host; 0: the workers alone.
    """
    if task.streams:
        raise UserError(f"plan: data is {task.stream_name}, whose samples cannot be drawn for a measurement")
    most = task.batch_size  # shares without a sample would take no time
    sizes = tuple(count for count in dict.fromkeys((1, workers, *parts)) if count <= most)
    profiling = Profiling(parts=sizes, seconds=seconds, processes_here=processes)
    steps = profile_run(task, profiling, workers, device, drive)
    return profile_of_steps(steps, footprint, units, workers)


@dataclass
class TaskProfiles:
    """A task's profiles here, each measured when it is first asked for."""

    task: Task
    found: Estimate
    device: str = field(default="cpu", kw_only=True)
    seconds: float = field(default=_SECONDS, kw_only=True)
    say: Callable[[str], None] = field(default=lambda _: None, kw_only=True)
    noise: float = field(default=0.0, init=False)  # of the noisiest measurement

    def __post_init__(self) -> None:
        self._units = units_of(self.found.model)
        self._measured: dict[tuple[int, int], TaskProfile] = {}  # by workers, and threads if fewer
        self._alone: dict[int, float] = {}  # by threads

    def of(self, workers: int, processes: int) -> TaskProfile:
        """Of a worker of so many, whose host's cores are shared by so many processes."""
        threads = threads_per_role(processes)
        alike = self.device != "cpu" or threads == threads_per_role(workers)
        key = workers, 0 if alike else threads
        if key not in self._measured:
            self.say(f"measuring the task on {num_of(workers, 'worker')}")
            measured = measure_profile(
                self.task,
                self.found.footprint,
                self._units,
                workers,
                parts=[workers * many for many in (2, 4)] if workers > 1 else [],
                device=self.device,
                seconds=self.seconds,
                processes=0 if alike else processes,
            )
            self.noise = max(self.noise, measured.noise)
            self._measured[key] = measured.profile
        found = self._measured[key]
        return found if processes <= workers else replace(found, owner_alone_s=self._alone_s(processes))

    def _alone_s(self, processes: int) -> float:
        """A step of all parameters by one of so many processes, while no other takes one, as a server does."""
        threads = threads_per_role(processes)
        if threads not in self._alone:
            found = measure_profile(
                self.task,
                self.found.footprint,
                self._units,
                1,
                device=self.device,
                seconds=self.seconds / 2,
                processes=processes,
            )
            self._alone[threads] = found.profile.by_owners_s
        return self._alone[threads]


def profile_of_steps(
    steps: Sequence[Sequence[TimedStep]], footprint: ModelFootprint, units: Sequence[Unit], workers: int
) -> ProfiledTask:
    """From the timed steps of each worker."""
    by_parts: dict[int, list[TimedStep]] = {}
    for one in (step for of_worker in steps for step in of_worker):
        by_parts.setdefault(one.parts, []).append(one)
    samples = {parts: footprint.batch_size / parts for parts in by_parts}

    def through(seconds: Callable[[TimedStep], float]) -> ComputeTime:
        return ComputeTime.through(
            {samples[parts]: statistics.median(map(seconds, timed)) for parts, timed in by_parts.items()}
        )

    forward, backward = through(lambda one: one.forward_s), through(lambda one: one.backward_s)
    every = [one for timed in by_parts.values() for one in timed]
    own_s = [one.optimizer_s for one in every if not one.is_owners]
    owners_s = [one.optimizer_s for one in every if one.is_owners]
    rest = through(lambda one: max(0.0, one.whole_s - one.forward_s - one.backward_s - one.optimizer_s))
    whole = by_parts[min(by_parts)]
    forward_of = _shares([one.unit_forward_s for one in whole], units)
    backward_of = _shares([one.unit_backward_s for one in whole], units)
    output = {
        unit.number: statistics.median(one.unit_output.get(unit.number, 0) for one in whole) for unit in units
    }
    layers = tuple(
        LayerTimes(
            name=unit.name,
            forward=forward.times(forward_of[unit.number]),
            backward=backward.times(backward_of[unit.number]),
            gradient_bytes=sum(unit.parameters[number].nbytes for number in unit.trained),
            output_bytes=output[unit.number] / footprint.batch_size * min(by_parts),
        )
        for unit in units
    )
    shared = _shared(by_parts, workers)  # without the optimizer, which takes its step in two ways
    shares = [[one.whole_s - one.optimizer_s for one in mine if one.parts == shared] for mine in steps]
    pooled = sorted(one for of_worker in shares for one in of_worker)
    low, high = (pooled[round(at * (len(pooled) - 1))] for at in (0.1, 0.9))
    profile = TaskProfile(
        layers=layers,
        model=footprint,
        rest=rest,
        optimizer_s=statistics.median(own_s),
        owners_s=statistics.median(owners_s),
        slowest=expected_slowest(shares) / statistics.median(pooled),
    )
    return ProfiledTask(profile=profile, noise=(high - low) / statistics.median(pooled))


def _shared(by_parts: Mapping[int, Sequence[TimedStep]], workers: int) -> int:
    """The parts of a batch that each of so many workers computes one of, or what was measured nearest to it."""
    return workers if workers in by_parts else max(by_parts)


def expected_slowest(took_s: Sequence[Sequence[float]]) -> float:
    """The median time of the slowest, where each takes one of its times at random."""
    draw = random.Random(0)
    return statistics.median(max(draw.choice(one) for one in took_s) for _ in range(_DRAWS))


def _shares(took_s: Sequence[Mapping[int, float]], units: Sequence[Unit]) -> dict[int, float]:
    """What part of the whole each unit takes; of units that were never seen, nothing."""
    medians = {
        unit.number: statistics.median(one.get(unit.number, 0.0) for one in took_s) if took_s else 0.0
        for unit in units
    }
    total = sum(medians.values())
    if not total:
        return {unit.number: 1 / len(units) for unit in units}
    return {number: median / total for number, median in medians.items()}
