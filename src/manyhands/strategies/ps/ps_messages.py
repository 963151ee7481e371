"""The messages between the roles of a parameter server: frozen values without tensors, sockets or clocks.

    launcher ──View──► everyone          membership: who serves which shard, who holds which slot
    worker ──Hello, Read, Push──► the primary of a shard ──Welcome, Parameters──► worker
    worker ──ReadRows──► the primary of a shard ──RowValues──► worker     tables, once the batch is known
    carrier of a host ──HostPush──► the primary of a shard ──SendAlone──► worker     several pushes, one sum
    lead shard ──Chosen──► other shards  who belongs to a group, where arrival decides
    primary ──Concluded──► launcher      after a restore: everyone has left, and nothing is open here
    primary ──Forward──► backup ──Forwarded──► primary

A **slot** is one worker's place in the run, 0 to n-1; a **member** is one process, numbered in the order in which the
launcher started it, servers and workers alike. A slot passes from a dead member to its successor, whose number is
higher: that number fences the old one. A **clock** counts a slot's updates; (slot, clock) names an update for ever.
A **version** counts a shard's optimizer steps.

Payloads (gradients, parameters, snapshots) travel beside these messages and never inside them: a core decides by what
is here alone. The messages of every step are NamedTuples: creating a frozen dataclass takes three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

LAUNCHER = 0
"""The launcher's number; members count from 1."""

LEAD = 0
"""The shard that decides for all: which slot gets which batch, which updates form a group, when a slot begins."""


class WorkKind(IntEnum):
    """What the lead shard tells a worker to do."""

    TRAIN = 1
    FINISHED = 2  # every batch is done or assigned. (From a shard other than the lead: as far as it knows.)
    RETIRED = 3  # the slot was removed from the run. (From a shard other than the lead: as far as it knows.)
    UNKNOWN = 4  # this shard is not the lead: the lead's answer says
    AHEAD = 5  # the clock that was read for is no longer needed: read for this one


class Work(NamedTuple):
    """Part `part` of `parts` of global batch `batch`, to be pushed as `clock`.

    A `clock` beyond the one that was read for means that those in between are no longer needed, whatever the
    kind.
    """

    kind: WorkKind
    clock: int = 0
    batch: int = 0
    part: int = 0
    parts: int = 1


class Update(NamedTuple):
    """The name of an update."""

    slot: int
    clock: int


# ── membership ────────────────────────────────────────────────────────────────────────────────────────────────────────


class ShardView(NamedTuple):
    """The replicas of a shard; `epoch` grows whenever they change."""

    shard: int
    epoch: int
    primary: int  # the primary's member number; 0 while there is none
    backup: int = 0  # the member that holds, or is about to receive, a copy; 0 for none


class SlotView(NamedTuple):
    """The member in a slot; 0 while its successor is being started."""

    slot: int
    member: int


class View(NamedTuple):
    """The launcher's view of the membership; a higher epoch replaces a lower one."""

    epoch: int
    shards: tuple[ShardView, ...]
    slots: tuple[SlotView, ...]  # the active slots, in order; the number of a removed one is never reused
    retiring: tuple[SlotView, ...] = ()
    """Removed slots: their worker, or a successor, finishes their outstanding updates, until it is told RETIRED."""
    gone: tuple[Update, ...] = ()
    """Slots whose worker has left for good, FINISHED or RETIRED: no update below this clock will be sent.

    Every shard had all of them. One that lacks some was restored from an older snapshot, and no worker is left in
    the slot to tell it so.
    """


# ── a worker and the primary of a shard ───────────────────────────────────────────────────────────────────────────────


class Hello(NamedTuple):
    """Worker to primary, before anything else and again after a change of primary: this member holds this slot.

    Everything of this slot below clock `settled` was settled at this shard as far as the worker knows (0: it is
    new). A shard that has less was restored from an older snapshot, and reports what was lost.
    """

    shard: int
    slot: int
    member: int
    settled: int


class Welcome(NamedTuple):
    """The answer: the lowest clock of this slot that the shard lacks."""

    shard: int
    slot: int
    next_clock: int
    version: int
    arrived: int = 0  # the lowest clock that has not arrived, if later: those between do not count yet


