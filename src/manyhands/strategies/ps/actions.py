"""The actions that the cores of a parameter server return: values, which the driver of the core executes in
order.

The driver holds what the cores never see: payloads, stores and connections. A gradient is held under (shard,
slot, clock) from `Keep` until `Apply` or `Drop` names it. A payload that came with a message and was not kept by
the end of that message's actions can be discarded. An update without a gradient (`skip`) is never kept, applied
or dropped.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from manyhands.strategies.ps.log_rows import Row, StepRow
from manyhands.strategies.ps.ps_messages import Message


class SendMessage(NamedTuple):
    """Send a message to a member, with its payload if it has one.

    Parameters and RowValues carry the store's values as they are at this point of the list. A Forward of a Push
    carries its gradient. Install carries the store's state and every gradient that is held for the shard.
    """

    to: int
    message: Message


class Keep(NamedTuple):
    """Hold the gradient that came with the current message.

    With `copy`, the worker may overwrite the gradient before it is applied. The driver has to copy it if it lies
    in the worker's memory and is still held after this list of actions.

    With `carried`, the update's gradient lies within its carrier's: there is nothing to hold but its name.
    """

    shard: int
    slot: int
    clock: int
    copy: bool
    carried: bool = False


class Apply(NamedTuple):
    """Take one optimizer step, release its gradients, and append the step's row to the shard's log.

    The gradient of the step is the weighted sum of those of `row.updates`, in this order, without those that a carrier
    brought in its own. A learning rate schedule advances by as many batches as they are of.
    """

    row: StepRow
    settings: str = ""  # of the first update that has any: the optimizer's, as `Push.settings`


class Adopt(NamedTuple):
    """Continue from the checkpoint that the settings of an update without a gradient name."""

    shard: int
    settings: str


class Outcome(IntEnum):
    """What happened to a push."""

    APPLIED = 1  # the optimizer has taken the step it belongs to
    ACCEPTED = 2  # it is safe, and waits for the rest of its group
    DUPLICATE = 3  # the shard had it already
    LATE = 4  # its group was complete without it (backup workers): it is ignored
    SKIPPED = 5  # the worker sent no gradient, because it was not finite


class Ack(NamedTuple):
    """The push is durable: it survives as many deaths as the run promises.

    Nothing is sent, since the answer to the Read behind the push implies it. A simulated run is checked by it.
    """

    shard: int
    slot: int
    clock: int
    outcome: Outcome


class Drop(NamedTuple):
    """Release a held gradient without applying it."""

    shard: int
    slot: int
    clock: int


class Load(NamedTuple):
    """Replace the shard's store and held gradients with the payload of the current Install."""

    shard: int


class Discard(NamedTuple):
    """Release the shard's store and its held gradients: this server is no longer a replica of the shard."""

    shard: int


class Log(NamedTuple):
    """Append a row to the shard's log."""

    row: Row


Action = SendMessage | Keep | Apply | Adopt | Ack | Drop | Load | Discard | Log
