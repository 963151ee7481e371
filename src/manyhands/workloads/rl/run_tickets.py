"""The logs of tickets of a run: one for each worker that has actors, by the environments that they act in.

RUN/tickets/environments-0-15.jsonl
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from manyhands.data.store.rundir import RunDirectory
from manyhands.observe.record.checked_values import whole
from manyhands.strategy import Strategy
from manyhands.workloads.rl.ticket_log import (
    TicketRecord,
    audit_start,
    audit_tickets,
    last_starts,
    read_tickets,
)

__all__ = ["AuditedLog", "AuditedTickets", "audit_run_tickets", "log_of", "starts_of"]

_FOLDER = "tickets"
_NAME = re.compile(r"environments-(\d+)-(\d+)\.jsonl")


def log_of(run: Path, environments: range) -> Path:
    """Where the tickets of actors in these environments are logged; the folder is made for it."""
    folder = run / _FOLDER
    with suppress(OSError):  # whoever writes there says it
        folder.mkdir(exist_ok=True)
    return folder / f"environments-{environments.start}-{environments.stop - 1}.jsonl"


def starts_of(run: Path, environments: range) -> dict[int, TicketRecord]:
    """What a replay of actors in these environments repeats, by the step of the run at which it begins."""
    return last_starts(read_tickets(log_of(run, environments)))


@dataclass(frozen=True, slots=True)
class AuditedLog:
    """What one log says."""

    environments: range
    starts: int
    batches: int
    lags: Counter[int]  # tickets that were acted, by the policy lag of their rollouts
    dropped: int  # tickets, with the actors that had begun them


@dataclass(frozen=True, slots=True)
class AuditedTickets:
    """The logs of a run, and what in them breaks a promise or is missing, a sentence each."""

    logs: tuple[AuditedLog, ...]
    broken: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def verdict(self) -> str:
        return "broken" if self.broken else "incomplete" if self.missing else "complete"


def audit_run_tickets(run: Path) -> AuditedTickets | None:
    """Audit the logs of tickets of the run in this directory; None where it has none."""
    directory = RunDirectory.open(run, lock=False)
    found = {}
    for path in (run / _FOLDER).iterdir() if (run / _FOLDER).is_dir() else ():
        if (match := _NAME.fullmatch(path.name)) is not None:
            found[range(int(match[1]), int(match[2]) + 1)] = read_tickets(path)
    if not found:
        return None
    records = {environments: found[environments] for environments in sorted(found, key=lambda one: one.start)}
    summary = directory.read_summary()
    steps = whole((summary or {}).get("steps"))
    missing = [] if steps is not None else ["the run did not finish: it has no summary"]
    facts = Strategy.parse(str(directory.config.get("strategy"))).facts
    workers = whole(directory.config.get("workers")) or 1
    batch = whole(directory.config.get("batch_size")) or 0
    if facts.splits_batches:  # every worker takes part in every step, in its share of the environments
        broken = _audit_steps(records, steps or 0, range(batch), missing)
    else:
        broken = [
            (names, one)
            for names, starts in records.items()
            for start in starts
            for one in audit_start(start)
        ]
        missing += _uncovered(records, range(workers * batch))
    return AuditedTickets(
        logs=tuple(_audited(environments, starts) for environments, starts in records.items()),
        broken=tuple(f"environments {names.start} to {names.stop - 1}: {one}" for names, one in broken),
        missing=tuple(missing),
    )


def _audit_steps(
    records: dict[range, list[TicketRecord]], steps: int, environments: range, missing: list[str]
) -> list[tuple[range, str]]:
    """A run that was resumed with other workers has its environments in other logs: each is followed through all."""
    broken = []
    for number in sorted({names.start for names in records} & set(environments)):
        through = [names for names in records if number in names]
        starts = [start for names in through for start in records[names]]
        broken += [(through[-1], one) for one in audit_tickets(starts)]
        end = max((start.end for start in starts), default=0)
        if end < steps:
            missing.append(f"the log of environment {number} ends at step {end}, but the run made {steps}")
    missing += _uncovered(records, environments)
    return list(dict.fromkeys(broken))


def _uncovered(records: dict[range, list[TicketRecord]], environments: range) -> list[str]:
    known = {number for names in records for number in names}
    absent = [number for number in environments if number not in known]
    return [f"no log has the tickets of environment {absent[0]}"] if absent else []


def _audited(environments: range, starts: list[TicketRecord]) -> AuditedLog:
    each = [start.header.rollouts_per_update for start in starts for _ in start.rows]
    rows = [row for start in starts for row in start.rows]
    lags = Counter(
        row.ticket.number // count - row.ticket.version
        for row, count in zip(rows, each, strict=True)
        if not row.dropped
    )
    batches = sum(len(start.batches) for start in starts)
    return AuditedLog(environments, len(starts), batches, lags, sum(row.dropped for row in rows))
