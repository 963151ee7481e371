"""What a schedule costs, counted from its table: steps, messages, bytes, and alpha-beta-gamma time.

A message of b bytes takes alpha + b * beta, reducing b bytes takes b * gamma (Hockney's model with
reduction, as in Thakur, Rabenseifner and Gropp 2005). A rank has one port out and one port in, which work
at the same time and each carry one message after the other; it reduces when its round's messages are in,
and goes on to its next round without waiting for ranks it exchanges nothing with. So the time is that of
the longest chain of waits, found by playing the rounds through.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from manyhands.errors import UserError
from manyhands.strategies.common.collectives.schedule import Algorithm, How, Step, Table, span_bounds

__all__ = ["Cost", "cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one all-reduce.

    `steps` is the sum over rounds of the most messages that any rank sends or receives in that round;
    `messages` and `bytes_sent` are what each rank sends.
    """

    steps: int
    messages: tuple[int, ...]
    bytes_sent: tuple[int, ...]
    _tables: tuple[Table, ...] = field(repr=False)
    _sizes: _Sizes = field(repr=False)

    def time(self, alpha: float, beta: float, gamma: float) -> float:
        """Time until the last rank is done; alpha per message, beta per byte sent, gamma per byte reduced."""
        clocks = [0.0] * len(self._tables)
        for steps in zip(*self._tables, strict=True):
            clocks = _play(steps, clocks, self._sizes, (alpha, beta, gamma))
        return max(clocks)


def cost(algorithm: Algorithm, world: int, num_bytes: int, item_bytes: int = 1) -> Cost:
    """Count one all-reduce of `num_bytes`, cut between items of `item_bytes` as the executor cuts them."""
    if num_bytes < 0 or item_bytes < 1 or num_bytes % item_bytes:
        raise UserError(
            f"num_bytes={num_bytes}, item_bytes={item_bytes}: a vector is a whole number of items"
        )
    tables = algorithm.tables(world)
    sizes = _Sizes(count=num_bytes // item_bytes, item_bytes=item_bytes, chunks=algorithm.chunks(world))
    return Cost(
        steps=sum(
            max(max(len(step.sends), len(step.receives)) for step in steps)
            for steps in zip(*tables, strict=True)
        ),
        messages=tuple(sum(len(step.sends) for step in table) for table in tables),
        bytes_sent=tuple(sum(sizes.of(s.chunks) for step in table for s in step.sends) for table in tables),
        _tables=tables,
        _sizes=sizes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """How many bytes a run of chunks has."""

    count: int
    item_bytes: int
    chunks: int

    def of(self, span: range) -> int:
        begin, end = span_bounds(self.count, self.chunks, span)
        return (end - begin) * self.item_bytes


def _play(
    steps: tuple[Step, ...], clocks: list[float], sizes: _Sizes, rates: tuple[float, float, float]
) -> list[float]:
    """The clock of every rank after a round."""
    alpha, beta, gamma = rates
    left: dict[tuple[int, int], deque[float]] = {}
    finished = []
    for rank, step in enumerate(steps):
        out = clocks[rank]
        for send in step.sends:
            out += alpha + sizes.of(send.chunks) * beta
            left.setdefault((rank, send.to), deque()).append(out)
        finished.append(out)
    for rank, step in enumerate(steps):
        port = clocks[rank]
        for receive in step.receives:
            carried = port + alpha + sizes.of(receive.chunks) * beta
            port = max(carried, left[receive.source, rank].popleft())
        finished[rank] = max(finished[rank], port) + gamma * _reduced(step, sizes)
    return finished


def _reduced(step: Step, sizes: _Sizes) -> int:
    """Bytes added in a round; what is kept counts when it arrives, although its fold may come later."""
    return sum(sizes.of(receive.chunks) for receive in step.receives if receive.how is not How.COPY)
