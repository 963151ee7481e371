"""Damaged frames and handshakes, drawn from a seed, against everything that reads bytes of a peer.

    python tests/wire_fuzz.py --frames 1000000 --processes 16            the seed is drawn and printed
    python tests/wire_fuzz.py --frames 1000 --seed 7 --only hub          one target
    python tests/wire_fuzz.py --frames 20000 --only live                 against the servers of a run that trains

Case k of a target is a function of (seed, target, k) alone, so that a failure, which names them, is found again with
`--seed S --only TARGET --first K --frames 1`. What is asked of every case: the reader refuses with ProtocolError or
returns what it could have sent itself; nothing else is raised, nothing takes long, and memory stays bounded.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import resource
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from manyhands.native.dtypes import LINKED
from manyhands.strategies.ps.live.ps_job import CODEC
from manyhands.transport.frames import (
    HEADER_BYTES,
    IN_ARENA,
    OF_TRANSPORT,
    FrameDecoder,
    FrameHeader,
    Limits,
    encode_header,
)
from manyhands.transport.hub.admission import Rejections
from manyhands.transport.hub.handshake import (
    BEFORE_HANDSHAKE,
    CONTROL,
    NO_PROOF,
    Credentials,
    Handshake,
    HandshakeRefused,
    Proof,
)
from manyhands.transport.hub.hub import Hub
from manyhands.transport.hub.hub_events import Arrived, Joined, Lost, Rejected, Settings, Shared
from manyhands.transport.link.interface import Header as LinkHeader
from manyhands.transport.messages import MessageCoder, ProtocolError

TOKEN = b"the secret of this run, 32 bytes"
NUMBERS = (0, 1, -1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 10**400)
TEXTS = (
    b"",
    b"ab",
    b"\0",
    b"\x1b[2J",
    "\u202e".encode(),
    b"x" * 3000,
    b"\xed\xa0\x80",
    b"\xff\xfe",
    b"\xf0\x9f",
)
_MESSAGES, _CONTROL = [*CODEC._encoders], [*CONTROL._encoders]
_GROWTH_BYTES = 256 << 20
_CASES_PER_ALARM = 200
_ALARM_S = 60


class Failure(AssertionError):
    """A case that broke a reader; the text says how to see it again."""


# ── valid things ──────────────────────────────────────────────────────────────────────────────────────────────────────


def sample(hint: Any, rng: random.Random) -> Any:
    """A value that an annotation allows."""
    if hint is int:
        return rng.choice((rng.randrange(100), rng.choice([n for n in NUMBERS if -(2**63) <= n < 2**63])))
    if hint is float:
        return rng.choice((0.0, 0.5, -1e300, math.inf, math.nan, rng.random()))
    if hint is bool:
        return rng.random() < 0.5
    if hint is str:
        return rng.choice(("", "worker", "ä\N{GRINNING FACE}", "\x1b[2J\n", "x" * rng.randrange(50)))
    if hint is bytes:
        return rng.randbytes(32)
    if hint is NoneType:
        return None
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return rng.choice([*hint])
    if get_origin(hint) is tuple:
        return tuple(sample(get_args(hint)[0], rng) for _ in range(rng.randrange(4)))
    if get_origin(hint) in (UnionType, Union):
        return sample(rng.choice(get_args(hint)), rng)
    hints = get_type_hints(hint)
    if issubclass(hint, tuple):
        return hint(*(sample(hints[name], rng) for name in hint._fields))
    assert is_dataclass(hint), hint
    return hint(**{field.name: sample(hints[field.name], rng) for field in fields(hint)})


def frame(codec: MessageCoder, message: object, flags: int, payload: bytes = b"") -> bytes:
    kind, body = codec.encode(message)
    return encode_header(kind, flags, len(body), len(payload)) + body + payload


def a_frame(rng: random.Random) -> bytes:
    """A valid frame of a member: a message of the server or of the transport."""
    if rng.random() < 0.3:
        return frame(CONTROL, sample(rng.choice(_CONTROL), rng), OF_TRANSPORT)
    payload = rng.randbytes(rng.choice((0, 0, 1, 64, 300)))
    return frame(CODEC, sample(rng.choice(_MESSAGES), rng), 0, payload)


# ── damage ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def damaged(data: bytes, rng: random.Random, other: Callable[[], bytes]) -> bytes:
    """`data` after one to three accidents."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = rng.choice(_ACCIDENTS)(data, rng, other)
    return data