class Read(NamedTuple):
    """Worker to primary: request the parameters for update `clock`; held until the consistency allows the answer.

    With `bare`, the answer comes without its payload: another worker of this host fetches the parameters for both.
    """

    shard: int
    slot: int
    member: int
    clock: int
    bare: bool = False


class Parameters(NamedTuple):
    """The answer, with one consistent version as its payload."""

    shard: int
    slot: int
    clock: int
    version: int
    work: Work
    term: int = 0  # of the shard at this version; a new one begins with each return to a snapshot
    waited_for: int = -1  # the slot whose update the Read waited for; -1 if for none
    bare: bool = False  # the values do not come along, as the Read asked
    ahead: int = 0  # so many bytes of the values came before it, as ValuesAhead


class ValuesAhead(NamedTuple):
    """Primary to worker, with a part of the values from byte `begin` on: perhaps those of the next answer.

    They are sent while the gradients of the step are still arriving. The worker must not use them before Parameters
    of this version say how many bytes count.
    """

    shard: int
    clock: int  # of the Read that they are for
    version: int
    begin: int


class ReadRows(NamedTuple):
    """Worker to primary, once it knows its batch: request the values of table rows for update `clock`.

    The payload names the rows; `whole`, without a payload, means all of them. Never held: what the consistency
    requires has been included since the Read was answered.
    """

    shard: int
    slot: int
    member: int
    clock: int
    whole: bool = False


class RowValues(NamedTuple):
    """The answer, with the rows' values of one version as its payload."""

    shard: int
    slot: int
    clock: int
    version: int


class RowsUnknown(NamedTuple):
    """The answer to a ReadRows or a Push that names row sets which are not known here: send it again with their rows.

    Nothing changed; `names` are SHA-256 in hexadecimal.
    """

    shard: int
    slot: int
    clock: int
    names: tuple[str, ...]


class Push(NamedTuple):
    """Worker to primary, with a gradient as its payload: this slot's update `clock`.

    `read_version` and `read_term` are those of the Parameters it was computed from. `weight` is the gradient's
    share of its batch (it is scaled by that already); `batch`, `part` and `parts` are those of its Work. `skip`
    has no payload: the gradient was not finite, and only the clock advances. `settings`, as JSON, come from a loop of
    the user's own: the optimizer's settings for this step, or with `skip` a checkpoint to load.

    A push is durable, with as many deaths as the run promises to survive, once a Read of a later clock is answered.
    """

    shard: int
    slot: int
    member: int
    clock: int
    read_version: int
    batch: int
    part: int
    parts: int
    weight: float
    skip: bool = False
    read_term: int = 0
    rows_version: int = -1  # the version at which table rows were read here; -1 if none were
    settings: str = ""
    carrier: int = -1
    """The slot whose push brings this gradient within a sum (`HostPush`); -1 if this one does."""
    pulls: bool = False  # a push-pull: the Read of the next clock is in this message
    bare: bool = False  # that Read's


class HostPush(NamedTuple):
    """Carrier to primary, with the sum of the parts' gradients as its payload: the pushes of one host's workers.

    The first part is the carrier's; the others name its slot as their `carrier`. All parts have one clock. They count
    together or not at all: nobody could take a part out of the sum.
    """

    shard: int
    parts: tuple[Push, ...]


class SendAlone(NamedTuple):
    """Primary to a worker: the HostPush with its update does not count here; send the update by itself."""

    shard: int
    slot: int
    clock: int


class CopyShard(NamedTuple):
    """Worker to primary, in a loop of the user's own: write the shard's state to this folder, as of `step`."""

    shard: int
    folder: str
    step: int


class Refused(NamedTuple):
    """The push is refused (its gradient is not finite); nothing changed, the clock still waits for it."""

    shard: int
    slot: int
    clock: int
    reason: str


class Fenced(NamedTuple):
    """The slot is held by a later member: the receiver stops, and requests a new slot from the launcher."""

    shard: int
    slot: int
    holder: int


class NotPrimary(NamedTuple):
    """This server does not serve the shard (any more, or yet); wait for a view with another primary."""

    shard: int
    epoch: int


