"""What the members of a parameter-server run report to its launcher, and what it tells them.

Shards, workers and servers speak with each other in `strategies.ps.ps_messages`; this is the other conversation, over
the control channel that every process of a run has with the one that started it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from manyhands.places.local.notes import TypedNotes
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
    """A worker has what it needs to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerListens:
    """A server can be reached."""

    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsWelcomed:
    """Every shard, as of this view, has welcomed the worker."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComputed:
    """A worker has the gradient of its part of a batch, which has this loss."""

    clock: int
    batch: int
    part: int
    parts: int
    loss: float
    share: float
    """Of the batch that the part is."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSkipped:
    """A worker's clock went on without a gradient."""

    clock: int
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The metrics before batch `step`."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceLost:
    """A worker's slot is held by another; it stands by."""

    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft:
    """A worker has nothing more to do."""

    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftShard:
    """A shard at the end of a run, and who served it last."""

    shard: int
    member: int
    staleness: tuple[tuple[int, int], ...]
    """How many updates were so stale, ascending."""
    nbytes: int
    sha256: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsLeft:
    """A server has left its shards where the launcher finds them."""

    shards: tuple[LeftShard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that the user should know."""

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
    """A view, where its servers listen, and which roles they have in events, by member."""

    view: View
    addresses: Mapping[int, str]
    roles: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceGiven:
    """A worker that stood by has this slot now, under a new number."""

    slot: int
    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreShard:
    """Serve this shard from its newest snapshot."""

    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveShards:
    """All is trained: leave those of these shards that are served here, and say so."""

    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The launcher has everything: end."""


ORDERS = TypedNotes(ViewPublished, PlaceGiven, RestoreShard, LeaveShards, Finish)
