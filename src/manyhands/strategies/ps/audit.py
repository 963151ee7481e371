"""The audit of a run's records: every batch in every shard exactly once, no read too stale, nothing missing.

`audit_run` reads the files of a run directory. `audit` is a pure function of parsed rows. It checks, in this order:
the logs of all servers that kept a shard against each other, and each shard's log against the rules of its policy
(`audit_shard`), the shards against each other and against what the workers recorded, and all of that against the
length of the run and its summary (here). It depends on the policy only, not on the code that wrote the records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any

from manyhands.data.batches import BatchPlan, split
from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import DataError, UserError, num_of, printable
from manyhands.observe.record.checked_values import whole
from manyhands.strategies.common.consistency import Policy
from manyhands.strategies.ps.audit_shard import Fate, ShardAuditor, ShardSummary, Violation
from manyhands.strategies.ps.log_rows import RestoredRow, Row, UpdateRow
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategies.ps.update_files import (
    ComputedRow,
    RunRecord,
    read_computed,
    read_logs,
    read_record,
    record_of,
)
from manyhands.strategy import Strategy

__all__ = [
    "Audit",
    "AuditedRun",
    "Evidence",
    "ShardSummary",
    "Verdict",
    "Violation",
    "audit",
    "audit_run",
    "is_of_servers",
]


class Verdict(Enum):
    """The overall result of an audit."""

    COMPLETE = "complete"  # every batch of the run is in every shard, once, and no rule was broken
    RESTORED = "restored"  # a shard went back to a snapshot; no rule was broken, lost batches are counted

    INCOMPLETE = "incomplete"
    """No rule was broken as far as the records go, but the run did not finish or the records lack something."""

    BROKEN = "broken"  # the records contradict each other or a rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of a run besides its logs; an absent item is not compared."""

    computed: Mapping[int, Sequence[ComputedRow]] | None = None  # the rows that workers recorded, by process
    share: Callable[[int, int, int], float] | None = None
    """The share of its batch that (batch, part, parts) is: the weight of an update."""
    versions: Mapping[int, int] | None = None  # the final version by shard; None if the run left no summary
    recorded: Mapping[str, int] = field(default_factory=dict)
    """The number of rows written, by file, for processes that ended in order."""
    found: Mapping[str, int] = field(default_factory=dict)  # the number of rows that were read, by file
    unrecorded: Sequence[str] = ()  # a sentence for each file whose recording ended before the run did
    begun: int = 0  # the first batch that these shards trained; others were trained under another strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The findings of an audit."""

    violations: tuple[Violation, ...]  # in the order of the log, shard by shard
    missing: tuple[str, ...]  # a sentence for each thing that the records lack
    shards: tuple[ShardSummary, ...]
    lost: int = 0  # how many batches shards lack after a return to a snapshot, summed over shards

    @property
    def clean(self) -> bool:
        """Whether no rule was broken."""
        return not self.violations

    @property
    def verdict(self) -> Verdict:
        if self.violations:
            return Verdict.BROKEN
        if self.missing:
            return Verdict.INCOMPLETE
        return Verdict.RESTORED if any(shard.restores for shard in self.shards) else Verdict.COMPLETE

    @property
    def words(self) -> str:
        """The verdict as text, with the number of lost batches after a restore."""
        return f"restored, {self.lost} lost" if self.verdict is Verdict.RESTORED else self.verdict.value


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
        shards[shard].read(kept, evidence.share)
    run = _RunAuditor(shards, policy, steps, evidence, restores > 0)
    run.check()
    return Audit(
        violations=(*(one for shard in shards.values() for one in shard.violations), *run.violations),
        missing=(*run.missing, *(sentence for shard in shards.values() for sentence in shard.missing)),
        shards=tuple(shard.summary for shard in shards.values()),
        lost=run.lost,
    )


