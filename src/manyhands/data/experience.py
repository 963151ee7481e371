"""Training data that do not exist beforehand: a batch is made by acting with the model as it is at that moment.

Reinforcement learning needs this. A global batch has a part from each of `batch_size` environments, and every worker
keeps a contiguous share of the environments for the length of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from manyhands.data.batches import BatchShares, Share, share_of, split
from manyhands.data.own import WorkerData

__all__ = ["Experience", "ExperienceCollector", "ExperienceShares"]


class ExperienceCollector(ABC):
    """What one worker acts with: its environments, and how far they are."""

    @abstractmethod
    def collect(self, model: nn.Module, step: int) -> Any:
        """The worker's part of batch `step`, from acting with `model`; the same again where it is asked for again."""

    @abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """What the history tells of the last batch besides its loss, once."""

    def notices(self) -> Sequence[str]:
        """Sentences for the user, each given once."""
        return ()

    @abstractmethod
    def close(self) -> None: ...


class Experience(WorkerData):
    """Data of a task that learns from acting."""

    @property
    def processes(self) -> int:
        """How many processes each worker starts, once it is dealt."""
        return 0

    @abstractmethod
    def collector(self, environments: range, seed: int) -> ExperienceCollector:
        """For these environments, by their numbers among those of all workers; called in the worker."""

    def dealt(self, parts: int) -> Experience:
        del parts
        return self

    def recorded_in(self, run: Path) -> Experience:
        """The same, whose collectors record in the directory of a run what a replay of it needs."""
        del run
        return self

    def replayed_from(self, run: Path, *, each_process: bool = False) -> Experience | None:
        """The same, to act again as a recorded run did; None where that needs no record.

        A collector acts for all starts of the run; where `each_process` of the run has one of its own, for the start
        that it began with.
        """
        del run, each_process
        return None

    def show(self, model: nn.Module, run: Path) -> None:
        """Leave in the directory of a run that has ended what its page shows of acting with `model`, if anything."""

    def stream(self, part: int, parts: int) -> Iterable[Any]:
        return _no_stream(part, parts)


def _no_stream(part: int, parts: int) -> NoReturn:
    raise TypeError(f"part {part} of {parts}: experience is collected with a model, and never read")


class ExperienceShares(BatchShares):
    """Shares of batches that are collected when they are fetched, with the model that `model` gives then.

    Where workers split a batch, each has its share of the environments. Where every worker computes whole batches, each
    has as many environments as a batch needs, and their numbers follow from its `rank`.
    """

    def __init__(
        self, data: Experience, batch_size: int, rank: int, seed: int, model: Callable[[], nn.Module]
    ) -> None:
        self._data, self._batch_size = data, batch_size
        self._seed, self._model = seed, model
        self._process, self._ranks = 0, {0: rank}
        self._acting: dict[int, tuple[range, ExperienceCollector]] = {}  # by process

    def act_as(self, process: int, rank: int) -> None:
        """From now on what this process collects, which began as worker `rank`: a replay does what all of them did."""
        self._process = process
        self._ranks.setdefault(process, rank)

    def share(self, step: int, part: int, parts: int) -> Share:
        mine = split(self._batch_size, part, parts)
        if parts == 1:
            rank = self._ranks[self._process]
            mine = range(rank * self._batch_size, (rank + 1) * self._batch_size)
        return share_of(mine, self._batch_size, 1, partial(self._collect, step))

    def _collect(self, step: int, environments: range) -> Any:
        known, collector = self._acting.get(self._process, (range(0), None))
        if collector is None or known != environments:
            if collector is not None:  # workers have come or gone, and the environments are shared out anew
                collector.close()
            collector = self._data.collector(environments, self._seed)
            self._acting[self._process] = environments, collector
        return collector.collect(self._model(), step)

    def facts(self) -> Mapping[str, Any]:
        found = self._acting.get(self._process)
        return found[1].facts() if found is not None else {}

    def notices(self) -> Sequence[str]:
        found = self._acting.get(self._process)
        return found[1].notices() if found is not None else ()

    def close(self) -> None:
        for _, collector in self._acting.values():
            collector.close()
        self._acting.clear()
