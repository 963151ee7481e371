"""The liveness rule of every connection, and of ranks on other hosts. No I/O: datagrams and times in, verdicts out.

Every peer sends something at least every `heartbeat_s`, so no input for `silence_s` means that its process is gone,
frozen or cut off. A process that did not poll for a while (a long computation) has read nothing either: the input
waits unread. After such a gap each peer has `heartbeat_s` more, once, before it is given up.
docs/internals/liveness.md names the states and who drives this rule.

Between hosts the heartbeats are datagrams:

    | magic 8 | token 16 | kind 4 | rank 4 | count 8 | progress 8 | blamed 8 |      one datagram, 56 bytes

Every rank sends every rank of another host a heartbeat twice a second, which a slow link can delay behind data. So data
that arrives from a host excuses its ranks, unless heartbeats of another rank of that host arrive: the route works. A
rank that was never heard is not judged: a firewall may drop datagrams. A rank that gives up another reports it to all
others, the one given up included: after a cut in one direction that one still receives everything and would not know. A
rank that has missed the same one for a while agrees. The token, which rejects unknown peers and datagrams of other
jobs, is sent in the clear, like everything that Gloo sends: the hosts need a trusted network.
"""

from __future__ import annotations

import hmac
import os
import struct
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from manyhands.errors import UserError

K = TypeVar("K", bound=Hashable)
_CALLED: Final = 6
SILENT_AFTER_S: Final = 5.0
"""After how long without a heartbeat a process counts as lost, on one host and over a connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessTimes:
    """How often to send heartbeats, when a peer counts as lost, and how long a pending connection may stay so."""

    heartbeat_s: float = 0.5
    silence_s: float = SILENT_AFTER_S
    handshake_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "silence_s", "handshake_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise UserError(f"{name}={value} must be a finite number above 0")
        if self.silence_s < 2 * self.heartbeat_s:
            raise UserError(
                f"silence_s={self.silence_s} must be at least twice heartbeat_s={self.heartbeat_s}"
            )


class LivenessMonitor(Generic[K]):
    """The deadline of each peer for its next heartbeat."""

    def __init__(self, times: LivenessTimes, now_s: float) -> None:
        self._times = times
        self._looked_s = now_s
        self.next_look_s = now_s + times.heartbeat_s / 2  # when to call `look` again, at the latest
        self._until_s: dict[K, float] = {}
        self._pending: set[K] = set()
        self._spared: set[K] = set()

    def arrived(self, peer: K, now_s: float, *, waits: bool = False) -> None:
        """Add a pending connection; only `heard` extends its deadline. One that this end dialled `waits` longer."""
        self._pending.add(peer)
        self._until_s[peer] = now_s + self._times.handshake_s * (_CALLED if waits else 1)

    def heard(self, peer: K, now_s: float) -> None:
        """Note input from a peer, which is known from now on at least."""
        self._until_s[peer] = now_s + self._times.silence_s
        self._pending.discard(peer)
        self._spared.discard(peer)

    def left(self, peer: K) -> None:
        self._until_s.pop(peer, None)
        self._pending.discard(peer)
        self._spared.discard(peer)

    def look(self, now_s: float) -> list[tuple[K, str]]:
        """The peers to give up now, and why; all input that has arrived must have been read before."""
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        self.next_look_s = now_s + self._times.heartbeat_s / 2
        lost: list[tuple[K, str]] = []
        for peer, until_s in self._until_s.items():
            if now_s < until_s:
                continue
            if gap_s >= self._times.silence_s / 2 and peer not in self._spared:
                self._spared.add(peer)
                self._until_s[peer] = now_s + self._times.heartbeat_s
            elif peer in self._pending:
                lost.append((peer, "did not identify itself in time"))
            else:
                silence_s = self._times.silence_s
                lost.append((peer, f"nothing received for {silence_s:g} s, not even a heartbeat"))
        return lost


BETWEEN_HOSTS: Final = LivenessTimes(heartbeat_s=0.5, silence_s=4.0)
"""So that a silent rank is named within five seconds, as on one host."""

FRAME: Final = struct.Struct("<8s16sIIQQq")
COUNT_OFFSET: Final = 32
PROGRESS_OFFSET: Final = 40
_MAGIC: Final = b"mhbeat\x00\x01"
_TOKEN_BYTES: Final = 16
_UNHEARD_S: Final = 30.0


class RendezvousStore(Protocol):
    """What ranks need of a store in which they find each other: torch's stores have it, and so does the leader's."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if its value is as expected, or if it is absent and nothing is expected; return the result."""

    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def set(self, key: str, value: str, /) -> None: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...


