"""The memory and links of one epoch: created by the launcher, passed to its members over a Unix socket.

Members start before the epochs that they will be in, so they cannot inherit an epoch's descriptors. What is sent is a
packet of a `SOCK_SEQPACKET` pair: a few names as JSON, and a descriptor for each (SCM_RIGHTS). Nothing has a name in
a file system, and what no process holds any more is freed.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from manyhands.errors import Aborted, PeerTimeout
from manyhands.native.group.shared_group import SharedGroupFiles
from manyhands.strategy import Strategy
from manyhands.transport.link.mesh import Mesh, mesh_kind

__all__ = ["STATE_FILES", "EpochFiles", "close_all", "receive_files", "send_files"]

STATE_FILES = ("state tensors", "state tree")
"""The names of the memory files in which a donor leaves its state."""

_MOST_IN_A_PACKET = 128  # the kernel's limit is 253
_PACKET_BYTES = 64 * 2**10


class EpochFiles:
    """What the members of one epoch share, as held by the launcher; `close` is idempotent.

    `of` returns what each member gets. `let_go` is called when all have theirs: a link's end that stayed open here
    would hide a death. The control word stays open, for `abort`.
    """

    def __init__(self, world: int, strategy: Strategy, *, with_state: bool) -> None:
        self._passed = ExitStack()
        self._state: dict[str, int] = {}
        self._mesh: Mesh | None = None
        self._group = SharedGroupFiles.create(world)
        with ExitStack() as stack:
            stack.callback(self._group.close)
            passed = stack.enter_context(ExitStack())
            if strategy.facts.uses_links and world > 1:
                self._mesh = passed.enter_context(mesh_kind(network=strategy.uses_network)(world))
            for name in STATE_FILES if with_state else ():
                self._state[name] = os.memfd_create(f"manyhands:{name}", os.MFD_CLOEXEC)
                passed.callback(os.close, self._state[name])
            self._passed = passed.pop_all()
            stack.pop_all()

    def of(self, rank: int) -> dict[str, int]:
        """Return the descriptors for the member of `rank`, by name; they remain owned by this object."""
        files = {"control": self._group.control, "arena": self._group.arena, **self._state}
        if self._mesh is not None:
            for peer, ends in self._mesh.descriptors(rank).items():
                for part, descriptor in zip(self._mesh.parts, ends, strict=True):
                    files[f"link {peer} {part}"] = descriptor
        return files

    def let_go(self) -> None:
        """Close what members have received; called once all have theirs."""
        self._passed.close()

    def abort(self, rank: int | None) -> None:
        """End every wait in the epoch."""
        self._group.abort(rank)

    def close(self) -> None:
        """Close every descriptor."""
        self._passed.close()
        self._group.close()


def send_files(connection: socket.socket, epoch: int, files: Mapping[str, int]) -> None:
    """Send descriptors without waiting; BlockingIOError if the receiver reads nothing, OSError if it is gone."""
    names = list(files)
    for first in range(0, len(names), _MOST_IN_A_PACKET):
        some = names[first : first + _MOST_IN_A_PACKET]
        more = first + len(some) < len(names)
        head = json.dumps({"epoch": epoch, "names": some, "more": more}).encode()
        rights = array.array("i", [files[name] for name in some])
        connection.sendmsg(
            [head],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)],
            socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL,
        )


def receive_files(connection: socket.socket, epoch: int, timeout_s: float) -> dict[str, int]:
    """Return the descriptors of this epoch, for the caller to close; those of earlier epochs are closed unread.

    Raises PeerTimeout if the launcher has not sent them after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    found: dict[str, int] = {}
    while True:
        readable, _, _ = select.select([connection], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            close_all(found.values())
            raise PeerTimeout(
                f"the launcher has not sent the memory of epoch {epoch} for {timeout_s:g} s", -1
            )
        head, descriptors = _receive(connection)
        if head["epoch"] != epoch:
            close_all(descriptors)
            continue
        found |= dict(zip(head["names"], descriptors, strict=True))
        if not head["more"]:
            return found


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    room = socket.CMSG_SPACE(4 * _MOST_IN_A_PACKET)
    data, control, _, _ = connection.recvmsg(_PACKET_BYTES, room, flags)
    if not data:
        raise Aborted("the launcher is gone")
    descriptors = array.array("i")
    for level, kind, content in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return json.loads(data), descriptors.tolist()


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors that are not needed."""
    for descriptor in descriptors:
        os.close(descriptor)
