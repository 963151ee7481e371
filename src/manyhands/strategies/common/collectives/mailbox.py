"""The links of one rank as the executor uses them: every failure becomes an error that names its peer.

Posting never waits. What a full link refuses is returned and tried again while receiving from others, so
back-pressure cannot deadlock the ranks: a message that is awaited can always be delivered eventually.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NoReturn

import torch

from manyhands.engine.exchange import PeerTraffic, Traffic
from manyhands.errors import ManyhandsError, PeerTimeout, UserError, WorkerFailed
from manyhands.native.wait_sign import LONG_WAIT_S, LongWait
from manyhands.transport.link.interface import (
    Closed,
    Flushed,
    Full,
    Link,
    Message,
    PeerDied,
    Queued,
    Received,
    TimedOut,
)
from manyhands.transport.link.shared_exchange import SharedExchange
from manyhands.transport.liveness import Alarm
from manyhands.transport.messages import ProtocolError

LinkMessage = tuple[int, torch.Tensor | Message]
"""A payload of the present round, or a message, and the rank it goes to; it must not change until it is flushed."""

_RETRY_S: Final = 0.001  # between two tries of a link that is full
_ALARM_SLICE_S: Final = 0.2
_CAUSE_S: Final = 0.75


class Mailbox:
    """Sends to and receives from the peers of `rank`, each wait at most `timeout_s`.

    A message carries its collective (`kind`), its call (`call`) and its round; a message with other values than this
    rank's is rejected. `messages_sent` and `bytes_sent` only grow. An `alarm`, if given, ends every wait, and errors
    blame the worker that it names. `roles` maps ranks to the numbers by which errors and traffic name them.
    """

    def __init__(
        self,
        rank: int,
        links: Mapping[int, Link],
        timeout_s: float,
        alarm: Alarm | None = None,
        roles: Sequence[int] | None = None,
    ) -> None:
        if not timeout_s > 0:
            raise UserError(f"timeout_s={timeout_s}: must be above 0")
        self.messages_sent = self.bytes_sent = 0
        self._rank, self.links, self._timeout_s = rank, links, timeout_s
        self._alarm, self._roles = alarm, roles
        self._slice_s = LONG_WAIT_S if alarm is None else _ALARM_SLICE_S
        self._posts: defaultdict[int, PeerTraffic] = defaultdict(PeerTraffic)
        self._name, self._place = "", (0, 0, 0)

    def enter(self, name: str, kind: int, call: int, round_number: int) -> None:
        """Enter a round: messages belong to it from here on; `name` is used in errors."""
        self._name, self._place = name, (kind, call, round_number)
        if self._alarm is not None:
            self._alarm.mark(call)

    def traffic(self) -> Traffic:
        return Traffic(messages_sent=self.messages_sent, bytes_sent=self.bytes_sent)

    def take_traffic(self) -> Mapping[int, PeerTraffic]:
        posts, self._posts = self._posts, defaultdict(PeerTraffic)
        return {self._role(peer): post for peer, post in posts.items()}

    def post(self, messages: Iterable[LinkMessage]) -> list[LinkMessage]:
        """Send what the links take at once; return the rest in order, to be posted again."""
        refused: list[LinkMessage] = []
        full: set[int] = set()
        for peer, payload in messages:
            if peer in full or not self._send(peer, payload):
                full.add(peer)
                refused.append((peer, payload))
        return refused

    def receive(
        self, source: int, space: torch.Tensor, refused: list[LinkMessage], *, or_less: bool = False
    ) -> tuple[list[LinkMessage], int]:
        """Fill `space` with the next message of `source`, posting meanwhile; it may be shorter with `or_less`.

        Returns what is left to post, and how many bytes came.
        """
        message, refused = self.next(source, space, refused)
        self._check(source, message, space.nbytes, or_less=or_less)
        return refused, message.payload_bytes

    def _check(self, source: int, message: Message, room: int, *, or_less: bool = False) -> None:
        came = message.payload_bytes
        place = (message.kind, message.step, message.tag)
        if place != self._place or not (0 if or_less else room) <= came <= room:
            raise ManyhandsError(  # of another collective, call, round or length: the ranks have diverged
                f"{self._where()}: rank {self._role(source)} sent {came} bytes of (kind, call, round) "
                f"{place}, expected {room} bytes of {self._place}; all ranks must make the same calls "
                "in the same order with buffers of the same length"
            )

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> bool:
        """Send a tensor to each of some peers and fill one from each of some, all at once; False where links cannot."""
        messages = {peer: self._message(payload) for peer, payload in sends.items()}
        exchange = SharedExchange.begin(self.links, messages, receives)
        if exchange is None:
            return False
        for peer, message in messages.items():
            self._count(peer, message)
        try:
            self._go_on(exchange)
        finally:
            exchange.end()
        for peer, message in exchange.received.items():
            self._posts[peer].received_ns = time.monotonic_ns()
            self._check(peer, message, receives[peer].nbytes)
        return True

    def _go_on(self, exchange: SharedExchange) -> None:
        left_s, moved = self._timeout_s, 0
        with LongWait() as wait:
            while True:
                slice_s = min(left_s, self._slice_s)
                try:
                    outcome = exchange.go_on(slice_s)
                except ProtocolError as error:
                    self.refuse(exchange.peer, str(error))
                if outcome is None:
                    return
                if not isinstance(outcome, TimedOut):
                    self._lost(exchange.peer, outcome)
                left_s = self._timeout_s if exchange.moved > moved else left_s - slice_s
                moved = exchange.moved
                self._check_alarm()
                if left_s <= 0:
                    self._late(exchange.peer, "sent nothing or received nothing")
                wait.goes_on(self._role(exchange.peer))

    def next(
        self, source: int, space: torch.Tensor | None, refused: list[LinkMessage]
    ) -> tuple[Message, list[LinkMessage]]:
        """Wait for the next message of `source`, into `space` if given, posting meanwhile what was refused."""
        link = self._link(source)
        left_s = self._timeout_s
        with LongWait() as wait:
            while True:
                slice_s = min(left_s, _RETRY_S if refused else self._slice_s)
                try:
                    outcome = link.receive(slice_s, space)
                except ProtocolError as error:
                    self.refuse(source, str(error))
                if not isinstance(outcome, TimedOut):
                    break
                left_s -= slice_s
                self._check_alarm()
                if left_s <= 0:
                    self._late(source, "sent nothing")
                wait.goes_on(self._role(source))
                refused = self.post(refused)
        if not isinstance(outcome, Received):
            self._lost(source, outcome)
        self._posts[source].received_ns = time.monotonic_ns()
        return outcome.message, refused

    def flush(self, refused: Sequence[LinkMessage], peers: Iterable[int]) -> None:
        """Post what was refused, on whichever link has capacity first, and wait until everything is sent."""
        left_s = self._timeout_s
        while refused and (still := self.post(refused)):
            left_s = self._timeout_s if len(still) < len(refused) else left_s - _RETRY_S
            refused = still
            if left_s <= 0:
                self._late(still[0][0], "received nothing")
            self._flush(still[0][0], _RETRY_S)
        for peer in peers:
            if not self._flush(peer, self._timeout_s):
                self._late(peer, "received nothing")

    def refuse(self, source: int, why: str) -> NoReturn:
        raise ManyhandsError(f"{self._where()}: from rank {self._role(source)}: {why}")

    def _flush(self, peer: int, timeout_s: float) -> bool:
        with LongWait() as wait:
            while True:
                slice_s = min(timeout_s, self._slice_s)
                outcome = self._link(peer).flush(slice_s)
                if isinstance(outcome, Flushed):
                    return True
                if not isinstance(outcome, TimedOut):
                    self._lost(peer, outcome)
                timeout_s -= slice_s
                if timeout_s <= 0:
                    return False
                self._check_alarm()
                wait.goes_on(self._role(peer))

    def _message(self, payload: torch.Tensor) -> Message:
        kind, call, round_number = self._place
        return Message(kind=kind, step=call, tag=round_number, payload=payload)

    def _send(self, peer: int, message: torch.Tensor | Message) -> bool:
        if isinstance(message, torch.Tensor):
            message = self._message(message)
        outcome = self._link(peer).send(message)
        if isinstance(outcome, Full):
            return False
        if not isinstance(outcome, Queued):
            self._lost(peer, outcome)
        self._count(peer, message)
        return True

    def _count(self, peer: int, message: Message) -> None:
        num_bytes = message.payload_bytes
        self.messages_sent += 1
        self.bytes_sent += num_bytes
        post = self._posts[peer]
        post.sent_ns = post.sent_ns or time.monotonic_ns()
        post.messages_sent += 1
        post.bytes_sent += num_bytes

    def _link(self, peer: int) -> Link:
        if peer not in self.links:
            there = sorted(map(self._role, self.links))
            raise UserError(f"{self._where()}: no link to rank {self._role(peer)}, only to {there}")
        return self.links[peer]

    def _late(self, peer: int, what: str) -> NoReturn:
        role = self._role(peer)
        raise PeerTimeout(f"{self._where()}: rank {role} {what} within {self._timeout_s:g} s", role)

    def _check_alarm(self, wait_s: float = 0.0) -> None:
        lost = self._alarm.lost(wait_s) if self._alarm is not None else None
        if lost is not None:
            raise WorkerFailed(f"{self._where()}: {lost[1]}", lost[0])

    def _lost(self, peer: int, outcome: Closed | PeerDied) -> NoReturn:
        self._check_alarm(_CAUSE_S)  # it may have left because of another loss, which the alarm will name
        reason = outcome.reason if isinstance(outcome, PeerDied) else "the link was closed"
        raise WorkerFailed(f"{self._where()}: lost rank {self._role(peer)}: {reason}", self._role(peer))

    def _role(self, rank: int) -> int:
        return rank if self._roles is None else self._roles[rank]

    def _where(self) -> str:
        _, call, round_number = self._place
        return f"rank {self._role(self._rank)}, {self._name}, call {call}, round {round_number}"
