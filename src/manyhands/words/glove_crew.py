"""Worker processes of one GloVe training and the parent that they report to after each pass.

A worker takes part in pass p when the parent has said go, reports its sum of costs, and waits for the next go; the
parent keeps the parameters in between, when nobody writes them.

    | what the strategy shares | abort | go | serving | tickets | blocks |      words of control, a cache line each
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from manyhands.cluster.context import RoleContext
from manyhands.cluster.local import LocalCluster, Role
from manyhands.errors import Aborted, PeerTimeout
from manyhands.memory.counters import Counter
from manyhands.memory.segment import CACHE_LINE, Segment, round_up
from manyhands.memory.waiting import ABORTED, REACHED, announce, spins_for, wait_until
from manyhands.words.glove_model import Snapshot
from manyhands.words.glove_passes import Passes, Work

__all__ = ["CONTROL_BYTES", "PATIENCE_S", "Control", "Plan", "Report", "run_crew"]

_ABORT, _GO, _SERVING, _TICKETS, _BLOCKS = (CACHE_LINE * number for number in range(5))
CONTROL_BYTES = 5 * CACHE_LINE
PATIENCE_S = 120.0  # others may be as busy as this machine allows
_NOTE_S = 0.25


class Control:
    """The words that workers and parent agree on, at an address in memory that `holder` keeps."""

    def __init__(self, address: int, holder: object) -> None:
        self.abort_word = address + _ABORT
        self.serving = address + _SERVING
        self.tickets = address + _TICKETS
        self._go = address + _GO
        self._aborted = Counter(self.abort_word, holder)
        self._blocks = Counter(address + _BLOCKS, holder)

    def begin_pass(self, number: int) -> None:
        """Lay out the blocks again and let the workers go; none of them is in a pass now."""
        self._blocks.set(0)
        announce(self._go, number + 1)

    def await_pass(self, number: int, rank: int) -> None:
        """Wait until the parent lets pass `number` begin, which it does when all have finished the one before."""
        deadline_ns = time.monotonic_ns() + int(PATIENCE_S * 1e9)
        self.check(wait_until(self._go, number + 1, self.abort_word, deadline_ns, spins_for(1)), rank)

    def take_block(self) -> int:
        """The number of the next block of this pass; each is given once."""
        return self._blocks.add()

    def abort(self) -> None:
        """End every wait."""
        self._aborted.set(1)

    def check_alive(self, rank: int) -> None:
        """Raise Aborted where someone called `abort`."""
        self.check(ABORTED if self._aborted.get() else REACHED, rank)

    def check(self, status: int, rank: int) -> None:
        """Raise what the end of a wait means, unless it was REACHED."""
        if status == ABORTED:
            raise Aborted(f"worker {rank} stops: another failed first, or the run was interrupted")
        if status != REACHED:
            raise PeerTimeout(
                f"worker {rank} waited {PATIENCE_S:g} s for the others; see whether they still run", -1
            )


class Report:
    """How a worker process tells its parent how far it is, and hears that it must stop."""

    def __init__(self, context: RoleContext, control: Control) -> None:
        self._context = context
        self._control = control
        self._records = 0
        self._told_at = time.monotonic()

    def advance(self, records: int) -> None:
        """So many more records were visited; called often, tells now and then."""
        self._records += records
        if time.monotonic() - self._told_at > _NOTE_S:
            self._tell({})
            if self._context.stop_requested():
                raise Aborted(f"worker {self._context.rank} was asked to stop")

    def begin_pass(self, number: int) -> None:
        """Wait for the parent's go."""
        self._control.await_pass(number, self._context.rank)

    def end_pass(self, cost: float) -> None:
        """This worker's part of a pass is over, with this sum of costs."""
        self._tell({"cost": cost})

    def _tell(self, more: Mapping[str, float]) -> None:
        self._context.send({"records": self._records, **more})
        self._records, self._told_at = 0, time.monotonic()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a strategy needs of its crew."""

    target: Callable[[RoleContext, Segment, Report, Control], None]
    """Run in each worker process, with the shared memory mapped; sent to it, so it holds plain values only."""

    shared_bytes: int
    purpose: str
    prepare: Callable[[Segment], Callable[[], Snapshot]]
    """Called in the parent: fills the shared memory, and gives a function that copies the parameters out of it."""

    descriptors: Mapping[str, int] = field(default_factory=dict)
    """What the workers inherit besides."""

    on_failure: Callable[[int], None] = lambda _rank: None
    """Ends waits of workers that are not on the words of control."""


def run_crew(work: Work, passes: Passes, plan: Plan) -> None:
    """Run a strategy's workers to the end; when this returns or raises, none is left."""
    control_offset = round_up(plan.shared_bytes, CACHE_LINE)
    with Segment.create(control_offset + CONTROL_BYTES, plan.purpose) as segment:
        snapshot = plan.prepare(segment)
        control = Control(segment.address + control_offset, segment)
        costs: dict[int, float] = {}

        def heard(rank: int, note: Mapping[str, Any]) -> None:
            passes.advance(note["records"])
            if "cost" in note:
                costs[rank] = note["cost"]
            if len(costs) == work.workers:
                total = sum(
                    costs[worker] for worker in range(work.workers)
                )  # in one order, whoever came first
                costs.clear()
                passes.finish(total, snapshot)
                control.begin_pass(len(passes.costs))

        def failed(rank: int) -> None:
            control.abort()
            plan.on_failure(rank)

        target = partial(_work, target=plan.target, control_offset=control_offset)
        descriptors = {"shared": segment.descriptor, **plan.descriptors}
        roles = [
            Role(name=f"worker {rank}", target=target, descriptors=descriptors, env={"OMP_NUM_THREADS": "1"})
            for rank in range(work.workers)
        ]
        control.begin_pass(0)
        with LocalCluster(roles, on_note=heard, on_failure=failed) as cluster:
            cluster.run()


def _work(
    context: RoleContext,
    *,
    target: Callable[[RoleContext, Segment, Report, Control], None],
    control_offset: int,
) -> None:
    with Segment.attach(context.descriptor("shared")) as segment:
        control = Control(segment.address + control_offset, segment)
        target(context, segment, Report(context, control), control)
