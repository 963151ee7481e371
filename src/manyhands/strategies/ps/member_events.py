"""The events and actions of `ps_membership`, besides those that all memberships have."""

from __future__ import annotations

from typing import NamedTuple

from manyhands.places.place import AddWorker, RemoveWorker
from manyhands.strategies.common.membership import (
    Died,
    Fail,
    KillMember,
    MemberJoined,
    MemberSilent,
    StartWorker,
)
from manyhands.strategies.ps.client_core import Reason
from manyhands.strategies.ps.ps_messages import Concluded, Installed, View

# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Progressed(NamedTuple):
    """A worker has reached this clock."""

    member: int
    clock: int


class Rejoin(NamedTuple):
    """A worker learned that another member holds its slot, and requests a new one."""

    member: int


class SlotFinished(NamedTuple):
    """A worker has left its slot: everything is done (FINISHED), or the slot was removed (RETIRED)."""

    member: int
    reason: Reason


class Left(NamedTuple):
    """After the end: a server has handed over these shards."""

    member: int
    shards: tuple[int, ...]


_OfMember = MemberJoined | Died | MemberSilent | Progressed | Rejoin | SlotFinished | Left
PsEvent = _OfMember | Installed | Concluded | AddWorker | RemoveWorker


# ── actions ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Publish(NamedTuple):
    """Send this view to every server and worker that has joined."""

    view: View


class StartServer(NamedTuple):
    """Start a server process under this number."""

    member: int


class Assign(NamedTuple):
    """Tell the worker known as `member` that it is now `as_member` and works in `slot`, as if newly started."""

    member: int
    as_member: int
    slot: int


class ShardLost(NamedTuple):
    """No replica of this shard is left: `member` is its primary in the next view, and must restore a snapshot."""

    shard: int
    member: int


class Recovered(NamedTuple):
    """A loss is repaired: `what` is `slot 3` or `every shard`, `member` is the replacement."""

    what: str
    member: int


class Over(NamedTuple):
    """Every active slot has finished and every shard has a primary: have the servers hand over these shards.

    Issued again when a server died before its handover and its shards are served again: what the servers that had
    to follow it handed over before no longer counts.
    """

    shards: tuple[int, ...]


PsAction = Publish | StartServer | StartWorker | Assign | KillMember | ShardLost | Recovered | Fail | Over
