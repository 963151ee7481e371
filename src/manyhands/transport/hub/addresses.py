"""Addresses as text: `unix:NAME`, an abstract Unix socket, and `tcp:HOST:PORT`, with an IPv4 address or a host name.

TCP off loopback would send weights and gradients in the clear. It is refused here unless it is encrypted or the
user allowed it (`transport.security.Security`).
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import struct
from typing import Final

from manyhands.errors import UserError
from manyhands.transport.security import Security, is_loopback

__all__ = ["tune"]

HOW: Final = ("unix", "tcp")
_LOOPBACK: Final = "127.0.0.1"
_NAME: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")
_BACKLOG: Final = 4096  # the kernel may allow less
_TCP_USER_TIMEOUT: Final = getattr(socket, "TCP_USER_TIMEOUT", 18)


def listen(address: str, security: Security) -> tuple[socket.socket, str]:
    """Open a listening socket; return it and the address at which others reach it.

    `unix` alone chooses a free name, and `tcp` alone or port 0 a free port; `tcp` alone means loopback. If it
    listens on every address of this host (0.0.0.0), the caller must know which of them others use.
    """
    how, _, place = address.partition(":")
    if how == "unix":
        name = place or f"manyhands-{secrets.token_hex(16)}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: str | tuple[str, int] = f"\0{name}"
    elif how == "tcp":
        host, port = _place(place or f"{_LOOPBACK}:0", address, security)
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # SO_REUSEADDR: the successor of a process that died listens at the same port while the kernel still closes
        # the old connections.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        target = (host, port)
    else:
        raise _no_address(address)
    try:
        listening.setblocking(False)
        listening.bind(target)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise UserError(f"address {address!r}: cannot listen there: {error}") from error
    if how == "unix":
        return listening, f"unix:{name}"
    host, port = listening.getsockname()
    return listening, f"tcp:{host}:{port}"


def dial(address: str, security: Security) -> socket.socket:
    target = check(address, security)
    is_unix = isinstance(target, str)
    end = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET, socket.SOCK_STREAM)
    try:
        end.setblocking(False)
        end.connect(target)
    except BlockingIOError as error:
        if is_unix:  # its backlog is full; unlike TCP, a Unix socket does not connect by itself later
            end.close()
            raise ConnectionRefusedError(f"too many wait at {address}") from error
    except OSError:
        end.close()
        raise
    if not same_user(end):  # a predictable name may be taken by another user before its owner listens
        end.close()
        raise ConnectionRefusedError(f"another user listens at {address}")
    return end


def check(address: str, security: Security) -> str | tuple[str, int]:
    """Where to connect to; UserError if the address is malformed, or not allowed by `security`."""
    how, _, place = address.partition(":")
    if how == "unix" and place:
        return f"\0{place}"
    if how == "tcp" and place:
        return _place(place, address, security)
    raise _no_address(address)


def tune(end: socket.socket, patience_s: float) -> None:
    """Disable Nagle's delay, and let the kernel drop a TCP peer that accepts nothing for `patience_s`."""
    if end.family == socket.AF_INET:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, int(patience_s * 1000))


def origin(end: socket.socket) -> str:
    """Which peer connected, as the beginning of a sentence; empty for a process of this host."""
    if end.family == socket.AF_UNIX:
        return ""
    try:
        host, _ = end.getpeername()
    except OSError:
        return ""  # it disconnected at once
    return "" if is_loopback(host) else f"{host}: "


def same_user(end: socket.socket) -> bool:
    """Whether the peer of a Unix socket runs as this user; True for TCP, which cannot tell."""
    if end.family != socket.AF_UNIX:
        return True
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


def _place(place: str, address: str, security: Security) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    # An IPv4 address or a valid host name (RFC 1123): the last label of a name is not a number.
    is_name = _NAME.fullmatch(host) is not None and not host.rpartition(".")[2].isdigit()
    if not is_name:
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise _no_address(address) from None
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise _no_address(address)
    security.check_address(host)
    return (_LOOPBACK if host == "localhost" else host), int(port)


def _no_address(address: str) -> UserError:
    return UserError(f"address {address!r}: must be unix:NAME or tcp:HOST:PORT, as in tcp:127.0.0.1:0")
