"""The receiving half of a link: a read that can stop at any byte and continue later."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Final

import torch

from manyhands.transport.link.interface import Closed, PeerDied, ReceiveOutcome, TimedOut, hand_out, room_for
from manyhands.transport.link.message import HEADER_BYTES, FrameKind, Header
from manyhands.transport.link.outgoing import SLICE_NS
from manyhands.transport.messages import ProtocolError

__all__ = ["Incoming", "Read"]

Read = Callable[[int, int, int, int, int], int]
"""(address, bytes, done, until, spins): fill memory after its first `done` bytes until that moment in nanoseconds, 0
for no wait, looking so often before it sleeps; how many bytes are there now."""

_LOOK_EVERY_NS: Final = 500_000
_PART_EVERY_NS: Final = 10_000_000
_NEVER_NS: Final = 1 << 63
_GOODBYE: Final = FrameKind.GOODBYE  # looked at with every message, and enumerations are slow


class Incoming:
    """One direction of a link at its consumer, which takes the bytes with `read`.

    The part of an unfinished message that was read is kept here, so a deadline in the middle of one loses nothing.
    With `part`, a consumer that runs on the same core as its producer moves to another core.
    """

    def __init__(
        self,
        read: Read,
        max_payload_bytes: int,
        peer_end: Callable[[], Closed | PeerDied | None],
        peer: str,
        spins: int = 0,
        part: Callable[[], bool] | None = None,
    ) -> None:
        self._read = read
        self._max_payload_bytes = max_payload_bytes
        self._peer_end = peer_end
        self._peer = peer
        self._bytes = bytearray(HEADER_BYTES)
        self._bytes_address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        self._header: Header | None = None
        self._target: torch.Tensor | None = None
        self._done = 0  # bytes read of the header, and then of the payload
        self._sequence = 0
        self._spins = spins
        self._part = part
        self._part_ns = 0 if part is not None else _NEVER_NS

    def receive(self, timeout_s: float, into: torch.Tensor | None) -> ReceiveOutcome:
        """Read the next message, or continue the one that a deadline interrupted."""
        start_ns = time.monotonic_ns()
        deadline_ns = start_ns + int(timeout_s * 1e9)
        if start_ns >= self._part_ns:
            self._leave_core(start_ns)
        header = self._header
        if header is None:
            outcome = self._fill(self._bytes_address, HEADER_BYTES, start_ns, deadline_ns)
            if outcome is not None:
                return outcome
            header = self._decode()
        if header.frame is _GOODBYE:
            return Closed()
        if self._target is None:
            self._target = room_for(header, into, self._peer)
        elif into is not None:
            room_for(header, into, self._peer)  # what does not fit is refused before the rest is read
        if self._target is not None and header.payload_bytes:
            outcome = self._fill(self._target.data_ptr(), header.payload_bytes, start_ns, deadline_ns)
            if outcome is not None:
                return outcome
        received = hand_out(header, self._target, into, self._peer)
        self._header, self._target, self._done = None, None, 0
        self._sequence += 1
        return received

    def _leave_core(self, now_ns: int) -> None:
        """Leave this core if the peer runs on it too, unless that was tried just now."""
        assert self._part is not None, "else it is never tried"
        self._part_ns = now_ns + (_PART_EVERY_NS if self._part() else _LOOK_EVERY_NS)

    def _decode(self) -> Header:
        header = Header.decode(self._bytes, self._max_payload_bytes)
        if header.sequence != self._sequence:
            raise ProtocolError(
                "sequence", f"{self._peer} sent number {header.sequence}, number {self._sequence} was due"
            )
        self._header, self._done = header, 0
        return header

    def _fill(
        self, address: int, num_bytes: int, start_ns: int, deadline_ns: int
    ) -> TimedOut | Closed | PeerDied | None:
        """Read on until `num_bytes` are there (None), the deadline passes or the peer is found gone."""
        if self._done == num_bytes:
            return None
        now_ns = start_ns
        while True:
            until_ns = min(deadline_ns, now_ns + SLICE_NS) if deadline_ns > now_ns else 0
            self._done = self._read(address, num_bytes, self._done, until_ns, self._spins)
            if self._done == num_bytes:
                return None
            end = self._peer_end()
            if end is not None:
                # What the peer sent before it left may have arrived after the last look.
                self._done = self._read(address, num_bytes, self._done, 0, 0)
                return None if self._done == num_bytes else end
            now_ns = time.monotonic_ns()
            if now_ns >= deadline_ns:
                return TimedOut((now_ns - start_ns) / 1e9)
