"""Strangers who know the port of a run and not its secret: a process of its own that does to a hub what it can.

    python tests/hostile.py --ports 40001,40002 --held 200 --threads 4 --seed 7     until its standard input is closed

It knows the protocol as far as anybody can read it, and imports nothing of the library, so that it starts at once.
`Strangers` starts and ends it from a test; `listening_ports` finds where a run listens.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from itertools import count
from pathlib import Path
from types import TracebackType

HEADER = struct.Struct("<4sHHHHIQQ")
TRANSPORT = 1
SURROGATE = '"\\ud800"'
NONCE = "ab" * 32
LONGEST_S = 2.0  # of one attack


def frame(
    kind: int, body: bytes, *, version: int = 4, body_bytes: int | None = None, payload: int = 0
) -> bytes:
    """A frame of the transport itself, with any lengths."""
    announced = len(body) if body_bytes is None else body_bytes
    return HEADER.pack(b"MHFR", version, kind, TRANSPORT, 0, announced, payload, 0) + body


def listening_ports(pids: Collection[int]) -> dict[int, int]:
    """The TCP port at which each of these processes listens, if it listens at one."""
    inodes = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            inodes[fields[9]] = int(fields[1].split(":")[1], 16)
    found = {}
    for pid in pids:
        try:
            links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:  # it has ended
            continue
        for link in links:
            match = re.fullmatch(r"socket:\[(\d+)\]", link)
            if match is not None and match[1] in inodes:
                found[pid] = inodes[match[1]]
    return found


class Strangers:
    """The process of strangers at these ports, while the context lasts; `tried` is known afterwards."""

    def __init__(self, ports: Collection[int], *, held: int, threads: int = 2, seed: int = 0) -> None:
        self._command = [
            *(sys.executable, __file__, "--ports", ",".join(map(str, ports)), "--held", str(held)),
            *("--threads", str(threads), "--seed", str(seed)),
        ]
        self.tried: dict[str, int] = {}

    def __enter__(self) -> Strangers:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "at work\n"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            output, _ = self._process.communicate(timeout=240)
        finally:
            self._process.kill()
            self._process.wait()
        self.tried = json.loads(output)


# ── what they do ──────────────────────────────────────────────────────────────────────────────────────────────────────


def garbage(end: socket.socket, rng: random.Random) -> None:
    end.sendall(rng.randbytes(rng.randrange(1, 4096)))
    answer(end)


def web_browser(end: socket.socket, rng: random.Random) -> None:
    end.sendall(b"GET /\x1b[2J HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer(end)


def half_a_frame(end: socket.socket, rng: random.Random) -> None:
    whole = frame(1, json.dumps([NONCE, NONCE]).encode())
    end.sendall(whole[: rng.randrange(1, len(whole))])
    time.sleep(rng.random() * LONGEST_S / 4)


def huge_lengths(end: socket.socket, rng: random.Random) -> None:
    body, payload = rng.choice(
        [(1 << 31, 0), ((1 << 32) - 1, 0), (0, 1 << 40), (4097, 0), (64, (1 << 64) - 1)]
    )
    end.sendall(frame(rng.randrange(1, 9), b"[]", body_bytes=body, payload=payload))
    answer(end)


def slow_loris(end: socket.socket, rng: random.Random) -> None:
    whole = frame(1, json.dumps([NONCE, NONCE]).encode())
    for place in range(12):
        end.sendall(whole[place : place + 1])
        time.sleep(LONGEST_S / 12)


def surrogates(end: socket.socket, rng: random.Random) -> None:
    """Text that is no text, in every message of the handshake."""
    for kind in rng.sample(range(1, 6), 3):
        count = rng.randrange(1, 6)
        end.sendall(frame(kind, f"[{','.join([SURROGATE] * count)}]".encode()))
    answer(end)


def loud_refusals(end: socket.socket, rng: random.Random) -> None:
    """A reason that clears the screen, ends a page and is no text."""
    reason = "\\u001b[2J\\u001b[1;1H<script>alert(1)</script>\\ud800\\u202e" + "x" * rng.randrange(3000)
    for _ in range(50):
        end.sendall(frame(5, f'["\\u0007","{reason}"]'.encode()))
    answer(end)


def curious(end: socket.socket, rng: random.Random) -> None:
    """Ask for the release, then for the task, then send a proof that breaks a comparison of texts.

    This ended runs whose handshake compared before it proved.
    """
    where, version = end.getpeername(), rng.choice((1, 2))
    known = {"package": "x", "fingerprint": "x"}
    for _ in range(4):
        with socket.create_connection(where, timeout=LONGEST_S) as end:
            greeting = [7, "worker", known["package"], known["fingerprint"], NONCE]
            end.sendall(frame(1, json.dumps(greeting).encode(), version=version))
            kind, body = answer(end)
            if kind == 2:
                end.sendall(frame(3, f"[{SURROGATE},false]".encode(), version=version))
                answer(end)
                return
        report = re.search(rb"'(package|fingerprint)'.* has '([^']*)'", body)
        if report is None:
            return
        known[report[1].decode()] = report[2].decode()


def replayed(end: socket.socket, rng: random.Random) -> None:
    """Give back what the other end said, and greet twice."""
    greeting = frame(1, json.dumps([NONCE, NONCE]).encode())
    end.sendall(greeting)
    kind, body = answer(end)
    end.sendall(frame(kind, body) + greeting)
    answer(end)


ATTACKS: list[Callable[[socket.socket, random.Random], None]] = [
    garbage,
    web_browser,
    half_a_frame,
    huge_lengths,
    slow_loris,
    surrogates,
    loud_refusals,
    curious,
    replayed,
]


def answer(end: socket.socket) -> tuple[int, bytes]:
    """The next frame of the other end; kind 0 if it has none for us."""
    data = b""
    while len(data) < HEADER.size:
        more = end.recv(4096)
        if not more:
            return 0, b""
        data += more
    _, _, kind, _, _, body_bytes, _, _ = HEADER.unpack(data[: HEADER.size])
    return kind, data[HEADER.size : HEADER.size + body_bytes]


def attack(ports: list[int], seed: int, over: threading.Event, tried: dict[str, int]) -> None:
    rng = random.Random(seed)
    for number in count(seed):
        if over.is_set():
            return
        chosen = ATTACKS[number % len(ATTACKS)]  # each has its turn, however slow the machine
        try:
            where = ("127.0.0.1", rng.choice(ports))
            with socket.create_connection(where, timeout=LONGEST_S) as end:
                chosen(end, rng)
        except OSError:  # its connection was closed
            pass
        tried[chosen.__name__] = tried.get(chosen.__name__, 0) + 1


def hold(ports: list[int], count: int, over: threading.Event) -> None:
    """Keep `count` silent connections at each port: whoever is disconnected comes back at once."""
    poll = select.epoll()
    ends: dict[int, tuple[socket.socket, int]] = {}

    def come(port: int) -> None:
        end = socket.socket()
        end.setblocking(False)
        end.connect_ex(("127.0.0.1", port))
        poll.register(end, select.EPOLLIN | select.EPOLLRDHUP)
        ends[end.fileno()] = (end, port)

    for port in ports:
        for _ in range(count):
            come(port)
    while not over.is_set():
        for descriptor, _ in poll.poll(0.1):
            end, port = ends.pop(descriptor)
            end.close()
            come(port)
        time.sleep(0.01)  # a server that is gone refuses at once


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ports", required=True)
    parser.add_argument("--held", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    ports = [int(port) for port in asked.ports.split(",")]
    over, tried = threading.Event(), dict[str, int]()
    work = [
        threading.Thread(target=attack, args=(ports, asked.seed + number, over, tried))
        for number in range(asked.threads)
    ]
    if asked.held:
        work.append(threading.Thread(target=hold, args=(ports, asked.held, over)))
    for thread in work:
        thread.start()
    print("at work", flush=True)
    sys.stdin.read()
    over.set()
    for thread in work:
        thread.join()
    print(json.dumps(tried))


if __name__ == "__main__":
    main()
