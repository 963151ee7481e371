"""Mutual authentication of the two ends of a new connection: one message in, at most one out.

    connecting end                                accepting end
        Hello(nonce, seal)                   ──►
                                             ◄──  Challenge(nonce, proof)
        Proof(claim, expected, proof)        ──►                              with an arena, where memory is shared
                                             ◄──  Welcome(claim, proof)
        either, at any time:                      Refusal(field, reason)

A claim says which member a process is, of which release, for which task. Seal and proofs are HMAC-SHA-256 under the
run's token, with a different label for each of the four, over both nonces (the seal: over its own) and all claims
so far. So the token is never sent, and a proof is valid only for this connection, this direction and these claims.

The token is proved before anything else is disclosed or compared. A peer that cannot seal its hello is refused with
one sentence, `NO_PROOF`, whatever it sent, and learns neither release nor task. A replayed hello gets a challenge
with random bytes, and nothing more. Once the token is proved, release and task are compared, and an honest mistake
is named. `Handshake` does no I/O; a hub drives it as messages arrive, `authenticate` over a socket of one's own.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from manyhands.errors import UserError, check_count, printable
from manyhands.native.version import __version__
from manyhands.transport.frames import HEADER_BYTES, OF_TRANSPORT, Limits, decode_header, encode_header
from manyhands.transport.messages import MessageCoder, ProtocolError

BEFORE_HANDSHAKE: Final = Limits(body_bytes=4096, payload_bytes=0)
_SECRET_BYTES: Final = 32  # size of a nonce, and of an HMAC
_Secret = Annotated[bytes, _SECRET_BYTES]
_LEAST_TOKEN_BYTES: Final = 16
_REASON_CHARACTERS: Final = 300
_SLICE_S: Final = 0.2


class Claim(NamedTuple):
    """The identity, release and task that a process claims."""

    member: int
    role: str
    package: str
    fingerprint: str


class HandshakeHello(NamedTuple):
    """The first message of the connecting end; the seal shows that it has the token, and discloses nothing else."""

    nonce: _Secret
    seal: _Secret


class Challenge(NamedTuple):
    """The nonce and the proof of the accepting end."""

    nonce: _Secret
    proof: _Secret


class Proof(NamedTuple):
    """The connecting end's claim, whom it wants to reach, and its proof; with `arena`, a segment is passed along."""

    claim: Claim
    expected: int
    proof: _Secret
    arena: bool


class HandshakeWelcome(NamedTuple):
    """The connecting end is admitted; carries the accepting end's claim and its proof."""

    claim: Claim
    proof: _Secret


