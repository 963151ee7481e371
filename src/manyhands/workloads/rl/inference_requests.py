"""What actors ask of central inference, in memory that they share with it: rows of rollouts that need actions.

The environments of an actor may be in two groups, so that those of one step while the other waits for its actions.
Each group has a request, which names the row of a rollout where its observations are and where its actions are to be
written. Two words (see `native.waiting`) count what was asked and what was answered; where they differ it is open.

    | wakeup | end | asked, of each request | answered, of each request |      each on a cache line of its own
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import int64, uint32
from torch import Tensor

from manyhands.data.batches import split
from manyhands.native.atomics import load_u32
from manyhands.native.decorators import njit
from manyhands.native.segment import CACHE_LINE
from manyhands.native.waiting import ABORTED, REACHED, announce, nudge, spins_for, wait_until
from manyhands.workloads.rl.rollouts import RolloutSpec
from manyhands.workloads.rl.stepping import Array

__all__ = ["ActionRequest", "ActionRequests", "Asked", "groups_of", "request_tensors"]

_WORDS = 2  # before those of the requests
_LOOK_NS = 1_000_000_000

_Tensors = list[tuple[tuple[int, ...], torch.dtype]]


def groups_of(rows: int, most: int) -> list[range]:
    """The environments of each group, of an actor that has so many."""
    groups = min(most, rows)
    return [split(rows, group, groups) for group in range(groups)]


def request_tensors(spec: RolloutSpec, groups: Sequence[range], actors: int) -> _Tensors:
    """Shape and type of each, in the order of `ActionRequests`: the words, then what each request has."""
    words = (((_WORDS + 2 * actors * len(groups)) * CACHE_LINE,), torch.uint8)
    return [words] + [one for group in groups for one in _tensors_of_one(spec, len(group))] * actors


def _tensors_of_one(spec: RolloutSpec, rows: int) -> _Tensors:
    return [
        ((3,), torch.int64),  # ticket, row, number of finals
        ((rows, spec.length), torch.float64),  # the numbers that a rollout's actions are drawn with
        ((rows,), torch.int64),  # of which environments the finals are
        ((rows, *spec.observation_shape), spec.observation_dtype),
    ]


class Asked(NamedTuple):
    """An open request: actions for this row of the ticket, unless that is the rollout's length; values of finals."""

    number: int
    ticket: int
    row: int
    places: Array
    finals: Array


class ActionRequest:
    """Of the environments `rows` of an actor, which asks and waits; inference reads and answers."""

    def __init__(
        self, lines: Tensor, numbers: tuple[int, int], rows: range, tensors: Iterator[Tensor]
    ) -> None:
        """`numbers` are those of the lines that count what was asked and what was answered."""
        self._lines = lines  # which are here for as long as their addresses are used
        self._wakeup, self._asked, self._answered = (
            lines.data_ptr() + number * CACHE_LINE for number in (0, *numbers)
        )
        self.rows = rows
        self._where, self.uniforms, self._places, self._finals = (next(tensors).numpy() for _ in range(4))

    @property
    def _number(self) -> int:
        return int(load_word(self._asked))

    @property
    def is_open(self) -> bool:
        return self._number != int(load_word(self._answered))

    def ask(self, ticket: int, row: int, finals: Mapping[int, Array]) -> None:
        for place, (index, final) in enumerate(finals.items()):
            self._places[place], self._finals[place] = index, final
        self._where[:] = ticket, row, len(finals)
        announce(self._asked, self._number + 1)
        nudge(self._wakeup)

    def wait(self, spins: int, goes_on: Callable[[], bool]) -> bool:
        """Until it is answered; False if it never will be. How long that may take is the learner's to say."""
        while True:
            deadline = time.monotonic_ns() + _LOOK_NS
            end = self._wakeup + CACHE_LINE
            status = wait_until(self._answered, self._number, end, deadline, spins)
            if status == REACHED:
                return True
            if status == ABORTED or not goes_on():
                return False

    def read(self) -> Asked:
        ticket, row, count = self._where.tolist()
        return Asked(self._number, ticket, row, self._places[:count], self._finals[:count])

    def is_still(self, asked: Asked) -> bool:
        """Whether the actor that asked this has neither been answered nor been lost."""
        return self.is_open and self._number == asked.number

    def close(self) -> None:
        """It is answered, or nobody waits for an answer any more."""
        announce(self._answered, self._number)


class ActionRequests:
    """All requests: those of each actor, and in one order."""

    def __init__(self, groups: Sequence[range], actors: int, tensors: Iterator[Tensor]) -> None:
        self._lines = next(tensors)
        self._first = self._lines.data_ptr()
        count = actors * len(groups)
        self.of_actors: list[list[ActionRequest]] = []
        for actor in range(actors):
            first = _WORDS + actor * len(groups)
            self.of_actors.append(
                [
                    ActionRequest(self._lines, (line, line + count), group, tensors)
                    for line, group in enumerate(groups, first)
                ]
            )
        self._open = np.zeros(count, np.int64)
        self.spins = spins_for(actors + 2)  # with inference and the learner

    def wait(self, seconds: float) -> list[int]:
        """Which ones are open, as soon as there are any; none after so many seconds, or when it ends."""
        deadline = time.monotonic_ns() + round(seconds * 1e9)
        count = wait_for_requests(self._first, self._open, deadline, self.spins)
        return self._open[:count].tolist()  # type: ignore[no-any-return]

    def end(self) -> None:
        """Nobody answers any more: whoever waits is to stop."""
        self._lines[CACHE_LINE] = 1
        nudge(self._first)


@njit("int64(int64)", nogil=True, cache=True)
def load_word(word: int) -> int:
    return int64(load_u32(word))  # type: ignore[no-any-return]


@njit("int64(int64, int64[::1], int64, int64)", nogil=True, cache=True)
def wait_for_requests(words: int, found: Array, deadline_ns: int, spins: int) -> int:
    """How many are open, and in `found` which."""
    while True:
        wakeup = load_u32(words)
        count = 0
        for request in range(len(found)):
            asked = words + (_WORDS + request) * CACHE_LINE
            if load_u32(asked) != load_u32(asked + len(found) * CACHE_LINE):
                found[count] = request
                count += 1
        if count > 0:
            return count
        end = words + CACHE_LINE
        if wait_until(words, int64(wakeup + uint32(1)), end, deadline_ns, spins) != REACHED:
            return 0