@dataclass(slots=True)
class _RunAuditor:
    """The checks of a run across its shards."""

    shards: Mapping[int, ShardAuditor]
    policy: Policy
    steps: int
    evidence: Evidence
    is_restored: bool
    violations: list[Violation] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    lost: int = 0

    def check(self) -> None:
        for name, written in sorted(self.evidence.recorded.items()):
            found = self.evidence.found.get(name, 0)
            if found < written:
                self.missing.append(f"{name} has {found} of the {written} rows that were written")
            elif found > written:
                sentence = f"{name} has {found} rows, but only {written} were written"
                self.violations.append(Violation(shard=-1, sentence=sentence))
        self.missing += self.evidence.unrecorded
        for number, version in sorted((self.evidence.versions or {}).items()):
            one = self.shards.get(number)
            recorded = one.summary.versions if one is not None else 0
            if recorded < version:
                self.missing.append(
                    f"shard {number}: its log ends at version {recorded}, the run at version {version}"
                )
            elif recorded > version and one is not None:
                one.say(f"its log ends at version {recorded}, the run at version {version}")
        for shard in self.shards.values():
            self._check_batches(shard)
        if not self.is_restored:
            self._check_shards()
        if self.evidence.computed is not None:
            self._check_workers(self.evidence.computed)

    def _check_batches(self, shard: ShardAuditor) -> None:
        """Check that every batch of the run is there; the cost is linear in the rows, not in the run's length."""
        there = self._whole_steps(shard) if self.policy.stepwise else self._whole_batches(shard)
        shard.summary.batches = len(there)
        begun = self.evidence.begun
        num_absent = self.steps - begun - len(there)
        if num_absent <= 0:
            return
        if self.is_restored and self.evidence.versions is not None:
            # The logs are complete, so the absent batches were lost when a shard returned to a snapshot.
            self.lost += num_absent
            return
        first = next(batch for batch in count(begun) if batch not in there)
        which = f"batch {first} is" if num_absent == 1 else f"batch {first} and {num_absent - 1} more are"
        shard.lack(f"its log has {len(there)} of the run's {self.steps - begun} batches; {which} missing")

    def _whole_batches(self, shard: ShardAuditor) -> set[int]:
        """The batches of a policy where an update is a whole batch; a batch with two updates is a violation."""
        seen: dict[int, tuple[int, int]] = {}
        for (slot, clock), settled in shard.settled.items():
            batch = settled.batch
            if batch is None:
                continue
            if batch in seen and not self.is_restored:
                other = seen[batch]
                shard.say(
                    f"slot {slot}, clock {clock}: batch {batch} was {settled.fate.value}, but slot {other[0]}, "
                    f"clock {other[1]} already had this batch"
                )
            seen.setdefault(batch, (slot, clock))
        return {batch for batch in seen if self.evidence.begun <= batch < self.steps}

    def _whole_steps(self, shard: ShardAuditor) -> set[int]:
        """The batches of a policy where a step combines the parts of one batch: those with all parts that count."""
        there = set()
        for clock in sorted({clock for _, clock in shard.settled}):
            generation = shard.generation_at(clock)
            slots = generation.slots if generation is not None else ()
            fates = [shard.settled.get((slot, clock)) for slot in slots]
            here = sum(one is not None and one.fate in (Fate.APPLIED, Fate.SKIPPED) for one in fates)
            if not self.evidence.begun <= clock < self.steps or None in fates or not here:
                continue
            if here < len(fates) and not (self.policy.chosen_by_lead or self.is_restored):
                late = next(slot for slot, one in zip(slots, fates, strict=True) if one and one.batch is None)
                shard.say(
                    f"slot {late}, clock {clock}: {self.policy} waits for every part, and this one is missing"
                )
            if not self.is_restored or all(one is None or one.fate is not Fate.LOST for one in fates):
                there.add(clock)
        return there

    def _check_shards(self) -> None:
        """Check that an update has the same batch in all shards, and that all agree on which updates were late."""
        first, *others = self.shards.values()
        for shard in others:
            for name, settled in shard.settled.items():
                other = first.settled.get(name)
                if other is None:
                    continue  # `_check_batches` reports it if it should be there
                here, there = settled.update, other.update
                what, at = f"slot {name[0]}, clock {name[1]}", f"at shard {first.summary.shard}"
                if here is not None and there is not None and _batch_of(here) != _batch_of(there):
                    shard.say(f"{what}: {_batch_of(here)}, but {at} it is {_batch_of(there)}")
                elif Fate.LATE in (settled.fate, other.fate) and settled.fate is not other.fate:
                    shard.say(f"{what}: {settled.fate.value}, but {at} it is {other.fate.value}")

    def _check_workers(self, computed: Mapping[int, Sequence[ComputedRow]]) -> None:
        """Check every applied update against its worker's record of it."""
        made: defaultdict[tuple[int, int, int], list[ComputedRow]] = defaultdict(list)
        tops: defaultdict[tuple[int, int], int] = defaultdict(lambda: -1)
        for row in (row for rows in computed.values() for row in rows):
            made[row.name].append(row)
            tops[row.slot, row.member] = max(tops[row.slot, row.member], row.clock)
        evidence = self.evidence
        short = (one for one, rows in evidence.recorded.items() if evidence.found.get(one, 0) < rows)
        is_cut = evidence.versions is None or any("worker." in one for one in (*short, *evidence.unrecorded))
        for number, shard in self.shards.items():
            for step, update in shard.applied:
                name = f"version {step.version}, slot {update.slot}, clock {update.clock}"
                if update.name in made:
                    _compare(shard, number, name, update, made[update.name])
                    continue
                # It is only missing if the worker's record may have ended before it.
                is_missing = is_cut and tops[update.slot, update.member] < update.clock
                report = shard.lack if is_missing else shard.say
                report(f"{name}: no worker recorded that member {update.member} computed it")
            if not self.is_restored:
                _check_acknowledged(shard, computed)


