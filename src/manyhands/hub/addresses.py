"""Addresses of one host, as text: `unix:NAME`, an abstract Unix socket, and `tcp:127.0.0.1:PORT`, loopback only.

TCP off the host would carry gradients and tokens' proofs in the clear, so it is refused here until it is encrypted.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import struct
from typing import Final

from manyhands.errors import UserError

__all__ = ["HOW", "check", "dial", "listen", "same_user", "tune"]

HOW: Final = ("unix", "tcp")
_BACKLOG: Final = 4096  # the kernel may allow less
_TCP_USER_TIMEOUT: Final = getattr(socket, "TCP_USER_TIMEOUT", 18)


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket, and the address at which others reach it.

    `unix` and `tcp` alone choose a free name or port; so does port 0.
    """
    how, _, place = address.partition(":")
    if how == "unix":
        name = place or f"manyhands-{secrets.token_hex(16)}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: str | tuple[str, int] = f"\0{name}"
    elif how == "tcp":
        host, port = _loopback(place or "127.0.0.1:0", address)
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
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


def dial(address: str) -> socket.socket:
    """A socket that is connected or about to be; OSError if nobody listens, UserError for what is no address."""
    target = check(address)
    is_unix = isinstance(target, str)
    end = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET, socket.SOCK_STREAM)
    try:
        end.setblocking(False)
        end.connect(target)
    except BlockingIOError as error:
        if is_unix:  # its queue is full; unlike TCP, it does not connect by itself later
            end.close()
            raise ConnectionRefusedError(f"too many wait at {address}") from error
    except OSError:
        end.close()
        raise
    return end


def check(address: str) -> str | tuple[str, int]:
    """Where to connect to; UserError for what is no address of this host."""
    how, _, place = address.partition(":")
    if how == "unix" and place:
        return f"\0{place}"
    if how == "tcp" and place:
        return _loopback(place, address)
    raise _no_address(address)


def tune(end: socket.socket, patience_s: float) -> None:
    """Send small messages at once, and let the kernel give up a TCP peer that takes nothing for `patience_s`."""
    if end.family == socket.AF_INET:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, int(patience_s * 1000))


def same_user(end: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is of this user; True for TCP, which cannot tell."""
    if end.family != socket.AF_UNIX:
        return True
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


def _loopback(place: str, address: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    try:
        found = ipaddress.IPv4Address("127.0.0.1" if host == "localhost" else host)
        number = int(port)
    except ValueError:
        raise _no_address(address) from None
    if not 0 <= number < 1 << 16:
        raise _no_address(address)
    if not found.is_loopback:
        raise UserError(
            f"address {address!r}: {found} is not on loopback (127.0.0.0/8); connections between hosts are refused "
            "as long as they are not encrypted"
        )
    return str(found), number


def _no_address(address: str) -> UserError:
    return UserError(f"address {address!r}: must be unix:NAME or tcp:127.0.0.1:PORT")
