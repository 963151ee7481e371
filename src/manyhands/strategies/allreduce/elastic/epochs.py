"""What the members of one epoch have in common, at one of them: memory of one host, or links between any hosts.

ready ──► view ──► open ──► hand_over (who has the state) ─┬─► collective ──► close
                            take      (who is new)         ┘

The memory of an epoch is created by the launcher. Members start before the epochs that they will be in, so they cannot
inherit an epoch's descriptors: these come as packets of a `SOCK_SEQPACKET` pair, a few names as JSON and a descriptor
for each (SCM_RIGHTS). Nothing has a name in a file system, and what no process holds any more is freed.

The state that a donor passes on has the form of a checkpoint: raw tensors (safetensors), and JSON for the rest. A new
member continues from it as a resumed run continues from a checkpoint; no disk is involved.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.data.store.checkpoint import Loaded
from manyhands.data.store.state_tree import flatten, unflatten
from manyhands.data.store.tensorfile import encode_tensors, read_tensors
from manyhands.engine.worker_resources import Resources
from manyhands.errors import Aborted, ManyhandsError, PeerTimeout
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles
from manyhands.strategies.allreduce.elastic.elastic_messages import EpochView, MemberReady
from manyhands.strategies.allreduce.elastic.member_control import MemberLine
from manyhands.strategies.allreduce.exchange import collective_for
from manyhands.strategies.allreduce.strategy import AllReduce
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.strategy import Strategy
from manyhands.transport.link.interface import Link
from manyhands.transport.link.mesh import Mesh, mesh_kind

__all__ = [
    "Epoch",
    "EpochFiles",
    "Epochs",
    "SharedEpochs",
    "State",
    "restore_buffers",
    "send_files",
    "state_tree",
    "write_file",
]

_BUFFERS = "buffers that no checkpoint has"
_STATE_FILES = ("state tensors", "state tree")
"""The names of the memory files in which a donor leaves its state."""

_MOST_IN_A_PACKET = 128  # the kernel's limit is 253
_PACKET_BYTES = 64 * 2**10


State = Callable[[], Mapping[str, Any]]
"""Returns a `state_tree`."""


class Epoch(ABC):
    """One member's end of one epoch; a wait for a lost member raises `epoch_collective.LOST`."""

    @abstractmethod
    def hand_over(self, state: State | None) -> None:
        """Collective among members that are not fresh, if some are: the donor passes its `state`, the others None."""

    @abstractmethod
    def take(self) -> Loaded:
        """On a fresh member: wait for the donor's state."""

    @abstractmethod
    def collective(self, strategy: AllReduce) -> tuple[Collective, Callable[[], None] | None]:
        """Collective, once: return the strategy's collective, and what `ElasticCollective` confirms by."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; idempotent."""


class Epochs(ABC):
    """Opens one member's epochs one after the other; a context manager."""

    @abstractmethod
    def ready(self, member: int) -> MemberReady:
        """Return the message that asks for a seat."""

    @abstractmethod
    def open(self, view: EpochView, line: MemberLine) -> Epoch:
        """Collective: enter this epoch; raises `epoch_collective.LOST` if a member is lost before all are in."""

    @abstractmethod
    def close(self) -> None:
        """Release what opening epochs needs; no epoch is opened afterwards."""


class SharedEpochs(Epochs):
    """Epochs on one host, whose memory the launcher sends over a Unix socket; owns the socket."""

    def __init__(self, files: socket.socket, timeout_s: float) -> None:
        self._files, self._timeout_s = files, timeout_s

    def ready(self, member: int) -> MemberReady:
        """Return the message that asks for a seat; all members are on one host."""
        return MemberReady(member=member)

    def open(self, view: EpochView, line: MemberLine) -> Epoch:
        """Receive the memory, which the launcher sent before the view."""
        return _SharedEpoch(
            receive_files(self._files, view.epoch, self._timeout_s), view, line.member, self._timeout_s
        )

    def close(self) -> None:
        """Close the socket."""
        self._files.close()


