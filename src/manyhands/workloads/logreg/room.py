"""Whether what is kept of all features fits in memory, asked before any of it is made."""

from __future__ import annotations

from manyhands.errors import UserError, format_bytes
from manyhands.facts import Truth
from manyhands.native.segment import available_bytes
from manyhands.strategy import Strategy
from manyhands.workloads.logreg.logreg_kernels import WIDTHS

__all__ = ["check_capacity", "row_bytes"]

_SAVING_BYTES = 12  # of a feature: its weight without the bias, the file's bytes, and a copy of these
_ITEM = 4  # single precision


def row_bytes(strategy: Strategy, learner: str, workers: int) -> int:
    """All that workers, servers and this process keep of one feature, until the model is saved."""
    width = WIDTHS[learner]  # the weight and the learner's state
    if strategy.facts.record_order is not None and (strategy.facts.in_threads or workers == 1):
        kept = width + 3  # the table, its weights, the model and an earlier one
    elif strategy.truth is Truth.ONE_MEMORY:
        kept = 3 * width + 3  # the table of all workers, on its way from them, and where it arrives
    else:
        # Each worker and server has a copy, with a gradient, what is sent of it, and the model that it began with.
        servers = strategy.facts.kept_copies if strategy.truth is Truth.SERVERS else 0
        kept = (workers + servers) * (width + 3) + 3
    return _ITEM * kept + _SAVING_BYTES


def check_capacity(size: int, row_bytes: int) -> None:
    """UserError where what is kept of so many features does not fit in memory, as one absurd index may make it.

    `row_bytes` is all that is kept of one feature until the model is saved, copies included.
    """
    needed, room = size * row_bytes, available_bytes()
    if needed > room:
        raise UserError(
            f"a weight for every feature up to {size - 1} takes {format_bytes(needed)} with its copies, but only "
            f"{format_bytes(room)} is available; hash the features into fewer with a number of bits, such as 24"
        )
