"""A slower network on one host: the whole command in a network namespace of its own, whose loopback is shaped.

A token bucket (`tc … tbf`) before `lo` holds what goes through TCP within the namespace to the rate. Nothing outside is
touched. It needs Linux with `unshare` and iproute2 (`ip`, `tc`), and either root or user namespaces.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.errors import UserError

SHAPED = "MANYHANDS_SHAPED"
"""Set to the rate for the command in the namespace, so that it does not start itself again."""

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TOOLS = {"unshare": "util-linux", "ip": "iproute2", "tc": "iproute2", "sh": "a shell"}
_BURST_PACKETS = 2  # no less than that, or what is larger would be dropped
_BURST_S = 0.00025  # as coarse as a kernel's timers; more would let a small gradient through at no cost
_PACKET_BYTES = (65_536, 16_384)
"""Of loopback: as it is, and where that is longer on the wire than a burst may be."""
_QUEUE_MS = 200  # what waits for longer is dropped, and sent again
_PROBE_S = 10.0
_ADMIN_PATHS = ("/usr/sbin", "/sbin")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Bits per second, with a text form."""

    bits_per_s: int

    @classmethod
    def parse(cls, text: str) -> Rate:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower().removesuffix("/s"))
        if match is None or match[2] not in _UNITS or float(match[1]) * _UNITS[match[2]] < 8000:
            raise UserError(f"--bandwidth {text!r} is not a rate; write it as 1Gbit, 100Mbit or 256kbit")
        return cls(bits_per_s=round(float(match[1]) * _UNITS[match[2]]))

    @property
    def packet_bytes(self) -> int:
        usual, small = _PACKET_BYTES
        return usual if _BURST_PACKETS * usual <= round(self.bits_per_s / 8 * _BURST_S) else small

    @property
    def burst_bytes(self) -> int:
        return max(_BURST_PACKETS * self.packet_bytes, round(self.bits_per_s / 8 * _BURST_S))

    def __str__(self) -> str:
        for unit, factor in (("Gbit", 10**9), ("Mbit", 10**6), ("kbit", 10**3)):
            if self.bits_per_s >= factor:
                return f"{self.bits_per_s / factor:g} {unit}/s"
        return f"{self.bits_per_s} bit/s"


def inside() -> bool:
    return SHAPED in os.environ


def shaped_command(rate: Rate, command: Sequence[str], *, as_root: bool) -> list[str]:
    """The command line that runs `command` where the loopback is shaped; without root in a user namespace."""
    shape = (
        f"ip link set lo mtu {rate.packet_bytes} up && "
        f"tc qdisc add dev lo root tbf rate {rate.bits_per_s}bit burst {rate.burst_bytes}b latency {_QUEUE_MS}ms && "
        'exec "$@"'
    )
    user = [] if as_root else ["--user", "--map-root-user"]
    return ["unshare", "--net", *user, "sh", "-c", shape, "sh", *command]


def why_not(rate: Rate) -> str | None:
    """Why this machine cannot shape its loopback, as one sentence; None where it can."""
    if not sys.platform.startswith("linux"):
        return f"only Linux has network namespaces, and this is {sys.platform}"
    for tool, package in _TOOLS.items():
        if shutil.which(tool, path=tool_path()) is None:
            return f"the program {tool!r} is missing; install {package}"
    try:
        tried = subprocess.run(
            shaped_command(rate, ["true"], as_root=os.geteuid() == 0),
            env={**os.environ, "PATH": tool_path()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"making a network namespace did not end within {_PROBE_S:.0f} s"
    if tried.returncode == 0:
        return None
    said = tried.stderr.strip().splitlines()
    reason = said[-1] if said else f"unshare ended with status {tried.returncode}"
    return f"{reason}; it needs root or user namespaces, and the kernel's tbf"


def enter(rate: Rate, command: Sequence[str]) -> None:
    """Continue as `command` in a shaped namespace: this process becomes it; UserError where that is not allowed."""
    reason = why_not(rate)
    if reason is not None:
        raise UserError(f"--bandwidth: this machine cannot shape its loopback: {reason}")
    chosen = shaped_command(rate, command, as_root=os.geteuid() == 0)
    os.execvpe(chosen[0], chosen, {**os.environ, "PATH": tool_path(), SHAPED: str(rate)})


def tool_path() -> str:
    """The search path with the folders of administrators' programs, which a user's may lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *_ADMIN_PATHS])
