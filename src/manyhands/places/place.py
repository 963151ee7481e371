"""A place gives a run its processes: it starts them, or they were started there. Light to import: `fit` asks it first.

    fit ── find_place ──►  place.resolve(strategy, workers)    what the strategy is on the processes there
                           place.run(run)                      in each process: run.here(), or run.take_part(process)

A place is a class in a file of its own and a line in `registry.PLACES`; `docs/internals/extending.md` shows one.
"""

from __future__ import annotations

import os
import queue
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, Self

from manyhands.errors import UserError
from manyhands.places.registry import PLACES
from manyhands.strategy import Strategy

TF_CONFIG: Final = "TF_CONFIG"
"""The variable in TensorFlow's format: the roles of the cluster, and which of them this process is."""

LAUNCHER_VARIABLE: Final = "MANYHANDS_LAUNCHER"
"""Set by `manyhands launch` to its version, in the environment of its workers."""

_ENTRY: Final = str(Path(__file__).with_name("local") / "entry.py")
_declared: Place | None = None
_alone = False


MORE_WORKERS: Final = 16  # how many may be added to a run in all; what they need is made ready when it starts


@dataclass(frozen=True, slots=True)
class AddWorker:
    """Add one worker, in a new slot: the next number, counted from the initial number of workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveWorker:
    """Remove the worker in this slot, once it has finished its pending work."""

    slot: int


@dataclass(frozen=True, slots=True, eq=False)
class Command:
    """A change of the workers; `done` receives the slot that it concerns."""

    change: AddWorker | RemoveWorker | None  # None: end the run
    done: Future[int] = field(default_factory=Future)


class PlacedRun(Protocol):
    """A run as a place sees it; `engine.placed_run` has that of `fit`."""

    @property
    def strategy(self) -> Strategy: ...
    @property
    def workers(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def min_workers(self) -> int | None: ...
    @property
    def max_workers(self) -> int | None: ...
    @property
    def commands(self) -> queue.SimpleQueue[Command] | None: ...
    @property
    def calls_back(self) -> bool:
        """Whether functions of the caller's process are called while it trains."""

    def here(self) -> Any:
        """Train in this process and in workers that it starts; what `fit` returns."""

    def take_part(self, process: Any, name: str | None = None) -> Any:
        """Be the process of that `ProcessPlace`, rank 0 to lead; what `fit` returns. `name` is the run's, on each."""

    def for_others(self) -> Self:
        """The same run without what is this process's alone: it can be pickled."""

    def following(self, commands: queue.SimpleQueue[Command]) -> Self:
        """The same run, whose workers change as `commands` say."""

    def pack(self, result: Any) -> bytes:
        """A result for another process, without any code in it."""

    def unpack(self, data: bytes) -> Any:
        """The result that another process has packed."""


class Place(ABC):
    """Where a run's processes come from."""

    kind: ClassVar[str]  # its name in `PLACES`
    forks: ClassVar[bool] = False  # whether workers are forked from the template process of this one
    changes_size: ClassVar[bool] = False
    """Whether it adds and removes workers by itself, between `min_workers` and `max_workers`."""
    world: int | None = None  # how many processes there are already; None where the run starts its own
    leads: bool = True  # whether this process keeps the run directory and the terminal

    @classmethod
    def parse(cls, text: str) -> Self:
        """The place that `cluster=` asks for; UserError where nobody can ask for it."""
        raise UserError(f"cluster={text}: {cls.kind} starts the processes of the run itself; leave it out")

    @classmethod
    def found(cls, environment: Mapping[str, str]) -> Self | None:  # noqa: ARG003
        """The place whose variables are set; None where they describe nothing."""
        return None

    def resolve(self, strategy: Strategy, workers: int | None) -> tuple[Strategy, int]:
        """What the strategy is here, and how many work; UserError where so many cannot."""
        return strategy, 1 if workers is None else workers

    @abstractmethod
    def run(self, run: PlacedRun) -> Any:
        """Have every process take its part, and return this one's result; no process is left behind."""


class LocalPlace(Place):
    """This host: the run starts its workers here."""

    kind = "local"
    forks = True

    @classmethod
    def parse(cls, text: str) -> Self:
        if text.split() != ["local"]:
            raise UserError(f"cluster={text!r}: local has no settings")
        return cls()

    def run(self, run: PlacedRun) -> Any:
        return run.here()


def find_place(cluster: str | Place | None = None, environment: Mapping[str, str] = os.environ) -> Place:
    """The place that `cluster` asks for, or at which this process was started; UserError where both are said.

    Inside a script of `manyhands launch`, and in a worker of another run, a run starts workers of its own.
    """
    place, alone = _declared, _alone and environment is os.environ
    if place is None and not (alone or LAUNCHER_VARIABLE in environment or is_worker()):
        named = (one for one in PLACES.values() if one.variables and set(one.variables) <= environment.keys())
        found = (one.load().found(environment) for one in named)
        place = next((one for one in found if one is not None), None)
    if cluster is None:
        return place or LocalPlace()
    if place is not None:
        raise UserError(f"cluster={cluster}: {place.kind} already started this run's processes; leave it out")
    if isinstance(cluster, Place):
        return cluster
    word = cluster.split()[0] if isinstance(cluster, str) and cluster.split() else ""
    entry = PLACES.get(word, PLACES["ray"])  # an address is one of a Ray cluster
    chosen: Place = entry.load().parse(cluster)
    return chosen


def is_worker() -> bool:
    """Whether this process is a worker that another one of manyhands has forked."""
    return getattr(sys.modules.get("__main__"), "__file__", None) == _ENTRY


def may_be_started_externally(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a place was declared, or the environment may describe one; loads no place."""
    named = any(one.variables and set(one.variables) <= environment.keys() for one in PLACES.values())
    return _declared is not None or (not _alone and named)


@contextmanager
def using_place(place: Place) -> Iterator[Place]:
    """While open, `find_place` returns this place, in every thread of this process."""
    global _declared
    before, _declared = _declared, place
    try:
        yield place
    finally:
        _declared = before


def ignore_environment() -> None:
    """From now on this process starts workers of its own, whatever its environment says."""
    global _alone
    _alone = True
