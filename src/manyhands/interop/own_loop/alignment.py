"""Collective: by how much each worker's clock differs from worker 0's, over whatever connects them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from manyhands.interop.own_loop.small_sums import Call, Words
from manyhands.observe.record.clocks import Bracket, Offset, offset_from

__all__ = ["align"]

_ROUNDS = 9


def align(words: Words, now_ns: Callable[[], int] = time.monotonic_ns) -> tuple[Offset, int]:
    """Collective: this worker's distance to worker 0's clock, and worker 0's own distance to the time of day.

    All meet after looking at their clocks, then worker 0 looks at its own and tells all: so its reading lies between
    the two looks of everyone, however the workers are connected.
    """
    content = torch.zeros(2, dtype=torch.int64)
    brackets = []
    for _ in range(_ROUNDS):
        before_ns = now_ns()
        words.meet(Call.ALIGN)
        if words.rank == 0:
            content[0] = now_ns()
            content[1] = time.time_ns() - time.monotonic_ns()
        words.broadcast(content.view(torch.uint8))
        brackets.append(Bracket(before_ns=before_ns, theirs_ns=int(content[0]), after_ns=now_ns()))
    offset = offset_from(brackets) if words.rank else Offset(ns=0, error_ns=0)
    return offset, int(content[1])
