"""Lines of members to their leader, over real sockets in one process: who is let in, what is said, who is lost."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hubs import FAST, dial
from manyhands.errors import Aborted, ManyhandsError, PeerTimeout, UserError
from manyhands.observe.analyse.collect import Collector
from manyhands.observe.record.event_files import read_events
from manyhands.observe.record.events import NO_STEP, NOBODY, RECORD, EventKind
from manyhands.places.external.control_connection import ControlConnection, open_control_connection
from manyhands.places.external.control_messages import ControlEvents, ControlPing
from manyhands.places.external.control_server import (
    ControlEvent,
    ControlServer,
    Delivered,
    ProcessRejected,
    Warned,
    hello_of,
    terms_of,
)
from manyhands.places.external.process_place import ProcessPlace
from manyhands.places.local.rendezvous import meet
from manyhands.places.local.roster import Ended, Said, Started
from manyhands.places.local.status import State

TOKEN = b"the secret of this run, 32 bytes"
TERMS = terms_of({"task": "digits", "steps": 10})


class Party:
    """A leader that polls in a thread, and lines to it."""

    def __init__(self, world: int, how: str = "unix") -> None:
        self.world = world
        self.control_server = ControlServer(
            ProcessPlace(rank=0, world=world, kind="torchrun"), TERMS, TOKEN, settings=FAST
        )
        self.address = self.control_server.listen(how)
        self.events: list[ControlEvent] = []
        self.dismissing: tuple[int, str] | None = None
        self._stop = threading.Event()
        self._stack = ExitStack()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._stop.is_set():
            self.events += self.control_server.poll(0.02)
            if self.dismissing is not None:  # by the thread that polls
                self.control_server.dismiss(*self.dismissing)
                self.dismissing = None

    def join(
        self, rank: int, *, terms: Any = TERMS, token: bytes = TOKEN, world: int = 0
    ) -> ControlConnection:
        place = ProcessPlace(rank=rank, world=world or self.world, kind="torchrun", host=f"host{rank}")
        return self._stack.enter_context(
            open_control_connection(
                place, "worker 0 on hostA", self.address, token, terms, timeout_s=5.0, settings=FAST
            )
        )

    def until(self, done: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 180
        while not done():
            assert time.monotonic() < deadline, self.events
            time.sleep(0.005)

    def one(self, kind: type) -> Any:
        self.until(lambda: any(isinstance(event, kind) for event in self.events))
        event = next(event for event in self.events if isinstance(event, kind))
        self.events.remove(event)
        return event

    def close(self) -> None:
        self._stack.close()
        self._stop.set()
        self._thread.join()
        self.control_server.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Party]]:
    with ExitStack() as stack:

        def made(world: int = 3, how: str = "unix") -> Party:
            party = Party(world, how)
            stack.callback(party.close)
            return party

        yield made


@pytest.mark.parametrize("how", ["unix", "tcp"])
def test_what_is_said_arrives_in_order_with_events_marks_and_result(
    make: Callable[..., Party], how: str
) -> None:
    party = make(2, how)
    line = party.join(1)
    assert party.one(Started) == Started(1, os.getpid())
    assert party.control_server.members == (1,)
    for number in range(3):
        line.send({"number": number})
    began = time.monotonic_ns()
    line.ring.record(EventKind.COMPUTE, began, 5, step=7)
    line.mark(7, State.COMPUTING)
    party.until(lambda: party.control_server.known[1].seen.step == 7)
    assert party.control_server.known[1].seen.doing() == "computing step 7"
    party.until(lambda: party.control_server.rings[1].written == 1)
    (record,) = party.control_server.rings[1].drain()
    assert (record["start_ns"], record["step"], record["role"]) == (began, 7, 1)
    party.control_server.tell(1, {"go": "on"})
    party.until(lambda: line._notes)
    assert line.received() == [{"go": "on"}]
    assert not line.stop_requested()
    party.control_server.ask_to_stop(1)
    party.until(line.stop_requested)
    line.end({"steps": 7})
    assert [party.one(Said).payload["number"] for _ in range(3)] == [0, 1, 2]
    ended = party.one(Ended)
    assert (ended.member, ended.payload, ended.failure) == (1, {"steps": 7}, None)
    data = np.random.default_rng(0).bytes(5 << 20)
    party.control_server.give(1, "weights", [data[:100], data[100:]])
    assert line.take("weights", 5.0) == data
    assert line.over is None
    line.close()
    assert not [event for event in party.events if isinstance(event, Ended)]


def test_a_member_sends_something_large_in_order_with_what_it_says(make: Callable[..., Party]) -> None:
    party = make(2, "tcp")
    line = party.join(1)
    data = np.random.default_rng(1).bytes(3 << 20)
    line.send({"before": True})
    line.give("a shard", [data[:10], data[10:]])
    line.send({"after": True})
    party.until(lambda: len(party.events) == 4)
    started, before, delivered, after = party.events
    assert isinstance(started, Started)
    assert (before, after) == (Said(1, {"before": True}), Said(1, {"after": True}))
    assert delivered == Delivered(1, "a shard", bytearray(data))


def test_a_selector_wakes_when_the_leader_has_said_something(make: Callable[..., Party]) -> None:
    party = make(2)
    line = party.join(1)
    party.one(Started)
    ear = [line.control_fileno()]
    line.received()
    assert not select.select(ear, [], [], 0)[0]
    party.control_server.tell(1, {"go": "on"})
    assert select.select(ear, [], [], 10)[0]
    assert line.received() == [{"go": "on"}]
    assert not select.select(ear, [], [], 0)[0]
    party.control_server.break_off(0, "it is over")
    assert select.select(ear, [], [], 10)[0]
    assert line.stopping


def test_who_is_dismissed_is_told_and_another_may_come(make: Callable[..., Party]) -> None:
    party = make(2)
    first = party.join(1)
    party.one(Started)
    party.dismissing = (1, "the leader went on without it")
    ended = party.one(Ended)
    assert "the leader went on without it" in ended.failure.sentence
    party.until(lambda: first.over is not None)
    assert first.over is not None
    assert first.over.sentence == "the leader went on without it"
    assert not first.over.is_lost
    second = party.join(1)
    party.one(Started)
    second.send({"here": True})
    assert party.one(Said) == Said(1, {"here": True})


def test_a_record_that_no_role_makes_ends_its_line_and_leaves_the_events_whole(
    make: Callable[..., Party], tmp_path: Path
) -> None:
    party = make(2)
    bad: list[tuple[dict[str, Any], int]] = [({"kind": 200}, 0), ({"codec": 31}, 0), ({"wire": 9}, 0)]
    bad += [({"peer": -2}, 0), ({"step": -2}, 0), ({"start_ns": 2**63}, 0)]
    bad += [({"duration_ns": 2**63}, 0), ({"num_bytes": 2**63}, 0), ({}, -1), ({}, 2**62)]
    bad += [({"kind": EventKind.HOLD, "value": math.nan}, 0)]
    ring = party.control_server.rings[1]
    for number, (fields, lost) in enumerate(bad):
        line = party.join(1)
        line.ring.record(EventKind.COMPUTE, time.monotonic_ns(), 5, step=7)
        party.until(lambda due=number + 1: ring.written == due)
        records = np.zeros(2, RECORD)
        records["kind"], records["step"], records["peer"] = EventKind.WAIT, NO_STEP, NOBODY
        for name, value in fields.items():
            records[name][1] = value
        line.queue.put(ControlEvents(lost=lost), [records.tobytes()])
        failure = party.one(Ended).failure
        assert "it violated the protocol: link protocol, field 'events'" in failure.sentence
        line.close()
    Collector({"worker-1": ring}, workers=2, directory=tmp_path).start().close()
    assert read_events(tmp_path / "worker-1.bin")["id"].tolist() == list(range(len(bad)))


def test_a_failure_reaches_the_leader_with_its_traceback_and_everyone_else_as_the_end(
    make: Callable[..., Party],
) -> None:
    party = make(3)
    first, second = party.join(1), party.join(2)
    over: list[str] = []
    second.on_over(lambda broken: over.append(broken.sentence))
    first.mark(4, State.COMPUTING)
    try:
        raise ZeroDivisionError("of nothing")
    except ZeroDivisionError as error:
        first.fail(error)
    ended = party.one(Ended)
    error = ended.failure.error()
    assert f"worker 1 on host1 (process {os.getpid()}) raised ZeroDivisionError at step 4: of nothing" in str(
        error
    )
    assert "test_control_connections.py" in str(error)
    assert error.worker_rank == 1
    party.control_server.break_off(1, ended.failure.sentence)
    party.until(lambda: over)
    assert over == [ended.failure.sentence]
    assert second.stop_requested()
    with pytest.raises(Aborted, match="of nothing"):
        second.store.get("x")
    with pytest.raises(Aborted, match="of nothing"):
        second.take("weights", 5.0)


def test_what_fails_in_a_lines_own_thread_ends_its_waits_and_reaches_the_leader(
    make: Callable[..., Party],
) -> None:
    party = make(2)
    line = party.join(1)
    party.one(Started)
    ended_waits: list[str] = []
    line.on_over(lambda broken: ended_waits.append(broken.sentence))

    def chunks() -> Iterator[bytes]:
        yield b"some of it"
        raise ZeroDivisionError("of nothing")

    line.give("a shard", chunks())
    over = line.wait_over(10.0)
    assert over is not None
    assert (over.rank, over.is_lost) == (1, False)
    assert "worker 1 on host1: its connection to worker 0 on " in over.sentence
    assert "failed: ZeroDivisionError('of nothing')" in over.sentence
    assert line.stop_requested()
    with pytest.raises(Aborted, match="of nothing"):
        line.take("weights", 5.0)
    failure = party.one(Ended).failure
    assert "raised ZeroDivisionError at step 0: of nothing" in failure.sentence
    assert "test_control_connections.py" in str(failure.error())
    party.until(lambda: ended_waits)
    assert ended_waits == [over.sentence]


@pytest.mark.parametrize(
    ("asked", "kind", "told"),
    [
        ({"terms": terms_of({"task": "words", "steps": 10})}, UserError, "worker 1 on host1 has task=words"),
        ({"world": 4}, UserError, "has world size 4"),
        ({"token": b"another secret of another run"}, UserError, "field 'token'"),
    ],
)
def test_a_process_that_does_not_belong_is_refused_by_name_on_both_sides(
    make: Callable[..., Party], asked: dict[str, Any], kind: type[Exception], told: str
) -> None:
    party = make()
    with pytest.raises(kind) as raised:
        party.join(1, **asked)
    assert told in str(raised.value)
    if "token" not in asked:  # of strangers the leader says nothing
        assert party.one(ProcessRejected).sentence == str(raised.value)
    party.join(1)  # who does belong is let in afterwards
    assert party.one(Started).member == 1


def test_of_two_processes_with_one_rank_the_second_is_refused_and_the_first_stays(
    make: Callable[..., Party],
) -> None:
    party = make()
    first = party.join(1)
    with pytest.raises(UserError, match="two processes have rank 1"):
        party.join(1)
    assert "two processes have rank 1" in party.control_server.register.late("join", 1.0)
    first.send({"still": "here"})
    assert party.one(Said).payload == {"still": "here"}


def test_a_member_that_dies_or_leaves_is_told_once_and_may_come_again(make: Callable[..., Party]) -> None:
    party = make(2, "tcp")
    line = party.join(1)
    line.mark(3, State.EXCHANGING)
    party.until(lambda: party.control_server.known[1].seen.step == 3)
    line._hub._reactor.members[0].end.shutdown(2)  # as if its process were gone
    ended = party.one(Ended)
    assert "worker 1 on host1" in ended.failure.sentence
    assert "last seen exchanging step 3" in ended.failure.sentence
    assert party.control_server.members == ()
    party.until(lambda: line.over is not None)
    assert "the leader of the run, " in line.over.sentence
    again = party.join(1)
    party.until(lambda: party.control_server.members == (1,))
    again.close()
    assert "left before it reported a result" in party.one(Ended).failure.sentence


def test_silence_is_noticed_on_both_sides(make: Callable[..., Party]) -> None:
    party = make(2, "tcp")
    line = party.join(1)
    party.one(Started)
    for hub in (line._hub, party.control_server._hub):
        hub._reactor._stop_heartbeats.set()  # nothing is sent any more, though both connections stand
    began = time.monotonic()
    ended = party.one(Ended)
    party.until(lambda: line.over is not None)
    assert "worker 1 on host1" in ended.failure.sentence
    assert "worker 0 on " in line.over.sentence
    assert "nothing received for 0.5 s" in ended.failure.sentence + line.over.sentence  # who looked first
    assert time.monotonic() - began < 60.0


def test_a_leader_that_does_not_answer_is_named(make: Callable[..., Party]) -> None:
    party = make(2, "tcp")
    address = party.address
    party.close()
    place = ProcessPlace(rank=1, world=2, kind="torchrun", host="hostB")
    with pytest.raises((PeerTimeout, ManyhandsError), match="worker 0 on hostA"):
        open_control_connection(
            place, "worker 0 on hostA", address, TOKEN, TERMS, timeout_s=0.3, settings=FAST
        )


def test_an_unknown_peer_tells_the_leader_nothing(make: Callable[..., Party]) -> None:
    party = make(2, "tcp")
    with dial(party.address) as foreign_row:
        foreign_row.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
        party.join(1)
    party.one(Started)
    assert party.events == []


def test_who_breaks_the_rules_of_the_line_is_lost_and_others_are_not(make: Callable[..., Party]) -> None:
    party = make(3)
    first, second = party.join(1), party.join(2)
    with pytest.raises(Aborted):
        first.store.ask("fly", ["a"])
    assert "call: fly" in party.one(Ended).failure.sentence.replace("'", "")
    second.store.set("k", "v")
    assert party.control_server.store.get("k") == b"v"


def test_who_says_twice_who_it_is_is_lost_and_takes_no_second_rank(make: Callable[..., Party]) -> None:
    party = make(4)
    line = party.join(1)
    line.queue.put(hello_of(ProcessPlace(rank=2, world=4, kind="torchrun", host="hostB"), TERMS))
    assert "is lost: it sent a second hello" in party.one(Ended).failure.sentence
    assert (party.control_server.members, party.control_server.register.missing) == ((), (1, 2, 3))
    party.join(2)
    party.until(lambda: party.control_server.members == (2,))


def test_processes_meet_in_the_store_that_the_leader_keeps(make: Callable[..., Party]) -> None:
    party = make(3)
    stores = [party.control_server.store, *(party.join(rank).store for rank in (1, 2))]
    with ThreadPoolExecutor(3) as pool:
        meetings = list(
            pool.map(
                lambda rank: meet(stores[rank], rank=rank, world=3, name="fit", timeout_s=10.0), range(3)
            )
        )
    assert [rendezvous.hosts for rendezvous in meetings] == [((0, 1, 2),)] * 3
    for rendezvous in meetings:
        rendezvous.close()
    party.until(lambda: not party.control_server.store._values)


def test_events_of_another_clock_are_put_on_the_leaders(make: Callable[..., Party]) -> None:
    party = make(2)
    line = party.join(1)
    line._same_clock = False  # as if the host had been started at another time: the truth is an offset of 0
    line._post(ControlPing(sent_ns=time.monotonic_ns()))
    party.until(lambda: line._brackets)
    assert abs(line.offset().ns) <= line.offset().error_ns
    assert 0 < line.offset().error_ns < 1_000_000_000


def test_a_wall_clock_hours_off_is_told_and_ends_nothing(make: Callable[..., Party]) -> None:
    party = make(2)
    hello = hello_of(ProcessPlace(rank=1, world=2, kind="torchrun", host="hostB"), TERMS)
    started, remarked = party.control_server._greet(77, hello._replace(unix_s=time.time() - 7200))
    assert isinstance(started, Started)
    assert isinstance(remarked, Warned)
    assert "the clock of worker 1 on hostB is 2.0 h behind the leader's" in remarked.sentence


def test_what_comes_right_behind_the_welcome_is_not_lost(make: Callable[..., Party]) -> None:
    party = make(2)
    greet = party.control_server._greet

    def greet_and_tell(connection: int, hello: Any) -> Any:
        told = greet(connection, hello)
        for number in range(50):
            party.control_server.tell(1, {"number": number})
        party.control_server._send_queued()
        return told

    party.control_server._greet = greet_and_tell  # type: ignore[method-assign]
    line = party.join(1)
    said: list[Any] = []
    party.until(lambda: said.extend(line.received()) or len(said) == 50)
    assert [one["number"] for one in said] == list(range(50))