class HeartbeatKind(IntEnum):
    """What a datagram says."""

    HEARTBEAT = 1
    GOODBYE = 2
    GIVEN_UP = 3


class PeerLost(NamedTuple):
    """A rank of another host that is waited for in vain, and why."""

    rank: int
    sentence: str


class PeerLiveness:
    """What one rank knows of the ranks of other hosts; `hosts` describes where each of them is."""

    def __init__(self, rank: int, hosts: Mapping[int, str], secret: bytes, now_s: float) -> None:
        self._rank = rank
        self._hosts = hosts
        self._secret = secret
        self._liveness: LivenessMonitor[int] = LivenessMonitor(BETWEEN_HOSTS, now_s)
        self._began_s = now_s
        self._heard_s: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._progress: dict[int, int] = {}
        self._gone: set[int] = set()
        self._reported_unheard = False

    @property
    def next_look_s(self) -> float:
        return self._liveness.next_look_s

    def frame(
        self, to: int, kind: HeartbeatKind, count: int = 0, progress: int = 0, blamed: int = -1
    ) -> bytes:
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
                sentence = f"rank {rank} on {self._hosts[rank]}"
                where = f" on {self._hosts[blamed]}" if blamed in self._hosts else ""
                sentence += (
                    f" no longer receives anything from rank {blamed}, but still sends to it: the network is cut in "
                    "the direction from here to there"
                    if blamed == self._rank
                    else f" has left: it no longer receives anything from rank {blamed}{where}"
                )
                return PeerLost(rank=rank, sentence=sentence)
        return None

    def left(self, rank: int) -> None:
        self._gone.add(rank)
        self._liveness.left(rank)

    def suspects(self, now_s: float) -> dict[int, str]:
        """The ranks unheard for half the time that leads to a verdict, with their hosts."""
        return {
            rank: self._hosts[rank]
            for rank, heard_s in self._heard_s.items()
            if rank not in self._gone and now_s - heard_s > BETWEEN_HOSTS.silence_s / 2
        }

    def data_came(self, host: str, at_s: float, now_s: float) -> None:
        """Data from `host` arrived at `at_s`: its ranks are excused until then, if none of its heartbeats arrive."""
        ranks = [rank for rank, where in self._hosts.items() if where == host and rank in self._heard_s]
        if any(now_s - self._heard_s[rank] < BETWEEN_HOSTS.silence_s / 2 for rank in ranks):
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
            sentence=f"rank {rank} on {self._hosts[rank]} fell silent: neither a heartbeat nor data from it for "
            f"{seconds:.1f} s, last received in exchange {self._progress[rank]}; it was stopped or its host is down, "
            "or the network in between is cut",
        )

    def unheard(self, now_s: float) -> tuple[int, ...]:
        """The ranks that were never heard though there was time; reported once."""
        missing = tuple(rank for rank in self._hosts if rank not in self._heard_s and rank not in self._gone)
        if self._reported_unheard or not missing or now_s - self._began_s < _UNHEARD_S:
            return ()
        self._reported_unheard = True
        return missing

    def _token(self, sender: int, receiver: int) -> bytes:
        return hmac.digest(self._secret, b"%d>%d" % (sender, receiver), "sha256")[:_TOKEN_BYTES]


class Alarm:
    """Reports the first lost rank that a monitor has found; `mark` gets the number of each collective, for monitors."""

    def __init__(self, mark: Callable[[int], None] = lambda _call: None) -> None:
        self.mark = mark
        self._rung = threading.Event()
        self._lost: tuple[int, str] | None = None
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def on_ring(self, act: Callable[[], None]) -> None:
        """Call `act` in the thread that raises the alarm, at once if it was raised: for waits that cannot poll."""
        with self._lock:
            if self._lost is None:
                self._listeners.append(act)
                return
        act()

    def ring(self, rank: int, sentence: str) -> None:
        """Raise the alarm: rank `rank` is lost, for this reason."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = rank, sentence
            listeners, self._listeners = self._listeners, []
        self._rung.set()
        for act in listeners:
            act()

    def lost(self, wait_s: float = 0.0) -> tuple[int, str] | None:
        """The lost rank and the reason, waiting up to `wait_s` for it; None if no rank was lost."""
        if wait_s > 0:
            self._rung.wait(wait_s)
        return self._lost


class Holder(Protocol):
    """Something with sockets, which a child closes without a goodbye."""

    def let_go_in_child(self) -> None: ...


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
forget_in_children = _holders.add  # have a `Holder` let go in every child that is forked from now on


def _let_go() -> None:
    for holder in list(_holders):
        holder.let_go_in_child()


os.register_at_fork(after_in_child=_let_go)
