"""What a page says of how a run was begun: command, host, date and settings, as text by name.

Both files are a user's: whatever stands there is shown as plain text of bounded length, and nothing is required.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from manyhands.errors import printable
from manyhands.observe.record.checked_values import number

__all__ = ["about_run"]

_LONG = frozenset({"parameters"})  # a line for each tensor, which is no setting
_MOST_SETTINGS = 60


def about_run(config: Mapping[str, Any], origin: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """By name, in the order of the page; what is not known, as of a run of an older release, is left out."""
    found = {name: origin.get(name) for name in ("command", "host")}
    rows = [(name, printable(value)) for name, value in found.items() if isinstance(value, str) and value]
    begun = number(origin.get("unix_s"))
    if begun is not None:
        try:
            rows.append(("begun", datetime.fromtimestamp(begun, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")))
        except (OverflowError, OSError, ValueError):
            pass  # no clock of ours
    settings = [(name, value) for name, value in config.items() if name not in _LONG and value is not None]
    rows += [
        (printable(str(name).replace("_", " ")), _shown(value)) for name, value in settings[:_MOST_SETTINGS]
    ]
    return tuple(rows)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        named = [f"{name}={_plain(one)}" for name, one in value.items() if one is not None]
        return printable(", ".join(named[:_MOST_SETTINGS])) or "–"
    if isinstance(value, list):
        return printable(", ".join(map(_plain, value[:_MOST_SETTINGS]))) or "–"
    return printable(_plain(value))


def _plain(value: Any) -> str:
    """A value itself; of what holds others, which may be deep, that there is something."""
    return "…" if isinstance(value, Mapping | list) else str(value)
