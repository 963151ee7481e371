"""Hosts on one machine: network namespaces with a cable between two, or a switch between many, and what may happen."""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

_ON_HOST = Path(__file__).with_name("on_host.py")
_CLONE_NEWNET = 0x40000000
_ALL_PROTOCOLS = 0x0003
_SO_RCVBUFFORCE = 33
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x2, 0x1000  # linux/if_tun.h
_FRAME = 1 << 16
NOWHERE = "02:00:00:00:00:99"


@dataclass(frozen=True)
class Hosts:
    """Two network namespaces; the cable ends at 10.231.77.1 in the first and at 10.231.77.2 in the second."""

    names: tuple[str, str]

    def address(self, host: int) -> str:
        return f"10.231.77.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """What goes before a command to run it on that host."""
        return ["ip", "netns", "exec", self.names[host]]

    def script(self, host: int, *words: object) -> list[str]:
        """The command that runs a script of Python on that host, and can be forked warm."""
        return [sys.executable, str(_ON_HOST), self.names[host], *map(str, words)]

    def ip(self, host: int, *words: str) -> None:
        subprocess.run(["ip", "-n", self.names[host], *words], check=True, timeout=240, capture_output=True)

    def cut(self, sender: int) -> None:
        """From now on nothing that `sender` sends arrives, and nobody is told: its frames go to no card at all."""
        receiver = self.address(1 - sender)
        self.ip(sender, "neigh", "replace", receiver, "lladdr", NOWHERE, "dev", "cable", "nud", "permanent")

    def heal(self) -> None:
        """What is sent arrives again, in both directions."""
        for sender in (0, 1):
            self.ip(sender, "neigh", "flush", "dev", "cable", "nud", "permanent")

    def starve(self, sender: int, rate: str, queue: str) -> None:
        """Let `sender` send no faster than `rate`, with `queue` waiting before anything is dropped."""
        shape = ["root", "tbf", "rate", rate, "burst", "10kb", "limit", queue]
        command = [*self.inside(sender), "tc", "qdisc", "add", "dev", "cable", *shape]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        if done.returncode != 0:
            pytest.skip(f"the kernel has no token bucket: {done.stderr.strip()}")


@pytest.fixture
def two_hosts() -> Iterator[Hosts]:
    """Gone after the test."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = (f"manyhands-a-{os.getpid()}", f"manyhands-b-{os.getpid()}")

    def ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=240)
        if done.returncode != 0:
            pytest.skip(
                f"network namespaces are not permitted here: ip {' '.join(words)}: {done.stderr.strip()}"
            )

    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False, timeout=240)
        near, far = ["cable", "netns", names[0]], ["cable", "netns", names[1]]
        ip("link", "add", *near, "type", "veth", "peer", "name", *far)
        for number, name in enumerate(names, start=1):
            ip("-n", name, "address", "add", f"10.231.77.{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield Hosts(names)


@contextmanager
def standing_on(name: str) -> Iterator[None]:
    """What this thread makes meanwhile, its sockets, say, is of that namespace, and stays so."""
    with open("/proc/thread-self/ns/net") as here:
        enter(name)
        try:
            yield
        finally:
            _enter(here.fileno())


def enter(name: str) -> None:
    """From now on this thread, and those that it starts, are in that namespace."""
    with open(f"/run/netns/{name}") as there:
        _enter(there.fileno())


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class Wiretap:
    """Every packet that passes a host's end of the cable, as its bytes; a context manager."""

    def __init__(self, name: str) -> None:
        with standing_on(name):
            self._packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
        self._packets.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
        self._packets.bind(("cable", 0))
        self._packets.setblocking(False)

    def heard(self) -> bytes:
        """What has passed since the last call."""
        packets = []
        try:
            while True:
                packets.append(self._packets.recv(1 << 17))
        except BlockingIOError:
            return b"".join(packets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._packets.close()


@dataclass(frozen=True)
class Switched:
    """Network namespaces at one switch; host i has the address 10.231.78.(i + 1)."""

    names: tuple[str, ...]

    def address(self, host: int) -> str:
        return f"10.231.78.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """What goes before a command to run it on that host."""
        return ["ip", "netns", "exec", self.names[host]]

    def plug(self, host: int, *, plugged: bool) -> None:
        """Pull the cable of a host out of the switch, or put it back; nobody is told."""
        end = ["link", "set", f"port{host}", *(["master", "switch"] if plugged else ["nomaster"])]
        subprocess.run(["ip", "-n", self.names[-1], *end], check=True, timeout=240, capture_output=True)


@contextmanager
def switched_hosts(count: int) -> Iterator[Switched]:
    """So many hosts; the switch is in a namespace of its own, the last one. All are gone afterwards."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = tuple(f"manyhands-{host}-{os.getpid()}" for host in [*range(count), "switch"])

    def ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=240)
        if done.returncode != 0:
            pytest.skip(f"no switch can be made here: ip {' '.join(words)}: {done.stderr.strip()}")

    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False, timeout=240)
        ip("-n", names[-1], "link", "add", "switch", "type", "bridge")
        ip("-n", names[-1], "link", "set", "switch", "up")
        for host, name in enumerate(names[:-1]):
            port = f"port{host}"
            ends = ["cable", "netns", name, "type", "veth", "peer", "name", port, "netns", names[-1]]
            ip("link", "add", *ends)
            ip("-n", names[-1], "link", "set", port, "master", "switch", "up")
            ip("-n", name, "address", "add", f"10.231.78.{host + 1}/24", "dev", "cable")
            for device in ("cable", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield Switched(names)


class BadCable:
    """Two hosts whose cable is a thread of this process: it carries each frame late, or loses it; a context manager."""

    def __init__(self) -> None:
        self.hosts = Hosts((f"manyhands-c-{os.getpid()}", f"manyhands-d-{os.getpid()}"))
        self.lost = 0.0  # the share of frames
        self.bytes_per_s = 0.0  # 0: as fast as it can
        self.dropped = 0
        self._dice = random.Random(0)
        self._ends: list[int] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="cable")

    def __enter__(self) -> Self:
        for number, name in enumerate(self.hosts.names, start=1):
            _ip("netns", "add", name)
            with standing_on(name):
                end = os.open("/dev/net/tun", os.O_RDWR)
                fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", b"cable", _IFF_TAP | _IFF_NO_PI))
            self._ends.append(end)
            _ip("-n", name, "address", "add", f"10.231.77.{number}/24", "dev", "cable")
            for device in ("cable", "lo"):
                _ip("-n", name, "link", "set", device, "up")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        for end in self._ends:
            os.close(end)
        for name in self.hosts.names:
            _ip("netns", "del", name)

    def _carry(self) -> None:
        other = dict(zip(self._ends, reversed(self._ends), strict=True))
        while not self._stopped.is_set():
            for end in select.select(self._ends, [], [], 0.1)[0]:
                frame = os.read(end, _FRAME)
                if self._dice.random() < self.lost:
                    self.dropped += 1
                    continue
                if self.bytes_per_s:
                    time.sleep(len(frame) / self.bytes_per_s)
                os.write(other[end], frame)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=60)


@pytest.fixture
def bad_cable() -> Iterator[BadCable]:
    """Gone after the test."""
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        pytest.skip("a cable of one's own needs root and /dev/net/tun")
    with BadCable() as made:
        yield made
