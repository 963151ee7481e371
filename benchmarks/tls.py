"""What encryption costs: a link and a hub between two processes, with TLS and without, at three sizes.

    python benchmarks/tls.py [--rounds 15] [--out benchmarks/results/tls.json]

One process sends several messages of a size, the other says when it has them all. The four carriers take turns within
each round, so that a busy moment of the machine meets all of them; the median over rounds is reported, and the seconds
of a core that both processes spent on a gigabyte. Over loopback, and, where network namespaces are permitted, between
two of them over a cable that a token bucket holds to the rate of a network.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyhands.errors import format_bytes
from manyhands.hub.encoding import MessageCoder
from manyhands.hub.handshake import Credentials
from manyhands.hub.hub import Arrived, Hub, Joined, Settings
from manyhands.link.authority import make_certificates
from manyhands.link.base import Full, Link, Queued, Received
from manyhands.link.message import Message
from manyhands.link.secure import Security
from manyhands.link.tcp import TcpLink

SIZES = {1 << 16: 200, 1 << 20: 32, 1 << 26: 2}  # bytes, and messages per measurement
TIMEOUT_S = 120.0
TOKEN = b"the secret of this benchmark, no other"
HOSTS = ("10.231.78.1", "10.231.78.2")
CABLES = {"10 Gbit/s": "10gbit", "1 Gbit/s": "1gbit"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    cpu_ns: int


class Carrier(ABC):
    """One way to send a tensor to the other process."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def send(self, tensor: torch.Tensor, times: int) -> int:
        """Send it so often, wait until all of it is there; what the other process's processor spent, in ns."""

    @abstractmethod
    def receive(self, target: torch.Tensor, times: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class OverLink(Carrier):
    def __init__(self, name: str, link: Link) -> None:
        super().__init__(name)
        self.link = link

    def send(self, tensor: torch.Tensor, times: int) -> int:
        for number in range(times):
            self._say(Message(kind=1, step=number, payload=tensor))
        outcome = self.link.receive(TIMEOUT_S)
        assert isinstance(outcome, Received), outcome
        return outcome.message.step

    def receive(self, target: torch.Tensor, times: int) -> None:
        begin = time.process_time_ns()
        for _ in range(times):
            outcome = self.link.receive(TIMEOUT_S, target)
            assert isinstance(outcome, Received), outcome
        self._say(Message(kind=2, step=time.process_time_ns() - begin))

    def _say(self, message: Message) -> None:
        while isinstance(outcome := self.link.send(message), Full):
            self.link.flush(TIMEOUT_S)
        assert isinstance(outcome, Queued), outcome

    def close(self) -> None:
        self.link.close()


class OverHub(Carrier):
    def __init__(self, name: str, member: int, security: Security) -> None:
        super().__init__(name)
        self.peer = 1 - member
        self.target: memoryview | None = None
        self.hub = Hub(
            Credentials(member=member, role="benchmark", token=TOKEN, fingerprint="tls"),
            MessageCoder({1: Chunk, 2: Done}),
            destination=lambda _member, _message, _num_bytes: self.target,
            settings=Settings(security=security, queue_bytes=256 << 20),
        )

    def send(self, tensor: torch.Tensor, times: int) -> int:
        payload = [tensor.numpy()]
        for number in range(times):
            while not self.hub.send(self.peer, Chunk(number=number), payload):
                assert self.hub.flush(TIMEOUT_S)
        [done] = self._take(1)
        assert isinstance(done.message, Done)
        return done.message.cpu_ns

    def receive(self, target: torch.Tensor, times: int) -> None:
        begin = time.process_time_ns()
        self.target = memoryview(target.numpy()).cast("B")
        self._take(times)
        self.hub.send(self.peer, Done(cpu_ns=time.process_time_ns() - begin))

    def _take(self, count: int) -> list[Arrived]:
        taken: list[Arrived] = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(taken) < count:
            assert time.monotonic() < deadline, self.name
            for event in self.hub.poll(1.0):
                assert isinstance(event, Arrived | Joined), event
                if isinstance(event, Arrived):
                    taken.append(event)
        return taken

    def close(self) -> None:
        self.hub.flush(TIMEOUT_S)
        self.hub.close()


def carriers(security: Security, host: str, addresses: dict[str, str] | None) -> list[Carrier]:
    """The four of one process; it listens where it is told no addresses, and prints its own."""
    plain = Security.insecure()
    ways = {"plain": plain, "TLS": security}
    member = int(addresses is None)
    hubs = {name: OverHub(f"hub, {name}", member, way) for name, way in ways.items()}
    ends: dict[str, socket.socket] = {}
    if addresses is None:
        with socket.create_server((host, 0)) as server:
            told = {name: over.hub.listen(f"tcp:{host}:0") for name, over in hubs.items()}
            print(json.dumps({**told, "links": f"{host}:{server.getsockname()[1]}"}), flush=True)
            server.settimeout(TIMEOUT_S)
            for name in ways:
                ends[name] = server.accept()[0]
    else:
        where, _, port = addresses["links"].rpartition(":")
        for name, over in hubs.items():
            ends[name] = socket.create_connection((where, int(port)), TIMEOUT_S)
            over.hub.connect(1, addresses[name])
    links: list[Carrier] = []
    for name, way in ways.items():
        ends[name].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wrap = way.wrap_server if addresses is None else way.wrap_client
        links.append(OverLink(f"link, {name}", TcpLink(wrap(ends[name], "the peer"), peer="the peer")))
    for over in hubs.values():
        deadline = time.monotonic() + TIMEOUT_S
        while not over.hub.members():
            assert time.monotonic() < deadline
            for event in over.hub.poll(0.1):
                assert isinstance(event, Joined), event
    return [*links, *hubs.values()]


def be_receiver(rounds: int, host: str, security: Security) -> None:
    used = carriers(security, host, None)
    for num_bytes, times in SIZES.items():
        target = torch.zeros(num_bytes // 4)
        for _ in range(rounds + 1):
            for carrier in used:
                carrier.receive(target, times)
    for carrier in used:
        carrier.close()


def be_sender(rounds: int, addresses: dict[str, str], security: Security) -> list[dict[str, Any]]:
    used = carriers(security, "", addresses)
    rows: list[dict[str, Any]] = []
    for num_bytes, times in SIZES.items():
        tensor = torch.from_numpy(np.random.default_rng(num_bytes).random(num_bytes // 4, np.float32))
        rates: dict[str, list[float]] = {carrier.name: [] for carrier in used}
        spent: dict[str, list[float]] = {carrier.name: [] for carrier in used}
        for _ in range(rounds + 1):
            for carrier in used:
                begin, cpu_ns = time.perf_counter(), time.process_time_ns()
                theirs_ns = carrier.send(tensor, times)
                rates[carrier.name].append(times * num_bytes / (time.perf_counter() - begin))
                both_ns = time.process_time_ns() - cpu_ns + theirs_ns
                spent[carrier.name].append(both_ns / (times * num_bytes))
        rows += [
            {
                "carrier": name,
                "num_bytes": num_bytes,
                "bytes_per_s": statistics.median(rates[name][1:]),  # the first round warms up
                "best_bytes_per_s": max(rates[name][1:]),
                "core_seconds_per_gb": statistics.median(spent[name][1:]),
            }
            for name in rates
        ]
    for carrier in used:
        carrier.close()
    return rows


def compare(rounds: int, folder: Path, inside: Sequence[Sequence[str]], host: str) -> list[dict[str, Any]]:
    """Measure between two processes, each started by what stands in `inside`; the second listens at `host`."""
    command = [sys.executable, __file__, "--rounds", str(rounds), "--certificates", str(folder)]
    receiver = subprocess.Popen([*inside[1], *command, "--receive", host], stdout=subprocess.PIPE, text=True)
    try:
        assert receiver.stdout is not None
        addresses = receiver.stdout.readline()
        sender = subprocess.run(
            [*inside[0], *command, "--send", addresses],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=1800,
        )
        receiver.wait(TIMEOUT_S)
    finally:
        receiver.kill()
        receiver.wait()
    rows: list[dict[str, Any]] = json.loads(sender.stdout)
    return rows


@contextmanager
def cable(rate: str) -> Iterator[list[list[str]]]:
    """Two network namespaces with a cable that carries no more than `rate`; how to start something in each."""
    names = [f"manyhands-tls-{end}-{os.getpid()}" for end in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)

    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False, timeout=10)
        ip(
            "link",
            "add",
            "cable",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            names[1],
        )
        inside = [["ip", "netns", "exec", name] for name in names]
        for name, host, enter in zip(names, HOSTS, inside, strict=True):
            ip("-n", name, "address", "add", f"{host}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            shape = ["root", "tbf", "rate", rate, "burst", "2mb", "limit", "16mb"]
            subprocess.run([*enter, "tc", "qdisc", "add", "dev", "cable", *shape], check=True, timeout=10)
        yield inside


def places(folder: Path, rounds: int) -> Iterator[dict[str, Any]]:
    yield {"place": "loopback", "rows": compare(rounds, folder, ([], []), "127.0.0.1")}
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return
    for name, rate in CABLES.items():
        with cable(rate) as inside:
            yield {"place": name, "rows": compare(rounds, folder, inside, HOSTS[1])}


def show(place: dict[str, Any]) -> None:
    print(place["place"])
    for row in place["rows"]:
        print(
            f"{format_bytes(row['num_bytes']):>10}  {row['carrier']:<12} {row['bytes_per_s'] / 1e9:6.2f} GB/s"
            f"  best {row['best_bytes_per_s'] / 1e9:6.2f}  {row['core_seconds_per_gb']:.2f} core s/GB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tls.json")
    parser.add_argument("--certificates", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    parser.add_argument("--send", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.receive or options.send:
        security = Security.from_directory(options.certificates / ("b" if options.receive else "a"))
        if options.receive:
            be_receiver(options.rounds, options.receive, security)
        else:
            print(json.dumps(be_sender(options.rounds, json.loads(options.send), security)))
        return
    load = os.getloadavg()[0]
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        make_certificates(Path(folder) / "run", ["a", "b"])
        for place in places(Path(folder) / "run", options.rounds):
            show(place)
            measured.append(place)
    facts = {
        "cores": len(os.sched_getaffinity(0)),
        "load_before": load,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "openssl": ssl.OPENSSL_VERSION,
        "torch": torch.__version__,
        "rounds": options.rounds,
        "places": measured,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
