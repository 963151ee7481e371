"""What a worker of a group is reading: which part of which global batch, of which loader, by whose random numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from manyhands.data.randomness import GENERATORS

_WORDS: Final = 625  # of Python's generator: 624 and a position
_KEYS: Final = 624  # of numpy's


class Draws:
    """States of the three global random generators of a process, to be sent to another and lent to whoever draws.

    A dataset that shuffles or augments as it goes draws from torch, from Python's `random` or from numpy. Lent the same
    states, it gives the same samples in every worker.
    """

    def __init__(self) -> None:
        self._states = [take() for take, _ in GENERATORS]
        self._first = list(self._states)
        self._lent = list(range(len(GENERATORS)))

    @classmethod
    def from_content(cls, content: torch.Tensor) -> Draws:
        raw = content.numpy().tobytes()
        words = np.frombuffer(raw, np.uint32, _WORDS)
        keys = np.frombuffer(raw, np.uint32, _KEYS, offset=4 * _WORDS)
        after = 4 * (_WORDS + _KEYS)
        next_gauss, position, has_gauss, gauss = np.frombuffer(raw, np.float64, 4, offset=after).tolist()
        of_python = (3, tuple(words.tolist()), None if np.isnan(next_gauss) else next_gauss)
        of_numpy = ("MT19937", keys, int(position), int(has_gauss), gauss)
        draws = cls()
        draws._states = [of_python, of_numpy, content[after + 32 :].clone()]
        draws._first = list(draws._states)
        return draws

    def content(self) -> torch.Tensor:
        (_, words, next_gauss), (_, keys, *of_numpy), of_torch = self._states
        numbers = np.array([np.nan if next_gauss is None else next_gauss, *of_numpy], np.float64)
        raw = np.array(words, np.uint32).tobytes() + np.asarray(keys, np.uint32).tobytes() + numbers.tobytes()
        return torch.cat([torch.frombuffer(bytearray(raw), dtype=torch.uint8), of_torch])

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Whoever draws inside continues from here; afterwards the process has its own states back."""
        own = [(index, GENERATORS[index][0]()) for index in self._lent]
        for index in self._lent:
            GENERATORS[index][1](self._states[index])
        try:
            yield
        finally:
            for index, state in own:
                take, put = GENERATORS[index]
                self._states[index] = take()
                put(state)

    def leave_out_unused(self) -> None:
        """From now on lend only what has been drawn from: taking a state and putting it back costs time."""
        self._lent = [index for index in self._lent if not _equal(self._states[index], self._first[index])]

    def keep(self) -> None:
        """Continue from here in this process, whose they are, with each generator that it has not used meanwhile."""
        for (take, put), first, state in zip(GENERATORS, self._first, self._states, strict=True):
            if _equal(take(), first):
                put(state)


def draw_from(
    states: torch.Tensor,
    draw: Callable[[], Any],
    own: Sequence[torch.Tensor],
    generators: Sequence[torch.Generator],
) -> Any:
    """Call `draw` with another worker's `states` of torch's generator, which has its `own` afterwards, and these."""
    of_torch, *others = torch.split(states, [len(state) for state in own])
    for generator, state in zip(generators, others, strict=True):
        generator.set_state(state.clone())
    torch.set_rng_state(of_torch.clone())
    try:
        return draw()
    finally:
        torch.set_rng_state(own[0])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


FILLERS: Final = 2  # samples for a worker without a share: batch norm needs two
END = object()  # what comes after the last batch
Move = Callable[[Any], Any]  # takes a batch to where the worker computes
_LOADER_SETTINGS: Final = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"),
    *("prefetch_factor", "persistent_workers"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPart:
    """What one worker has of a global batch."""

    share: float  # of the whole batch
    samples: int = 0
    mark: int = 0  # a checksum of the whole batch: the same on all workers, or they do not read the same
    last: bool = False  # this worker's stream has no other batch after this one
    index: int = -1  # which batch of the training it is, where workers do not meet at every backward


class Turn(NamedTuple):
    """Which samples of a batch a worker reads."""

    span: range
    batch: int = -1  # the `index` of a `LoaderPart`


def remade(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """The user's loader once more, but for `changes`, which say how it makes batches."""
    kept = {name: getattr(loader, name) for name in _LOADER_SETTINGS}
    kept["multiprocessing_context"] = loader.multiprocessing_context if loader.num_workers else None
    return DataLoader(loader.dataset, **{**kept, **changes})


@dataclass(slots=True)
class LoaderReading:
    """One loader being read, from its first batch to its last."""

    loader: Any  # it has `is_stopped`: set, it gives no batch any more
    part: LoaderPart
    is_over: bool = False  # the loop over the loader ends after the batch at hand


class Readings:
    """The loaders that a worker reads at the moment, an inner loop's last; `weigh` gets each batch's share."""

    def __init__(self, world: int, weigh: Callable[[float], None]) -> None:
        self._whole, self.weigh = LoaderPart(share=1 / world), weigh
        self._open: list[LoaderReading] = []
        self._input_ns = 0

    def read(self, batches: Iterator[Any]) -> Any:
        begin = time.monotonic_ns()
        batch = next(batches, END)
        self._input_ns += time.monotonic_ns() - begin
        return batch

    def take_input_ns(self) -> int:
        spent, self._input_ns = self._input_ns, 0
        return spent

    @property
    def part(self) -> LoaderPart:
        return self._open[-1].part if self._open else self._whole

    @contextmanager
    def open(self, loader: Any) -> Iterator[LoaderReading]:
        reading = LoaderReading(loader, self.part)
        self._open.append(reading)
        try:
            yield reading
        finally:
            self._open.remove(reading)
            self.weigh(self.part.share)

    def begin(self, reading: LoaderReading, part: LoaderPart) -> None:
        reading.part = part
        self.weigh(self.part.share)

    def end_stream(self) -> None:
        """Another worker's stream has no batch after this one."""
        for reading in self._open[-1:]:
            reading.is_over = True

    def stop(self) -> None:
        for reading in self._open:
            reading.is_over = reading.loader.is_stopped = True
