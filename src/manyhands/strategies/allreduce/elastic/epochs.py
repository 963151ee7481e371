"""What the members of one epoch have in common, at one of them: memory of one host, or links between any hosts.

ready ──► view ──► open ──► hand_over (who has the state) ─┬─► collective ──► close
                            take      (who is new)         ┘

The memory of an epoch is created by the launcher. Members start before the epochs that they will be in, so they cannot
inherit an epoch's descriptors: these come as packets of a `SOCK_SEQPACKET` pair, a few names as JSON and a descriptor
for each (SCM_RIGHTS). Nothing has a name in a file system, and what no process holds any more is freed. The state that
a donor passes on has the form of a checkpoint: raw tensors (safetensors), and JSON for the rest.
"""

from __future__ import annotations

import array
import hmac
import json
import os
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.data.store.checkpoint import Loaded
from manyhands.data.store.state_tree import flatten, pack_tree, unflatten, unpack_tree
from manyhands.data.store.tensorfile import encode_tensors, read_tensors
from manyhands.engine.exchange import Resources
from manyhands.errors import Aborted, ManyhandsError, PeerTimeout
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles
from manyhands.places.external.links import connect_all, no_group
from manyhands.places.local.host import host_identity
from manyhands.places.local.rendezvous import hosts_of
from manyhands.strategies.allreduce.elastic.elastic_membership import EpochView, MemberReady
from manyhands.strategies.allreduce.elastic.member_control import MemberLine
from manyhands.strategies.allreduce.exchange import collective_across_hosts, collective_for
from manyhands.strategies.allreduce.strategy import AllReduce
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.strategies.common.collectives.mailbox import Mailbox
from manyhands.strategy import Strategy
from manyhands.transport.link.interface import Link
from manyhands.transport.link.mesh import Mesh, mesh_kind
from manyhands.transport.link.tcp import TcpLink
from manyhands.transport.liveness import SILENT_AFTER_S, Alarm
from manyhands.transport.security import Security

_BUFFERS = "buffers that no checkpoint has"
_STATE_FILES = ("state tensors", "state tree")  # the memory files in which a donor leaves its state
_MOST_IN_A_PACKET = 128  # the kernel's limit is 253
_PACKET_BYTES = 64 * 2**10


class Epoch(ABC):
    """One member's end of one epoch; a wait for a lost member raises `exchange.LOST`."""

    @abstractmethod
    def hand_over(self, state: Mapping[str, Any] | None) -> None:
        """Collective among members that are not fresh, if some are: the donor passes a `state_tree`, others None."""

    @abstractmethod
    def take(self) -> Loaded: ...  # on a fresh member: wait for the donor's state
    @abstractmethod
    def collective(self, strategy: AllReduce) -> tuple[Collective, Callable[[], None] | None]:
        """Collective, once: return the strategy's collective, and what `ElasticCollective` confirms by."""

    @abstractmethod
    def close(self) -> None: ...  # release all resources; idempotent


class Epochs(ABC):
    """Opens one member's epochs one after the other; a context manager."""

    @abstractmethod
    def ready(self, member: int) -> MemberReady: ...  # the message that asks for a seat
    @abstractmethod
    def open(self, view: EpochView, line: MemberLine) -> Epoch:
        """Collective: enter this epoch; raises `exchange.LOST` if a member is lost before all are in."""

    @abstractmethod
    def close(self) -> None: ...  # release what opening epochs needs; no epoch is opened afterwards


class SharedEpochs(Epochs):
    """Epochs on one host, whose memory the launcher sends over a Unix socket; owns the socket."""

    def __init__(self, files: socket.socket, timeout_s: float) -> None:
        self._files, self._timeout_s = files, timeout_s

    def ready(self, member: int) -> MemberReady:
        return MemberReady(member=member)

    def open(self, view: EpochView, line: MemberLine) -> Epoch:
        files = receive_files(self._files, view.epoch, self._timeout_s)  # they were sent before the view
        return _SharedEpoch(files, view, line.member, self._timeout_s)

    def close(self) -> None:
        self._files.close()


