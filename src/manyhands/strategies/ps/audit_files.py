"""The audit of a run directory: reads the files and passes their contents to `audit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyhands.data.batches import BatchPlan, split
from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import DataError, UserError, printable
from manyhands.observe.record.checked_values import whole
from manyhands.strategies.ps.audit import Audit, Evidence, Violation, audit
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategies.ps.update_files import (
    RunRecord,
    read_computed,
    read_logs,
    read_record,
    record_of,
)
from manyhands.strategy import Strategy

__all__ = ["AuditedRun", "audit_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedRun:
    """The result of the audit of one run directory."""

    strategy: Ps
    found: Audit
    notes: tuple[str, ...]  # what was skipped while reading


def audit_run(run: Path) -> AuditedRun:
    """Audit the run in directory `run`; UserError if nothing was recorded, DataError that names a damaged line."""
    directory = RunDirectory.open(run, lock=False)
    strategy = Strategy.parse(str(directory.config.get("strategy")))
    if not isinstance(strategy, Ps):
        raise UserError(f"{run} is a run of {strategy}; only ps applies updates that can be audited")
    record, logs, computed = read_record(run), read_logs(run), read_computed(run)
    for shard in range(strategy.servers):
        if shard not in logs.files:
            raise DataError(f"{run} has no log of shard {shard} of {strategy.servers}: its file is gone")
    summary = directory.read_summary() or {}
    recorded, unrecorded = summary.get("recorded"), summary.get("unrecorded")
    recorded = recorded if isinstance(recorded, dict) else {}
    evidence = Evidence(
        computed=computed,
        share=_share(run, directory.config),
        versions=_versions(summary),
        recorded={name: rows for name, rows in recorded.items() if type(rows) is int},
        found={**logs.lengths, **{record_of(process): len(rows) for process, rows in computed.items()}},
        unrecorded=tuple(map(str, unrecorded if isinstance(unrecorded, list) else ())),
        begun=record.begun,
    )
    found = audit(logs.files, strategy.consistency, record.steps, evidence)
    other_length: tuple[str, ...] = ()
    if (steps := directory.config.get("steps")) not in (None, record.steps):
        # The run was resumed for more steps and ended before it continued.
        says = f"{record.steps} steps, and config.json says steps={printable(str(steps))}"
        other_length = (f"updates/run.json is of a run of {says}",)
    found = replace(
        found,
        violations=(*_contradictions(record, strategy, directory.config), *found.violations),
        missing=(*other_length, *found.missing),
    )
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
            shown = f"{name}={value}, and config.json says {name}={known[name]}"
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
    if not isinstance(servers, list):
        return None
    versions = {}
    for one in servers:
        pair = (one.get("shard"), one.get("version")) if isinstance(one, dict) else (None, None)
        if type(pair[0]) is not int or type(pair[1]) is not int:
            return None
        versions[pair[0]] = pair[1]
    return versions
