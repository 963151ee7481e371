"""The control channel between the launcher and one of its children: small typed messages over a socket pair.

The frames are those of `transport.frames`: lengths are checked before anything is read, and nothing on the channel can
carry code. Child to launcher: `RoleStarted`, `Note`..., then `Failed` or `Finished`. Launcher to child: `Note`...,
`Stop`. Processes of other hosts send the same messages over their control connections.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from manyhands.errors import Aborted, ManyhandsError, PeerTimeout, UserError, nearest
from manyhands.places.local.forking import RoleSpec
from manyhands.places.local.status import NOBODY, StagePlace, State, StatusTable
from manyhands.transport.frames import FrameDecoder, Limits, encode_header
from manyhands.transport.messages import MessageCoder, ProtocolError

MAX_FRAME_BYTES = 16 * 2**20
_LIMITS: Final = Limits(body_bytes=MAX_FRAME_BYTES, payload_bytes=0)
_SEND_TIMEOUT_S: Final = 60.0


class Unread(ManyhandsError):
    """The other end reads so little that nothing more is kept for it."""


class RoleStarted(NamedTuple):
    """The child has loaded its job and is about to enter it."""

    pid: int


class Note(NamedTuple):
    """Something the application tells the other end while it runs, such as metrics."""

    payload: Mapping[str, Any]


class Failed(NamedTuple):
    """The child's job raised; `kind` is a word of `failure.KINDS` or empty, `details` plain attributes."""

    kind: str
    error: str
    message: str
    traceback: str
    step: int
    details: Mapping[str, Any]


