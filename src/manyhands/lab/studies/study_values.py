"""What studies share: options as text, read into numbers, and the room and the cores of live runs.

A UserError names the option and what it may be.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from manyhands.errors import Overload, UserError
from manyhands.lab.sweep.trials import flag, parse_values

if TYPE_CHECKING:
    from manyhands.strategy import Strategy

V = TypeVar("V")


def counts_of(name: str, text: str) -> list[int]:
    """`1,2,4` as increasing integers of at least 1."""
    return sorted(
        {int(value) for value in _valid(name, text, lambda one: one.isdecimal() and int(one) > 0, "1,2,4")}
    )


def numbers_of(name: str, text: str) -> list[float]:
    """`0,0.5,2` as increasing numbers of at least 0."""
    return sorted({float(value) for value in _valid(name, text, _is_number, "0,0.5,2")})


def read_as(name: str, text: str, read: Callable[[str], V]) -> V:
    """What `read` makes of the text; its UserError gets the option's name."""
    try:
        return read(text)
    except UserError as error:
        raise UserError(f"{flag(name)}: {error}") from None


@contextmanager
def using_cores(count: int) -> Iterator[None]:
    """Processes that are started meanwhile have so many cores, or all: a worker brings one, and torch no second thread.

    A lone worker would otherwise compute with all cores, and seem as fast as several.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def require_room(task: Any, strategy: Strategy, workers: int) -> None:
    """UserError where so many live workers of `task` do not fit on this host."""
    from manyhands.engine.options import Options
    from manyhands.engine.request import Length, Request
    from manyhands.engine.session import check_capacity_for

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of batches too small for so many workers: the runs will say it
        request = Request.make(task, strategy, workers, Length(steps=1), 0, Options(), "cpu")
    try:
        check_capacity_for(request, task.model())
    except Overload as error:
        raise UserError(f"--workers: {str(error).partition('; use fewer')[0]}; give fewer") from None


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def _valid(name: str, text: str, is_valid: Callable[[str], bool], example: str) -> Sequence[str]:
    values = read_as(name, text, lambda one: parse_values(one, ","))
    for value in values:
        if not value.isascii() or not is_valid(value):
            at_least = "an integer of at least 1" if "." not in example else "a number of at least 0"
            raise UserError(f"{flag(name)} {value!r} is not {at_least}; write several as {example}")
    return values
