"""What a worker of a group is reading: which part of which global batch, of which loader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch.utils.data import DataLoader

from manyhands.interop.own_loop.random_state import Draws

__all__ = ["END", "FILLERS", "Loader", "LoaderPart", "LoaderReading", "Move", "Reader", "Readings", "remade"]

FILLERS: Final = 2
"""Samples for a worker without a share: batch norm needs two."""

END = object()
"""What comes after the last batch."""


Move = Callable[[Any], Any]
"""Takes a batch to where the worker computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPart:
    """What one worker has of a global batch."""

    share: float
    """Of the whole batch."""

    samples: int = 0
    mark: int = 0
    """A checksum of the whole batch: the same on all workers, or they do not read the same."""

    last: bool = False
    """This worker's stream has no other batch after this one."""


def remade(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """The user's loader once more, but for `changes`, which say how it makes batches."""
    kept: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context if loader.num_workers else None,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    return DataLoader(loader.dataset, **{**kept, **changes})


class Loader(Protocol):
    """A loader that can be stopped permanently."""

    is_stopped: bool
    """It gives no batch any more: a worker asked to stop while it was being read."""


@dataclass(slots=True)
class LoaderReading:
    """One loader being read, from its first batch to its last."""

    loader: Loader
    part: LoaderPart
    is_over: bool = False
    """The loop over the loader ends after the batch at hand."""


class Readings:
    """The loaders that a worker reads at the moment, an inner loop's last; `weigh` is told each batch's share."""

    def __init__(self, world: int, weigh: Callable[[float], None]) -> None:
        self._whole = LoaderPart(share=1 / world)
        self._weigh = weigh
        self._open: list[LoaderReading] = []
        self._input_ns = 0

    def read(self, batches: Iterator[Any]) -> Any:
        """The next of `batches`, or END; the time counts as input."""
        begin = time.monotonic_ns()
        batch = next(batches, END)
        self._input_ns += time.monotonic_ns() - begin
        return batch

    def take_input_ns(self) -> int:
        """What reading took since the last call."""
        spent, self._input_ns = self._input_ns, 0
        return spent

    @property
    def part(self) -> LoaderPart:
        """What is being worked on: of an even split where no loader is being read."""
        return self._open[-1].part if self._open else self._whole

    @contextmanager
    def open(self, loader: Loader) -> Iterator[LoaderReading]:
        """While a loader is being read."""
        reading = LoaderReading(loader, self.part)
        self._open.append(reading)
        try:
            yield reading
        finally:
            self._open.remove(reading)
            self._weigh(self.part.share)

    def begin(self, reading: LoaderReading, part: LoaderPart) -> None:
        """The next batch of a loader is handed out."""
        reading.part = part
        self._weigh(self.part.share)

    def end_stream(self) -> None:
        """Another worker's stream has no batch after this one."""
        for reading in self._open[-1:]:
            reading.is_over = True

    def stop(self) -> None:
        """Stop all loaders being read, permanently."""
        for reading in self._open:
            reading.is_over = reading.loader.is_stopped = True


class Reader(Protocol):
    """The group as a loader sees it."""

    rank: int
    world: int
    readings: Readings

    def in_worker_0s_order(self, draw: Callable[[], Any], generators: Sequence[torch.Generator]) -> Any:
        """Collective: call `draw` as if torch's random numbers, and these generators, were worker 0's."""

    def all_have_a_batch(self, mine: bool) -> bool:
        """Collective: whether every worker's stream has one."""

    def worker_0s_draws(self) -> Draws:
        """Collective: worker 0's random generators, as they are now."""

    def require_one_batch(self, mark: int) -> None:
        """Collective: UserError unless the batch that all workers have read is the same."""
