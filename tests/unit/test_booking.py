"""The parts of a step, booked one behind the other."""

from __future__ import annotations

from typing import Any

from manyhands.engine.exchange import MicrobatchTime, PeerTraffic, Traffic
from manyhands.engine.reporting import StepBook
from manyhands.observe.record.events import EventKind


class Book:
    """What was recorded: kind, begin, duration and the rest."""

    def __init__(self) -> None:
        self.rows: list[tuple[EventKind, int, int, dict[str, Any]]] = []

    def record(self, kind: EventKind, start_ns: int, duration_ns: int = 0, **fields: Any) -> bool:
        self.rows.append((kind, start_ns, duration_ns, fields))
        return True


def test_each_part_begins_where_the_one_before_it_ended() -> None:
    kept = Book()
    book = StepBook(kept.record, 7, 1000)
    book.input(100, 32)
    book.compute(1500, less_ns=50)
    book.waits({2: 30, 0: 20})
    book.exchange(1700, Traffic(bytes_sent=8, messages_sent=2), 3, hidden_ns=50)
    book.compute(1800)
    book.end(1800, 32, 0.5)
    assert kept.rows == [
        (EventKind.INPUT, 1000, 100, {"step": 7, "count": 32}),
        (EventKind.COMPUTE, 1100, 350, {"step": 7}),
        (EventKind.WAIT, 1500, 30, {"step": 7, "peer": 2}),
        (EventKind.WAIT, 1530, 20, {"step": 7, "peer": 0}),
        (EventKind.EXCHANGE, 1550, 200, {"step": 7, "num_bytes": 8, "count": 2, "wire": 3}),
        (EventKind.COMPUTE, 1700, 100, {"step": 7}),
        (EventKind.STEP, 1000, 800, {"step": 7, "count": 32, "value": 0.5}),
    ]
    parts = sum(duration for kind, _, duration, _ in kept.rows if kind is not EventKind.STEP)
    assert parts == 800, "what is hidden behind computing is not counted twice"


def test_what_passes_between_slices_inside_a_turn_is_exchange() -> None:
    kept = Book()
    book = StepBook(kept.record, 0, 1000)
    turns = [
        MicrobatchTime(begin_ns=1000, end_ns=1100, microbatch=0),
        MicrobatchTime(begin_ns=1100, end_ns=1130, microbatch=0, waited_for=1, exchange_ns=70),
    ]
    book.microbatches(turns)
    book.compute(1210)
    book.exchange(1300, Traffic(), 0, hidden_ns=70)
    report = [(kind, begin, duration) for kind, begin, duration, _ in kept.rows]
    assert report == [
        (EventKind.COMPUTE, 1000, 100),
        (EventKind.WAIT, 1100, 30),
        (EventKind.COMPUTE, 1200, 10),
        (EventKind.EXCHANGE, 1210, 160),
    ]


def test_what_clocks_say_of_a_moment_before_is_no_time() -> None:
    kept = Book()
    book = StepBook(kept.record, 0, 1000)
    book.waits({1: 500})
    book.compute(1200)
    book.exchange(1100, Traffic(), 0)
    book.at_ns = 2000
    book.compute(2001)
    assert [(begin, duration) for _, begin, duration, _ in kept.rows] == [
        (1000, 500),
        (1500, 0),
        (1200, 0),
        (2000, 1),
    ]


def test_a_message_has_one_number_at_both_ends() -> None:
    kept = Book()
    book = StepBook(kept.record, 4, 0)
    book.posts(
        {1: PeerTraffic(messages_sent=3, bytes_sent=24, sent_ns=10, received_ns=20), 2: PeerTraffic()}, 5
    )
    assert kept.rows == [
        (
            EventKind.SEND,
            10,
            0,
            {"step": 4, "peer": 1, "num_bytes": 24, "count": 3, "message": 5, "wire": 5},
        ),
        (EventKind.RECEIVE, 20, 0, {"step": 4, "peer": 1, "message": 5, "wire": 5}),
    ]
