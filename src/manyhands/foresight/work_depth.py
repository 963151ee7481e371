"""Work and depth of a graph of operators: its limits on any number of processors; pure.

Work is all arithmetic, the time of one processor; depth is the longest chain of operators that need each other, the
time of any number of processors (Blelloch, Programming parallel algorithms, 1996). Their ratio is the parallelism,
which no speed-up exceeds; by Brent (1974), p processors need at most depth + (work - depth) / p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Op", "WorkDepth", "work_depth"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator of torch, as it ran once."""

    name: str
    is_backward: bool
    flops: int  # one for each number that it computes or reads, unless torch knows better; 0: it only looks at memory
    outputs: int  # numbers that it computes, independently of each other
    needs: tuple[int, ...]  # the operators whose results it reads, by number: earlier ones

    @property
    def span(self) -> int:
        """Its own depth: each output is a tree over what it is computed from, such as the products of a row."""
        return max(1, math.ceil(math.log2(self.flops / self.outputs))) if self.flops and self.outputs else 0


@dataclass(frozen=True, slots=True)
class WorkDepth:
    """Two numbers about a graph, in operations."""

    work: float
    depth: float

    @property
    def parallelism(self) -> float:
        """The speed-up that no number of processors exceeds."""
        return self.work / self.depth if self.depth else 1.0

    def at_most(self, processors: int) -> float:
        return min(float(processors), self.parallelism)

    def at_least(self, processors: int) -> float:
        """The speed-up that Brent's bound guarantees, if every processor always finds the next operation at once."""
        took = self.depth + (self.work - self.depth) / processors
        return self.work / took if took else 1.0


def work_depth(ops: Sequence[Op], cost: Callable[[Op], float], *, backward: bool | None = None) -> WorkDepth:
    """Work is that of `ops`, depth the longest chain, in which each takes its `cost`; `backward` chooses a half."""
    finished, work = [0.0] * len(ops), 0
    for number, op in enumerate(ops):
        if backward is not None and op.is_backward != backward:
            continue
        finished[number] = cost(op) + max((finished[one] for one in op.needs), default=0.0)
        work += op.flops
    return WorkDepth(work, max(finished, default=0.0))
