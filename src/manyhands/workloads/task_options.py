"""Options of a workload: a frozen dataclass whose fields carry their help text and what they allow.

A field's type, default and `option(...)` give Python's keyword options, the checks and the command line's `--options`:
nothing is said twice.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import typing
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, TypeVar

from manyhands.errors import UserError, nearest, printable
from manyhands.strategy import parse_size

Options = TypeVar("Options")
_SWITCH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", Path: "a path"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option, as a command line offers it."""

    name: str
    kind: type  # int, float, bool, str or Path
    default: Any
    """None where the option may be left out and has no value then, and where it is required."""
    required: bool = False
    many: bool = False  # whether it may be given several times; its value is a tuple
    help: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: Collection[str] = ()
    flag: str = ""
    """Its flag, where that is not made of its name; a bool with one takes no value, and turns the default around."""
    metavar: str = ""
    shown: str = ""  # what the help says of the default, where the default itself does not
    hidden: bool = False  # for Python alone: no command offers it
    reads: Callable[[str], Any] | None = None  # how text becomes the value, where `kind` does not say

    def parse(self, text: str) -> Any:
        """The value that `text` stands for; UserError where it stands for none."""
        try:
            value = _SWITCH[text.lower()] if self.kind is bool else (self.reads or self.kind)(text)
        except UserError:
            raise
        except (ValueError, KeyError) as error:
            raise UserError(f"{self.name} is {text!r}; it must be {self.allowed}") from error
        return self._checked(value)

    def check(self, value: Any) -> Any:
        """`value` as this option holds it; UserError names the option, the value and what is allowed."""
        if value is None and not self.required and self.default is None:
            return value
        return tuple(map(self._checked, value)) if self.many else self._checked(value)

    def _checked(self, value: Any) -> Any:
        if self.kind is Path and isinstance(value, str):
            value = Path(value)
        if self.kind is float and type(value) is int and abs(value) <= sys.float_info.max:
            value = float(value)
        fits = isinstance(value, self.kind) and (self.kind is bool or not isinstance(value, bool))
        if fits and self.kind in (int, float):
            fits = (
                (isinstance(value, int) or math.isfinite(value))
                and (self.at_least is None or value >= self.at_least)
                and (self.above is None or value > self.above)
                and (self.at_most is None or value <= self.at_most)
                and (self.below is None or value < self.below)
            )
        if fits and self.kind is Path:
            fits = False
            with suppress(UnicodeEncodeError):
                fits = b"\0" not in os.fsencode(value)  # a file can be called this
        if fits and self.choices and value not in self.choices:
            raise UserError(f"{self.name} is {printable(repr(value))}; {nearest(value, self.choices)}")
        if not fits:
            raise UserError(f"{self.name} is {printable(repr(value))}; it must be {self.allowed}")
        return value

    @property
    def allowed(self) -> str:
        words = [("of at least", self.at_least), ("above", self.above)]
        words += [("and at most", self.at_most), ("and below", self.below)]
        bounds = [f"{word} {bound:g}" for word, bound in words if bound is not None]
        return " ".join([_KINDS[self.kind], *bounds])


def option(default: Any, help_text: str, **about: Any) -> Any:
    """A field of an options dataclass; `default` is `...` where it is required, `about` as the fields of `Option`."""
    metadata = {"option": {"help": help_text, **about}}
    return dataclasses.field(default=MISSING if default is ... else default, metadata=metadata)


def memory_option(help_text: str, *, at_least: int = 1, **about: Any) -> Any:
    given = {"at_least": at_least, "reads": parse_size, "metavar": "SIZE", "shown": "2GiB"}
    return option(2 << 30, help_text, **given, **about)


def check_options(options: Any) -> None:
    """Check every field of an options dataclass and bring it to its type; called from `__post_init__`."""
    for one in options_of(type(options)):
        # the fields are frozen once this has run
        object.__setattr__(options, one.name, one.check(getattr(options, one.name)))


@dataclass(frozen=True, kw_only=True)
class CheckedOptions:
    """Options that are checked when they are made: a UserError names the field, its value and what is allowed."""

    def __post_init__(self) -> None:
        check_options(self)


def options_of(options_type: type) -> tuple[Option, ...]:
    hints = typing.get_type_hints(options_type)
    found = []
    for field in dataclasses.fields(options_type):
        if "option" in field.metadata:
            kind, many = _kind(hints[field.name])
            required = field.default is MISSING
            about = {"default": None if required else field.default, **field.metadata["option"]}
            found.append(Option(name=field.name, kind=kind, many=many, required=required, **about))
    return tuple(found)


def chosen(name: str, options_type: type[Options], given: Mapping[str, Any]) -> Options:
    """The options of the task `name`; an unknown one, or a required one left out, is a UserError."""
    options = options_of(options_type)
    names = [one.name for one in options]
    for key in given:
        if key not in names:
            raise UserError(f"task {name!r} has no option {key!r}; {nearest(key, names)}")
    for one in options:
        if one.required and one.name not in given:
            raise UserError(f"task {name!r} needs {one.name}: {one.help}")
    return options_type(**given)


def narrowed(options_type: type[Options], chosen: Any) -> Options:
    """The part of `chosen` that `options_type`, a class that it extends, has."""
    names = [field.name for field in dataclasses.fields(options_type)]  # type: ignore[arg-type]
    return options_type(**{name: getattr(chosen, name) for name in names})


def _kind(hint: Any) -> tuple[type, bool]:
    """`Path | None` as `Path`, and whether there may be several, as in `tuple[Path, ...]`."""
    if typing.get_origin(hint) is tuple:
        return _kind(typing.get_args(hint)[0])[0], True
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
    if len(kinds) == 1 and typing.get_origin(kinds[0]) is tuple:
        return _kind(kinds[0])
    if len(kinds) != 1 or kinds[0] not in _KINDS:
        allowed = ", ".join(kind.__name__ for kind in _KINDS)
        raise TypeError(f"an option cannot be of type {hint!r}; allowed: {allowed}")
    return typing.cast(type, kinds[0]), False
