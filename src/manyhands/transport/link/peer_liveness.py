"""Who on other hosts is still there, in pure code: datagrams and times in, verdicts out.

    | magic 8 | token 16 | kind 4 | rank 4 | count 8 | progress 8 | blamed 8 |      one datagram, 56 bytes

Every rank sends every rank of another host a beat twice a second. A rank whose beats stop is silent: its process is
stopped or gone, or the way from it is cut. Beats can also be stuck behind data on a slow link. So data that arrives
from a host excuses its ranks, unless beats of another rank of that host come through, which then prove the way.

Nobody is judged who was never heard: where a firewall lets no datagrams pass, nothing is claimed. Who leaves in peace
says goodbye. Who gives up another says so to all the others, the one given up included: after a cut in one direction it
hears everything and would not know. Whoever has missed that one for a while as well names it, too.

The token keeps out strangers and datagrams of other jobs. It travels in the clear, as all that Gloo sends: hosts need a
network that is trusted.
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
    """What one rank knows of the ranks of other hosts; `hosts` says in words where each of those is."""

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
        """Take in what arrived; what is not of this group is dropped without a word."""
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
                if blamed in self.suspects(now_s):  # it is missed here as well, a moment less long
                    self.left(blamed)
                    return self._silent(blamed, now_s)
                self.left(rank)
                return PeerLost(rank=rank, sentence=self._gave_up(rank, blamed))
        return None

    def left(self, rank: int) -> None:
        """It is no longer waited for."""
        self._gone.add(rank)
        self._liveness.left(rank)

    def suspects(self, now_s: float) -> dict[int, str]:
        """Who has not been heard for half the time that leads to a verdict, and where it is."""
        return {
            rank: self._hosts[rank]
            for rank, heard_s in self._heard_s.items()
            if rank not in self._gone and now_s - heard_s > self._silence.silence_s / 2
        }

    def data_came(self, host: str, at_s: float, now_s: float) -> None:
        """Data from `host` arrived at `at_s`: its ranks are excused until then, if none of its beats come through."""
        ranks = [rank for rank, where in self._hosts.items() if where == host and rank in self._heard_s]
        if any(now_s - self._heard_s[rank] < self._silence.silence_s / 2 for rank in ranks):
            return
        for rank in ranks:
            if rank not in self._gone and at_s > self._heard_s[rank]:
                self._liveness.heard(rank, at_s)

    def excuse(self, rank: int, now_s: float) -> None:
        """It is known to live, though its beats do not come."""
        if rank in self._heard_s and rank not in self._gone:
            self._liveness.heard(rank, now_s)

    def look(self, now_s: float) -> PeerLost | None:
        """The first rank that has been silent for too long; all that has arrived must have been handled before."""
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
        """The ranks that were never heard though there was time; told once."""
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
