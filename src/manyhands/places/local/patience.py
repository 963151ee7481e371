"""How patient a watchdog may be; apart from it, because options are checked long before anything is watched."""

from __future__ import annotations

from manyhands.errors import UserError

__all__ = ["check_watchdog_s"]

_LEAST_S = 2.0  # a wait shows itself after one second, and the stacks take another


def check_watchdog_s(watchdog_s: float) -> float:
    """The deadline, or UserError."""
    if watchdog_s != 0 and not watchdog_s >= _LEAST_S:
        raise UserError(f"watchdog_s={watchdog_s:g} must be at least {_LEAST_S:g} seconds, or 0 to look away")
    return watchdog_s
