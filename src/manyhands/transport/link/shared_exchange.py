"""Messages to and from several processes of one host, all carried at once by the thread that waits for them.

A link by itself writes what its ring has room for and leaves the rest to a thread, which needs the interpreter's lock
whenever the ring was full. A thread that is to send and to receive anyway needs no other: one compiled loop fills the
rings and empties the others (`byte_ring.carry`), straight from and into the tensors. The bytes on the links are the
same, so a peer may exchange in the one way or the other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Self

import numpy as np
import torch

from manyhands.transport.link import byte_ring
from manyhands.transport.link.interface import HEADER_BYTES, Closed, Link, Message, PeerDied, TimedOut
from manyhands.transport.link.queued import SLICE_NS
from manyhands.transport.link.shared_link import SharedLink

_PAYLOAD, _DONE = slice(3, 6), 5  # of a row: address, bytes and how many of them are done


class SharedExchange:
    """A message to each of some peers and one from each of some, over links of this host; made by `begin`.

    `go_on` until all is done, and in any case `end`: by one thread, which does nothing else on these links meanwhile.
    """

    def __init__(
        self,
        links: Mapping[int, SharedLink],
        sends: Mapping[int, Message],
        receives: Mapping[int, torch.Tensor],
    ) -> None:
        self._links, self._sends, self._receives = links, sends, receives
        self.peer = next(iter(links))  # who is waited for, or sent what is refused
        self._table = np.zeros((len(sends) + len(receives), byte_ring.ROW_BYTES // 8), np.int64)
        self._rows = [*sends, *receives]  # whose they are
        self._announced = False
        self.received: dict[int, Message] = {}  # from the end on
        for row, (peer, message) in zip(self._table, sends.items(), strict=False):
            assert message.payload is not None, "only large messages are worth it"
            row[:3] = links[peer].rings[0], links[peer].begin_send(message), HEADER_BYTES
            row[_PAYLOAD] = message.payload.data_ptr(), message.payload_bytes, 0
        for row, peer in zip(self._table[len(sends) :], receives, strict=True):
            row[0] = links[peer].rings[1]
            row[_PAYLOAD] = links[peer].header_address, HEADER_BYTES, 0

    @classmethod
    def begin(
        cls, links: Mapping[int, Link], sends: Mapping[int, Message], receives: Mapping[int, torch.Tensor]
    ) -> Self | None:
        """None where a link is of another kind, or has something else to finish first."""
        used: dict[int, SharedLink] = {}
        for peer in dict.fromkeys((*sends, *receives)):
            link = links.get(peer)
            if not isinstance(link, SharedLink) or not link.is_between:
                return None
            used[peer] = link
        return cls(used, sends, receives) if used else None

    @property
    def moved(self) -> int:
        """Bytes so far, out and in."""
        return int(self._table[:, _DONE].sum())

    def go_on(self, timeout_s: float) -> TimedOut | Closed | PeerDied | None:
        """Carry what can be carried, at most for `timeout_s`; None once all is done, else how it is with `peer`."""
        began_ns = now_ns = time.monotonic_ns()
        deadline_ns = began_ns + int(timeout_s * 1e9)
        while now_ns < deadline_ns:
            with ExitStack() as stack:
                for peer, link in self._links.items():
                    stack.enter_context(link.held())
                    if link.is_closed:
                        self.peer = peer
                        return Closed()
                while self._carry(min(deadline_ns, now_ns + SLICE_NS)):
                    if self._announced:
                        return None
                    if not self._announce():
                        return Closed()
                for peer in self._left():
                    gone, self.peer = self._links[peer].peer_end(), peer
                    # What the peer sent before it left may have arrived after the last look.
                    if gone is not None and not (self._announced and self._carry(0)):
                        return gone
            now_ns = time.monotonic_ns()
        return TimedOut((now_ns - began_ns) / 1e9)

    def end(self) -> None:
        """Let the links know what was carried: they go on with what was not, and with what comes next."""
        for row, (peer, message) in zip(self._table, self._sends.items(), strict=False):
            self._links[peer].end_send(message, int(row[_DONE]))
        for row, (peer, space) in zip(self._table[len(self._sends) :], self._receives.items(), strict=True):
            received = self._links[peer].end_receive(space, int(row[_DONE]))
            if received is not None:
                self.received[peer] = received

    def _carry(self, until_ns: int) -> bool:
        spins = min(link.spins for link in self._links.values()) // len(self._rows)  # each looks at all rows
        counts = len(self._sends), len(self._receives)
        return bool(byte_ring.carry(self._table.ctypes.data, *counts, self._announced, until_ns, spins))

    def _announce(self) -> bool:
        """All headers are here: the payloads go where they announce; False where `peer` has said goodbye."""
        for row, (peer, space) in zip(self._table[len(self._sends) :], self._receives.items(), strict=True):
            self.peer = peer
            room = self._links[peer].announced(space)
            if room is None:
                return False
            row[_PAYLOAD] = *room, 0
        self._announced = True
        return True

    def _left(self) -> list[int]:
        """Of whom something is still to come, and then for whom something is still to leave."""
        left = self._table[:, 2] + self._table[:, 4] > self._table[:, _DONE]
        reads = range(len(self._sends), len(self._rows))
        return [self._rows[row] for row in (*reads, *range(len(self._sends))) if left[row]]
