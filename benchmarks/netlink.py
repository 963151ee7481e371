"""Network namespaces with devices and token buckets, asked of the kernel itself; needs root, and no program.

What iproute2's `ip` and `tc` do, for machines that lack them: messages of rtnetlink (`man 7 rtnetlink`).
As a program, `python benchmarks/netlink.py NAME COMMAND …` runs a command in a namespace.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

_Found = TypeVar("_Found")

_WHERE: Final = Path("/run/netns")  # where `ip netns` looks, too
_CLONE_NEWNET, _MS_BIND, _MNT_DETACH = 0x40000000, 0x1000, 2  # linux/sched.h, linux/mount.h
_ACKNOWLEDGED, _CREATED = 0x5, 0x600  # NLM_F_REQUEST | NLM_F_ACK; NLM_F_CREATE | NLM_F_EXCL
_NEWLINK, _NEWADDR, _NEWQDISC, _ERROR = 16, 20, 36, 2  # linux/rtnetlink.h, linux/netlink.h
_IFNAME, _MTU, _MASTER, _TXQLEN, _LINKINFO, _NET_NS_FD = 3, 4, 10, 13, 18, 28  # linux/if_link.h
_KIND, _DATA, _PEER = 1, 2, 1
_UP, _ROOT, _ETHERNET = 1, 0xFFFFFFFF, 1
_TBF_PARMS, _TBF_BURST = 1, 6  # linux/pkt_sched.h
_UNITS: Final = {
    "kb": 1 << 10,
    "mb": 1 << 20,
    "kbit": 125,
    "mbit": 125e3,
    "gbit": 125e6,
    "bit": 1 / 8,
    "ms": 1e-3,
}
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def enter(name: str) -> None:
    """From now on this thread is in that namespace."""
    with open(_WHERE / name) as there:
        _call("setns", there.fileno(), _CLONE_NEWNET)


def _apart(work: Callable[[], _Found]) -> _Found:
    """Do something in a thread of its own, which may be in another namespace than this one."""
    found: list[_Found] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def within(name: str, work: Callable[[], _Found]) -> _Found:
    """What `work` returns, done in that namespace."""

    def there() -> _Found:
        enter(name)
        return work()

    return _apart(there)


def add_namespace(name: str) -> None:
    _WHERE.mkdir(exist_ok=True)

    def make() -> None:
        _call("unshare", _CLONE_NEWNET)
        (_WHERE / name).touch(exist_ok=False)
        mine = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"
        _call("mount", mine.encode(), str(_WHERE / name).encode(), None, _MS_BIND, None)
        bring_up("lo")

    _apart(make)


def remove_namespace(name: str) -> None:
    """Remove it with all devices in it; nothing where there is none."""
    if (_WHERE / name).exists():
        _libc.umount2(str(_WHERE / name).encode(), _MNT_DETACH)
        (_WHERE / name).unlink()


def add_cable(near: tuple[str, str], far: tuple[str, str]) -> None:
    """Connect two namespaces by a pair of devices, each end a namespace and a name in it; both are up."""
    with open(_WHERE / far[0]) as there:
        peer = _link(0) + _text(_IFNAME, far[1]) + _attribute(_NET_NS_FD, struct.pack("I", there.fileno()))
        within(near[0], lambda: _add_device(near[1], "veth", _attribute(_PEER, peer)))
    for name, device in (near, far):
        within(name, lambda device=device: bring_up(device))  # type: ignore[misc]


def add_bridge(device: str) -> None:
    _add_device(device, "bridge", b"")
    bring_up(device)


def plug(device: str, bridge: str) -> None:
    _ask(_NEWLINK, _link(_index(device)) + _attribute(_MASTER, struct.pack("I", _index(bridge))))


def bring_up(device: str) -> None:
    _ask(_NEWLINK, _link(_index(device), _UP))


def resize(device: str, mtu: int, queue: int) -> None:
    lengths = _attribute(_MTU, struct.pack("I", mtu)) + _attribute(_TXQLEN, struct.pack("I", queue))
    _ask(_NEWLINK, _link(_index(device)) + lengths)


def give_address(device: str, address: str) -> None:
    """An address of IPv4 in a network of 255 of them."""
    packed = socket.inet_aton(address)
    body = struct.pack("BBBBI", socket.AF_INET, 24, 0, 0, _index(device))
    _ask(_NEWADDR, body + _attribute(1, packed) + _attribute(2, packed), _CREATED)


def hold(device: str, rate: str, bucket: dict[str, str]) -> None:
    """Let what leaves by a device pass no faster; rate, burst, and latency or limit are spelled as for `tc … tbf`."""
    bytes_per_s, burst = int(quantity(rate)), int(quantity(bucket["burst"]))
    waiting = (
        quantity(bucket["limit"]) if "limit" in bucket else quantity(bucket["latency"]) * bytes_per_s + burst
    )
    shape = struct.pack("BBHhHI", 0, _ETHERNET, 0, 0, 0, bytes_per_s) + bytes(12)  # the latter: no peak
    options = _attribute(_TBF_PARMS, shape + struct.pack("III", int(waiting), 0, 0))
    options += _attribute(_TBF_BURST, struct.pack("I", burst))
    body = struct.pack("BxHiIII", 0, 0, _index(device), 0, _ROOT, 0)
    _ask(_NEWQDISC, body + _text(1, "tbf") + _attribute(2, options), _CREATED)


def quantity(words: str) -> float:
    """Bytes, bytes a second or seconds, in the units of `tc`."""
    found = re.fullmatch(r"(\d+)([a-z]+)", words)
    if found is None or found[2] not in _UNITS:
        raise SystemExit(f"{words}: write it as 100mbit, 1gbit, 256kb or 100ms")
    return int(found[1]) * _UNITS[found[2]]


def _add_device(name: str, kind: str, data: bytes) -> None:
    about = _attribute(_LINKINFO, _text(_KIND, kind) + _attribute(_DATA, data))
    _ask(_NEWLINK, _link(0) + _text(_IFNAME, name) + about, _CREATED)


def _link(index: int, flags: int = 0) -> bytes:
    return struct.pack("BxHiII", 0, 0, index, flags, flags)


def _index(device: str) -> int:
    return socket.if_nametoindex(device)


def _text(kind: int, text: str) -> bytes:
    return _attribute(kind, text.encode() + b"\0")


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("HH", len(value) + 4, kind) + value + bytes(-len(value) % 4)


def _ask(kind: int, body: bytes, flags: int = 0) -> None:
    """Send one request to the kernel in this thread's namespace; OSError where it refuses."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(10)
        kernel.send(struct.pack("IHHII", 16 + len(body), kind, flags | _ACKNOWLEDGED, 1, 0) + body)
        answer = kernel.recv(1 << 16)
    _, came, _, _, _, number = struct.unpack_from("IHHIIi", answer)
    if came != _ERROR or number != 0:
        raise OSError(-number, f"rtnetlink refuses request {kind}: {os.strerror(-number)}")


if __name__ == "__main__":
    enter(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])