class Refusal(NamedTuple):
    """The sender ends the connection because of the peer's `field`."""

    field: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The sender is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The sender closes the connection in good order."""


class ShareSegment(NamedTuple):
    """The descriptor of a shared segment is passed along; `tag` says which it is."""

    tag: int


# Numbers are part of the protocol: never reuse one (1 to 4 were the handshake of version 1).
CONTROL: Final = MessageCoder(
    {
        5: Refusal,
        6: Heartbeat,
        7: Goodbye,
        8: ShareSegment,
        9: HandshakeHello,
        10: Challenge,
        11: Proof,
        12: HandshakeWelcome,
    }
)

NO_PROOF: Final = Refusal("token", "field 'token': the ends did not prove that they have the same token")
"""The only answer to a peer that has not proved the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The claim of one process, and the secret of its run."""

    member: int
    role: str
    token: bytes
    fingerprint: str

    def __post_init__(self) -> None:
        check_count("member", self.member, 0)
        if len(self.token) < _LEAST_TOKEN_BYTES:
            raise UserError(f"the token has {len(self.token)} bytes; it needs at least {_LEAST_TOKEN_BYTES}")

    def __repr__(self) -> str:
        """Leave the token out of logs and tracebacks."""
        return f"Credentials(member={self.member}, role={self.role!r}, fingerprint={self.fingerprint!r})"


class HandshakeRefused(Exception):
    """The other end refused this one; the sentence says why."""


class Handshake:
    """One end of the handshake; `expected` is the member that the connecting end dials, None at the accepting end.

    `handle` raises ProtocolError naming the field that does not match, and HandshakeRefused if the other end refused.
    `trusted` says that the other end has proved the token; `peer` is set once its claim matches too.
    """

    def __init__(self, mine: Credentials, expected: int | None) -> None:
        self._token = mine.token
        self._expected = expected
        self.outgoing = expected is not None
        self._claim = Claim(mine.member, mine.role, __version__, mine.fingerprint)
        self._nonce = secrets.token_bytes(_SECRET_BYTES)
        self._nonces: bytes | None = None  # of the connecting end, then of the accepting end
        self._theirs: Claim | None = None
        self.trusted = False
        self.peer: Claim | None = None

    def hello(self) -> HandshakeHello:
        return HandshakeHello(nonce=self._nonce, seal=self._sign(b"hello", self._nonce))

    @property
    def claimed(self) -> int | None:
        """The member that the connecting end dials; at the accepting end, that of the peer once it is proved."""
        return self._expected if self._theirs is None else self._theirs.member

    def handle(self, message: object) -> Challenge | Proof | HandshakeWelcome | None:
        """The reply to a message of the other end, or None."""
        match message, self.outgoing:
            case Refusal(), _:
                raise HandshakeRefused(f"it refused: {printable(message.reason, _REASON_CHARACTERS)}")
            case HandshakeHello(), False if self._nonces is None:
                self._compare(message.seal, self._sign(b"hello", message.nonce))
                self._nonces = message.nonce + self._nonce
                return Challenge(nonce=self._nonce, proof=self._sign(b"accept", self._nonces))
            case Challenge(), True if self._nonces is None:
                nonces = self._nonce + message.nonce
                self._compare(message.proof, self._sign(b"accept", nonces))
                self._nonces, self.trusted = nonces, True
                assert self._expected is not None, "the connecting end knows whom it wants"
                proof = self._sign_claim(nonces, self._claim, self._expected)
                return Proof(claim=self._claim, expected=self._expected, proof=proof, arena=False)
            case Proof(), False if self._nonces is not None and self.peer is None:
                self._compare(message.proof, self._sign_claim(self._nonces, message.claim, message.expected))
                self.trusted = True
                if message.expected != self._claim.member:
                    raise ProtocolError(
                        "member", f"{self._claim.member} answers, but {message.expected} is expected"
                    )
                self._take(message.claim, None)
                said = self._nonces + _bytes_of(message.claim) + _bytes_of(self._claim)
                return HandshakeWelcome(claim=self._claim, proof=self._sign(b"welcome", said))
            case HandshakeWelcome(), True if self._nonces is not None and self.peer is None:
                said = self._nonces + _bytes_of(self._claim) + _bytes_of(message.claim)
                self._compare(message.proof, self._sign(b"welcome", said))
                self._take(message.claim, self._expected)
                return None
        raise ProtocolError("handshake", f"{type(message).__name__} arrived out of order")

    def _take(self, theirs: Claim, expected: int | None) -> None:
        self._theirs, mine = theirs, self._claim
        for field, there, here in (
            ("package", theirs.package, mine.package),
            ("fingerprint", theirs.fingerprint, mine.fingerprint),
        ):
            if there != here:
                raise ProtocolError(
                    field, f"member {theirs.member} has {there[:80]!r}, but member {mine.member} has {here!r}"
                )
        if theirs.member < 0 or theirs.member == mine.member:
            raise ProtocolError("member", f"{theirs.member} is invalid or this member's own number")
        if expected is not None and theirs.member != expected:
            raise ProtocolError("member", f"{theirs.member} answers, but {expected} is expected")
        self.peer = theirs

    def _sign_claim(self, nonces: bytes, claim: Claim, expected: int) -> bytes:
        return self._sign(b"connect", nonces + expected.to_bytes(8, "little", signed=True) + _bytes_of(claim))

    def _sign(self, label: bytes, content: bytes) -> bytes:
        return hmac.digest(self._token, label + b"|" + content, "sha256")

    def _compare(self, proof: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(proof, expected):
            raise ProtocolError("token", "the proof is wrong: the other end has a different token, or none")


def authenticate(
    end: socket.socket,
    mine: Credentials,
    expected: int | None,
    deadline: float,
    still: Callable[[], None] = lambda: None,
) -> Claim:
    """Run a handshake over a socket that nothing else reads from; the other end's claim. No byte behind it is read.

    TimeoutError at the deadline. `still` is called several times a second, and raises if waiting has become pointless.
    Header and body are sent one after the other, for sockets that keep messages apart.
    """
    handshake, limits = Handshake(mine, expected), BEFORE_HANDSHAKE
    end.settimeout(max(deadline - time.monotonic(), 0.001))
    message: object = handshake.hello() if handshake.outgoing else None
    while True:
        if message is not None:
            kind, body = CONTROL.encode(message)
            end.sendall(encode_header(kind, OF_TRANSPORT, len(body), 0))
            end.sendall(body)
        if handshake.peer is not None:
            end.settimeout(None)
            return handshake.peer
        head = _read(end, HEADER_BYTES, deadline, still)
        header = decode_header(head, 0, limits.body_bytes, limits.payload_bytes)
        body = _read(end, header.body_bytes, deadline, still)
        message = handshake.handle(CONTROL.decode(header.kind, body))


def _read(end: socket.socket, num_bytes: int, deadline: float, still: Callable[[], None]) -> bytes:
    data = b""
    while len(data) < num_bytes:
        still()
        left_s = deadline - time.monotonic()
        end.settimeout(max(0.001, min(left_s, _SLICE_S)))
        try:
            more = end.recv(num_bytes - len(data))
        except TimeoutError:
            if left_s <= _SLICE_S:
                raise
            continue
        if not more:
            raise ConnectionResetError("it closed the connection")
        data += more
    return data


_CLAIMS: Final = MessageCoder({1: Claim})


def _bytes_of(claim: Claim) -> bytes:
    """A claim as it is signed: prefixed with its length, so that two claims in a row are unambiguous."""
    _, body = _CLAIMS.encode(claim)
    return len(body).to_bytes(4, "little") + body
