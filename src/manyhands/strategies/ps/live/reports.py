"""The messages between members and launcher, over the control channel that every process has with its launcher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from manyhands.places.local.control import TypedNotes
from manyhands.strategies.ps.client_core import Reason
from manyhands.strategies.ps.ps_messages import Concluded, Installed, View

# ── a member reports ──────────────────────────────────────────────────────────────────────────────────────────────────


class WorkerReady(NamedTuple):
    """A worker is ready to train; others of its host reach it at `address`, if they may share memory."""

    host: str = ""
    address: str = ""


class ServerListens(NamedTuple):
    """A server accepts connections at this address."""

    address: str


class ShardsWelcomed(NamedTuple):
    """Every shard of this view has welcomed the worker."""

    epoch: int


class StepComputed(NamedTuple):
    """A worker has computed the gradient of its part of a batch, with this loss."""

    clock: int
    batch: int
    part: int
    parts: int
    loss: float
    share: float  # the part's share of the batch
    seconds: float
    facts: Mapping[str, Any] | None = None  # where the batch was made by acting


class StepSkipped(NamedTuple):
    """A worker's clock advanced without a gradient."""

    clock: int
    sentence: str


class Evaluated(NamedTuple):
    """The metrics before batch `step`."""

    step: int
    metrics: Mapping[str, float]


class PlaceLost(NamedTuple):
    """Another member holds the worker's slot; the worker stands by."""

    sentence: str


class WorkerLeft(NamedTuple):
    """A worker has left its slot."""

    reason: Reason


class LeftShard(NamedTuple):
    """A shard at the end of a run, and the member that served it last."""

    shard: int
    member: int
    staleness: tuple[tuple[int, int], ...]  # (staleness, number of updates) pairs, ascending
    nbytes: int
    sha256: str
    version: int


class ShardsLeft(NamedTuple):
    """A server has handed over its shards to the launcher."""

    shards: tuple[LeftShard, ...]


class Notice(NamedTuple):
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

# ── the launcher orders ───────────────────────────────────────────────────────────────────────────────────────────────


class ViewPublished(NamedTuple):
    """A view, with its servers' addresses and their roles in events, and where workers are, by member."""

    view: View
    addresses: Mapping[int, str]
    roles: Mapping[int, int]
    workers: Mapping[int, WorkerReady]


class PlaceGiven(NamedTuple):
    """A standby worker gets this slot, under a new member number."""

    slot: int
    member: int


class RestoreShard(NamedTuple):
    """Serve this shard from its newest snapshot."""

    shard: int


class LeaveShards(NamedTuple):
    """Training is over: hand over those of these shards that are served here, and report it."""

    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The launcher has everything: exit."""


ORDERS = TypedNotes(ViewPublished, PlaceGiven, RestoreShard, LeaveShards, Finish)


class LossBook:
    """The history of a run whose batches end in any order: one row per batch, from the parts that workers report.

    A batch or an evaluation that is computed again (by a successor, or after a return to a snapshot) adds no second
    row. `known` are the rows that a resumed run already has.
    """

    def __init__(self, known: Iterable[Mapping[str, Any]] = ()) -> None:
        self._parts: dict[int, dict[int, StepComputed]] = {}
        rows = list(known)
        self._done = {int(row["step"]) - 1 for row in rows if "loss" in row}
        self._evaluated = {int(row["step"]) for row in rows if "metrics" in row}

    def add_evaluation(self, evaluation: Evaluated, at_s: float) -> dict[str, Any] | None:
        if evaluation.step in self._evaluated:
            return None
        self._evaluated.add(evaluation.step)
        return {"step": evaluation.step, "metrics": dict(evaluation.metrics), "at_s": at_s}

    def add(self, part: StepComputed, at_s: float) -> dict[str, Any] | None:
        """Add a report; the batch's row when its last part arrives, else None."""
        batch = part.batch
        if batch in self._done:
            return None
        parts = self._parts.setdefault(batch, {})
        parts[part.part] = part
        if len(parts) < part.parts:
            return None
        del self._parts[batch]
        self._done.add(batch)
        ordered = [parts[number] for number in sorted(parts)]
        return {
            "step": batch + 1,
            "loss": sum(one.loss * one.share for one in ordered),
            "seconds": max(one.seconds for one in ordered),
            "at_s": at_s,
            **(ordered[0].facts or {}),
        }
