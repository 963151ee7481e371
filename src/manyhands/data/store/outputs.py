"""The directory that a command of many runs is given by `--out`: new or empty, and its own from then on."""

from __future__ import annotations

from pathlib import Path

from manyhands.data.store.atomic import make_directory, reason
from manyhands.errors import UserError

__all__ = ["make_output", "require_empty"]


def require_empty(out: Path) -> None:
    """UserError unless nothing is at `out`, or an empty directory; nothing is touched."""
    try:
        taken = next(out.iterdir(), None) if out.exists() else None
    except OSError as error:
        raise UserError(f"--out {out} cannot be used: {reason(error)}") from error
    if taken is not None:
        raise UserError(f"--out {out} is not empty (it has {taken.name!r} in it); choose another")


def make_output(out: Path) -> None:
    """Make the directory, where it is not there yet; UserError where the disk does not take it."""
    try:
        make_directory(out)
    except OSError as error:
        raise UserError(f"--out {out} cannot be used: {reason(error)}") from error
