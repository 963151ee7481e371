"""The log of a learner's tickets, one JSON object a line: what an audit and a replay need.

    {"first_step":0,"steps_each":1,"actors":8,"environments":2,"rollouts_per_update":8,"lag":4,"central":0,"seed":0}
    {"acted":[0,3,0,0,0]}                       ticket, actor, incarnation, rollout of that, version
    {"dropped":[9,2,0,1,0]}
    {"update":0,"rollouts":"9f0c61d2a58be374"}  its batch was complete; a hash of its bytes

The lines of a batch are written before it is learned from, and outlive the process. Each start of the run begins with a
line of the first kind, and with environments, tickets and versions that begin anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from manyhands.data.store.atomic import LineFile, reason
from manyhands.errors import DataError
from manyhands.native.closeable import Closeable
from manyhands.native.hashing import xxh64
from manyhands.observe.record.checked_values import whole
from manyhands.workloads.rl.rollouts import Rollouts
from manyhands.workloads.rl.tickets import LogRow, Ticket, audit

__all__ = [
    "BatchRow",
    "TicketHeader",
    "TicketRecord",
    "TicketWriter",
    "audit_start",
    "audit_tickets",
    "last_starts",
    "read_tickets",
    "rollouts_hash",
]


_MOST_TICKETS = 1 << 20  # of a batch: a file may say anything


class TicketHeader(NamedTuple):
    """What determines who acts for what."""

    first_step: int  # of the run
    steps_each: int  # of the run, by each batch
    actors: int
    environments: int  # of each actor
    rollouts_per_update: int
    lag: int
    central: int  # 1 where inference was: what no replay repeats
    seed: int  # of 64 bits


class BatchRow(NamedTuple):
    """A batch that was complete, when so many rows of tickets had been written."""

    update: int
    rollouts: str
    rows: int


@dataclass(frozen=True, slots=True)
class TicketRecord:
    """One start of a run: `replayed` of `Actors`."""

    header: TicketHeader
    rows: list[LogRow] = field(default_factory=list)
    batches: list[BatchRow] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The step of the run up to which its batches serve."""
        return self.header.first_step + self.header.steps_each * len(self.batches)


class TicketWriter(Closeable):
    """Appends to the file of one learner; WriteFailed where the disk does not take it."""

    def __init__(self, path: Path, header: TicketHeader) -> None:
        self._file = LineFile(path)
        self._written = 0
        self._pending = [header._asdict()]

    def write(self, log: Sequence[LogRow], update: int, rollouts: str) -> None:
        """The rows of `log` since the last time, then the batch."""
        new = log[self._written :]
        lines: list[dict[str, Any]] = [*self._pending]
        lines += ({"dropped" if row.dropped else "acted": list(row.ticket)} for row in new)
        lines.append({"update": update, "rollouts": rollouts})
        self._file.append(
            b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        )
        self._written += len(new)
        self._pending = []

    def close(self) -> None:
        self._file.close()


def rollouts_hash(rollouts: Rollouts) -> str:
    """16 hexadecimal digits of every byte of a batch."""
    total = 0
    for one in rollouts:
        total = xxh64(one.contiguous().view(-1).view(torch.uint8).numpy(), total)
    return f"{total:016x}"


def read_tickets(path: Path) -> list[TicketRecord]:
    """The starts of a run, in order; a last line without an end is of a process that was killed, and is skipped."""
    try:
        *lines, _ = path.read_text(errors="replace").split("\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}") from error
    records: list[TicketRecord] = []
    for number, line in enumerate(lines, 1):
        try:
            _take(records, json.loads(line))
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            raise DataError(
                f"{path}, line {number}: {line[:80]!r} is not a line of a log of tickets"
            ) from None
    return records


def _take(records: list[TicketRecord], line: Any) -> None:
    match line:
        case {"acted": [*numbers]} | {"dropped": [*numbers]}:
            row = LogRow(Ticket(*_counts(numbers)), dropped="dropped" in line)
            records[-1].rows.append(row)
        case {"update": update, "rollouts": str(rollouts)}:
            records[-1].batches.append(BatchRow(_counts([update])[0], rollouts, len(records[-1].rows)))
        case {"first_step": _}:
            *counts, seed = (line[name] for name in TicketHeader._fields)
            header = TicketHeader._make((*_counts(counts), seed))
            if type(seed) is not int or not 0 < header.rollouts_per_update <= _MOST_TICKETS:
                raise ValueError
            records.append(TicketRecord(header))
        case _:
            raise ValueError


def _counts(values: Sequence[Any]) -> list[int]:
    if any((whole(one) if one is not None else None) is None or one < 0 for one in values):
        raise ValueError
    return list(values)


def audit_tickets(records: Sequence[TicketRecord]) -> list[str]:
    """What in the log of a run breaks a promise, one sentence each.

    Every ticket of every batch was acted once, within the lag, and before its batch was complete; a start continues
    where one before it was, or before that, at a checkpoint.
    """
    found = [sentence for record in records for sentence in audit_start(record)]
    reached = 0
    for record in sorted(records, key=lambda one: one.header.first_step):
        first = record.header.first_step
        if first > reached:
            found.append(f"a start began at step {first}, but only {reached} had been made")
        reached = max(reached, record.end)
    return found


def audit_start(record: TicketRecord) -> list[str]:
    """The same of one start, wherever it begins and ends."""
    each, found = record.header.rollouts_per_update, list[str]()
    acted = {row.ticket.number: place for place, row in enumerate(record.rows) if not row.dropped}
    for update, batch in enumerate(record.batches):
        if batch.update != update:
            found.append(f"batch {batch.update} was complete where batch {update} was next")
        late = [n for n in range(update * each, (update + 1) * each) if acted.get(n, -1) >= batch.rows]
        found += [f"ticket {number} was acted after its batch {update} had been complete" for number in late]
    return found + audit(record.rows, each, record.header.lag, len(record.batches))


def last_starts(records: Sequence[TicketRecord]) -> dict[int, TicketRecord]:
    """By the steps at which they began, the starts whose batches are in the weights at the end of the run.

    A start that continues from a checkpoint undoes what others did after it.
    """
    found: dict[int, TicketRecord] = {}
    for record in records:
        first = record.header.first_step
        found = {begun: one for begun, one in found.items() if begun < first} | {first: record}
    return found