def _compare(
    shard: ShardAuditor, number: int, name: str, update: UpdateRow, made: Sequence[ComputedRow]
) -> None:
    """Check that what the shard logged of an update equals one of its worker's records of it."""
    for row in made:
        if not number < len(row.versions) == len(row.rows_versions):
            shard.say(f"{name}: its worker recorded {num_of(len(row.versions), 'shard')}")
            return
    fields = ("batch", "part", "read version", "row version")
    logged = (update.batch, (update.part, update.parts), update.read_version, update.rows_version)
    recorded = [
        (row.batch, (row.part, row.parts), row.versions[number], row.rows_versions[number]) for row in made
    ]
    if logged not in recorded:
        what, ours, theirs = next(
            one for one in zip(fields, logged, recorded[-1], strict=True) if one[1] != one[2]
        )
        shard.say(f"{name}: the shard logged {what} {ours}, but its worker recorded {theirs}")


def _check_acknowledged(shard: ShardAuditor, computed: Mapping[int, Sequence[ComputedRow]]) -> None:
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
                    f"its log lacks slot {before.slot}, clock {before.clock}, which it acknowledged before "
                    f"member {row.member} computed clock {row.clock}"
                )


def _batch_of(update: UpdateRow) -> str:
    return f"part {update.part} of {update.parts} of batch {update.batch}, with weight {update.weight!r}"


# ── the files of a run ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedRun:
    """The result of the audit of one run directory."""

    strategy: Ps
    found: Audit
    notes: tuple[str, ...]  # what was skipped while reading


_OF_LOOP = ("steps", "samples", "batch_size")


def is_of_servers(run: Path) -> bool:
    return isinstance(Strategy.parse(str(RunDirectory.open(run, lock=False).config.get("strategy"))), Ps)