def _flip(data: bytes, rng: random.Random, _: Callable[[], bytes]) -> bytes:
    if not data:
        return b"\0"
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def _cut(data: bytes, rng: random.Random, _: Callable[[], bytes]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _insert(data: bytes, rng: random.Random, _: Callable[[], bytes]) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.randbytes(rng.randrange(1, 40)) + data[place:]


def _splice(data: bytes, rng: random.Random, other: Callable[[], bytes]) -> bytes:
    more = other()
    return data[: rng.randrange(len(data) + 1)] + more[rng.randrange(len(more) + 1) :]


def _twice(data: bytes, rng: random.Random, other: Callable[[], bytes]) -> bytes:
    return data + data if rng.random() < 0.5 else data + other()


_FIELDS = ((0, "<I"), (4, "<H"), (6, "<H"), (8, "<H"), (10, "<H"), (12, "<I"), (16, "<Q"), (24, "<Q"))


def _renumber(data: bytes, rng: random.Random, _: Callable[[], bytes]) -> bytes:
    """Another number in one field of the header."""
    place, code = rng.choice(_FIELDS)
    size = struct.calcsize(code)
    if len(data) < place + size:
        return data
    number = rng.choice((rng.choice(NUMBERS), rng.randrange(24), len(data), 4096, 4097)) % (1 << 8 * size)
    return data[:place] + struct.pack(code, number) + data[place + size :]


def _reword(data: bytes, rng: random.Random, _: Callable[[], bytes]) -> bytes:
    """Another text, number or count somewhere in the body behind the header; the length of the body is made right."""
    body = data[HEADER_BYTES:]
    if not body:
        return data
    sized = [
        place
        for place in range(len(body) - 3)
        if int.from_bytes(body[place : place + 4], "little") <= len(body) - place - 4
    ]
    begin = rng.choice(sized) if sized and rng.random() < 0.7 else rng.randrange(len(body))
    length = int.from_bytes(body[begin : begin + 4], "little") if begin in sized else rng.randrange(9)
    word = rng.choice(TEXTS)
    number = rng.choice(NUMBERS)
    value = rng.choice(
        (
            struct.pack("<I", len(word)) + word,
            struct.pack("<I", number % (1 << 32)),
            struct.pack("<Q", number % (1 << 64)),
        )
    )
    body = body[:begin] + value + body[begin + 4 + length :]
    return data[:12] + struct.pack("<I", len(body)) + data[16:HEADER_BYTES] + body


_ACCIDENTS = (_flip, _flip, _cut, _insert, _splice, _twice, _renumber, _renumber, _reword, _reword, _reword)


# ── readers of one stream ─────────────────────────────────────────────────────────────────────────────────────────────


def _interpret(header: FrameHeader, body: memoryview) -> Any:
    codec = CONTROL if header.flags & OF_TRANSPORT else CODEC
    message = codec.decode(header.kind, body)
    again = codec.decode(*codec.encode(message))  # it could have been sent
    assert repr(again) == repr(message), (message, again)
    for text in _texts(message):
        text.encode()  # and can be written
    return message


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _texts(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _texts(getattr(value, field.name))


def frames(rng: random.Random) -> None:
    """The decoder of a stream, before and after the handshake, in pieces of any size."""
    limits = rng.choice((BEFORE_HANDSHAKE, Limits()))
    decoder: FrameDecoder[Any] = FrameDecoder(limits, _interpret, lambda _message, _num_bytes: None)
    data = damaged(a_frame(rng), rng, lambda: a_frame(rng))
    piece = rng.choice((1, 7, 100, 1 << 20)) if len(data) < 2000 else 1 << 20
    try:
        while data:
            room = decoder.room()
            assert len(room) > 0, "no room"
            taken = min(len(room), piece, len(data))
            room[:taken], data = data[:taken], data[taken:]
            decoder.advance(taken)
            while (found := decoder.next_frame()) is not None:
                assert found.header.body_bytes <= limits.body_bytes
                assert len(found.payload) == (
                    0 if found.header.flags & IN_ARENA else found.header.payload_bytes
                )
    except ProtocolError as refused:
        if len(str(refused)) > 1000:
            raise ValueError("a long complaint") from refused


def link_headers(rng: random.Random) -> None:
    """The header of a link's message, which has one form for each meaning."""
    dtype = rng.choice((None, *LINKED))
    items = 0 if dtype is None else rng.randrange(1000)
    header = LinkHeader.goodbye(rng.randrange(100)) if rng.random() < 0.1 else None
    if header is None:
        message = LinkHeader.of(_NoMessage(), 0)
        header = message._replace(
            kind=rng.randrange(1 << 32),
            tag=rng.randrange(1 << 32),
            step=rng.randrange(1 << 64),
            dtype=dtype,
            payload_bytes=items * (dtype.itemsize if dtype is not None else 0),
        )
    data = damaged(header.encode(), rng, header.encode)
    try:
        found = LinkHeader.decode(data, 1 << 34)
    except ProtocolError:
        return
    assert found.encode() == data


@dataclass(frozen=True)
class _NoMessage:
    kind: int = 0
    tag: int = 0
    step: int = 0
    payload: None = None


# ── the handshake ─────────────────────────────────────────────────────────────────────────────────────────────────────


def handshakes(rng: random.Random) -> None:
    """One message is damaged on the way, or one end is without the token: nobody is let in by mistake."""
    token = TOKEN if rng.random() < 0.7 else rng.randbytes(16)
    mine = Credentials(member=1, role="server", token=TOKEN, fingerprint="task")
    theirs = Credentials(member=2, role="worker", token=token, fingerprint="task")
    client, server = Handshake(theirs, expected=1), Handshake(mine, expected=None)
    ends, turn = (server, client), 0
    message: Any = client.hello()
    victim = rng.randrange(4)
    while message is not None:
        data = frame(CONTROL, message, OF_TRANSPORT)
        try:
            if turn == victim:
                data = damaged(
                    data, rng, lambda: frame(CONTROL, sample(rng.choice(_CONTROL), rng), OF_TRANSPORT)
                )
            heard = _one_message(data)
            reply = ends[turn % 2].handle(heard)
        except (ProtocolError, HandshakeRefused):
            break
        if heard != message:  # whether an arena comes along is not signed: the descriptor says it
            assert isinstance(message, Proof), f"{heard} was believed for {message}"
            assert heard._replace(arena=message.arena) == message, f"{heard} was believed for {message}"
        message, turn = reply, turn + 1
    if token != TOKEN:
        assert server.peer is None, "a stranger is in"
        assert client.peer is None, "a stranger was believed"


def _one_message(data: bytes) -> Any:
    decoder: FrameDecoder[Any] = FrameDecoder(BEFORE_HANDSHAKE, _interpret, lambda _message, _num_bytes: None)
    data = data[:60_000]
    decoder.room()[: len(data)] = data
    decoder.advance(len(data))
    found = decoder.next_frame()
    if found is None or not found.header.flags & OF_TRANSPORT:
        raise ProtocolError("frame", "no message came")
    return found.message


# ── a hub that goes on ────────────────────────────────────────────────────────────────────────────────────────────────


class ReportsAll(Rejections):
    """Reports everybody at once, so that no reason is lost."""

    def due(self, now_s: float) -> Rejected | None:
        return super().due(math.inf)


class LiveHub:
    """A hub with one honest member, and bare sockets that come to it one after the other."""

    def __init__(self, settings: Settings | None = None, *ways: str) -> None:
        server = Credentials(member=1, role="server", token=TOKEN, fingerprint="task")
        self.hub = Hub(server, CODEC, settings=settings)
        self.hub._reactor.listeners.rejections = ReportsAll()
        self.addresses = [self.hub.listen(way) for way in ways or ("tcp", "unix")]
        worker = Credentials(member=2, role="worker", token=TOKEN, fingerprint="task")
        self.friend = Hub(worker, CODEC, settings=settings)
        self.friend.connect(1, self.addresses[0])

    def begin(self) -> None:
        self.await_that(lambda: self.hub.members() == (2,) and self.friend.members() == (1,))

    def close(self) -> None:
        self.friend.close()
        self.hub.close()

    def await_that(self, condition: Callable[[], bool], within_s: float = 120.0) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline_s, "the hub hangs"
            for event in self.hub.poll(0):
                self._check(event)
            for event in self.friend.poll(0.0005):
                assert isinstance(event, Joined | Arrived), event

    def _check(self, event: Any) -> None:
        match event:
            case Rejected(reason=reason) | Lost(reason=reason):
                assert "defect" not in reason, reason
                assert reason.isprintable()
                assert not (isinstance(event, Lost) and event.member == 2), reason
            case Shared(segment=segment):
                segment.close()
            case Arrived():
                event.release()

    def case(self, rng: random.Random) -> None:
        """One connection: a damaged handshake, or a member that sends damaged frames."""
        address = rng.choice(self.addresses)
        remote, is_member = self.hub.rejected, rng.random() < 0.4

        def is_gone() -> bool:
            return 9 not in self.hub.members() if is_member else self.hub.rejected > remote

        with dialled(address) as end:
            if is_member:
                self._come_in(end)
                data = b"".join(a_frame(rng) for _ in range(rng.randrange(3)))
                send(end, data + damaged(a_frame(rng), rng, lambda: a_frame(rng)))
            else:
                shake = Handshake(Credentials(member=9, role="", token=TOKEN, fingerprint="task"), expected=1)
                hello = frame(CONTROL, shake.hello(), OF_TRANSPORT)
                send(end, damaged(hello, rng, lambda: a_frame(rng)))
            end.shutdown(socket.SHUT_WR)
            if rng.random() < 0.5:  # else it leaves without hearing why
                self.await_that(is_gone)
        self.await_that(is_gone)

    def _come_in(self, end: socket.socket) -> None:
        shake = Handshake(Credentials(member=9, role="worker", token=TOKEN, fingerprint="task"), expected=1)
        send(end, frame(CONTROL, shake.hello(), OF_TRANSPORT))
        heard = bytearray()
        end.setblocking(False)

        def challenged() -> bool:
            try:
                heard.extend(end.recv(4096))
            except BlockingIOError:
                pass
            return len(heard) > HEADER_BYTES

        self.await_that(challenged)
        end.setblocking(True)
        send(end, frame(CONTROL, shake.handle(_one_message(bytes(heard))), OF_TRANSPORT))
        self.await_that(lambda: 9 in self.hub.members())


@contextmanager
def dialled(address: str) -> Iterator[socket.socket]:
    how, _, place = address.partition(":")
    end = socket.socket(socket.AF_UNIX if how == "unix" else socket.AF_INET)
    with end:
        end.settimeout(20.0)
        end.connect(f"\0{place}" if how == "unix" else ("127.0.0.1", int(place.rpartition(":")[2])))
        yield end


def send(end: socket.socket, data: bytes) -> None:
    try:
        end.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        pass  # its connection was closed before it was done


# ── a run that trains ─────────────────────────────────────────────────────────────────────────────────────────────────


def live(seed: int, first: int, count: int) -> None:
    """Damaged handshakes to both servers of a run over TCP, which ends with the weights of the plain loop."""
    import manyhands as mh
    from assassin import events
    from equality import OPTIMIZERS, distance, make_task, train_plainly
    from hostile import listening_ports

    task, steps = make_task(OPTIMIZERS["momentum"]), 200
    sent = 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with mh.start(task, "ps servers=2 link=tcp", workers=2, steps=10**6, out=out) as running:
            pids = _await_servers(out, events)
            ports = [*listening_ports(pids).values()]
            deadline_s = time.monotonic() + 60 + count * 0.05
            for case in range(first, first + count):
                assert time.monotonic() < deadline_s, "the servers hang"
                sent += _strange(random.Random(f"{seed} live {case}"), ports)
            sizes = [_resident_bytes(pid) for pid in pids]
            assert (out / "metrics.jsonl").stat().st_size > 0, "nobody trained meanwhile"
            assert not [event for event in events(out) if event["event"] in ("died", "silent")]
            running.stop()
        notes = [event for event in events(out) if event["event"] == "note"]
        assert all(event["sentence"].isprintable() and "defect" not in event["sentence"] for event in notes)
        assert len(notes) < 60, f"{len(notes)} notes"
        assert all(size < 2 << 30 for size in sizes), sizes
    run = mh.fit(task, "ps servers=2 link=tcp", workers=2, steps=steps)
    assert distance(run.model.state_dict(), train_plainly(task, steps)) < 1e-9
    assert sent > count // 2, "too few got through to say anything"


def _await_servers(out: Path, events: Callable[[Path], list[dict[str, Any]]]) -> list[int]:
    deadline_s = time.monotonic() + 180
    while not (out / "metrics.jsonl").exists():
        assert time.monotonic() < deadline_s, "the run did not begin"
        time.sleep(0.05)
    started = {event["name"]: event["pid"] for event in events(out) if event["event"] == "started"}
    return [pid for name, pid in started.items() if name.startswith("server")]


def _strange(rng: random.Random, ports: list[int]) -> bool:
    """One damaged handshake of somebody without the token; whether it could be said."""
    shake = Handshake(Credentials(member=9, role="", token=rng.randbytes(32), fingerprint="task"), expected=1)
    try:
        with dialled(f"tcp:127.0.0.1:{rng.choice(ports)}") as end:
            send(end, damaged(frame(CONTROL, shake.hello(), OF_TRANSPORT), rng, lambda: a_frame(rng)))
            end.shutdown(socket.SHUT_WR)
            report = end.recv(4096)
    except ConnectionResetError:
        return True
    assert report in (b"", frame(CONTROL, NO_PROOF, OF_TRANSPORT)), report
    return True


def _resident_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmRSS"))) << 10


# ── all of it ─────────────────────────────────────────────────────────────────────────────────────────────────────────

PURE: dict[str, Callable[[random.Random], None]] = {
    "frames": frames,
    "link_headers": link_headers,
    "handshakes": handshakes,
}
TARGETS = {"frames": 0.58, "link_headers": 0.05, "handshakes": 0.30, "hub": 0.05, "tls": 0.02}
"""Which part of the cases each target gets; `live` is for whoever asks."""


def fuzz(target: str, seed: int, first: int, count: int) -> None:
    """Cases `first` to `first + count` of a target; Failure names the first that breaks something."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    if target == "live":
        live(seed, first, count)
        return
    hub = _hub(target)
    run = hub.case if hub is not None else PURE[target]
    try:
        if hub is not None:
            hub.begin()
        for case in range(first, first + count):
            if (case - first) % _CASES_PER_ALARM == 0:
                signal.alarm(_ALARM_S)  # a case that hangs is found by its number
            _one(run, target, seed, case)
    finally:
        signal.alarm(0)
        if hub is not None:
            hub.close()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    if grown > _GROWTH_BYTES:
        raise Failure(f"{target}: {count} cases from seed {seed} took {grown >> 20} MiB")


def _hub(target: str) -> LiveHub | None:
    if target == "tls":
        from wire_fuzz_tls import SecureHub  # it stands on this module

        return SecureHub()
    return LiveHub() if target == "hub" else None


def _one(run: Callable[[random.Random], None], target: str, seed: int, case: int) -> None:
    try:
        run(random.Random(f"{seed} {target} {case}"))
    except Exception as error:
        raise Failure(
            f"case {case} of {target}: {type(error).__name__}: {error}\n"
            f"see it with: python tests/wire_fuzz.py --seed {seed} --only {target} --first {case} --frames 1"
        ) from error


def _hangs(*_: object) -> None:
    raise TimeoutError(f"{_CASES_PER_ALARM} cases took more than {_ALARM_S} s")


def _task(job: tuple[str, int, int, int]) -> tuple[str, int, str]:
    signal.signal(signal.SIGALRM, _hangs)
    try:
        fuzz(*job)
    except Failure as failure:
        return job[0], job[3], str(failure)
    return job[0], job[3], ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", choices=[*TARGETS, "live"])
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if asked.seed is None else asked.seed
    shares = {asked.only: 1.0} if asked.only else TARGETS
    print(f"seed {seed}: {asked.frames} damaged frames and handshakes", flush=True)
    jobs = []
    for target, share in shares.items():
        left, first = math.ceil(asked.frames * share), asked.first
        piece = left if target == "live" else 5000
        while left > 0:
            jobs.append((target, seed, first, min(piece, left)))
            first, left = first + piece, left - piece
    begin_s, done, failures = time.monotonic(), dict.fromkeys(shares, 0), []
    if asked.only == "live" or asked.processes == 1:
        results: Any = map(_task, jobs)
        pool = None
    else:
        pool = multiprocessing.get_context("spawn").Pool(asked.processes)
        results = pool.imap_unordered(_task, jobs)
    for target, count, failure in results:
        done[target] += count
        if failure:
            failures.append(failure)
            print(failure, flush=True)
    if pool is not None:
        pool.close()
        pool.join()
    print(f"{done} in {time.monotonic() - begin_s:.0f} s, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
