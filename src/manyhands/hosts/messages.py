"""What a process and its leader say to each other over the line, beside the notes of `cluster.control`.

process                                        leader
  LineHello(rank, who it is, terms)       ──►
                                          ◄──  LineWelcome | LineRefused(field, reason)
  LinePing(sent_ns)                       ──►
                                          ◄──  LinePong(sent_ns, leader_ns)        whose clock events are put on
  LineControl + a frame                   ◄─►  LineControl + a frame               notes, stop, result, failure
  LineMarked(step, state, …)              ──►
  LineEvents(lost) + records              ──►
  StoreCall(number, …)                    ──►
                                          ◄──  StoreAnswer(number, …)
                                          ◄─►  LinePiece(name, last) + bytes       of something large
                                          ◄──  LineOver(rank, sentence)            the run has failed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from manyhands.hub.encoding import MessageCoder

__all__ = [
    "LINE",
    "LINE_FINGERPRINT",
    "LineControl",
    "LineEvents",
    "LineHello",
    "LineMarked",
    "LineOver",
    "LinePiece",
    "LinePing",
    "LinePong",
    "LineRefused",
    "LineWelcome",
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
class LineHello:
    """Who is there, and what it is here for."""

    rank: int
    world: int
    role: str
    name: str
    host: str
    """Its identity, as `cluster.host` has it."""

    pid: int
    unix_s: float
    """What its wall clock says."""

    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineWelcome:
    """The process is one of the run's."""

    leader: str
    """The leader's name."""

    clock: str
    """The leader's clock: who has the same reads the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRefused:
    """The process cannot be one of the run's."""

    field: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePing:
    """What the process's clock says."""

    sent_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePong:
    """The ping's own reading, and what the leader's clock said between."""

    sent_ns: int
    leader_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LineControl:
    """A frame of `cluster.control` comes along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineMarked:
    """What the process is doing; `stage` is -1 outside of pipelines."""

    step: int
    state: int
    waiting_for: int
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LineEvents:
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
class LinePiece:
    """The next bytes of something large come along."""

    name: str
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LineOver:
    """The run has failed, and nobody is to wait for anybody; `rank` is whose failure it was."""

    rank: int
    sentence: str


# Numbers are part of the protocol: never reuse one.
LINE: Final = MessageCoder(
    {
        1: LineHello,
        2: LineWelcome,
        3: LineRefused,
        4: LinePing,
        5: LinePong,
        6: LineControl,
        7: LineMarked,
        8: LineEvents,
        9: StoreCall,
        10: StoreAnswer,
        11: LinePiece,
        12: LineOver,
    }
)