def audit_run(run: Path) -> AuditedRun:
    """Audit the run in directory `run`; UserError if nothing was recorded, DataError that names a damaged line."""
    directory = RunDirectory.open(run, lock=False)
    config = dict(directory.config)
    if config.get("steps") == 0:  # a loop of the user's own: what only the script knows stands at 0
        config = {name: value for name, value in config.items() if name not in _OF_LOOP}
    strategy = Strategy.parse(str(config.get("strategy")))
    if not isinstance(strategy, Ps):
        raise UserError(
            f"{run} is a run of {strategy}; only runs of ps, and runs with actors, can be audited"
        )
    record, logs, computed = read_record(run), read_logs(run), read_computed(run)
    for shard in range(strategy.servers):
        if shard not in logs.files:
            raise DataError(f"{run} has no log of shard {shard} of {strategy.servers}: its file is missing")
    summary = directory.read_summary() or {}
    recorded, unrecorded = summary.get("recorded"), summary.get("unrecorded")
    recorded = recorded if isinstance(recorded, dict) else {}
    evidence = Evidence(
        computed=computed,
        share=_share(run, config),
        versions=_versions(summary),
        recorded={name: rows for name, rows in recorded.items() if type(rows) is int},
        found={**logs.lengths, **{record_of(process): len(rows) for process, rows in computed.items()}},
        unrecorded=tuple(map(str, unrecorded if isinstance(unrecorded, list) else ())),
        begun=record.begun,
    )
    found = audit(logs.files, strategy.consistency, record.steps, evidence)
    missing = found.missing
    if (steps := config.get("steps")) not in (None, record.steps):
        # The run was resumed for more steps and ended before it continued.
        says = f"{record.steps} steps, but config.json says steps={printable(str(steps))}"
        missing = (f"updates/run.json is of a run of {says}", *missing)
    violations = (*_contradictions(record, strategy, config), *found.violations)
    found = replace(found, violations=violations, missing=missing)
    return AuditedRun(strategy=strategy, found=found, notes=logs.notes)


def _contradictions(record: RunRecord, strategy: Ps, config: Mapping[str, Any]) -> Iterator[Violation]:
    """The settings for which config.json and updates/run.json disagree."""
    try:
        recorded: Strategy | str = Strategy.parse(record.strategy)
    except UserError:
        recorded = record.strategy
    if isinstance(recorded, Ps):
        recorded = replace(recorded, link=strategy.link)  # externally started members use their own links
    known = {"strategy": str(strategy), "workers": config.get("workers"), "seed": config.get("seed")}
    said = {"strategy": str(recorded), "workers": record.workers, "seed": record.seed}
    for name, value in said.items():
        if known[name] not in (None, value):
            shown = f"{name}={value}, but config.json says {name}={known[name]}"
            yield Violation(shard=-1, sentence=f"updates/run.json says {printable(shown)}")


def _share(run: Path, config: Mapping[str, Any]) -> Callable[[int, int, int], float] | None:
    """The function that gives a part's share of its batch, computed as workers do; None if no sizes are known."""
    sizes = {name: config[name] for name in ("samples", "batch_size") if config.get(name) is not None}
    for name, value in sizes.items():
        if (whole(value) or 0) < 1:
            raise DataError(
                f"{run / 'config.json'}: {name} is {printable(repr(value))}; it must be an integer of at least 1"
            )
    if len(sizes) < 2:
        return None
    plan = BatchPlan(sizes["samples"], sizes["batch_size"], 0)

    def share(batch: int, part: int, parts: int) -> float:
        if batch < 0 or not 0 <= part < parts:
            return -1.0  # there is no such part: no logged weight is equal to this
        size = plan.size(batch)
        return len(split(size, part, parts)) / size

    return share


def _versions(summary: Mapping[str, Any]) -> dict[int, int] | None:
    """The final version by shard; None if the summary does not say."""
    servers = summary.get("servers")
    if not isinstance(servers, list) or not all(isinstance(one, dict) for one in servers):
        return None
    pairs = [(one.get("shard"), one.get("version")) for one in servers]
    return dict(pairs) if all(type(one) is int for pair in pairs for one in pair) else None
