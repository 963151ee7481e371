"""Arguments of public calls: one that does not exist is named with the nearest that does."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from manyhands.errors import UserError

__all__ = ["BadArguments", "named_arguments", "require_parameters"]

Called = TypeVar("Called", bound=Callable[..., Any])


class BadArguments(UserError, TypeError):
    """A call with an argument that does not exist, or without its name."""


def named_arguments(called: Called) -> Called:
    """Have a function, or a class with fields by name only, refuse unknown arguments by the nearest known name."""
    inner = called.__init__ if inspect.isclass(called) else called
    name = called.__name__
    known = [one for one in inspect.signature(inner).parameters.values() if one.name != "self"]
    names = [one.name for one in known]
    by_place = sum(one.kind is not inspect.Parameter.KEYWORD_ONLY for one in known)

    @functools.wraps(inner)
    def checked(*args: Any, **given: Any) -> Any:
        unknown = next((one for one in given if one not in names), None)
        if unknown is not None:
            close = difflib.get_close_matches(unknown, names, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(names)}"
            raise BadArguments(f"{name} has no argument {unknown!r}; {hint}")
        placed = args[1:] if inspect.isclass(called) else args
        if len(placed) > by_place:
            free = next((one for one in names[by_place:] if one not in given), names[-1])
            raise BadArguments(
                f"{name} takes its arguments by name; write {name}({free}={placed[by_place]!r:.100})"
            )
        return inner(*args, **given)

    if not inspect.isclass(called):
        return checked  # type: ignore[return-value]
    called.__init__ = checked  # type: ignore[method-assign]
    return called


def require_parameters(field: str, function: Callable[..., Any], parameters: tuple[str, ...]) -> None:
    """UserError unless `function` can be called with these arguments by place; what does not tell is let through."""
    try:
        # what a decorator put around another function is called, and not that function
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError):
        return
    try:
        signature.bind(*parameters)
    except TypeError:
        given = ", ".join(str(one).partition(":")[0] for one in signature.parameters.values())
        raise UserError(
            f"{field} takes ({given}), but it is called with ({', '.join(parameters)}); what a batch holds is taken "
            "apart inside it, as in: x, y = batch"
        ) from None
