"""How the two ends of a new connection come to trust each other: pure, one message in, at most one out.

    connecting end                                accepting end
        Greeting(who, version, task, nonce)  ──►
                                             ◄──  Answer(Greeting, proof)
        Proof(proof), with an arena          ──►
                                             ◄──  Welcome
        either, at any time:                      Refusal(field, reason)

A proof is the HMAC-SHA-256 of both greetings under the run's token, with a word for the direction: the token never
travels, and a proof is good for these two nonces only. Version and task are compared before the proofs, so that an
honest mistake is told by its name.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Final

from manyhands.errors import UserError
from manyhands.link.codec import Codec
from manyhands.link.message import ProtocolError
from manyhands.version import __version__

__all__ = [
    "CONTROL",
    "Answer",
    "Credentials",
    "Goodbye",
    "Greeting",
    "Handshake",
    "Heartbeat",
    "Proof",
    "Refusal",
    "Refused",
    "ShareSegment",
    "Welcome",
]

_NONCE_BYTES: Final = 32
_LEAST_TOKEN_BYTES: Final = 16
_REASON_CHARACTERS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """Who is there, of which release, for which task."""

    member: int
    role: str
    package: str
    fingerprint: str
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The accepting end's greeting, and its proof."""

    greeting: Greeting
    proof: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The connecting end's proof; with `arena`, the descriptor of a segment for payloads comes along."""

    proof: str
    arena: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The connecting end is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The sender ends the connection because of the peer's `field`."""

    field: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Still here; `progress` is whatever number the application counts its work by."""

    progress: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The sender leaves in peace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSegment:
    """The descriptor of a shared segment comes along; `tag` says which it is."""

    tag: int


# Numbers are part of the protocol: never reuse one.
CONTROL: Final = Codec(
    {
        1: Greeting,
        2: Answer,
        3: Proof,
        4: Welcome,
        5: Refusal,
        6: Heartbeat,
        7: Goodbye,
        8: ShareSegment,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What one process says of itself, and the secret of its run."""

    member: int
    role: str
    token: bytes
    fingerprint: str

    def __post_init__(self) -> None:
        if self.member < 0:
            raise UserError(f"member={self.member}: must not be negative")
        if len(self.token) < _LEAST_TOKEN_BYTES:
            raise UserError(f"token of {len(self.token)} bytes: must have at least {_LEAST_TOKEN_BYTES}")

    def __repr__(self) -> str:
        """Everything but the token."""
        return f"Credentials(member={self.member}, role={self.role!r}, fingerprint={self.fingerprint!r})"


class Refused(Exception):
    """The other end does not want this one; its sentence says why."""


class Handshake:
    """One end of it; `expected` is whom the connecting end wants to reach, None at the accepting end.

    `handle` raises ProtocolError naming the field that does not fit, and Refused if the other end said so; once `peer`
    is set, the peer has proved itself.
    """

    def __init__(self, mine: Credentials, expected: int | None) -> None:
        self._mine = mine
        self._expected = expected
        self.outgoing = expected is not None
        self._sent = Greeting(
            member=mine.member,
            role=mine.role,
            package=__version__,
            fingerprint=mine.fingerprint,
            nonce=secrets.token_hex(_NONCE_BYTES),
        )
        self._theirs: Greeting | None = None
        self._proved = False
        self.peer: Greeting | None = None

    def greeting(self) -> Greeting:
        """The first message of the connecting end."""
        return self._sent

    @property
    def claimed(self) -> int | None:
        """Who the other end says it is, whether proved or not."""
        return self._expected if self._theirs is None else self._theirs.member

    def handle(self, message: object) -> Answer | Proof | Welcome | None:
        """The reply to a message of the other end, or None."""
        if isinstance(message, Refusal):
            raise Refused(f"it refused: {message.reason[:_REASON_CHARACTERS]}")
        match message, self.outgoing:
            case Greeting(), False if self._theirs is None:
                self._check(message)
                self._theirs = message
                return Answer(greeting=self._sent, proof=self._proof(b"accept", message, self._sent))
            case Answer(), True if self._theirs is None:
                self._check(message.greeting)
                self._theirs = message.greeting
                self._compare(message.proof, self._proof(b"accept", self._sent, message.greeting))
                self._proved = True
                return Proof(proof=self._proof(b"connect", self._sent, message.greeting), arena=False)
            case Proof(), False if self._theirs is not None:
                self._compare(message.proof, self._proof(b"connect", self._theirs, self._sent))
                self.peer = self._theirs
                return Welcome()
            case Welcome(), True if self._proved:
                self.peer = self._theirs
                return None
        raise ProtocolError("handshake", f"{type(message).__name__} comes out of turn")

    def _check(self, theirs: Greeting) -> None:
        for field, there, here in (
            ("package", theirs.package, self._sent.package),
            ("fingerprint", theirs.fingerprint, self._sent.fingerprint),
        ):
            if there != here:
                raise ProtocolError(
                    field,
                    f"member {theirs.member} has {there[:80]!r}, member {self._mine.member} has {here!r}",
                )
        if theirs.member < 0 or theirs.member == self._mine.member:
            raise ProtocolError("member", f"{theirs.member} can not be another member's number")
        if self._expected is not None and theirs.member != self._expected:
            raise ProtocolError("member", f"{theirs.member} answers where {self._expected} is expected")

    def _proof(self, word: bytes, connecting: Greeting, accepting: Greeting) -> str:
        said = b"|".join((word, CONTROL.encode(connecting)[1], CONTROL.encode(accepting)[1]))
        return hmac.digest(self._mine.token, said, "sha256").hex()

    def _compare(self, proof: str, expected: str) -> None:
        if not hmac.compare_digest(proof.encode(), expected.encode()):
            raise ProtocolError("token", "the proof is wrong: the other end has another token, or none")
