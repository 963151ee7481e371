"""Networks for benchmarks: two network namespaces with a shaped cable between them, near or far, and loopback held to a
rate.

The first need root. The last needs nothing: the kernel paces what each socket sends (SO_MAX_PACING_RATE).
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import netlink
from manyhands.places.local.signals import ending

_SO_MAX_PACING_RATE: Final = 47  # asm-generic/socket.h; Python's socket has no name for it
_ENDS: Final = 2
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x2, 0x1000  # linux/if_tun.h
_JUMBO, _FRAME = 9000, 1 << 16  # large frames, so that the relay has few
_LOOK_S: Final = 0.1


def why_no_namespaces() -> str:
    """Why `two_namespaces` cannot be had here, found by making them with a held cable; empty where they can."""
    try:
        with two_namespaces("10.231.70.", "1gbit", ["burst", "256kb", "latency", "100ms"]):
            return ""
    except OSError as error:
        return str(error)


@contextmanager
def two_namespaces(subnet: str, rate: str | None, bucket: Sequence[str]) -> Iterator[list[str]]:
    """Two namespaces that stand for hosts, `subnet`1 and `subnet`2, by name.

    A token bucket at each end of the cable between them holds it to `rate`, if any, both as `tc` spells them.
    """
    with _namespaces("bench", range(_ENDS)) as names:
        netlink.add_cable((names[0], "cable"), (names[1], "cable"))
        for end, name in enumerate(names):
            _settle(name, f"{subnet}{end + 1}", rate, bucket)
        yield names


@contextmanager
def switched_hosts(count: int, subnet: str, rate: str | None, bucket: Sequence[str]) -> Iterator[list[str]]:
    """So many namespaces on one switch, `subnet`1 and so on; the switch is in the one named last.

    Token buckets hold each cable in both directions, as those of `two_namespaces` do.
    """
    with _namespaces("bench", [*range(count), "switch"]) as [*names, switch]:
        netlink.within(switch, partial(netlink.add_bridge, "bridge"))
        for number, name in enumerate(names):
            port = f"port{number}"
            netlink.add_cable((name, "cable"), (switch, port))
            netlink.within(switch, partial(netlink.plug, port, "bridge"))
            _settle(name, f"{subnet}{number + 1}", rate, bucket)
            _hold(switch, port, rate, bucket)
        yield [*names, switch]


@contextmanager
def _namespaces(what: str, ends: Sequence[object]) -> Iterator[list[str]]:
    names = [f"manyhands-{what}-{end}-{os.getpid()}" for end in ends]
    with ending(), ExitStack() as stack:  # a signal leaves no namespace behind
        for name in names:
            stack.callback(netlink.remove_namespace, name)
            netlink.add_namespace(name)
        yield names


def _settle(name: str, address: str, rate: str | None, bucket: Sequence[str]) -> None:
    """Give the device `cable` of a namespace its address, and hold what leaves by it."""
    netlink.within(name, partial(netlink.give_address, "cable", address))
    _hold(name, "cable", rate, bucket)


def _hold(name: str, device: str, rate: str | None, bucket: Sequence[str]) -> None:
    """Let what leaves by a device of that namespace pass no faster than that."""
    if rate is not None:
        words = dict(zip(bucket[::2], bucket[1::2], strict=True))
        netlink.within(name, partial(netlink.hold, device, rate, words))


def places(subnet: str, port: int, rank: int, world: int) -> dict[str, str]:
    """The environment of process `rank` of `world`, which find each other at the first host's `port`."""
    return {
        "MASTER_ADDR": f"{subnet}1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "RANK": str(rank),
        "GLOO_SOCKET_IFNAME": "cable",
        "OMP_NUM_THREADS": "1",
    }


def inside(name: str) -> list[str]:
    """What a command begins with that runs in a namespace."""
    return [sys.executable, netlink.__file__, name]


