"""What studies share: options as text, read into numbers. A UserError names the option and what it may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from manyhands.errors import UserError
from manyhands.lab.sweep.trials import flag, parse_values

__all__ = ["counts_of", "read_as"]

V = TypeVar("V")


def counts_of(name: str, text: str) -> list[int]:
    """`1,2,4` as increasing integers of at least 1."""
    values = read_as(name, text, lambda one: parse_values(one, ","))
    for value in values:
        if not value.isascii() or not value.isdecimal() or int(value) < 1:
            raise UserError(f"{flag(name)} {value!r} is not an integer of at least 1; write several as 1,2,4")
    return sorted({int(value) for value in values})


def read_as(name: str, text: str, read: Callable[[str], V]) -> V:
    """What `read` makes of the text; its UserError gets the option's name."""
    try:
        return read(text)
    except UserError as error:
        raise UserError(f"{flag(name)}: {error}") from None