class _SharedEpoch(Epoch):
    def __init__(self, files: dict[str, int], view: EpochView, member: int, timeout_s: float) -> None:
        self._files, self._timeout_s = files, timeout_s
        self._group = SharedGroup(
            control=files.pop("control"),
            arena=files.pop("arena"),
            rank=view.rank_of(member),
            world=len(view.seats),
            timeout_s=timeout_s,
            roles=[seat.member for seat in view.seats],
        )

    def hand_over(self, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            tensors, tree = (self._files[name] for name in _STATE_FILES)
            write_state(tensors, tree, state)
        self._group.barrier()

    def take(self) -> Loaded:
        self._group.barrier()
        return read_state(*(self._files[name] for name in _STATE_FILES))

    def collective(self, strategy: AllReduce) -> tuple[Collective, Callable[[], None] | None]:
        _close_all(self._files.pop(name) for name in _STATE_FILES if name in self._files)
        group, rank, world = self._group, self._group.rank, self._group.world

        def links() -> Mapping[int, Link]:
            kind = mesh_kind(network=strategy.uses_network)
            ends = {
                peer: [self._files.pop(f"link {peer} {part}") for part in kind.parts]
                for peer in range(world)
                if peer != rank
            }
            return kind.attach(rank, ends)

        wait_s = self._timeout_s
        resources = Resources(rank=rank, world=world, timeout_s=wait_s, group=lambda: group, links=links)
        return collective_for(strategy, resources), group.barrier if strategy.facts.uses_links else None

    def close(self) -> None:
        self._group.close()
        files, self._files = self._files, {}
        _close_all(files.values())


class EpochFiles:
    """What the members of one epoch share, as held by the launcher; `close` is idempotent.

    `of` returns what each member gets. `passed` is closed when all have theirs: a link's end that stayed open here
    would hide a death. The control word of `group` stays open, for `abort`.
    """

    def __init__(self, world: int, strategy: Strategy, *, with_state: bool) -> None:
        self._state: dict[str, int] = {}
        self._mesh: Mesh | None = None
        self.group = SharedGroupFiles.create(world)
        with ExitStack() as stack:
            stack.callback(self.group.close)
            passed = stack.enter_context(ExitStack())
            if strategy.facts.uses_links and world > 1:
                self._mesh = passed.enter_context(mesh_kind(network=strategy.uses_network)(world))
            for name in _STATE_FILES if with_state else ():
                self._state[name] = os.memfd_create(f"manyhands:{name}", os.MFD_CLOEXEC)
                passed.callback(os.close, self._state[name])
            self.passed = passed.pop_all()
            stack.pop_all()

    def of(self, rank: int) -> dict[str, int]:
        """Return the descriptors for the member of `rank`, by name; they remain owned by this object."""
        files = {"control": self.group.control, "arena": self.group.arena, **self._state}
        if self._mesh is not None:
            for peer, ends in self._mesh.descriptors(rank).items():
                for part, descriptor in zip(self._mesh.parts, ends, strict=True):
                    files[f"link {peer} {part}"] = descriptor
        return files

    def close(self) -> None:
        self.passed.close()
        self.group.close()


def send_files(connection: socket.socket, epoch: int, files: Mapping[str, int]) -> None:
    """Send descriptors without waiting; BlockingIOError if the receiver reads nothing, OSError if it is gone."""
    names = list(files)
    for first in range(0, len(names), _MOST_IN_A_PACKET):
        some = names[first : first + _MOST_IN_A_PACKET]
        more = first + len(some) < len(names)
        head = json.dumps({"epoch": epoch, "names": some, "more": more}).encode()
        rights = array.array("i", [files[name] for name in some])
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        connection.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], flags)


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
                f"the launcher did not send the memory of epoch {epoch} within {timeout_s:g} s", -1
            )
        room = socket.CMSG_SPACE(4 * _MOST_IN_A_PACKET)
        data, control, _, _ = connection.recvmsg(_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise Aborted("the launcher is gone")
        descriptors = array.array("i")
        for level, kind, content in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        head = json.loads(data)
        if head["epoch"] != epoch:
            _close_all(descriptors)
            continue
        found |= dict(zip(head["names"], descriptors, strict=True))
        if not head["more"]:
            return found


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


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
    flat, meta = flatten(dict(state))
    write_file(tensors, encode_tensors(flat))
    write_file(tree, [json.dumps(meta, allow_nan=False).encode()])


def read_state(tensors: int, tree: int) -> Loaded:
    # Opened again, with separate file offsets: members that read at once share those of the descriptors.
    flat, meta = (Path(f"/proc/self/fd/{descriptor}") for descriptor in (tensors, tree))
    try:
        return Loaded.of(unflatten(read_tensors(flat), json.loads(meta.read_bytes())))
    except (ValueError, KeyError, TypeError) as error:
        raise ManyhandsError(f"cannot read the state from another worker: {error}") from error


@torch.no_grad()
def restore_buffers(model: nn.Module, loaded: Loaded) -> None:
    """Load the buffers that a model keeps out of its `state_dict`."""
    buffers = dict(model.named_buffers())
    for name, value in loaded.extra.get(_BUFFERS, {}).items():
        buffers[name].copy_(value)


def write_file(descriptor: int, chunks: Iterable[bytes]) -> None:
    os.ftruncate(descriptor, 0)
    offset = 0
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            written = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[written:], offset + written


# Epochs of members on any hosts: a link between every two members, opened anew for each epoch.
#
# A member listens at one address for its lifetime and announces it when it is ready; the view of an epoch passes it to
# all. The proof that two members exchange when they connect is valid for one epoch only, so a late connection from an
# earlier epoch is rejected. Links between hosts are protected as the run is; those within a host never leave it.

_BACKLOG: Final = 128
_STATE: Final = 64  # the kind of message that a state comes in: none of a collective's
_PIECE_BYTES: Final = 16 << 20
_MOST_STATE: Final = 1 << 40
_BLAME_S: Final = 2 * SILENT_AFTER_S
"""After a link failed to open: how long to wait for the notice that its peer is lost."""


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """How other members reach a member."""

    address: str  # the address of this host as the others know it
    token: bytes  # the secret of the run
    security: Security


class LinkedEpochs(Epochs):
    """One member's listener, and its links in each epoch; UserError if it may not listen at the address."""

    def __init__(self, wiring: Wiring, timeout_s: float) -> None:
        wiring.security.check_address(wiring.address)
        self._wiring, self._timeout_s = wiring, timeout_s
        self._listener = socket.create_server((wiring.address, 0), backlog=_BACKLOG)

    def ready(self, member: int) -> MemberReady:
        port = self._listener.getsockname()[1]
        return MemberReady(member=member, host=host_identity(), address=f"{self._wiring.address}:{port}")

    def open(self, view: EpochView, line: MemberLine) -> Epoch:
        """Collective: open a link to every other member.

        Raises ManyhandsError if a link cannot be opened although no member is lost, as behind a firewall.
        """
        rank, wiring, plain = view.rank_of(line.member), self._wiring, Security.loopback()
        far = {
            peer: plain if seat.host == view.seats[rank].host else wiring.security
            for peer, seat in enumerate(view.seats)
            if peer != rank
        }

        def still() -> None:
            if line.is_over(view.epoch):
                raise Aborted(f"epoch {view.epoch} ended before it started")

        try:
            links = connect_all(
                rank,
                far,
                self._listener,
                lambda peer: view.seats[peer].address,
                token=hmac.digest(wiring.token, b"epoch %d" % view.epoch, "sha256"),
                deadline=time.monotonic() + self._timeout_s,
                name_of=lambda peer: f"worker {view.seats[peer].slot}",
                still=still,
            )
        except Aborted:
            raise
        except (ManyhandsError, OSError) as error:
            if line.is_over(view.epoch, _BLAME_S):
                raise Aborted(str(error)) from error
            raise
        return _LinkedEpoch(view, line, links, self._timeout_s)

    def close(self) -> None:
        self._listener.close()


class _LinkedEpoch(Epoch):
    def __init__(
        self, view: EpochView, line: MemberLine, links: Mapping[int, TcpLink], timeout_s: float
    ) -> None:
        self._view, self._links, self._timeout_s = view, links, timeout_s
        self._rank = view.rank_of(line.member)
        self._alarm = Alarm()
        line.on_leave(view.epoch, lambda: self._alarm.ring(-1, f"epoch {view.epoch} is over"))

    def hand_over(self, state: Mapping[str, Any] | None) -> None:
        """The donor sends its state to each fresh member directly."""
        if state is not None:
            data = torch.frombuffer(bytearray(b"".join(pack_tree(state))), dtype=torch.uint8)
            pieces = (torch.tensor([len(data)]), *torch.split(data, _PIECE_BYTES))
            fresh = [rank for rank, seat in enumerate(self._view.seats) if seat.fresh]
            mailbox = self._mailbox()
            mailbox.flush(mailbox.post([(rank, piece) for piece in pieces for rank in fresh]), fresh)

    def take(self) -> Loaded:
        assert self._view.donor is not None, "a fresh member takes the state of another one"
        donor, mailbox, length = self._view.rank_of(self._view.donor), self._mailbox(), torch.zeros(1).long()
        mailbox.receive(donor, length, [])
        count = int(length)
        if not 0 < count <= _MOST_STATE:
            raise ManyhandsError(f"worker {self._view.donor} offers an invalid state of {count} bytes")
        data = torch.empty(count, dtype=torch.uint8)
        for piece in torch.split(data, _PIECE_BYTES):
            mailbox.receive(donor, piece, [])
        return Loaded.of(unpack_tree(data.numpy().tobytes()))

    def collective(self, strategy: AllReduce) -> tuple[Collective, Callable[[], None] | None]:
        hosts = hosts_of([seat.host for seat in self._view.seats])
        chosen = strategy.across_hosts(hosts)
        assert isinstance(chosen, AllReduce), "an all-reduce is one on any hosts"
        resources = Resources(
            rank=self._rank,
            world=len(self._view.seats),
            timeout_s=self._timeout_s,
            group=no_group,
            links=lambda: self._links,
            hosts=hosts,
            alarm=self._alarm,
        )
        gradients, _ = collective_across_hosts(chosen, resources)
        return gradients, gradients.executor.barrier

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _mailbox(self) -> Mailbox:
        mailbox = Mailbox(self._rank, self._links, self._timeout_s, self._alarm)
        mailbox.enter("the state of the run", _STATE, 0, 0)
        return mailbox
