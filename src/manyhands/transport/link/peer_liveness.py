"""Liveness of the ranks on other hosts. Does no I/O: datagrams and times in, verdicts out.

    | magic 8 | token 16 | kind 4 | rank 4 | count 8 | progress 8 | blamed 8 |      one datagram, 56 bytes

Every rank sends every rank of another host a heartbeat twice a second. If a rank's heartbeats stop, its process is
stopped or gone, or the route from it is cut. Heartbeats can also be delayed behind data on a slow link. So data
that arrives from a host excuses its ranks, unless heartbeats of another rank of that host arrive, which proves that
the route works.

A rank that was never heard is not judged: if a firewall drops datagrams, nothing is claimed. A rank that leaves in
good order says goodbye. A rank that gives up another reports it to all others, the one given up included: after a
cut in one direction that one still receives everything and would not know. A rank that has missed the same one for
a while agrees with the verdict.

The token rejects unknown peers and datagrams of other jobs. It is sent in the clear, like everything that Gloo
sends: the hosts need a trusted network.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from manyhands.transport.link.liveness import LivenessMonitor, LivenessTimes

__all__ = [
    "BETWEEN_HOSTS",
    "COUNT_OFFSET",
    "FRAME",
    "PROGRESS_OFFSET",
    "HeartbeatKind",
    "PeerLiveness",
    "PeerLost",
]

BETWEEN_HOSTS: Final = LivenessTimes(heartbeat_s=0.5, silence_s=4.0)
"""So that a silent rank is named within five seconds, as on one host."""

FRAME: Final = struct.Struct("<8s16sIIQQq")
COUNT_OFFSET: Final = 32
PROGRESS_OFFSET: Final = 40
_MAGIC: Final = b"mhbeat\x00\x01"
_TOKEN_BYTES: Final = 16
_UNHEARD_S: Final = 30.0


class HeartbeatKind(IntEnum):
    """What a datagram says."""

    HEARTBEAT = 1
    GOODBYE = 2
    GIVEN_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost:
    """A rank of another host that is waited for in vain, and why."""

    rank: int
    sentence: str


class PeerLiveness:
    """What one rank knows of the ranks of other hosts; `hosts` describes where each of them is."""

    def __init__(self, rank: int, hosts: Mapping[int, str], secret: bytes, now_s: float) -> None:
        self._rank = rank
        self._hosts = hosts
        self._secret = secret
        self._silence = BETWEEN_HOSTS
        self._liveness: LivenessMonitor[int] = LivenessMonitor(self._silence, now_s)
        self._began_s = now_s
        self._heard_s: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._progress: dict[int, int] = {}
        self._gone: set[int] = set()
        self._told_unheard = False

    @property
    def next_look_s(self) -> float:
        """When to call `look`, at the latest."""
        return self._liveness.next_look_s

    def frame(
        self, to: int, kind: HeartbeatKind, count: int = 0, progress: int = 0, blamed: int = -1
    ) -> bytes:
        """What to send to rank `to`."""
        return FRAME.pack(_MAGIC, self._token(self._rank, to), kind, self._rank, count, progress, blamed)

    def handle(self, datagram: bytes, now_s: float) -> PeerLost | None:
        """Handle a datagram; one that is not of this group is dropped silently."""
        if len(datagram) != FRAME.size:
            return None
        magic, token, kind, rank, count, progress, blamed = FRAME.unpack(datagram)
        if magic != _MAGIC or rank not in self._hosts:
            return None
        if not hmac.compare_digest(token, self._token(rank, self._rank)) or rank in self._gone:
            return None
        match kind:
            case HeartbeatKind.HEARTBEAT if count > self._counts.get(rank, -1):
                self._counts[rank], self._progress[rank] = count, progress
                self._heard_s[rank] = now_s
                self._liveness.heard(rank, now_s)
            case HeartbeatKind.GOODBYE:
                self.left(rank)
            case HeartbeatKind.GIVEN_UP:
                if blamed in self.suspects(now_s):  # missed here as well, though for slightly less time
                    self.left(blamed)
                    return self._silent(blamed, now_s)
                self.left(rank)
                return PeerLost(rank=rank, sentence=self._gave_up(rank, blamed))
        return None

    def left(self, rank: int) -> None:
        """Stop monitoring a rank that has left."""
        self._gone.add(rank)
        self._liveness.left(rank)

    def suspects(self, now_s: float) -> dict[int, str]:
        """The ranks unheard for half the time that leads to a verdict, with their hosts."""
        return {
            rank: self._hosts[rank]
            for rank, heard_s in self._heard_s.items()
            if rank not in self._gone and now_s - heard_s > self._silence.silence_s / 2
        }

    def data_came(self, host: str, at_s: float, now_s: float) -> None:
        """Data from `host` arrived at `at_s`: its ranks are excused until then, if none of its heartbeats arrive."""
        ranks = [rank for rank, where in self._hosts.items() if where == host and rank in self._heard_s]
        if any(now_s - self._heard_s[rank] < self._silence.silence_s / 2 for rank in ranks):
            return
        for rank in ranks:
            if rank not in self._gone and at_s > self._heard_s[rank]:
                self._liveness.heard(rank, at_s)

    def excuse(self, rank: int, now_s: float) -> None:
        """Excuse a rank that is known to be alive although its heartbeats do not arrive."""
        if rank in self._heard_s and rank not in self._gone:
            self._liveness.heard(rank, now_s)

    def look(self, now_s: float) -> PeerLost | None:
        """The first rank whose heartbeats have stopped for too long; handle all that has arrived before."""
        for rank, _ in self._liveness.look(now_s):
            self.left(rank)
            return self._silent(rank, now_s)
        return None

    def _silent(self, rank: int, now_s: float) -> PeerLost:
        seconds = now_s - self._heard_s[rank]
        return PeerLost(
            rank=rank,
            sentence=f"rank {rank} on {self._hosts[rank]} fell silent: neither a heartbeat nor data of it for "
            f"{seconds:.1f} s, last heard in exchange {self._progress[rank]}; it was stopped or its host is down, "
            "or the network between is cut",
        )

    def unheard(self, now_s: float) -> tuple[int, ...]:
        """The ranks that were never heard though there was time; reported once."""
        missing = tuple(rank for rank in self._hosts if rank not in self._heard_s and rank not in self._gone)
        if self._told_unheard or not missing or now_s - self._began_s < _UNHEARD_S:
            return ()
        self._told_unheard = True
        return missing

    def _gave_up(self, rank: int, blamed: int) -> str:
        where = f"rank {rank} on {self._hosts[rank]}"
        if blamed == self._rank:
            return (
                f"{where} hears nothing of rank {self._rank} any more, though it is heard here: the network is cut in "
                "the direction from here to there"
            )
        about = f"rank {blamed}" + (f" on {self._hosts[blamed]}" if blamed in self._hosts else "")
        return f"{where} has left: it hears nothing of {about} any more"

    def _token(self, sender: int, receiver: int) -> bytes:
        return hmac.digest(self._secret, b"%d>%d" % (sender, receiver), "sha256")[:_TOKEN_BYTES]
