"""Epochs of members on any hosts: a link between every two members, opened anew for each epoch.

A member listens at one address for its lifetime and announces it when it is ready; the view of an epoch passes it to
all. The proof that two members exchange when they connect is valid for one epoch only, so a late connection from an
earlier epoch is rejected. Links between hosts are protected as the run is; those within a host never leave it.
"""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from manyhands.data.store.checkpoint import Loaded
from manyhands.data.store.state_tree import pack_tree, unpack_tree
from manyhands.engine.worker_resources import Resources
from manyhands.errors import Aborted, ManyhandsError
from manyhands.places.external.links import meet_all
from manyhands.places.external.sharing import no_group
from manyhands.places.local.host import host_identity
from manyhands.places.local.rendezvous import hosts_of
from manyhands.strategies.allreduce.elastic.elastic_messages import EpochView, MemberReady
from manyhands.strategies.allreduce.elastic.epochs import Epoch, Epochs, State
from manyhands.strategies.allreduce.elastic.member_control import MemberLine
from manyhands.strategies.allreduce.exchange import collective_across_hosts
from manyhands.strategies.allreduce.strategy import AllReduce
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.strategies.common.collectives.mailbox import Mailbox
from manyhands.transport.link.tcp import TcpLink
from manyhands.transport.liveness import SILENT_AFTER_S, Alarm
from manyhands.transport.security import Security

__all__ = ["LinkedEpochs", "Wiring"]

_BACKLOG: Final = 128
_STATE: Final = 64  # the kind of message that a state comes in: none of a collective's
_PIECE_BYTES: Final = 16 << 20
_MOST_STATE: Final = 1 << 40
_BLAME_S: Final = 2 * SILENT_AFTER_S
"""After a link failed to open: how long to wait for the notice that its peer is lost."""


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """How other members reach a member."""

    address: str
    """The address of this host as the others know it."""

    token: bytes
    """The secret of the run."""

    security: Security


class LinkedEpochs(Epochs):
    """One member's listener, and its links in each epoch; UserError if it may not listen at the address."""

    def __init__(self, wiring: Wiring, timeout_s: float) -> None:
        wiring.security.check_address(wiring.address)
        self._wiring, self._timeout_s = wiring, timeout_s
        self._listener = socket.create_server((wiring.address, 0), backlog=_BACKLOG)

    def ready(self, member: int) -> MemberReady:
        """Return the message that asks for a seat, with the listening address."""
        port = self._listener.getsockname()[1]
        return MemberReady(member=member, host=host_identity(), address=f"{self._wiring.address}:{port}")

    def open(self, view: EpochView, line: MemberLine) -> Epoch:
        """Collective: open a link to every other member.

        Raises ManyhandsError if a link cannot be opened although no member is lost, as behind a firewall.
        """
        rank = view.rank_of(line.member)
        here, wiring = view.seats[rank].host, self._wiring
        plain = Security.loopback()
        far = {
            peer: plain if seat.host == here else wiring.security
            for peer, seat in enumerate(view.seats)
            if peer != rank
        }

        def still() -> None:
            if line.is_over(view.epoch):
                raise Aborted(f"epoch {view.epoch} is over before it has begun")

        try:
            links = meet_all(
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
        """Stop listening."""
        self._listener.close()


class _LinkedEpoch(Epoch):
    def __init__(
        self, view: EpochView, line: MemberLine, links: Mapping[int, TcpLink], timeout_s: float
    ) -> None:
        self._view, self._links, self._timeout_s = view, links, timeout_s
        self._rank = view.rank_of(line.member)
        self._alarm = Alarm()
        line.on_leave(view.epoch, lambda: self._alarm.ring(-1, f"epoch {view.epoch} is over"))

    def hand_over(self, state: State | None) -> None:
        """The donor sends its state to each fresh member directly."""
        if state is None:
            return
        data = torch.frombuffer(bytearray(b"".join(pack_tree(state()))), dtype=torch.uint8)
        fresh = [rank for rank, seat in enumerate(self._view.seats) if seat.fresh]
        mailbox, length = self._mailbox(), torch.tensor([len(data)])
        letters = [(rank, piece) for piece in (length, *_pieces(data)) for rank in fresh]
        mailbox.flush(mailbox.post(letters), fresh)

    def take(self) -> Loaded:
        assert self._view.donor is not None, "who is new takes the state of somebody"
        donor, mailbox, length = self._view.rank_of(self._view.donor), self._mailbox(), torch.zeros(1).long()
        mailbox.receive(donor, length, [])
        count = int(length)
        if not 0 < count <= _MOST_STATE:
            raise ManyhandsError(f"worker {self._view.donor} offers a state of {count} bytes, which is none")
        data = torch.empty(count, dtype=torch.uint8)
        for piece in _pieces(data):
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
        return gradients, gradients.barrier

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _mailbox(self) -> Mailbox:
        mailbox = Mailbox(self._rank, self._links, self._timeout_s, self._alarm)
        mailbox.enter("the state of the run", _STATE, 0, 0)
        return mailbox


def _pieces(data: torch.Tensor) -> list[torch.Tensor]:
    return [data[begin : begin + _PIECE_BYTES] for begin in range(0, len(data), _PIECE_BYTES)]
