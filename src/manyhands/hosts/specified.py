"""A process's place in a run whose roles a cluster specification lists.

Ranks follow the specification: the chief where there is one, then the workers, then the servers. So the leader is rank
0, and under strategies without servers the chief counts as the first worker.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Final

from manyhands.errors import UserError
from manyhands.hosts.place import Place
from manyhands.hosts.specification import TF_CONFIG, ClusterRole, ClusterSpec
from manyhands.link.secure import is_loopback

__all__ = [
    "EVALUATOR",
    "check_hosts",
    "listening_at",
    "place_from",
    "place_of",
    "ranked",
]

EVALUATOR: Final = (
    "an evaluator has nothing to do here, and ends: workers evaluate while they train (--evaluate-every), and the "
    "leader at the end"
)
"""What an evaluator is told: it takes no part."""

Resolve = Callable[[str], str]


def ranked(spec: ClusterSpec) -> tuple[ClusterRole, ...]:
    """The roles that take part, by rank."""
    return spec.roles("chief", "worker", "ps")


def place_of(spec: ClusterSpec, role: ClusterRole) -> Place:
    """The place of one role; UserError for an evaluator, which has none."""
    roles = ranked(spec)
    if role not in roles:
        raise UserError(EVALUATOR)
    return Place(
        rank=roles.index(role),
        world=len(roles),
        kind="specification",
        role=role.type,
        index=role.index,
        leader=spec.address(spec.leader),
        cluster=spec,
    )


def place_from(environment: Mapping[str, str] = os.environ) -> Place | None:
    """What TF_CONFIG says of this process; None where it is not set, or says of no cluster."""
    text = environment.get(TF_CONFIG, "").strip()
    if not text or text == "{}":
        return None
    return place_of(*ClusterSpec.from_tf_config(text))


def check_hosts(spec: ClusterSpec, role: ClusterRole, resolve: Resolve = socket.gethostbyname) -> None:
    """UserError where this role's own name means loopback here, and others are elsewhere: nobody would reach it."""
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


def listening_at(spec: ClusterSpec, role: ClusterRole, resolve: Resolve = socket.gethostbyname) -> str:
    """Where a role binds: at its own address, or at every address of its host where that is one that leads to it.

    In a container the name of a service leads to an address that no interface has.
    """
    host, _, port = spec.address(role).rpartition(":")
    if host == "localhost" or is_loopback(host):
        return f"tcp:127.0.0.1:{port}" if host == "localhost" else f"tcp:{host}:{port}"
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