def cores_of(host: int, hosts: int) -> list[int]:
    """Those of one of several hosts: neighbours, so that no two hosts share a core's two threads."""
    every = sorted(os.sched_getaffinity(0), key=lambda core: (_physical(core), core))
    each = max(1, len(every) // hosts)
    return (every * hosts)[host * each : (host + 1) * each]


def _physical(core: int) -> int:
    name = Path(f"/sys/devices/system/cpu/cpu{core}/topology/core_id")
    return int(name.read_text()) if name.exists() else core


def run_ranks(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], within_s: float
) -> None:
    """Run one process for each rank, with its environment added to ours, until all have ended; none outlives this.

    SystemExit names the first that failed, or was not done in time.
    """
    deadline = time.monotonic() + within_s
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, environment in zip(commands, environments, strict=True):
            processes.append(subprocess.Popen(command, env={**os.environ, **environment}))
        for rank, process in enumerate(processes):
            if process.wait(timeout=max(0.1, deadline - time.monotonic())):
                raise SystemExit(f"rank {rank} of {len(processes)} ended with {process.returncode}")
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"a rank of {len(processes)} was not done after {within_s:g} s") from error
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def on_the_cable() -> tuple[int, int]:
    """Bytes that this process's host has sent and received over the cable."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    numbers = next(line for line in lines if line.strip().startswith("cable:")).split(":")[1].split()
    return int(numbers[8]), int(numbers[0])


def pace_every_connection(bytes_per_s: int) -> int:
    """Hold each TCP connection that this process has now to a rate; how many there are."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.family == socket.AF_INET and end.type == socket.SOCK_STREAM:
                    end.getpeername()  # OSError where it only listens
                    pace(end, bytes_per_s)
                    count += 1
        except OSError:
            continue
    return count


def pace(end: socket.socket, bytes_per_s: int) -> None:
    """Have the kernel send no more than so many bytes in a second through one connection."""
    end.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_s.to_bytes(8, "little"))


class DelayingRelay:
    """Carries frames between the taps of two namespaces, each `delay_s` after it came; a context manager.

    A tap is a network device whose other end is a file: so all that two hosts say to each other passes here.
    """

    def __init__(self, ends: Sequence[int], delay_s: float) -> None:
        self._ends, self._delay_s, self._stopped = ends, delay_s, threading.Event()
        self._thread = threading.Thread(target=self._carry, name="relay")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _carry(self) -> None:
        near, far = self._ends
        onward = {near: (far, deque[tuple[float, bytes]]()), far: (near, deque[tuple[float, bytes]]())}
        while not self._stopped.is_set():
            now = time.monotonic()
            for other, waiting in onward.values():
                while waiting and waiting[0][0] <= now:
                    os.write(other, waiting.popleft()[1])
            due = min((waiting[0][0] for _, waiting in onward.values() if waiting), default=now + _LOOK_S)
            for end in select.select(self._ends, [], [], max(0.0, due - time.monotonic()))[0]:
                onward[end][1].append((time.monotonic() + self._delay_s, os.read(end, _FRAME)))


@contextmanager
def two_regions(subnet: str, rate: str, bucket: Sequence[str], delay_s: float) -> Iterator[list[str]]:
    """`two_namespaces` that are far apart: what one sends arrives `delay_s` later at the other."""
    with _namespaces("geo", range(_ENDS)) as names, ExitStack() as stack:
        taps = []
        for end, name in enumerate(names):
            taps.append(netlink.within(name, _tap))
            stack.callback(os.close, taps[-1])
            netlink.within(name, partial(netlink.resize, "cable", _JUMBO, 10000))
            netlink.within(name, partial(netlink.bring_up, "cable"))
            _settle(name, f"{subnet}{end + 1}", rate, bucket)
        with DelayingRelay(taps, delay_s):
            yield names


def _tap() -> int:
    """Make the device `cable`; its other end."""
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", b"cable", _IFF_TAP | _IFF_NO_PI))
    return end
