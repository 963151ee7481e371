"""A cluster specification: the roles of a run, and the address at which each of them listens.

    {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"], "ps": ["d:2222"]}

It comes from Python, from a TOML or JSON file, or from the variable TF_CONFIG in TensorFlow's format, which also says
which of these roles this process is. Every mistake visible in the text is reported before anything starts.
"""

from __future__ import annotations

import json
import socket
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from manyhands.errors import UserError, nearest, printable
from manyhands.places.place import TF_CONFIG
from manyhands.transport.security import is_loopback

EVALUATOR: Final = (
    "an evaluator has no work here and ends: workers evaluate while they train (--evaluate-every), and the leader "
    "at the end"
)

ROLE_TYPES: Final = ("chief", "worker", "ps", "evaluator")
_MOST_PORT: Final = 65535


@dataclass(frozen=True, slots=True, order=True)
class ClusterRole:
    """One process of a cluster: its type, and which of that type it is."""

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type} {self.index}"


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Which roles a run consists of, and the `host:port` at which each of them listens, by type.

    Types are `chief`, `worker`, `ps` and `evaluator`. The chief leads where there is one, else worker 0 does. UserError
    names the entry that makes no sense.
    """

    addresses: Mapping[str, Sequence[str]]  # by type, in the order of the index

    def __post_init__(self) -> None:
        if not isinstance(self.addresses, Mapping):
            raise UserError(
                f"cluster={_shown(self.addresses)} must be a table from types ({', '.join(ROLE_TYPES)}) to lists of "
                "host:port"
            )
        checked: dict[str, tuple[str, ...]] = {}
        taken: dict[str, str] = {}
        for kind, listed in self.addresses.items():
            if kind not in ROLE_TYPES:
                known = nearest(str(kind), ROLE_TYPES)
                raise UserError(f"cluster.{printable(str(kind), 40)} is not a type of role; {known}")
            if isinstance(listed, str) or not isinstance(listed, Sequence):
                raise UserError(f"cluster.{kind}={_shown(listed)} must be a list of host:port")
            fields = [f"cluster.{kind}[{index}]" for index in range(len(listed))]
            checked[kind] = tuple(map(_checked_address, fields, listed))
            for field, address in zip(fields, checked[kind], strict=True):
                if address in taken:
                    raise UserError(
                        f"{field}={address!r} is also the address of {taken[address]}; every role needs its own "
                        "host and port"
                    )
                taken[address] = field
        kinds = {kind: checked[kind] for kind in ROLE_TYPES if checked.get(kind)}
        if len(kinds.get("chief", ())) > 1:
            raise UserError(
                f"cluster.chief lists {len(kinds['chief'])} addresses; list one, and the others under worker"
            )
        if "chief" not in kinds and "worker" not in kinds:
            raise UserError("cluster lists no worker; add worker = ['host:port']")
        object.__setattr__(self, "addresses", kinds)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """What a TOML or JSON file says, by its ending: the types at its top, or in a table named `cluster`."""
        path = Path(path)
        load: Callable[[str], Any] | None = {".toml": tomllib.loads, ".json": json.loads}.get(path.suffix)
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--spec {path} cannot be read: {error}") from None
        if load is None:
            raise UserError(f"--spec {path}: its name must end in .toml or .json")
        try:
            table = load(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"--spec {path} is not {path.suffix[1:].upper()}: {error}") from None
        if not isinstance(table, dict):
            raise UserError(
                f"--spec {path} must be a table from types ({', '.join(ROLE_TYPES)}) to lists of host:port"
            )
        try:
            return cls(table.get("cluster", table))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    @classmethod
    def from_tf_config(cls, text: str) -> tuple[Self, ClusterRole]:
        """The cluster that a value of TF_CONFIG describes, and which of its roles this process is."""
        try:
            table = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{TF_CONFIG} is not JSON ({error}): {_shown(text)}") from None
        if not isinstance(table, dict):
            raise UserError(f"{TF_CONFIG}={_shown(text)} must be an object with cluster and task")
        for key in ("cluster", "task"):
            if key not in table:
                raise UserError(
                    f"{TF_CONFIG} has no {key}: it must be like "
                    '{"cluster": {"worker": ["host:port"]}, "task": {"type": "worker", "index": 0}}'
                )
        try:
            spec = cls(table["cluster"])
            task = table["task"]
            if not isinstance(task, dict):
                raise UserError(f'task={_shown(task)} must be like {{"type": "worker", "index": 0}}')
            for key in ("type", "index"):
                if key not in task:
                    raise UserError(f"task has no {key}; it needs type and index")
            index = task["index"]
            # Some operators write it as a string.
            index = int(index) if isinstance(index, str) and index.isdecimal() else index
            return spec, spec.role(task["type"], index)
        except UserError as error:
            raise UserError(f"{TF_CONFIG}: {error}") from None

    def role(self, kind: str, index: int) -> ClusterRole:
        """The role of that type and index, UserError where there is none; an evaluator need not be listed."""
        if kind not in ROLE_TYPES:
            raise UserError(
                f"task.type={_shown(kind)} is not a type of role; {nearest(str(kind), ROLE_TYPES)}"
            )
        if type(index) is not int or index < 0:
            raise UserError(f"task.index={_shown(index)} must be an integer of at least 0")
        listed = self.addresses.get(kind, ())
        if kind == "evaluator" and not listed and index == 0:
            return ClusterRole(kind, index)
        if not listed:
            raise UserError(
                f"task.type={kind}: the cluster lists no {kind}, only {', '.join(self.addresses)}; add its address to "
                "the cluster, or use another type"
            )
        if index >= len(listed):
            raise UserError(
                f"task.index={index}: the cluster lists {len(listed)} of type {kind}, numbered from 0 to "
                f"{len(listed) - 1}"
            )
        return ClusterRole(kind, index)

    @property
    def leader(self) -> ClusterRole:
        return ClusterRole("chief" if "chief" in self.addresses else "worker", 0)

    def roles(self, *kinds: str) -> tuple[ClusterRole, ...]:
        """Those of these types, in the order that the types are given in; without any, all that are listed."""
        return tuple(
            ClusterRole(kind, index)
            for kind in kinds or ROLE_TYPES
            for index in range(len(self.addresses.get(kind, ())))
        )

    @property
    def ranked(self) -> tuple[ClusterRole, ...]:
        """Those who take part, by rank: the chief, who leads, or works where there are no servers; workers; servers."""
        return self.roles("chief", "worker", "ps")

    def rank(self, role: ClusterRole) -> int:
        if role.type == "evaluator":
            raise UserError(EVALUATOR)
        return self.ranked.index(role)

    def address(self, role: ClusterRole) -> str:
        """Where a role listens, as `host:port`; empty for an evaluator that is not listed."""
        listed = self.addresses.get(role.type, ())
        return listed[role.index] if role.index < len(listed) else ""

    def __str__(self) -> str:
        return ", ".join(f"{len(listed)} {kind}" for kind, listed in self.addresses.items())


def _checked_address(field: str, address: Any) -> str:
    if not isinstance(address, str) or not address:
        raise UserError(f"{field}={_shown(address)} must be an address like host:2222")
    host, colon, port = address.rpartition(":")
    if not colon:
        raise UserError(f"{field}={_shown(address)} has no port; write {printable(address, 60)}:2222")
    if not host:
        raise UserError(f"{field}={_shown(address)} has no host; write the one at which others can reach it")
    if "://" in host or any(one in host for one in "/ \t@[]") or not host.isascii() or ":" in host:
        raise UserError(
            f"{field}={_shown(address)}: {_shown(host)} is not a host name or IPv4 address; write host:port"
        )
    if not port.isdecimal() or not port.isascii():
        raise UserError(f"{field}={_shown(address)}: the port {_shown(port)} is not a number")
    if not 1 <= int(port) <= _MOST_PORT:
        raise UserError(
            f"{field}={_shown(address)}: the port must be between 1 and {_MOST_PORT}; 0 is not allowed, "
            "because others must know the port"
        )
    return f"{host.lower()}:{int(port)}"


def _shown(value: Any) -> str:
    return printable(repr(value), 80)


_Resolve = Callable[[str], str]  # resolves a host name to its IPv4 address; OSError if the name is unknown


def check_hosts(spec: ClusterSpec, role: ClusterRole, resolve: _Resolve = socket.gethostbyname) -> None:
    """UserError if this role's host name resolves to loopback here while other roles are on other hosts."""
    address = spec.address(role)
    host, field = address.rpartition(":")[0], f"cluster.{role.type}[{role.index}]={address!r}"
    others = [spec.address(other).rpartition(":")[0] for other in spec.roles()]
    if is_loopback(host) or all(other == host for other in others):
        return
    try:
        found = resolve(host)
    except OSError as error:
        raise UserError(
            f"{field}: this host does not know the name {host!r} ({error}); write an address that others can reach"
        ) from None
    if is_loopback(found):
        raise UserError(
            f"{field}: {host!r} is {found} on this host, where others cannot reach it; write its address in the "
            f"network, or correct {host!r} in /etc/hosts"
        )


def listening_at(address: str, resolve: _Resolve = socket.gethostbyname) -> str:
    """What to bind, as a hub writes it, to be reached at `host:port`; all addresses if no interface has that one."""
    host, _, port = address.rpartition(":")
    if is_loopback(host):
        return f"tcp:{address}"
    found = resolve(host)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((found, 0))
        except OSError:
            found = "0.0.0.0"
    return f"tcp:{found}:{port}"
