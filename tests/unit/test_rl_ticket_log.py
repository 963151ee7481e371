"""The log of tickets: what is written is read, damage is named by its line, and the audit sees what is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manyhands.errors import DataError
from manyhands.workloads.rl.rollouts import RolloutSpec
from manyhands.workloads.rl.ticket_log import (
    BatchRow,
    TicketHeader,
    TicketRecord,
    TicketWriter,
    audit_tickets,
    last_starts,
    read_tickets,
    rollouts_hash,
)
from manyhands.workloads.rl.tickets import Ticket, Tickets

HEADER = TicketHeader(
    first_step=0, steps_each=1, actors=2, environments=1, rollouts_per_update=2, lag=1, central=0, seed=3
)


def run(path: Path, header: TicketHeader, updates: int) -> Tickets:
    """A run of two actors that end their tickets in a drawn order; now and then one is lost."""
    tickets = Tickets(header.actors, header.rollouts_per_update, header.lag)
    draw, acting = random.Random(1), dict[int, Ticket]()
    with TicketWriter(path, header) as writer:
        for update in range(updates):
            while tickets.ready(update) is None:
                actor = draw.randrange(2)
                ticket = acting.pop(actor, None)
                begun = tickets.begin(actor, update) if ticket is None else None
                if isinstance(begun, Ticket):
                    acting[actor] = begun
                elif ticket is not None and draw.random() < 0.1:
                    tickets.lost(actor)
                elif ticket is not None:
                    tickets.finished(ticket)
            writer.write(tickets.log, update, f"{update:016x}")
    return tickets


def test_a_log_is_read_as_it_was_written_and_holds(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tickets = run(path, HEADER, 30)
    resumed = HEADER._replace(first_step=25, steps_each=2)
    again = run(path, resumed, 8)
    first, second = read_tickets(path)
    assert (first.header, second.header) == (HEADER, resumed)
    assert first.rows == tickets.log
    assert second.rows == again.log
    assert any(row.dropped for row in first.rows)
    assert [one[:2] for one in first.batches] == [(update, f"{update:016x}") for update in range(30)]
    assert audit_tickets([first, second]) == []
    assert (first.end, second.end) == (30, 41)
    assert last_starts([first, second]) == {0: first, 25: second}
    assert last_starts([first, second, first]) == {0: first}


def test_half_a_line_is_of_a_process_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    run(path, HEADER, 4)
    whole = read_tickets(path)
    path.write_text(path.read_text() + '{"acted":[9,1,')
    assert read_tickets(path) == whole


@pytest.mark.parametrize(
    "line", ["", "x", "[]", '{"acted":[1,2]}', '{"acted":[1,0,0,0,-1]}', '{"acted":[1,0,0,0,true]}', '{"update":0}',
             '{"first_step":0}', '{"update":1e400,"rollouts":"0"}', '{"dropped":5}', "[" * 100_000]
)  # fmt: skip
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    run(path, HEADER, 2)
    intact = path.read_text()
    path.write_text(intact + line + "\n")
    with pytest.raises(
        DataError, match=rf"log, line {len(intact.splitlines()) + 1}: .* is not a line of a log"
    ):
        read_tickets(path)


def test_a_file_that_begins_with_a_ticket_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"acted":[0,0,0,0,0]}\n')
    with pytest.raises(DataError, match="line 1"):
        read_tickets(path)


def without(number: int) -> Callable[[TicketRecord], TicketRecord]:
    return lambda record: replace(record, rows=[row for row in record.rows if row.ticket.number != number])


def batch_early(record: TicketRecord) -> TicketRecord:
    batches = list(record.batches)
    batches[3] = batches[3]._replace(rows=0)
    return replace(record, batches=batches)


def batch_twice(record: TicketRecord) -> TicketRecord:
    return replace(record, batches=[record.batches[0], *record.batches])


WRONG: dict[str, tuple[Callable[[TicketRecord], TicketRecord], str]] = {
    "a lost row": (without(23), "ticket 23 was never finished"),
    "a batch before its tickets": (batch_early, "ticket 6 was acted after its batch 3 had been complete"),
    "a batch twice": (batch_twice, "batch 0 was complete where batch 1 was next"),
    "a later start": (
        lambda record: replace(record, header=record.header._replace(first_step=2)),
        "a start began at step 2, but only 0 had been made",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_audit_of_a_file_names_what_is_wrong(case: str, tmp_path: Path) -> None:
    change, sentence = WRONG[case]
    path = tmp_path / "log"
    run(path, HEADER, 12)
    (record,) = read_tickets(path)
    assert audit_tickets([record]) == []
    assert sentence in audit_tickets([change(record)])


def test_the_hash_sees_every_field() -> None:
    spec = RolloutSpec(length=3, observation_shape=(2,), observation_dtype=torch.uint8)
    plain, seen = rollouts_hash(spec.empty(2)), set[str]()
    for place in range(9):
        changed = spec.empty(2)
        changed[place].view(-1)[-1] = 1
        seen.add(rollouts_hash(changed))
    assert len(seen | {plain}) == 10


def test_rows_of_a_batch_stand_before_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    run(path, HEADER, 1)
    (record,) = read_tickets(path)
    assert record.batches == [BatchRow(0, "0" * 16, len(record.rows))]
