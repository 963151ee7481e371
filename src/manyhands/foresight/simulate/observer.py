"""Observer interface of a simulated run."""

from __future__ import annotations

from typing import Any

from manyhands.foresight.simulate.faults import FaultRole
from manyhands.foresight.simulate.simulated_processes import Copy, ServerProcess
from manyhands.foresight.simulate.simulated_run import SimulatedHappening
from manyhands.strategies.ps.actions import Ack
from manyhands.strategies.ps.log_rows import StepRow
from manyhands.strategies.ps.ps_messages import Message, Work

__all__ = ["Observer"]


class Observer:
    """Callbacks for the events of a simulated run, without effect on it; tests override those they need."""

    def starts(self, member: int, role: FaultRole) -> None:
        """A process is started."""

    def waited(self, slot: int, work: Work, waited_for: int, since_s: float, now_s: float) -> None:
        """A worker has all values; the last shard to answer had waited for a slot, or for nobody (-1)."""

    def computes(self, slot: int, work: Work, read: list[Any], now_s: float) -> None:
        """A worker begins to compute from what it has read of each shard."""

    def computed(self, slot: int, work: Work, began_s: float, now_s: float) -> None:
        """The worker has the gradient, and pushes it now."""

    def sends(self, source: int, to: int, message: Message, now_s: float) -> None:
        """A member sends a message."""

    def arrives(self, source: int, to: int, message: Message, num_bytes: int, now_s: float) -> None:
        """A message arrives with its payload; the receiver may be busy with another."""

    def acknowledges(self, ack: Ack) -> None:
        """The primary of a shard says that a push is durable."""

    def steps(self, server: int, row: StepRow, began_s: float, took_s: float) -> None:
        """The primary of a shard takes an optimizer step."""

    def serves(self, shard: int, server: ServerProcess, now_s: float) -> None:
        """A server has learned that it serves a shard from now on."""

    def restores(self, shard: int, copy: Copy, now_s: float) -> None:
        """No replica of a shard was left: a server is told to continue from this snapshot."""

    def over(self, shard: int, server: ServerProcess) -> None:
        """Training is over, possibly repeated: `server` is to leave the shard as it is."""

    def happens(self, happening: SimulatedHappening) -> None:
        """A fault, a recovery or a loss has happened."""
