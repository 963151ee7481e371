"""The actions that the cores of a parameter server return: values, which the driver of the core executes in
order.

The driver holds what the cores never see: payloads, stores and connections. A gradient is held under (shard,
slot, clock) from `Keep` until `Apply` or `Drop` names it. A payload that came with a message and was not kept by
the end of that message's actions can be discarded. An update without a gradient (`skip`) is never kept, applied
or dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.strategies.ps.log_rows import Row
from manyhands.strategies.ps.ps_messages import Message

__all__ = ["Action", "Apply", "Discard", "Drop", "Keep", "Load", "Log", "SendMessage", "UpdateFactor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessage:
    """Send a message to a member, with its payload if it has one.

    Parameters and RowValues carry the store's values as they are at this point of the list. A Forward of a Push
    carries its gradient. Install carries the store's state and every gradient that is held for the shard.
    """

    to: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Hold the gradient that came with the current message.

    With `copy`, the worker may overwrite the gradient before it is applied. The driver has to copy it if it lies
    in the worker's memory and is still held after this list of actions.
    """

    shard: int
    slot: int
    clock: int
    copy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFactor:
    """A held gradient, and its factor in the weighted sum."""

    slot: int
    clock: int
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Take one optimizer step with the weighted sum of these gradients, in this order, then release them."""

    shard: int
    contributions: tuple[UpdateFactor, ...]
    rate: float
    """The factor on the learning rate."""
    batches: tuple[int, ...]
    """The batches of the gradients, ascending and without duplicates; a learning rate schedule follows the last."""
    version: int
    """The shard's version after the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Release a held gradient without applying it."""

    shard: int
    slot: int
    clock: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Replace the shard's store and held gradients with the payload of the current Install."""

    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """Release the shard's store and its held gradients: this server is no longer a replica of the shard."""

    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Append a row to the shard's log."""

    row: Row


Action = SendMessage | Keep | Apply | Drop | Load | Discard | Log
