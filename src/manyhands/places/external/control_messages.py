"""What a process and its leader say to each other over the line, beside the notes of `places.local.control`.

process                                        leader
  ControlHello(rank, who it is, terms)       ──►
                                          ◄──  ControlWelcome | ControlRefused(field, reason)
  ControlPing(sent_ns)                       ──►
                                          ◄──  ControlPong(sent_ns, leader_ns)        whose clock events are put on
  ControlFrame + a frame                   ◄─►  ControlFrame + a frame               notes, stop, result, failure
  ControlMarked(step, state, …)              ──►
  ControlEvents(lost) + records              ──►
  StoreCall(number, …)                    ──►
                                          ◄──  StoreAnswer(number, …)
                                          ◄─►  ControlPiece(name, last) + bytes       of something large
                                          ◄──  ControlOver(rank, sentence)            the run has failed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from manyhands.transport.hub.typed_messages import MessageCoder

__all__ = [
    "LINE",
    "LINE_FINGERPRINT",
    "ControlEvents",
    "ControlFrame",
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

LINE_FINGERPRINT: Final = "manyhands line 1"
"""What both ends of a line say they speak; the terms of the run are compared after that, one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Something that must be the same on every process of a run."""

    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlHello:
    """Who is there, and what it is here for."""

    rank: int
    world: int
    role: str
    name: str
    host: str
    """Its identity, as `places.local.host` has it."""

    pid: int
    unix_s: float
    """What its wall clock says."""

    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlWelcome:
    """The process is one of the run's."""

    leader: str
    """The leader's name."""

    clock: str
    """The leader's clock: who has the same reads the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRefused:
    """The process cannot be one of the run's."""

    field: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPing:
    """What the process's clock says."""

    sent_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPong:
    """The ping's own reading, and what the leader's clock said between."""

    sent_ns: int
    leader_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlFrame:
    """A frame of `places.local.control` comes along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlMarked:
    """What the process is doing; `stage` is -1 outside of pipelines."""

    step: int
    state: int
    waiting_for: int
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEvents:
    """Records come along; `lost` more were dropped since the last time."""

    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCall:
    """A call of the store that the leader keeps."""

    number: int
    call: str
    keys: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAnswer:
    """What a call of the store gave; `found` is False where there is no such key."""

    number: int
    found: bool
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPiece:
    """The next bytes of something large come along."""

    name: str
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOver:
    """The run has failed, and nobody is to wait for anybody; `rank` is whose failure it was."""

    rank: int
    sentence: str


# Numbers are part of the protocol: never reuse one.
LINE: Final = MessageCoder(
    {
        1: ControlHello,
        2: ControlWelcome,
        3: ControlRefused,
        4: ControlPing,
        5: ControlPong,
        6: ControlFrame,
        7: ControlMarked,
        8: ControlEvents,
        9: StoreCall,
        10: StoreAnswer,
        11: ControlPiece,
        12: ControlOver,
    }
)