class Finished(NamedTuple):
    """The child's job returned `payload`."""

    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The launcher asks the child to leave."""


Message = RoleStarted | Note | Failed | Finished | Stop
_CODER: Final = MessageCoder({1: RoleStarted, 2: Note, 3: Failed, 4: Finished, 5: Stop})


def encoded(message: Message, coder: MessageCoder = _CODER) -> tuple[int, bytes]:
    """Its kind and body; UserError if a payload is not JSON, ProtocolError if it is larger than a frame may be."""
    kind, body = coder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(
            "length",
            f"a {type(message).__name__} message of {len(body)} bytes is larger than {MAX_FRAME_BYTES}; "
            "pass large results through shared memory or a file",
        )
    return kind, body


def encode(message: Message) -> bytes:
    kind, body = encoded(message)
    return encode_header(kind, 0, len(body), 0) + body


def decoder() -> FrameDecoder[Message]:
    return FrameDecoder(_LIMITS, lambda header, body: _CODER.decode(header.kind, body))


class Channel:
    """One end of the socket pair; whole messages, in order. Any thread may `send` and `post`, one may `receive`."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        """Own `connection`; `peer` names the other end in errors."""
        connection.setblocking(False)
        self._connection = connection
        self.fileno, self.close = connection.fileno, connection.close
        self._decoder = decoder()
        self._room = self._decoder.room()  # kept: a role looks at every step, mostly for nothing
        self._sending = threading.Lock()
        self.queue = bytearray()  # what did not fit into the socket
        self.peer = peer
        self.ended = False

    def send(self, message: Message, timeout_s: float) -> None:
        """Hand the whole message over; PeerTimeout after `timeout_s`, Aborted when the other end is gone."""
        frame = encode(message)
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        with self._sending:
            self.queue += frame
            try:
                while not self._push():
                    left_s = deadline - time.monotonic()
                    if left_s <= 0 or not poll.poll(left_s * 1000):
                        raise PeerTimeout(f"{self.peer} has read nothing for {timeout_s:g} s", peer=-1)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise Aborted(f"{self.peer} is gone: {type(message).__name__} was not delivered") from error

    def post(self, message: Message) -> None:
        """Send without waiting, the rest of the `queue` by `flush`; dropped if it is gone, Unread if too much."""
        frame = encode(message)
        with self._sending:
            if len(self.queue) > MAX_FRAME_BYTES:
                raise Unread(f"{self.peer} has left {len(self.queue)} bytes unread: it is stuck")
            self.queue += frame
        self.flush()

    def flush(self) -> None:
        with self._sending:
            try:
                self._push()
            except OSError:  # the peer is gone, which the monitor of its process reports
                self.queue.clear()

    def receive(self) -> list[Message]:
        """All messages that have arrived, without waiting; `ended` is set once the other end has closed."""
        messages: list[Message] = []
        while not self.ended:
            try:
                num_bytes = self._connection.recv_into(self._room)
            except BlockingIOError:
                break
            except ConnectionResetError:
                num_bytes = 0
            self.ended = num_bytes == 0
            self._decoder.advance(num_bytes)
            while (frame := self._decoder.next_frame()) is not None:
                messages.append(frame.message)
            self._room = self._decoder.room()
        return messages

    def _push(self) -> bool:
        """Send as much of the queue as the socket takes; called with the lock held."""
        while self.queue:
            try:
                del self.queue[: self._connection.send(self.queue)]
            except BlockingIOError:
                return False
        return True


class Sender(Protocol):
    """What notes are sent through."""

    def send(self, payload: Mapping[str, Any]) -> None: ...


class TypedNotes:
    """The types of message that one side of a run may send the other in notes.

    TypedNotes(Joined, Left).write(Joined(member=3))    {"kind": "Joined", "body": its bytes, in hexadecimal}
    """

    def __init__(self, *kinds: type) -> None:
        self._coder = MessageCoder(dict(enumerate(kinds, 1)))
        self._numbers = {kind.__name__: number for number, kind in enumerate(kinds, 1)}

    def write(self, message: Any) -> dict[str, Any]:
        _, body = self._coder.encode(message)
        return {"kind": type(message).__name__, "body": body.hex()}

    def send(self, context: Sender, message: Any) -> None:
        context.send(self.write(message))

    def read(self, payload: Mapping[str, Any]) -> Any:
        number = self._numbers.get(str(payload.get("kind")))
        if number is None:
            raise ProtocolError("kind", f"{payload.get('kind')!r} must be one of {', '.join(self._numbers)}")
        try:
            body = bytes.fromhex(payload["body"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError("body", f"the body of a {payload['kind']} is not hexadecimal") from error
        return self._coder.decode(number, body)


class Context(Protocol):
    """What a role needs of its worker context, wherever its process is: `RoleContext` or `ControlConnection`."""

    name: str
    rank: int
    world: int

    def send(self, payload: Mapping[str, Any]) -> None: ...
    def mark(
        self, step: int, state: State, waiting_for: int = NOBODY, *, place: StagePlace = None
    ) -> None: ...
    def stop_requested(self) -> bool: ...
    @property
    def stopping(self) -> bool: ...
    def received(self) -> list[Mapping[str, Any]]: ...


class RoleContext:
    """A role's view of its run; `send` may be called from any thread, the rest from the thread of the job."""

    def __init__(self, spec: RoleSpec, channel: Channel, status_table: StatusTable) -> None:
        self.name = spec.name
        self.rank = spec.rank
        self.world = spec.world
        self.step = 0
        self._descriptors = spec.descriptors
        self._channel = channel
        self.control_fileno = channel.fileno
        """A descriptor for a selector, readable when the launcher sent something (or is gone).

        Both `stop_requested` and `received` read what arrived, so check both before waiting for more.
        """
        self._status_table = status_table
        self._row = spec.row
        self._notes: list[Mapping[str, Any]] = []
        self._stop_requested = False

    def descriptor(self, name: str) -> int:
        if name not in self._descriptors:
            raise UserError(f"{self.name} has no descriptor {name!r}; {nearest(name, self._descriptors)}")
        return self._descriptors[name]

    def send(self, payload: Mapping[str, Any]) -> None:
        """Send the launcher JSON; in order, and all of it before the result. PeerTimeout if it reads nothing."""
        self._channel.send(Note(payload=payload), _SEND_TIMEOUT_S)

    def mark(self, step: int, state: State, waiting_for: int = NOBODY, *, place: StagePlace = None) -> None:
        """Show in the status table what this role is doing; `place` is a pipeline's stage and micro-batch."""
        self.step = step
        self._status_table.mark(self._row, step, state, waiting_for, place)

    def stop_requested(self) -> bool:
        """Whether the launcher asked to leave; a role that does not is killed after the launcher's grace."""
        self._sort(self._channel.receive())
        return self._stop_requested or self._channel.ended

    @property
    def stopping(self) -> bool:
        """Whether a request to leave is among what was read so far; unlike `stop_requested`, reads nothing."""
        return self._stop_requested or self._channel.ended

    def received(self) -> list[Mapping[str, Any]]:
        """The launcher's messages since the last call, in order; does not wait."""
        self._sort(self._channel.receive())
        notes, self._notes = self._notes, []
        return notes

    def _sort(self, messages: Iterable[Message]) -> None:
        for message in messages:
            match message:
                case Stop():
                    self._stop_requested = True
                case Note(payload=payload):
                    self._notes.append(payload)
