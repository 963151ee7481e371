"""The vocabulary of a run: its kinds of event, and the fixed 64-byte record that holds one.

Whatever a run shows is computed from these records and nothing else. A record is one cache line, little-endian, without
pointers: the slot of a shared ring, the item of a file and the row of a numpy array.

Durations are taken on the role's own clock *before* any barrier: the time a role computes ends when its own work ends,
and the time it then spends for others is a WAIT that names the one waited for. The durations of COMPUTE, EXCHANGE and
WAIT of one role do not overlap: what is reduced inside a backward pass is taken off the compute.

A message is recorded by both its ends, with the same number: the SEND of role a to b and the RECEIVE of role b from a
belong together where their `message` is the same. What workers of one host read in each other's memory is not a
message; the WAIT for the one who wrote it is all there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from manyhands.transport.link.wire import KNOWN_WIRES, Wire, codec_of, wire_of

__all__ = [
    "KNOWN_WIRES",
    "MAX_ROLE",
    "MAX_SHOWN",
    "NOBODY",
    "NO_STEP",
    "RECORD",
    "Event",
    "EventKind",
    "Records",
    "Wire",
    "to_events",
    "wire_of",
]

NOBODY = -1  # the peer of an event that concerns no other role

NO_STEP = -1  # the step of an event that belongs to none

MAX_ROLE = 2**15 - 1  # roles are numbered 0 to this

MAX_SHOWN = 512  # views tell roles below this one apart: what they keep grows with the square of their number


class EventKind(IntEnum):
    """The kinds of event; 0 is not a kind, so that zeroed memory never reads as an event."""

    COMPUTE = 1
    """Forward, backward and optimizer step of this role's share of a batch, without waiting.

    In a pipeline, one work item on one micro-batch: `count` is the micro-batch's number, from 1; 0 for all of them.
    """
    EXCHANGE = 2  # moving or reducing gradients and parameters; `num_bytes` were sent in `count` messages
    WAIT = 3
    """Idle until `peer` arrived, or waiting for no particular peer (`peer` = -1); `count` as in COMPUTE."""
    STEP = 4
    """One whole step including all of the above; `value` is the loss, `count` the samples of this role's share."""
    EVALUATE = 5
    """Measuring the metrics on the evaluation data; `count` is the number of samples.

    A worker also records its beginning, with no duration and `count` = 0, so that views can show it.
    """
    CHECKPOINT = 6  # writing a checkpoint of `num_bytes`
    JOIN = 7  # the role joined the run; the duration is its start-up time
    LEAVE = 8  # the role left the run normally
    FAULT = 9  # A fault; `peer` is the role that caused it, -1 for this role itself
    INPUT = 10
    """Loading the samples of a batch: reading, collating, copying to the device; `count` is their number."""
    APPLY = 11
    """A server applied one update of worker `peer` to shard `count`; `value` is its staleness.

    The duration is that of the optimizer step, and 0 for all but the last of several updates in one step.
    """
    HOLD = 12
    """A server held back a request of worker `peer` for shard `count`; `value` is the worker it waited for, or -1."""
    SEND = 13
    """`num_bytes` were sent to `peer` in `count` messages; the matching RECEIVE has the same `message` number."""
    RECEIVE = 14  # message `message` of `peer` has arrived; the duration is that of receiving it


RECORD = np.dtype(
    [
        ("start_ns", "<u8"),  # CLOCK_MONOTONIC, shared by all processes of a host
        ("duration_ns", "<u8"),
        ("kind", "u1"),
        ("wire", "u1"),  # the transport of its bytes
        ("role", "<u2"),  # the role that recorded it; set by the ring
        ("peer", "<i2"),  # the role it concerns, or NOBODY
        ("codec", "<u2"),  # the codec of its bytes: 5 bits per stage of a chain, 0: raw
        ("step", "<i8"),  # the global batch, from 0, or NO_STEP
        ("num_bytes", "<u8"),
        ("value", "<f8"),
        ("id", "<u8"),  # events of this role before it, including lost ones: a gap is a loss; set by the ring
        ("count", "<u4"),
        ("message", "<u4"),  # the number of a message, 0: none
    ]
)  # the layout of one event, 64 bytes

Records = npt.NDArray[np.void]  # A one-dimensional array of dtype RECORD


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One record as plain Python values, for code that looks at single events."""

    kind: EventKind
    role: int
    id: int
    start_ns: int
    duration_ns: int
    step: int
    peer: int
    num_bytes: int
    count: int
    value: float
    message: int = 0
    wire: Wire = Wire.NONE
    codec: str = "raw"  # the words of it, as `topk+int8`; with which options, the run's strategy says

    @property
    def microbatch(self) -> int | None:
        """The micro-batch of its step that was computed or waited for, from 0; None for all of them."""
        has_one = self.kind in (EventKind.COMPUTE, EventKind.WAIT) and self.count > 0
        return self.count - 1 if has_one else None

    @classmethod
    def from_record(cls, record: Any) -> Event:
        plain = dict(zip(RECORD.names or (), record.item(), strict=True))
        plain["kind"], plain["wire"] = EventKind(plain["kind"]), Wire(plain["wire"])
        return cls(**plain | {"codec": codec_of(plain["codec"])})


def to_events(records: Records) -> list[Event]:
    return [Event.from_record(record) for record in records]
