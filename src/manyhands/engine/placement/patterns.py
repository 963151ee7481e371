"""Assigns devices to module names by patterns; pure, without querying any device."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from manyhands.errors import UserError

__all__ = ["assigned"]


def assigned(names: Sequence[str], where: Mapping[str, str]) -> dict[str, str]:
    """For each name of a module the device that `where` gives it; a name that no pattern reaches is left out.

    A pattern (as of file names: `*`, `?`, `[0-3]`) means the modules it matches and all that is in them. Where several
    reach a module, the one with the most letters that are no wildcards wins: `blocks.0` over `blocks.*` over `*`; of
    equals, the last.
    """
    for pattern in where:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"placement of {pattern!r}: no module has this name; {_nearest(pattern, names)}")
    ranked = sorted(where, key=_letters)  # a stable sort: of equals the last stays last
    found = {}
    for name in names:
        reached = [pattern for pattern in ranked if _reaches(pattern, name)]
        if reached:
            found[name] = where[reached[-1]]
    return found


def _reaches(pattern: str, name: str) -> bool:
    """Whether a pattern matches the module or one that contains it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:depth]), pattern) for depth in range(1, len(parts) + 1))


def _letters(pattern: str) -> int:
    return len(re.sub(r"\[[^]]*\]|[*?]", "", pattern))


def _nearest(pattern: str, names: Sequence[str], shown: int = 8) -> str:
    close = difflib.get_close_matches(pattern.replace("*", "").strip("."), names, n=1, cutoff=0.5)
    more = ", …" if len(names) > shown else ""
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"there are {', '.join(names[:shown])}{more}{hint}"
