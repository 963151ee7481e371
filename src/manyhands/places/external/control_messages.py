"""The messages of the control connection, which also carries those of `places.local.control`.

process                                        leader
  ControlHello(rank, who it is, terms)       ──►
                                          ◄──  ControlWelcome | ControlRefused(field, reason)
  ControlPing(sent_ns)                       ──►
                                          ◄──  ControlPong(sent_ns, leader_ns)        the clock for all events
  Note, Finished, Failed                  ◄─►  Note, Stop                            of `places.local.control`
  ControlMarked(step, state, …)              ──►
  ControlEvents(lost) + records              ──►
  StoreCall(number, …)                    ──►
                                          ◄──  StoreAnswer(number, …)
                                          ◄─►  ControlPiece(name, last) + bytes       of a large object
                                          ◄──  ControlOver(rank, sentence)            the run has failed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from manyhands.places.local.control import Failed, Finished, Note, Stop
from manyhands.places.local.status import State
from manyhands.transport.messages import MessageCoder

__all__ = [
    "CONTROL_CODER",
    "CONTROL_FINGERPRINT",
    "ControlEvents",
    "ControlHello",
    "ControlMarked",
    "ControlOver",
    "ControlPiece",
    "ControlPing",
    "ControlPong",
    "ControlRefused",
    "ControlWelcome",
    "StoreAnswer",
    "StoreCall",
    "Term",
]

CONTROL_FINGERPRINT: Final = "manyhands line 1"
"""The protocol fingerprint of both ends of a control connection. The terms of the run are compared later, one by
one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A setting that must be the same on every process of a run."""

    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlHello:
    """A process's first message: its identity, its rank, and the terms it expects."""

    rank: int
    world: int
    role: str
    name: str
    host: str
    """The identity of its host, from `places.local.host`."""
    pid: int
    unix_s: float
    """Its wall clock, for the warning about clocks that differ."""
    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlWelcome:
    """The leader admits the process to the run."""

    leader: str
    """The leader's name."""
    clock: str
    """The id of the leader's clock; a process with the same id reads the same time and needs no offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRefused:
    """The leader rejects the process; `field` names what did not match."""

    field: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPing:
    """A clock reading of the process, to be answered with the leader's."""

    sent_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPong:
    """The reading of the ping, and the leader's clock when it answered."""

    sent_ns: int
    leader_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlMarked:
    """What the process is doing; `stage` is -1 outside of pipelines."""

    step: int
    state: State
    waiting_for: int
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEvents:
    """The payload is event records; `lost` more were dropped since the last message."""

    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCall:
    """A call to the key-value store that the leader keeps."""

    number: int
    call: str
    keys: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAnswer:
    """The result of a store call; `found` is False if the key does not exist."""

    number: int
    found: bool
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPiece:
    """The payload is the next piece of a large object; `last` marks its end."""

    name: str
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOver:
    """The run has failed and all waits must end; `rank` is the process whose failure it was."""

    rank: int
    sentence: str


# Numbers are part of the protocol: never reuse one (6 was a frame of `places.local.control`).
CONTROL_CODER: Final = MessageCoder(
    {
        1: ControlHello,
        2: ControlWelcome,
        3: ControlRefused,
        4: ControlPing,
        5: ControlPong,
        7: ControlMarked,
        8: ControlEvents,
        9: StoreCall,
        10: StoreAnswer,
        11: ControlPiece,
        12: ControlOver,
        13: Note,
        14: Failed,
        15: Finished,
        16: Stop,
    }
)
