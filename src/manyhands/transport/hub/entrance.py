"""The listening sockets of a hub, and the admission of pending connections."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Iterator
from typing import Final, Generic

from manyhands.transport.hub import addresses
from manyhands.transport.hub.pending_connections import K, Newcomers, Tally
from manyhands.transport.link.secure import Security

__all__ = ["Entrance"]

_ACCEPTED_PER_POLL: Final = 32  # then the existing connections are served
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Entrance(Generic[K]):
    """The listening sockets in an epoll object; `newcomers` are the pending connections, `away` counts the rejected
    ones.
    """

    def __init__(self, epoll: select.epoll, security: Security) -> None:
        self._epoll = epoll
        self._security = security
        self._listening: dict[int, socket.socket] = {}
        self._rests = self._lacks_descriptors = False
        self.newcomers: Newcomers[K] = Newcomers()
        self.rejections = Tally()

    def __contains__(self, descriptor: object) -> bool:
        return descriptor in self._listening

    def listen(self, address: str) -> str:
        """Open a listening socket; return the address at which others reach it."""
        listening, reached_at = addresses.listen(address, self._security)
        self._listening[listening.fileno()] = listening
        self._epoll.register(listening, select.EPOLLIN)
        return reached_at

    def accept(self, descriptor: int, now_s: float) -> Iterator[socket.socket]:
        """Accept pending connections from a listening socket, up to a fair share.

        Without capacity, or without a free descriptor, they stay in the kernel's backlog until `wake`.
        """
        for _ in range(_ACCEPTED_PER_POLL):
            if not self.newcomers.has_room(now_s):
                self._watch(0)
                return
            try:
                end, _ = self._listening[descriptor].accept()
            except OSError as error:  # nobody is waiting any more
                if error.errno in _NO_DESCRIPTORS:
                    self._watch(0)
                    self._lacks_descriptors = True
                return
            if addresses.same_user(end):
                end.setblocking(False)
                yield end
            else:
                end.close()
                self.rejections.add("a process of another user", None)

    def wake(self) -> K | None:
        """Listen again if that was suspended; return the connection to close, so that the next one gets a
        descriptor.
        """
        if not self._rests:
            return None
        self._watch(select.EPOLLIN)
        lacked, self._lacks_descriptors = self._lacks_descriptors, False
        return self.newcomers.oldest() if lacked else None

    def close(self) -> None:
        """Close the listening sockets; idempotent."""
        for listening in self._listening.values():
            listening.close()
        self._listening.clear()

    def _watch(self, mask: int) -> None:
        self._rests = mask == 0
        for listening in self._listening.values():
            self._epoll.modify(listening, mask)
