"""The messages between the members of a parameter-server run and its launcher.

Workers and servers talk to each other in `strategies.ps.ps_messages`; these messages use the control channel that
every process of a run has with its launcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from manyhands.places.local.control import TypedNotes
from manyhands.strategies.ps.client_core import Reason
from manyhands.strategies.ps.ps_messages import Concluded, Installed, View

__all__ = [
    "ORDERS",
    "REPORTS",
    "Evaluated",
    "Finish",
    "LeaveShards",
    "LeftShard",
    "Notice",
    "PlaceGiven",
    "PlaceLost",
    "RestoreShard",
    "ServerListens",
    "ShardsLeft",
    "ShardsWelcomed",
    "StepComputed",
    "StepSkipped",
    "ViewPublished",
    "WorkerLeft",
    "WorkerReady",
]

# ── a member reports ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """A worker is ready to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerListens:
    """A server accepts connections at this address."""

    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsWelcomed:
    """Every shard of this view has welcomed the worker."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComputed:
    """A worker has computed the gradient of its part of a batch, with this loss."""

    clock: int
    batch: int
    part: int
    parts: int
    loss: float
    share: float
    """The part's share of the batch."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSkipped:
    """A worker's clock advanced without a gradient."""

    clock: int
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The metrics before batch `step`."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceLost:
    """Another member holds the worker's slot; the worker stands by."""

    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft:
    """A worker has left its slot."""

    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftShard:
    """A shard at the end of a run, and the member that served it last."""

    shard: int
    member: int
    staleness: tuple[tuple[int, int], ...]
    """(staleness, number of updates) pairs, ascending."""
    nbytes: int
    sha256: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsLeft:
    """A server has handed over its shards to the launcher."""

    shards: tuple[LeftShard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A notice for the user; `ends_recording` if a file of records stops here."""

    sentence: str
    ends_recording: bool = False


REPORTS = TypedNotes(
    WorkerReady,
    ServerListens,
    ShardsWelcomed,
    StepComputed,
    StepSkipped,
    Evaluated,
    PlaceLost,
    WorkerLeft,
    ShardsLeft,
    Notice,
    Installed,
    Concluded,
)

# ── the launcher tells ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewPublished:
    """A view, with its servers' addresses and their roles in events, by member."""

    view: View
    addresses: Mapping[int, str]
    roles: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceGiven:
    """A standby worker gets this slot, under a new member number."""

    slot: int
    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreShard:
    """Serve this shard from its newest snapshot."""

    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveShards:
    """Training is over: hand over those of these shards that are served here, and report it."""

    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The launcher has everything: exit."""


ORDERS = TypedNotes(ViewPublished, PlaceGiven, RestoreShard, LeaveShards, Finish)
