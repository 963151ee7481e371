"""What the links have in common that queue what their medium does not accept at once: counting, sending, closing.

    send ──Outgoing──► the medium (a ring, a connection) ──Incoming──► receive

A medium is two functions, one that writes and one that reads; see `outgoing.Write` and `incoming.Read`.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import TYPE_CHECKING

from manyhands.transport.link.forks import forget_in_children
from manyhands.transport.link.interface import (
    Closed,
    FlushOutcome,
    Full,
    Link,
    LinkCounters,
    PeerDied,
    Queued,
    Received,
    ReceiveOutcome,
    SendOutcome,
    check_size,
)
from manyhands.transport.link.message import Header, Message

if TYPE_CHECKING:
    import torch

    from manyhands.transport.link.incoming import Incoming
    from manyhands.transport.link.outgoing import Outgoing

__all__ = ["QueuedLink"]


class QueuedLink(Link):
    """A link whose medium is the subclass's; `max_payload_bytes` bounds what may be sent and announced."""

    _outgoing: Outgoing
    _incoming: Incoming

    def __init__(self, peer: str, max_payload_bytes: int) -> None:
        self.peer = peer
        self.counters = LinkCounters()
        self._max_payload_bytes = max_payload_bytes
        self._gone: Closed | PeerDied | None = None
        self._closed = False
        self._receiving = threading.Lock()
        self._leaving = threading.Lock()
        forget_in_children(self)

    def send(self, message: Message) -> SendOutcome:
        """Give the medium what it takes, queue the rest; see `Link.send`."""
        counters = self.counters
        header = Header.of(message, counters.messages_sent)
        num_bytes = header.payload_bytes
        check_size(num_bytes, self._max_payload_bytes, self.peer)
        outcome = self._outgoing.send(header.encode(), message.payload, num_bytes)
        if isinstance(outcome, Queued):
            if isinstance(self._gone, PeerDied):  # found out by trying
                return self._gone
            counters.messages_sent += 1
            counters.bytes_sent += num_bytes
        elif isinstance(outcome, Full):
            counters.full_count += 1
        return outcome

    def receive(self, timeout_s: float, into: torch.Tensor | None = None) -> ReceiveOutcome:
        """Take the next message out of the medium; see `Link.receive`."""
        with self._receiving:
            if self._closed:
                return Closed()
            outcome = self._incoming.receive(timeout_s, into)
        if isinstance(outcome, Received):
            self.counters.messages_received += 1
            self.counters.bytes_received += outcome.message.payload_bytes
        return outcome

    def flush(self, timeout_s: float) -> FlushOutcome:
        """Wait until the medium has every queued byte; see `Link.flush`."""
        return self._outgoing.flush(timeout_s)

    def close(self) -> None:
        """Say goodbye if nothing is still queued, stop the thread if there is one; see `Link.close`."""
        self._leave(silently=False)

    def abandon(self) -> None:
        """Close without a goodbye, as a crash would: the peer sees PeerDied."""
        self._leave(silently=True)

    def let_go_in_child(self) -> None:
        """Close a parent's end in its forked child (a data loader's, say): it would hide its death."""
        if not self._closed:
            self._closed = True
            self._let_go()

    def _leave(self, *, silently: bool) -> None:
        with self._leaving:
            if self._closed:
                return
            self._closed = True
            complete = self._outgoing.close()
            if not silently:
                self._say_goodbye(complete)
            self._wake()
            with self._receiving:
                self._release()

    @abstractmethod
    def _say_goodbye(self, complete: bool) -> None:
        """Tell the peer that this was all, or, where not all of it is `complete`, that the rest is lost."""

    def _wake(self) -> None:
        """Have a receive in another thread return, if it does not by itself."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of the medium; nobody receives any more."""

    @abstractmethod
    def _let_go(self) -> None:
        """Close, in a child, what would hide the death of its parent."""
