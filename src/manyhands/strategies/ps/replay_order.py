"""In which order one process can execute a recorded run again: pure, from the rows alone.

    shard 0   ──1──2──3──          Compute needs every shard at the version that was read; Apply needs the gradient.
    shard 1   ──1──2──3──          A version that is still to be read when its shard goes on is kept as a copy.

Each shard takes its steps in the recorded order of versions; between shards, anything that respects what was read gives
the same bits. Computing goes before applying, and of several shards that can go on, one that needs no copy does. As a
worker reads anew only when its last update is settled, there is never more than one version per shard and worker to
keep, nor more than one gradient per worker (softsync: besides those that wait for their group).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from manyhands.errors import ManyhandsError, UserError, num_of
from manyhands.strategies.ps.log_rows import RestoredRow, Row, SkippedRow, StepRow, UpdateRow
from manyhands.strategies.ps.update_files import ComputedRow

Name = tuple[int, int, int]  # (slot, clock, member) of an update


class ReplayImpossible(ManyhandsError):
    """The records contradict each other or lack something; the message names the first row that does."""


class ReplayKeep(NamedTuple):
    """Copy the values of a shard, which is at this version and about to advance."""

    shard: int
    version: int


class Forget(NamedTuple):
    """Release that copy."""

    shard: int
    version: int


class ReplayCompute(NamedTuple):
    """Compute a gradient from the versions that were read; these shards will apply it."""

    row: ComputedRow
    shards: tuple[int, ...]
    undone: bool = False  # whether its process restored its buffers afterwards, because it had lost its slot


class ReplayApply(NamedTuple):
    """Take one optimizer step of a shard; its gradients are not needed there again."""

    row: StepRow


ReplayAction = ReplayKeep | Forget | ReplayCompute | ReplayApply


def steps_of(shard: int, files: Iterable[Iterable[Row]]) -> list[StepRow]:
    """The optimizer steps of a shard in the order of versions, from all of its files.

    UserError for a shard that went back to a snapshot, ReplayImpossible for files that disagree or lack a version.
    """
    steps: dict[int, StepRow] = {}
    for rows in files:
        for row in rows:
            if isinstance(row, RestoredRow):
                raise UserError(
                    f"shard {shard} went back to a snapshot of version {row.version}, as after resuming or the death "
                    "of a server without replicas=1: workers may have read versions that are lost, so this run "
                    "cannot be replayed"
                )
            if isinstance(row, StepRow) and steps.setdefault(row.version, row) != row:
                raise ReplayImpossible(
                    f"shard {shard}, version {row.version}: two servers logged it differently"
                )
    if 0 in steps:
        raise ReplayImpossible(f"shard {shard}: a log has a step to version 0; the first version is 1")
    for version in range(1, max(steps, default=0) + 1):
        if version not in steps:
            raise ReplayImpossible(f"shard {shard}: no log has version {version}, but later versions exist")
    return [steps[version] for version in sorted(steps)]


def num_batches(row: StepRow) -> int:
    """The number of global batches in a step; a learning rate schedule advances by as many."""
    return len({update.batch for update in row.updates})


class ReplayOrder:
    """The actions that execute a recorded run again, as an iterable.

    `steps` are those of each shard, `computed` the records of each process. `until` stops every shard when it has
    applied that many batches; whatever that needs of the others is executed too. With `stateful` the model has
    buffers, so every process's computations are executed in order, also those that no shard took. The only
    exception is the last one before its process got a new slot, under a new number: its process has undone it.
    """

    def __init__(
        self,
        steps: Sequence[Sequence[StepRow]],
        computed: Mapping[int, Sequence[ComputedRow]],
        *,
        stateful: bool = False,
        until: int | None = None,
    ) -> None:
        self.steps = steps
        self.before: dict[Name, Name] = {}  # by update: the one that its process has to compute first
        self.undone: set[Name] = set()
        self.computed: dict[Name, ComputedRow] = {}
        for row in (row for rows in computed.values() for row in rows):
            if {len(row.versions), len(row.rows_versions), len(row.gradients)} != {len(steps)}:
                raise ReplayImpossible(
                    f"process {row.process} recorded {num_of(len(row.versions), 'shard')} for slot {row.slot}, clock "
                    f"{row.clock}, but the run has {len(steps)}"
                )
            if row.name in self.computed:
                raise ReplayImpossible(
                    f"slot {row.slot}, clock {row.clock} was recorded twice by member {row.member}"
                )
            self.computed[row.name] = row
        self.applied_as = [self._checked(shard) for shard in range(len(steps))]
        """By shard: the version that each update became there."""
        taken = set().union(*self.applied_as)
        for rows in computed.values() if stateful else ():
            # Each computation comes after the previous one that left an effect or was taken by a shard.
            self.undone |= {before.name for before, after in pairwise(rows) if before.member != after.member}
            kept = [row.name for row in rows if row.name not in self.undone or row.name in taken]
            self.before |= {after: before for before, after in pairwise(kept)}
        self.limits = tuple(self._limit(shard, until) for shard in range(len(steps)))
        """By shard: the version to stop at."""
        self.needed: dict[
            Name, ComputedRow
        ] = {}  # what has to be computed for every shard to reach its limit
        self.ends = list(self.limits)  # how far each shard advances for that
        done = [0] * len(steps)
        while done != self.ends:
            for shard, of_shard in enumerate(steps):
                for step in of_shard[done[shard] : self.ends[shard]]:
                    for update in step.updates:
                        self._need(update.name)
                    done[shard] = step.version

    def __iter__(self) -> Iterator[ReplayAction]:
        return _Walk(self).actions()

    def _checked(self, shard: int) -> dict[Name, int]:
        """The version of every update at a shard, each compared with what its worker recorded."""
        versions: dict[Name, int] = {}
        for row in self.steps[shard]:
            for update in row.updates:
                computed = self.computed.get(update.name)
                if computed is None:
                    raise ReplayImpossible(f"{_where(row, update)}: no worker recorded that it computed this")
                for what, logged, recorded in (
                    ("read_version", update.read_version, computed.versions[shard]),
                    ("rows_version", update.rows_version, computed.rows_versions[shard]),
                    ("batch", update.batch, computed.batch),
                    ("part", (update.part, update.parts), (computed.part, computed.parts)),
                ):
                    if logged != recorded:
                        raise ReplayImpossible(
                            f"{_where(row, update)}: the shard logged {what} {logged}, its worker recorded {recorded}"
                        )
                if update.name in versions:
                    before = versions[update.name]
                    raise ReplayImpossible(
                        f"{_where(row, update)}: it was already applied as version {before}"
                    )
                versions[update.name] = row.version
        return versions

    def _limit(self, shard: int, until: int | None) -> int:
        if until is None:
            return len(self.steps[shard])
        applied = [0, *accumulate(num_batches(row) for row in self.steps[shard])]
        if not 0 <= until <= applied[-1]:
            raise UserError(f"until={until} must be between 0 and {applied[-1]}, the batches of a shard")
        return next(version for version, batches in enumerate(applied) if batches >= until)

    def _need(self, name: Name | None) -> None:
        while name is not None and name not in self.needed:
            row = self.needed[name] = self.computed[name]
            for shard, version in row.reads:
                if version > len(self.steps[shard]):
                    raise ReplayImpossible(
                        f"slot {row.slot}, clock {row.clock} (batch {row.batch}) read version {version} of shard "
                        f"{shard}, but its log ends at version {len(self.steps[shard])}"
                    )
                self.ends[shard] = max(self.ends[shard], version)
            name = self.before.get(name)


class _Walk:
    """One pass through the order."""

    def __init__(self, order: ReplayOrder) -> None:
        self._order, needed = order, order.needed
        self._after = {before: name for name, before in order.before.items() if name in needed}
        self._at = [0] * len(order.steps)
        self._done: set[Name] = set()
        self._unread = Counter(read for row in needed.values() for read in row.reads)
        self._readers: defaultdict[tuple[int, int], list[Name]] = defaultdict(list)
        # by update: how many of the versions that it is of are still to come
        self._awaited = {name: len(row.reads) for name, row in needed.items()}
        for name, row in needed.items():
            for read in row.reads:
                self._readers[read].append(name)
        self._ready: deque[Name] = deque()

    def actions(self) -> Iterator[ReplayAction]:
        """All actions in a valid order; ReplayImpossible names the row if there is none."""
        steps, ends = self._order.steps, self._order.ends
        for shard in range(len(steps)):
            self._arrive(shard)
        while True:
            while self._ready:
                yield from self._compute(self._ready.popleft())
            ready = [
                (self._unread[shard, at] > 0, at, shard)
                for shard, at in enumerate(self._at)
                if at < ends[shard] and self._first_undone(steps[shard][at]) is None
            ]
            if not ready:
                break
            is_unread, at, shard = min(ready)
            if is_unread:
                yield ReplayKeep(shard=shard, version=at)
            yield ReplayApply(row=steps[shard][at])
            self._at[shard] = at + 1
            self._arrive(shard)
        for shard, end in enumerate(ends):
            if self._at[shard] < end:
                raise ReplayImpossible(self._why_stuck(steps[shard][self._at[shard]]))

    def _arrive(self, shard: int) -> None:
        for name in self._readers.pop((shard, self._at[shard]), ()):
            self._awaited[name] -= 1
            self._look_at(name)

    def _look_at(self, name: Name) -> None:
        before = self._order.before.get(name)
        if not self._awaited[name] and (before is None or before in self._done):
            self._ready.append(name)

    def _compute(self, name: Name) -> Iterator[ReplayAction]:
        order, row = self._order, self._order.needed[name]
        ends = enumerate(order.ends)
        users = tuple(shard for shard, end in ends if order.applied_as[shard].get(name, end + 1) <= end)
        yield ReplayCompute(row=row, shards=users, undone=name in order.undone)
        self._done.add(name)
        for shard, version in sorted(row.reads):
            self._unread[shard, version] -= 1
            if not self._unread[shard, version] and version < self._at[shard]:
                yield Forget(shard=shard, version=version)
        if name in self._after:
            self._look_at(self._after[name])

    def _first_undone(self, row: StepRow) -> UpdateRow | None:
        return next((one for one in row.updates if one.name not in self._done), None)

    def _why_stuck(self, row: StepRow) -> str:
        update = self._first_undone(row)
        assert update is not None, "a step whose gradients are all there is taken"
        name = update.name
        while not self._awaited[name]:  # the process had something to do before that
            name = self._order.before[name]
        read = self._order.needed[name]
        shard, version = next(at for at in sorted(read.reads) if self._at[at[0]] < at[1])
        return (
            f"{_where(row, update)} cannot be reached: slot {read.slot}, clock {read.clock} read version "
            f"{version} of shard {shard}, which itself waits for this update at version {self._at[shard]}"
        )


def _where(row: StepRow, update: UpdateRow) -> str:
    return f"shard {row.shard}, version {row.version} (slot {update.slot}, clock {update.clock}, batch {update.batch})"


class LoopTurn(NamedTuple):
    """A batch that was a worker's, and what came of it."""

    clock: int
    batch: int
    stepped: bool  # whether the loop took a step with it, or went on to the next batch
    applied: bool  # whether a shard took the gradient
    versions: tuple[int, ...] = ()  # of the shards, that it was computed from


def loop_turns(
    slot: int,
    order: ReplayOrder,
    computed: Mapping[int, Sequence[ComputedRow]],
    lead: Iterable[Iterable[Row]],
) -> list[LoopTurn]:
    """The turns of a slot, in the order of its clock; what a dead worker began counts where a shard has it."""
    taken = set().union(*order.applied_as)
    found: dict[int, LoopTurn] = {}
    for row in (row for rows in lead for row in rows):
        if isinstance(row, SkippedRow) and row.slot == slot:
            found[row.clock] = LoopTurn(row.clock, row.batch, stepped=False, applied=False)
    for one in (one for rows in computed.values() for one in rows if one.slot == slot):
        before, applied = found.get(one.clock), one.name in taken
        if before is not None and before.applied and applied:
            raise ReplayImpossible(
                f"slot {slot}, clock {one.clock}: two members computed it, each for some shards, which a script cannot "
                "do again"
            )
        if before is None or not before.applied:
            found[one.clock] = LoopTurn(one.clock, one.batch, True, applied, one.versions)
    return [found[clock] for clock in sorted(found)]
