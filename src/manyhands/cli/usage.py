"""A command line that cannot be understood, as one sentence: the option, what was given, and what to write instead.

What reads the command line says it over four lines, and of values in the words of a library underneath.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

import typer

from manyhands.errors import first_line, printable

__all__ = ["UsageError", "is_help", "usage_sentence"]

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The base of all that is wrong with a command line, which typer does not export."""

_KINDS = {"int": "an integer", "float": "a number", "bool": "true or false"}


def is_help(error: Exception) -> bool:
    """Whether it is no error, but the help that a group of commands shows where none is named."""
    return type(error).__name__ == "NoArgsIsHelpError"


def usage_sentence(error: Any) -> str:
    """What is wrong, what to write instead, and where all options are listed."""
    ctx = getattr(error, "ctx", None)
    if type(error).__name__ == "NoSuchOption":
        said = _unknown_option(error.option_name, ctx)
    else:
        said = _bad_value(error) or _said(error)
    return said if ctx is None else f"{said} (see {ctx.command_path} --help)"


def _said(error: Any) -> str:
    """What typer says of it, beginning small, as the rest of our sentences do."""
    text = first_line(ValueError(error.format_message()))
    return printable(text[:1].lower() + text[1:])


def _bad_value(error: Any) -> str | None:
    """Of a value of the wrong kind: the option, the kind and the value; None for any other error."""
    found = getattr(error.__cause__, "errors", None)
    option = getattr(error, "param", None)
    if found is None or option is None:
        return None
    first = found()[0]
    name = option.opts[0] if option.param_type_name == "option" else option.human_readable_name
    kind = _KINDS.get(str(first["type"]).partition("_")[0])
    if kind is not None:
        return f"{name} must be {kind}; got {printable(str(first['input']))!r}"
    said = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    return f"{name}: {printable(said)}"


def _unknown_option(word: str, ctx: Any) -> str:
    said = f"no such option {printable(word)}"
    if ctx is None:
        return said
    commands = list(getattr(ctx.command, "commands", {}))
    if commands and ctx.parent is not None:  # options belong to the commands of a group
        return f"{said} of `{ctx.info_name}` itself; name one of {', '.join(commands)} before it"
    options = [option for option in ctx.command.params if option.param_type_name == "option"]
    for option in options:  # `--svg` for `--format svg`
        choices = re.search(r"[\w-]+(\|[\w-]+)+", (option.get_help_record(ctx) or ("",))[0])
        if choices is not None and word.lstrip("-") in choices[0].split("|"):
            return f"{said}; did you mean {option.opts[0]} {word.lstrip('-')}?"
    names = [name for option in options for name in option.opts]
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"{said}; did you mean {close[0]}?" if close else said