# ── between servers ───────────────────────────────────────────────────────────────────────────────────────────────────


class Generation(NamedTuple):
    """From clock `start` on these slots are active; `base` is the first batch that they distribute."""

    start: int
    base: int
    slots: tuple[int, ...]


class Chosen(NamedTuple):
    """Lead to the primary of another shard: decision `number`, either a group of updates or a new slot table.

    As far as the lead knows, the shard has stored everything up to `kept`: a shard that has not was restored from
    an older snapshot. A lead that was itself restored continues in a higher `term`. A message whose `number` is
    `kept` decides nothing: it greets a new primary. A primary that is behind `kept` continues from there, and the
    same message releases the updates of the decisions it has lost (`freely`).
    """

    shard: int
    term: int
    number: int
    kept: int
    generations: tuple[Generation, ...]
    """The complete slot table, so that a shard that missed one catches up; empty while the lead asks the others."""
    step: int  # the clock whose group this is, where groups go by clock; all before it are decided
    updates: tuple[Update, ...] | None = None  # the group, in the order of its sum; None: no group
    freely: bool = False
    """No group: these updates and all before them in their slots become single steps, as they arrive.

    They were chosen in a term that the lead or this shard has lost since.
    """
    epoch: int = 0  # the lead shard's epoch, as the sender knows it: messages of a replaced lead are ignored


class ChosenKept(NamedTuple):
    """The answer, to the lead: decisions up to and including `number` are durable at `shard`.

    The rest is for a lead that was restored: the slots, the highest clock and the highest batch that the shard
    knows. A new primary of the shard `asks`: it may have missed messages sent before it knew that it serves, or
    lost what it had.
    """

    shard: int
    term: int
    number: int
    generations: tuple[Generation, ...]
    top_clock: int
    top_batch: int
    asks: bool = False
    epoch: int = 0  # the shard's epoch, as the sender knows it: messages of a replaced primary are ignored


class Assigned(NamedTuple):
    """An entry of the lead's log: this update gets the next free batch."""

    slot: int
    clock: int


class SlotsChanged(NamedTuple):
    """An entry of the lead's log: the active slots, from a clock on that no slot has begun yet."""

    slots: tuple[int, ...]


class UpdatesLost(NamedTuple):
    """An entry of a shard's log: updates of `slot` below clock `until` are lost."""

    slot: int
    until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """An entry of the lead's log: no worker is left to send an update, so what waits makes the last step."""


Entry = Push | HostPush | Chosen | ChosenKept | Assigned | SlotsChanged | UpdatesLost | Closing
"""Everything that changes the state of a shard; applied in the same order by the primary and by its backup."""


class Forward(NamedTuple):
    """Primary to backup: entry number `sequence` of the shard's log (a Push with its payload)."""

    shard: int
    epoch: int
    sequence: int
    entry: Entry


class Forwarded(NamedTuple):
    """The answer: all entries up to and including `sequence` are here."""

    shard: int
    epoch: int
    sequence: int


class Install(NamedTuple):
    """Primary to a new backup, with the store's state and the pending gradients as payload.

    `state` is the core's, as JSON text; forwards from `sequence` + 1 on follow.
    """

    shard: int
    epoch: int
    sequence: int
    state: str


class Installed(NamedTuple):
    """Backup to the launcher: the shard has a copy again."""

    shard: int
    epoch: int
    member: int


class Concluded(NamedTuple):
    """Primary to the launcher: by the view of this epoch all workers have left, and nothing is open here any more.

    Every update of every slot is in a step or logged as lost or late, on the backup too, and all shards have
    stored the lead's decisions.
    """

    shard: int
    view: int


class Yield(NamedTuple):
    """To a primary of an older epoch: another server serves this shard now."""

    shard: int
    epoch: int


_FromWorker = Hello | Read | ReadRows | Push | HostPush | CopyShard
_ToWorker = (
    Welcome | Parameters | ValuesAhead | RowValues | RowsUnknown | Refused | SendAlone | Fenced | NotPrimary
)
_BetweenServers = Chosen | ChosenKept | Forward | Forwarded | Install | Yield
Message = View | _FromWorker | _ToWorker | _BetweenServers | Installed | Concluded
