"""Where the roles of a cluster specification listen, and whether other hosts can reach them there."""

from __future__ import annotations

import socket
from collections.abc import Callable

from manyhands.errors import UserError
from manyhands.places.external.specification import ClusterRole, ClusterSpec
from manyhands.transport.security import is_loopback

__all__ = ["check_hosts", "listening_at"]

Resolve = Callable[[str], str]
"""Resolves a host name to its IPv4 address; OSError if the name is unknown."""


def check_hosts(spec: ClusterSpec, role: ClusterRole, resolve: Resolve = socket.gethostbyname) -> None:
    """UserError if this role's host name resolves to loopback here while other roles are on other hosts."""
    host = spec.address(role).rpartition(":")[0]
    others = [spec.address(other).rpartition(":")[0] for other in spec.roles()]
    if is_loopback(host) or all(other == host for other in others):
        return
    try:
        found = resolve(host)
    except OSError as error:
        raise UserError(
            f"cluster.{role.type}[{role.index}]={spec.address(role)!r}: this host does not know the name {host!r} "
            f"({error}); write the address that others reach it by"
        ) from None
    if is_loopback(found):
        raise UserError(
            f"cluster.{role.type}[{role.index}]={spec.address(role)!r}: {host!r} means {found} on this host, where "
            f"others cannot reach it; write its address in the network, or correct {host!r} in /etc/hosts"
        )


def listening_at(address: str, resolve: Resolve = socket.gethostbyname) -> str:
    """The address to bind for a process that others reach at `host:port`, in the hub's format.

    It is that address, or every address of this host if no interface has it: in a container, a service has an
    address that no interface has.
    """
    host, _, port = address.rpartition(":")
    if is_loopback(host):
        return f"tcp:{address}"
    found = resolve(host)
    return f"tcp:{found if _is_ours(found) else '0.0.0.0'}:{port}"


def _is_ours(address: str) -> bool:
    """Whether an interface of this host has the address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((address, 0))
        except OSError:
            return False
    return True
