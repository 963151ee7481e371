"""How a run was started, as text by name: command, host, date and settings.

Both source files may come from a user, so values are shown as plain text of bounded length and none is required.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from manyhands.errors import printable
from manyhands.observe.record.checked_values import number

__all__ = ["about_run"]

_LONG = frozenset({"parameters"})  # one line per tensor, which is not a setting
_MOST_SETTINGS = 60


def about_run(config: Mapping[str, Any], origin: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Facts by name, in page order; unknown ones, as in runs of older releases, are left out."""
    found = {name: origin.get(name) for name in ("command", "host")}
    rows = [(name, printable(value)) for name, value in found.items() if isinstance(value, str) and value]
    begun = number(origin.get("unix_s"))
    if begun is not None:
        try:
            rows.append(("begun", datetime.fromtimestamp(begun, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")))
        except (OverflowError, OSError, ValueError):
            pass  # outside the range of datetime
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
    """Return a plain value as it is; for a container, which may be deep, only say that it has content."""
    return "…" if isinstance(value, Mapping | list) else str(value)