class _SharedEpoch(Epoch):
    def __init__(self, files: dict[str, int], view: EpochView, member: int, timeout_s: float) -> None:
        self._files = files
        self._timeout_s = timeout_s
        self._group = SharedGroup(
            control=files.pop("control"),
            arena=files.pop("arena"),
            rank=view.rank_of(member),
            world=len(view.seats),
            timeout_s=timeout_s,
            roles=[seat.member for seat in view.seats],
        )

    def hand_over(self, state: State | None) -> None:
        if state is not None:
            write_state(*self._state_files, state())
        self._group.barrier()

    def take(self) -> Loaded:
        self._group.barrier()
        return read_state(*self._state_files)

    def collective(self, strategy: AllReduce) -> tuple[Collective, Callable[[], None] | None]:
        _close_all(self._files.pop(name) for name in _STATE_FILES if name in self._files)
        group = self._group
        resources = Resources(
            rank=group.rank,
            world=group.world,
            timeout_s=self._timeout_s,
            group=lambda: group,
            links=lambda: self._links(strategy),
        )
        return collective_for(strategy, resources), group.barrier if strategy.facts.uses_links else None

    def close(self) -> None:
        self._group.close()
        files, self._files = self._files, {}
        _close_all(files.values())

    def _links(self, strategy: AllReduce) -> Mapping[int, Link]:
        kind = mesh_kind(network=strategy.uses_network)
        ends = {
            peer: [self._files.pop(f"link {peer} {part}") for part in kind.parts]
            for peer in range(self._group.world)
            if peer != self._group.rank
        }
        return kind.attach(self._group.rank, ends)

    @property
    def _state_files(self) -> tuple[int, int]:
        tensors, tree = (self._files[name] for name in _STATE_FILES)
        return tensors, tree


# ── the memory of an epoch ────────────────────────────────────────────────────────────────────────────────────────────


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
            for name in _STATE_FILES if with_state else ():
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
            _close_all(found.values())
            raise PeerTimeout(
                f"the launcher has not sent the memory of epoch {epoch} for {timeout_s:g} s", -1
            )
        head, descriptors = _receive(connection)
        if head["epoch"] != epoch:
            _close_all(descriptors)
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


def _close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors that are not needed."""
    for descriptor in descriptors:
        os.close(descriptor)


# ── the state of the run ──────────────────────────────────────────────────────────────────────────────────────────────


def state_tree(model: nn.Module, optimizer: Optimizer, step: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state after `step` steps; its tensors are those of the model and the optimizer, not copies."""
    state = model.state_dict()
    passing = {name: buffer for name, buffer in model.named_buffers() if name not in state}
    return {
        "step": step,
        "model": dict(state),
        "optimizer": optimizer.state_dict(),
        "extra": {**extra, _BUFFERS: passing},
    }


def write_state(tensors: int, tree: int, state: Mapping[str, Any]) -> None:
    """Write a `state_tree` into two memory files."""
    flat, meta = flatten(dict(state))
    write_file(tensors, encode_tensors(flat))
    write_file(tree, [json.dumps(meta, allow_nan=False).encode()])


def read_state(tensors: int, tree: int) -> Loaded:
    """Read what `write_state` wrote, in the form that a checkpoint is loaded in."""
    try:
        meta = json.loads(_opened_again(tree).read_bytes())
        return Loaded.of(unflatten(read_tensors(_opened_again(tensors)), meta))
    except (ValueError, KeyError, TypeError) as error:
        raise ManyhandsError(f"the state that another worker left cannot be read: {error}") from error


def _opened_again(descriptor: int) -> Path:
    """Open the same memory with a separate file offset: members that read at once share the descriptor's."""
    return Path(f"/proc/self/fd/{descriptor}")


@torch.no_grad()
def restore_buffers(model: nn.Module, loaded: Loaded) -> None:
    """Load the buffers that a model keeps out of its `state_dict`."""
    buffers = dict(model.named_buffers())
    for name, value in loaded.extra.get(_BUFFERS, {}).items():
        buffers[name].copy_(value)


def write_file(descriptor: int, chunks: Iterable[bytes]) -> None:
    """Overwrite a memory file from its beginning."""
    os.ftruncate(descriptor, 0)
    offset = 0
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            written = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[written:], offset + written
