"""Which updates of a round are too large beside the others': one client alone must not be able to spoil the model.

    limit = the power of two above  ratio × the median of the round's norms;  an update of norm ≥ limit is rejected

The median stays honest as long as fewer than half of the clients are hostile. The limit is a power of two so that a
server need not keep single updates until the median is known: it adds up the updates of one power of two together
(`norm_class`), and leaves whole sums out. This bounds what one update can do; it does not find updates that are merely
wrong, for which there are the robust algorithms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from manyhands.errors import NonFinite, UserError

__all__ = [
    "FEWEST_NORMS",
    "check_norm_ratio",
    "described_clients",
    "described_norms",
    "largest_class",
    "norm_class",
    "rejected_by_norm",
    "require_finite",
]

FEWEST_NORMS: Final = 3
"""Fewest norms for a check: with two clients it is not clear which one is wrong."""
_ZERO_CLASS: Final = -2000  # below that of every number
_SHOWN: Final = 5


def check_norm_ratio(ratio: float) -> None:
    """UserError where about half of all updates would be rejected, or the number is not one."""
    if ratio and not 1 <= ratio < math.inf:
        raise UserError(f"norm_ratio={ratio:g}: must be a number of at least 1, or 0 for updates of any norm")


def norm_class(norm: float) -> int:
    """The exponent of the power of two above a norm: 2 ** (class - 1) ≤ norm < 2 ** class."""
    return math.frexp(norm)[1] if norm else _ZERO_CLASS


def largest_class(norms: Collection[float], ratio: float) -> int | None:
    """The largest class that counts; None where all do: too few norms to judge, most of them 0, or a ratio of 0."""
    if not ratio or len(norms) < FEWEST_NORMS:
        return None
    bound = ratio * statistics.median(norms)
    return norm_class(bound) if 0 < bound < math.inf else None


def rejected_by_norm(norms: Mapping[int, float], ratio: float) -> tuple[int, ...]:
    """The clients whose updates do not count, in ascending order."""
    largest = largest_class(norms.values(), ratio)
    if largest is None:
        return ()
    return tuple(sorted(client for client, norm in norms.items() if norm_class(norm) > largest))


def described_norms(norms: Mapping[int, float]) -> str:
    """Who sent what, the largest first: `client 2 (norm 1.8e+19), client 0 (norm 0.52) and 3 with at most 0.5`."""
    ranked = sorted(norms.items(), key=lambda one: (-one[1], one[0]))
    shown = ", ".join(f"client {client} (norm {norm:.2g})" for client, norm in ranked[:_SHOWN])
    rest = ranked[_SHOWN:]
    return shown if not rest else f"{shown} and {len(rest)} with at most {rest[0][1]:.2g}"


def described_clients(clients: Sequence[int]) -> str:
    """The clients by number, where nothing is known of what they sent."""
    rest = len(clients) - _SHOWN
    shown = ", ".join(f"client {client}" for client in clients[:_SHOWN])
    return shown if rest <= 0 else f"{shown} and {rest} more"


def require_finite(measured: Mapping[str, float], number: int, came: str, *, weights: bool = True) -> None:
    """NonFinite where round `number`, from 1, has spoiled the model; `came` names what it was made of.

    It is judged by the evaluation loss, and by whether all `weights` are finite: a metric may be undefined in peace.
    """
    loss = measured.get("evaluation_loss", 0.0)
    if weights and math.isfinite(loss):
        return
    what = f"its evaluation_loss is {loss}" if weights else "a weight of it is not finite"
    raise NonFinite(
        f"round {number} has spoiled the model: {what}; the round was made of the updates of {came}; leave out a "
        "client whose norm stands out, or use a smaller learning rate"
    )
