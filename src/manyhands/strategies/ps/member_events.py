"""What happens to the members of a run, and what the launcher is to do about it: the words of `membership`."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.strategies.ps.client_core import Reason
from manyhands.strategies.ps.ps_messages import Concluded, Installed, View

__all__ = [
    "AddSlot",
    "Assign",
    "Died",
    "Fail",
    "KillMember",
    "Left",
    "MemberJoined",
    "MemberSilent",
    "MembershipAction",
    "MembershipEvent",
    "Over",
    "Progressed",
    "Publish",
    "Recovered",
    "Rejoin",
    "RemoveSlot",
    "ShardLost",
    "SlotFinished",
    "StartServer",
    "StartWorker",
]


# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberJoined:
    """A process that was asked for has started, and can be spoken to."""

    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """A member's process has ended; `error` is the type of the exception that ended it, "" where it was killed."""

    member: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSilent:
    """A member's heart has not beaten for too long: paused, starved, or cut off."""

    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """A worker has come to this clock."""

    member: int
    clock: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejoin:
    """A worker was told that its slot is somebody else's, and asks for a place."""

    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFinished:
    """A worker has left its slot: everything is done (FINISHED), or the slot was removed (RETIRED)."""

    member: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Once all is over: a server has left these shards where they are wanted at the end."""

    member: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddSlot:
    """One more worker, please."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveSlot:
    """This slot is to be retired."""

    slot: int


MembershipEvent = (
    MemberJoined
    | Died
    | MemberSilent
    | Installed
    | Concluded
    | Progressed
    | Rejoin
    | SlotFinished
    | Left
    | AddSlot
    | RemoveSlot
)


# ── actions ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Send this view to every server and worker that has joined."""

    view: View


@dataclass(frozen=True, slots=True, kw_only=True)
class StartServer:
    """Start a server process under this number."""

    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start a worker process under this number, for this slot; an Assign follows when it has joined."""

    member: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """Tell the worker known as `member` that it is `as_member` from now on, and works in `slot`, as if new."""

    member: int
    as_member: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillMember:
    """Kill this member's process; its Died follows."""

    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLost:
    """No replica of this shard is left: `member` is its primary in the next view, and must restore a snapshot."""

    shard: int
    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a death took is there again: `what` is `slot 3` or `every shard`, `member` the one that took it over."""

    what: str
    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The run cannot go on."""

    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """Every active slot has finished, and every shard is there: have the servers leave these shards.

    Said again when a server that had not done so has died and its shards are there again: what servers left that had to
    be followed with it does not count any more.
    """

    shards: tuple[int, ...]


MembershipAction = (
    Publish | StartServer | StartWorker | Assign | KillMember | ShardLost | Recovered | Fail | Over
)
