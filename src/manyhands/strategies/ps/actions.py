"""What the cores of a parameter server want done: values, executed in order by whoever drives them.

The driver holds what the cores never see: payloads, stores and connections. A gradient is held under (shard, slot,
clock) from `Keep` until `Apply` or `Drop` names it; what came with a message and was not kept by the end of that
message's actions is not needed. An update without a gradient (`skip`) is never kept, applied or dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.strategies.ps.log_rows import Row
from manyhands.strategies.ps.ps_messages import Message

__all__ = ["Action", "Apply", "Discard", "Drop", "Keep", "Load", "Log", "SendMessage", "UpdateFactor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessage:
    """Send a message to a member, with its payload where it has one.

    Parameters and RowValues carry the store's values as they are at this point of the list; a Forward of a Push its
    gradient; Install the store's state and every gradient that is held for the shard.
    """

    to: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Hold the gradient that came with the message in hand.

    With `copy` its owner may overwrite it before it is applied: where it lies in the worker's memory and is still held
    after this list, it has to be copied.
    """

    shard: int
    slot: int
    clock: int
    copy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFactor:
    """A held gradient, and what it is multiplied by in the sum."""

    slot: int
    clock: int
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Take one optimizer step from the sum of these gradients, in this order, then let them go."""

    shard: int
    contributions: tuple[UpdateFactor, ...]
    rate: float
    """What the learning rate is multiplied by."""
    batches: tuple[int, ...]
    """The batches the gradients are of, without repetition, ascending; a learning rate schedule goes by the last."""
    version: int
    """The shard's version after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Let a held gradient go without applying it."""

    shard: int
    slot: int
    clock: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Replace the shard's store and held gradients by the payload of the Install in hand."""

    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """This server has no part in the shard any more: let go of its store and its held gradients."""

    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Write a row to the shard's log."""

    row: Row


Action = SendMessage | Keep | Apply | Drop | Load | Discard | Log
