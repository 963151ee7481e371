"""The audit of a run's records: every batch in every shard exactly once, no read staler than allowed, nothing
missing.

`audit` is a pure function of parsed rows. It checks, in this order: the logs of all servers that kept a shard
against each other (`audit_story`), each shard's log against the rules of its policy (`audit_shard`), the shards
against each other and against what the workers recorded, and all of that against the length of the run and its
summary (here). It depends on the policy only, not on the code that wrote the records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from manyhands.strategies.common.consistency import Policy
from manyhands.strategies.ps.audit_found import Audit, Evidence, Fate, ShardSummary, Verdict, Violation
from manyhands.strategies.ps.audit_shard import ShardAuditor
from manyhands.strategies.ps.audit_story import tell
from manyhands.strategies.ps.log_rows import RestoredRow, Row, UpdateRow
from manyhands.strategies.ps.update_files import ComputedRow

__all__ = ["Audit", "Evidence", "ShardSummary", "Verdict", "Violation", "audit"]

_NOTHING = Evidence()


def audit(
    logs: Mapping[int, Sequence[Iterable[Row]]], policy: Policy, steps: int, evidence: Evidence = _NOTHING
) -> Audit:
    """Check the logs of every shard (one or more files each, in any order) of a run of `steps` batches."""
    files = {shard: [list(file) for file in logs[shard]] for shard in sorted(logs)}
    restores = sum(isinstance(row, RestoredRow) for kept in files.values() for file in kept for row in file)
    shards = {}
    for shard, kept in files.items():
        shards[shard] = ShardAuditor(shard, policy, range(evidence.begun, steps), restores=restores)
        shards[shard].read(tell(kept), evidence.share)
    whole = _Whole(shards, policy, steps, evidence, is_restored=restores > 0)
    whole.check()
    found = [violation for shard in shards.values() for violation in shard.violations]
    missing = [sentence for shard in shards.values() for sentence in shard.missing]
    return Audit(
        violations=(*found, *whole.violations),
        missing=(*whole.missing, *missing),
        shards=tuple(shard.summary for shard in shards.values()),
        lost=whole.lost,
    )


class _Whole:
    """The checks of a run across its shards."""

    def __init__(
        self,
        shards: Mapping[int, ShardAuditor],
        policy: Policy,
        steps: int,
        evidence: Evidence,
        *,
        is_restored: bool,
    ) -> None:
        self.violations: list[Violation] = []
        self.missing: list[str] = []
        self.lost = 0
        self._shards, self._policy, self._steps, self._evidence = shards, policy, steps, evidence
        self._is_restored = is_restored

    def check(self) -> None:
        """Run all checks; they append to `violations` and `missing`."""
        self._check_files()
        self._check_versions()
        for shard in self._shards.values():
            self._check_batches(shard)
        if not self._is_restored:
            self._check_shards()
        if self._evidence.computed is not None:
            self._check_workers(self._evidence.computed)

    # ── the run and its summary ───────────────────────────────────────────────────────────────────────────────────────

    def _check_files(self) -> None:
        """Compare the row count of every file with the count that was recorded when it was written."""
        for name, written in sorted(self._evidence.recorded.items()):
            found = self._evidence.found.get(name, 0)
            if found < written:
                self.missing.append(f"{name} has {found} rows of the {written} that were written")
            elif found > written:
                self._say(f"{name} has {found} rows, and {written} were written")
        self.missing += self._evidence.unrecorded

    def _say(self, sentence: str, shard: int = -1) -> None:
        self.violations.append(Violation(shard=shard, sentence=sentence))

    def _check_versions(self) -> None:
        for number, version in sorted((self._evidence.versions or {}).items()):
            shard = self._shards.get(number)
            recorded = shard.summary.versions if shard is not None else 0
            if recorded < version:
                self.missing.append(
                    f"shard {number}: its log ends at version {recorded}, the run at version {version}"
                )
            elif recorded > version and shard is not None:
                shard.say(f"its log has version {recorded}, and it ended with version {version}")

    def _check_batches(self, shard: ShardAuditor) -> None:
        """Check that every batch of the run is there; the cost is linear in the rows, not in the length of the
        run.
        """
        there = self._whole_steps(shard) if self._policy.stepwise else self._whole_batches(shard)
        shard.summary.batches = len(there)
        begun = self._evidence.begun
        num_absent = self._steps - begun - len(there)
        if num_absent <= 0:
            return
        if self._is_restored and self._evidence.versions is not None:
            # The logs are complete, so the absent batches were lost when a shard returned to a snapshot.
            self.lost += num_absent
            return
        first = next(batch for batch in count(begun) if batch not in there)
        which = f"batch {first} is" if num_absent == 1 else f"batch {first} and {num_absent - 1} others are"
        shard.lack(f"its log has {len(there)} of the run's {self._steps - begun} batches; {which} not there")

    def _whole_batches(self, shard: ShardAuditor) -> set[int]:
        """The batches of a policy where an update is a whole batch; a batch with two updates is a violation."""
        seen: dict[int, tuple[int, int]] = {}
        for (slot, clock), settled in shard.settled.items():
            batch = settled.batch
            if batch is None:
                continue
            if batch in seen and not self._is_restored:
                other = seen[batch]
                shard.say(
                    f"slot {slot}, clock {clock}: batch {batch} was {settled.fate.value}, although slot {other[0]}, "
                    f"clock {other[1]} was of it already"
                )
            seen.setdefault(batch, (slot, clock))
        return {batch for batch in seen if self._evidence.begun <= batch < self._steps}

    def _whole_steps(self, shard: ShardAuditor) -> set[int]:
        """The batches of a policy where a step combines the parts of one batch: those with all parts that count."""
        there = set()
        may_be_late = self._policy.chosen_by_lead or self._is_restored
        for clock in sorted(
            {clock for _, clock in shard.settled if self._evidence.begun <= clock < self._steps}
        ):
            slots = shard.slots_at(clock)
            fates = [shard.settled.get((slot, clock)) for slot in slots]
            here = sum(one is not None and one.fate in (Fate.APPLIED, Fate.SKIPPED) for one in fates)
            if any(one is None for one in fates) or not here:
                continue
            if here < len(fates):
                late = next(slot for slot, one in zip(slots, fates, strict=True) if one and one.batch is None)
                if not may_be_late:
                    shard.say(
                        f"slot {late}, clock {clock}: {self._policy} waits for every part, and this is not there"
                    )
                elif self._is_restored and any(one is not None and one.fate is Fate.LOST for one in fates):
                    continue
            there.add(clock)
        return there

    # ── shards against each other ─────────────────────────────────────────────────────────────────────────────────────

    def _check_shards(self) -> None:
        """Check that an update has the same batch in all shards, and that all shards agree on which updates were
        late.
        """
        first, *others = self._shards.values()
        for shard in others:
            for name, settled in shard.settled.items():
                other = first.settled.get(name)
                if other is None:
                    continue  # `_check_batches` reports it if it should be there
                here, there = settled.update, other.update
                what = f"slot {name[0]}, clock {name[1]}"
                if here is not None and there is not None and _batch_of(here) != _batch_of(there):
                    shard.say(
                        f"{what}: {_words(here)}, and at shard {first.summary.shard} it is {_words(there)}"
                    )
                elif Fate.LATE in (settled.fate, other.fate) and settled.fate is not other.fate:
                    shard.say(
                        f"{what}: {settled.fate.value}, and at shard {first.summary.shard} {other.fate.value}"
                    )

    # ── what workers recorded ─────────────────────────────────────────────────────────────────────────────────────────

    def _check_workers(self, computed: Mapping[int, Sequence[ComputedRow]]) -> None:
        made: defaultdict[tuple[int, int, int], list[ComputedRow]] = defaultdict(list)
        tops: dict[tuple[int, int], int] = {}
        for rows in computed.values():
            for row in rows:
                made[row.name].append(row)
                holder = (row.slot, row.member)
                tops[holder] = max(tops.get(holder, -1), row.clock)
        for number, shard in self._shards.items():
            for step, update in shard.applied:
                name = f"version {step.version}, slot {update.slot}, clock {update.clock}"
                if update.name in made:
                    self._compare(shard, number, name, update, made[update.name])
                else:
                    self._find(shard, name, update, tops)
            if not self._is_restored:
                self._check_acknowledged(shard, computed)

    def _find(
        self, shard: ShardAuditor, name: str, update: UpdateRow, tops: Mapping[tuple[int, int], int]
    ) -> None:
        """Report an applied update that no worker recorded; it is only missing if the worker's record may have
        ended before it.
        """
        ended = tops.get((update.slot, update.member), -1) < update.clock
        sentence = f"{name}: no record of a worker says that member {update.member} computed this"
        if ended and (self._evidence.versions is None or self._is_cut()):
            shard.lack(sentence)
        else:
            shard.say(sentence)

    def _is_cut(self) -> bool:
        """Whether a worker's record is known to be truncated."""
        found = self._evidence.found
        short = (name for name, written in self._evidence.recorded.items() if found.get(name, 0) < written)
        return any("worker." in name for name in (*short, *self._evidence.unrecorded))

    def _compare(
        self, shard: ShardAuditor, number: int, name: str, update: UpdateRow, made: Sequence[ComputedRow]
    ) -> None:
        """Check that what the shard logged of an update equals one of its worker's records of it."""
        logged = {
            "batch": update.batch,
            "part": (update.part, update.parts),
            "read version": update.read_version,
            "version of rows": update.rows_version,
        }
        for row in made:
            if not number < len(row.versions) == len(row.rows_versions):
                shard.say(f"{name}: its worker recorded {len(row.versions)} shards")
                return
        recorded = [
            {
                "batch": row.batch,
                "part": (row.part, row.parts),
                "read version": row.versions[number],
                "version of rows": row.rows_versions[number],
            }
            for row in made
        ]
        if logged not in recorded:
            what = next(what for what in logged if logged[what] != recorded[-1][what])
            shard.say(
                f"{name}: its {what} is logged as {logged[what]}, and its worker recorded {recorded[-1][what]}"
            )

    def _check_acknowledged(self, shard: ShardAuditor, computed: Mapping[int, Sequence[ComputedRow]]) -> None:
        """Check that every update before a worker's newest is in the log.

        A worker continues only after every shard has settled its last update.
        """
        for rows in computed.values():
            newest: dict[tuple[int, int], ComputedRow] = {}
            for row in rows:
                before = newest.get((row.slot, row.member))
                newest[row.slot, row.member] = row
                if before is not None and (before.slot, before.clock) not in shard.settled:
                    shard.lack(
                        f"its log lacks slot {before.slot}, clock {before.clock}, which it had acknowledged before "
                        f"member {row.member} computed clock {row.clock}"
                    )


def _batch_of(update: UpdateRow) -> tuple[int, int, int, float]:
    return update.batch, update.part, update.parts, update.weight


def _words(update: UpdateRow) -> str:
    return f"part {update.part} of {update.parts} of batch {update.batch}, of weight {update.weight!r}"
