"""The vocabulary, the ring against a plain list, files against every kind of damage, the collector."""

import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from descriptors import open_descriptors
from manyhands.errors import DataError, UserError
from manyhands.native.segment import Segment
from manyhands.observe.analyse.collect import Collector
from manyhands.observe.record.event_files import (
    _LAYOUTS,
    _OLD_RECORD,
    Ending,
    EventFileWriter,
    read_events,
    read_header,
)
from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import (
    NO_STEP,
    NOBODY,
    RECORD,
    Event,
    EventKind,
    Records,
    Wire,
    to_events,
    wire_of,
)

HEADER_BYTES = 512
DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "internals" / "events.md"


@pytest.fixture
def ring() -> Iterator[EventRing]:
    with EventRing.create(role=3, capacity=8) as ring:
        yield ring


def write(ring: EventRing, count: int, start_ns: int = 0) -> None:
    for i in range(start_ns, start_ns + count):
        ring.record(EventKind.COMPUTE, i, 1)


def starts(records: Records) -> list[int]:
    return [int(start) for start in records["start_ns"]]


# --- vocabulary and record


def test_record_is_one_cache_line_without_holes() -> None:
    assert RECORD.itemsize == 64
    offset = 0
    for name in RECORD.names or ():
        assert RECORD.fields is not None
        dtype, at = RECORD.fields[name][:2]
        assert at == offset, name
        assert at % dtype.itemsize == 0, f"{name} is not aligned"
        offset += dtype.itemsize
    assert offset == 64


def test_zeroed_memory_is_no_event() -> None:
    with pytest.raises(ValueError, match="0 is not a valid EventKind"):
        to_events(np.zeros(1, RECORD))


def test_documented_vocabulary_is_the_vocabulary() -> None:
    documented = re.findall(r"^\| `([A-Z]+)` +\| +(\d+) ", DOCS.read_text(), re.MULTILINE)
    assert documented == [(kind.name, str(kind.value)) for kind in EventKind]


def test_every_field_comes_back(ring: EventRing) -> None:
    sent = Event(
        kind=EventKind.STEP,
        role=3,
        id=0,
        start_ns=2**62 + 1,
        duration_ns=2**40 + 3,
        step=2**33,
        peer=30_000,
        num_bytes=2**45,
        count=2**32 - 1,
        value=-0.1,
        wire=Wire.TCP,
        codec="topk+int8",
    )
    kept = ring.record(
        sent.kind,
        sent.start_ns,
        sent.duration_ns,
        step=sent.step,
        peer=sent.peer,
        num_bytes=sent.num_bytes,
        count=sent.count,
        value=sent.value,
        wire=wire_of(Wire.TCP, "topk:0.01+int8"),
    )
    assert kept
    assert to_events(ring.drain()) == [sent]


def test_what_is_not_said_is_nobody_and_no_step(ring: EventRing) -> None:
    ring.record(EventKind.JOIN, 5)
    (event,) = to_events(ring.drain())
    assert (event.peer, event.step, event.duration_ns, event.value) == (NOBODY, NO_STEP, 0, 0.0)


def test_numbers_of_numpy_and_whole_losses_are_taken(ring: EventRing) -> None:
    ring.record(EventKind.STEP, int(np.uint64(7)), np.int64(2), step=np.int64(4), value=3)  # type: ignore[arg-type]
    (event,) = to_events(ring.drain())
    assert (event.start_ns, event.duration_ns, event.step, event.value) == (7, 2, 4, 3.0)


# --- ring


def test_ring_behaves_like_a_bounded_list() -> None:
    """Ten thousand random operations, many times around: the ring and a plain list agree at every step."""
    generator = random.Random(0)
    unread: list[int] = []
    everything: list[int] = []
    attempts = dropped = 0
    with EventRing.create(role=0, capacity=16) as ring:
        for _ in range(10_000):
            operation = generator.random()
            if operation < 0.9:
                kept = ring.record(EventKind.WAIT, attempts)
                assert kept == (len(unread) < 16)
                if kept:
                    unread.append(attempts)
                    everything.append(attempts)
                else:
                    dropped += 1
                attempts += 1
            elif operation < 0.95:
                drained = ring.drain()
                assert starts(drained) == unread
                assert drained["id"].tolist() == unread, "an id counts the events before it, lost ones too"
                unread.clear()
            else:
                count = generator.randrange(20)
                assert starts(ring.last(count)) == everything[-min(count, 15) :] * (count > 0)
            assert (ring.written, ring.dropped) == (len(everything), dropped)
        assert dropped > 100
        assert len(everything) > 16 * 100


def test_full_ring_drops_the_new_and_goes_on_when_read(ring: EventRing) -> None:
    write(ring, 11)
    assert (ring.written, ring.dropped) == (8, 3)
    assert starts(ring.drain()) == list(range(8))
    write(ring, 1, start_ns=11)
    (event,) = to_events(ring.drain())
    assert (event.start_ns, event.id) == (11, 11)


def test_last_looks_without_taking(ring: EventRing) -> None:
    write(ring, 5)
    assert starts(ring.last(2)) == [3, 4]
    assert starts(ring.last(100)) == [0, 1, 2, 3, 4]
    assert starts(ring.drain()) == [0, 1, 2, 3, 4]
    assert starts(ring.last(2)) == [3, 4], "drained events stay visible until they are overwritten"
    assert len(ring.drain()) == 0


def test_drained_records_are_copies(ring: EventRing) -> None:
    write(ring, 8)
    drained = ring.drain()
    write(ring, 8, start_ns=100)
    assert starts(drained) == list(range(8))


def test_two_ends_of_one_memory(ring: EventRing) -> None:
    with EventRing.attach(os.dup(ring.descriptor)) as writer:
        assert (writer.role, writer.capacity) == (3, 8)
        write(writer, 3)
    assert starts(ring.drain()) == [0, 1, 2]
    with EventRing.attach(os.dup(ring.descriptor)) as restarted:
        restarted.record(EventKind.JOIN, 50)
    (event,) = to_events(ring.drain())
    assert (event.id, event.role) == (3, 3), "a restarted writer goes on where the first one stopped"


def test_threads_of_one_process_may_all_record() -> None:
    with EventRing.create(role=0, capacity=1 << 12) as ring:
        threads = [threading.Thread(target=write, args=(ring, 1000, 10_000 * i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        records = ring.drain()
    assert sorted(starts(records)) == [10_000 * i + k for i in range(4) for k in range(1000)]
    assert records["id"].tolist() == list(range(4000))


def test_closed_ring_refuses_and_closes_twice(ring: EventRing) -> None:
    ring.close()
    ring.close()
    for use in (
        lambda: ring.record(EventKind.JOIN, 0),
        ring.drain,
        lambda: ring.last(1),
        lambda: ring.dropped,
    ):
        with pytest.raises(ValueError, match="the event ring is closed"):
            use()


@pytest.mark.parametrize("capacity", [-8, 0, 1, 3, 1000])
def test_capacity_must_be_a_power_of_two(capacity: int) -> None:
    with pytest.raises(UserError, match=f"capacity={capacity} is not allowed"):
        EventRing.create(role=0, capacity=capacity)


@pytest.mark.parametrize("role", [-1, 65_536])
def test_role_must_fit_its_field(role: int) -> None:
    with pytest.raises(UserError, match=f"role={role} is not allowed"):
        EventRing.create(role=role)


@pytest.mark.parametrize("num_bytes", [0, 100, 1 << 16])
def test_other_memory_is_no_ring(num_bytes: int) -> None:
    with (
        Segment.create(num_bytes, "something else") as other,
        pytest.raises(UserError, match="is not an event ring"),
    ):
        EventRing.attach(os.dup(other.descriptor))


# --- files


def some_records(count: int, first_id: int = 0, role: int = 3) -> Records:
    records = np.zeros(count, RECORD)
    records["kind"] = EventKind.EXCHANGE
    records["role"] = role
    records["id"] = np.arange(first_id, first_id + count)
    records["start_ns"] = records["id"] * 1000
    return records


def written_file(directory: Path, count: int = 5) -> Path:
    writer = EventFileWriter.create(directory, name="worker-3", role=3, max_bytes=1 << 20)
    writer.append(some_records(count))
    writer.close(dropped=7)
    return writer.path


def test_file_gives_back_what_was_appended(tmp_path: Path) -> None:
    before_ns = time.time_ns()
    writer = EventFileWriter.create(tmp_path, name="worker-3", role=3, max_bytes=1 << 20)
    writer.append(some_records(5))
    assert read_header(writer.path).ending is Ending.OPEN
    np.testing.assert_array_equal(read_events(writer.path), some_records(5), "readable while it is written")
    writer.append(some_records(4, first_id=9))
    writer.close(dropped=4)
    writer.close(dropped=4)
    np.testing.assert_array_equal(
        read_events(writer.path), np.concatenate([some_records(5), some_records(4, first_id=9)])
    )
    header = read_header(writer.path)
    assert (header.role, header.name, header.dropped, header.unwritten) == (3, "worker-3", 4, 0)
    assert header.ending is Ending.COMPLETE
    now_ns = time.monotonic_ns() + header.wall_offset_ns
    assert before_ns - 10**9 <= now_ns <= time.time_ns() + 10**9
    assert writer.path.stat().st_size == HEADER_BYTES + 9 * 64
    assert writer.note == ""


def test_layout_fits_into_the_header(tmp_path: Path) -> None:
    layout = " ".join(f"{name}:{RECORD[name].str}" for name in RECORD.names or ())
    assert layout.encode() + b"\0" in written_file(tmp_path).read_bytes()[:HEADER_BYTES]


def test_torn_tail_is_left_out_wherever_it_tears(tmp_path: Path) -> None:
    path = written_file(tmp_path)
    whole = path.read_bytes()
    for size in range(HEADER_BYTES, len(whole) + 1, 16):
        path.write_bytes(whole[:size])
        assert len(read_events(path)) == (size - HEADER_BYTES) // 64
    path.write_bytes(whole + bytes(200))
    np.testing.assert_array_equal(read_events(path), some_records(5), "blocks that never reached the disk")


def test_cut_or_foreign_header_is_refused_by_name_and_offset(tmp_path: Path) -> None:
    path = written_file(tmp_path)
    whole = path.read_bytes()
    for size in (0, 3, 8, 100, HEADER_BYTES - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=f"{re.escape(str(path))}: offset {size if size >= 8 else 0}:"):
            read_events(path)
    path.write_bytes(b"\x89PNG" + whole)
    with pytest.raises(DataError, match="offset 0: not an event file"):
        read_events(path)
    with pytest.raises(DataError, match=r"absent\.bin: cannot be read"):
        read_events(tmp_path / "absent.bin")


@pytest.mark.parametrize(
    ("offset", "damage", "reported", "words"),
    [
        (8, b"\x04", 8, "version 4"),
        (8, b"\x02", 120, "not that of version 2"),
        (12, b"\x80", 120, "layout"),
        (128, b"x", 120, "layout"),
        (40, b"\x09", 40, "9 is not a known ending"),
        (HEADER_BYTES + 2 * 64 + 16, b"\x63", HEADER_BYTES + 2 * 64, "kind 99"),
        (HEADER_BYTES + 2 * 64 + 16, b"\x00", HEADER_BYTES + 2 * 64, "kind 0"),
        (HEADER_BYTES + 3 * 64 + 18, b"\x04", HEADER_BYTES + 3 * 64, "role 4"),
        (HEADER_BYTES + 1 * 64 + 48, b"\x00", HEADER_BYTES + 1 * 64, "id 0"),
        (HEADER_BYTES + 4 * 64 + 17, b"\x07", HEADER_BYTES + 4 * 64, "not the next event"),
    ],
)
def test_garbage_is_refused_by_offset(
    tmp_path: Path, offset: int, damage: bytes, reported: int, words: str
) -> None:
    path = written_file(tmp_path)
    data = bytearray(path.read_bytes())
    assert data[offset : offset + 1] != damage
    data[offset : offset + 1] = damage
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"offset {reported}: .*{words}"):
        read_events(path)


def test_a_file_of_the_version_before_is_read(tmp_path: Path) -> None:
    """Whose peer had 32 bits, and whose codec lay in the high half of the byte that tells the wire."""
    path = written_file(tmp_path)
    now = read_events(path)
    old = np.zeros(len(now), _OLD_RECORD)
    for name in _OLD_RECORD.names:
        old[name] = now[name]
    old["wire"], old["peer"][1] = Wire.TCP | 2 << 4, 1234
    data = bytearray(path.read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    data[120:512] = _LAYOUTS[2].ljust(392, b"\0")
    data[512:] = old.tobytes()
    path.write_bytes(data)
    assert read_header(path).version == 2
    events = to_events(read_events(path))
    assert {(event.wire, event.codec) for event in events} == {(Wire.TCP, "fp16")}
    assert events[1].peer == 1234
    assert [event.id for event in events] == now["id"].tolist()
    old["peer"][1] = 70_000  # more roles than there are now
    data[512:] = old.tobytes()
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"offset {512 + 64}: not the next event"):
        read_events(path)


def test_file_stops_at_its_bound_and_says_so(tmp_path: Path) -> None:
    bound = HEADER_BYTES + 3 * 64 + 63
    writer = EventFileWriter.create(tmp_path, name="worker-3", role=3, max_bytes=bound)
    writer.append(some_records(2))
    assert writer.note == ""
    writer.append(some_records(4, first_id=2))
    header = read_header(writer.path)
    assert header.ending is Ending.FULL, "said at once: the writer may be killed before it closes"
    writer.append(some_records(10, first_id=6))
    writer.close(dropped=0)
    assert writer.path.stat().st_size <= bound
    np.testing.assert_array_equal(read_events(writer.path), some_records(3))
    header = read_header(writer.path)
    assert (header.ending, header.unwritten) == (Ending.FULL, 13)
    assert "reached its bound of 767 B: 13 later events" in writer.note


@contextmanager
def files_may_not_exceed(num_bytes: int) -> Iterator[None]:
    """A disk that is full: the kernel itself refuses to let a file of this process grow further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_disk_that_refuses_costs_events_and_nothing_else(tmp_path: Path) -> None:
    writer = EventFileWriter.create(tmp_path, name="worker-3", role=3, max_bytes=1 << 20)
    with files_may_not_exceed(HEADER_BYTES + 2 * 64 + 10):
        writer.append(some_records(5))
    writer.append(some_records(4, first_id=5))
    writer.close(dropped=0)
    np.testing.assert_array_equal(read_events(writer.path), some_records(2))
    header = read_header(writer.path)
    assert (header.ending, header.unwritten) == (Ending.FAILED, 7)
    assert "could not be written (File too large): 7 later events" in writer.note


def test_resumed_run_keeps_the_files_of_the_first(tmp_path: Path) -> None:
    paths = [written_file(tmp_path, count) for count in (1, 2, 3)]
    assert [path.name for path in paths] == ["worker-3.bin", "worker-3.2.bin", "worker-3.3.bin"]
    assert [len(read_events(path)) for path in paths] == [1, 2, 3]


@pytest.mark.parametrize("name", ["", "../worker", "a/b", "a.b", "x" * 65])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="is not allowed"):
        EventFileWriter.create(tmp_path, name=name, role=0, max_bytes=1 << 20)
    assert list(tmp_path.iterdir()) == []


# --- collector


@pytest.fixture
def rings() -> Iterator[dict[str, EventRing]]:
    with (
        EventRing.create(role=0, capacity=64) as first,
        EventRing.create(role=1, capacity=64) as second,
    ):
        yield {"worker-0": first, "worker-1": second}


def test_collector_reads_in_the_background(rings: dict[str, EventRing], tmp_path: Path) -> None:
    with Collector(rings, directory=tmp_path / "events", interval_s=0.001) as collector:
        rings["worker-1"].record(EventKind.STEP, time.monotonic_ns(), 10, step=41, count=8, value=0.5)
        deadline = time.monotonic() + 180
        while collector.snapshot().step != 42:
            assert time.monotonic() < deadline, "the event was not read"
            os.sched_yield()
    (event,) = to_events(read_events(tmp_path / "events" / "worker-1.bin"))
    assert (event.kind, event.step, event.count, event.value) == (EventKind.STEP, 41, 8, 0.5)
    assert len(read_events(tmp_path / "events" / "worker-0.bin")) == 0


def test_closing_takes_in_the_last_events_without_waiting_for_the_interval(
    rings: dict[str, EventRing], tmp_path: Path
) -> None:
    began = time.monotonic()
    with Collector(rings, directory=tmp_path, interval_s=3600) as collector:
        for ring in rings.values():
            ring.record(EventKind.COMPUTE, 0, 2_000_000_000)
            ring.record(EventKind.EXCHANGE, 0, 500_000_000, num_bytes=100, count=3)
        rings["worker-0"].record(EventKind.WAIT, 0, 1_500_000_000, peer=1)
    assert time.monotonic() - began < 60
    collector.close()
    first, second = collector.summary()["per_worker"]
    assert (first["compute_s"], first["exchange_s"], first["wait_s"]) == (2.0, 0.5, 1.5)
    assert (second["compute_s"], second["exchange_s"], second["wait_s"]) == (2.0, 0.5, 0.0)
    assert first["wait_for_s"] == [0.0, 1.5]
    assert (first["bytes_sent"], first["messages_sent"]) == (100, 3)
    assert collector.summary()["events"] == {"recorded": 5, "dropped": 0, "unwritten": 0, "notes": []}
    assert [len(read_events(tmp_path / f"worker-{i}.bin")) for i in (0, 1)] == [3, 2]


def test_collector_without_a_directory_writes_nothing(
    rings: dict[str, EventRing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Collector(rings) as collector:
        rings["worker-0"].record(EventKind.COMPUTE, 0, 10**9)
    assert collector.summary()["per_worker"][0]["compute_s"] == 1.0
    assert list(tmp_path.iterdir()) == []


def test_losses_are_counted_and_said(rings: dict[str, EventRing], tmp_path: Path) -> None:
    bound = 2 * (HEADER_BYTES + 10 * 64)
    with Collector(rings, directory=tmp_path, max_bytes=bound, interval_s=3600) as collector:
        write(rings["worker-0"], 70)
    events = collector.summary()["events"]
    assert (events["recorded"], events["dropped"], events["unwritten"]) == (64, 6, 54)
    assert [note.split(" ")[0] for note in events["notes"]] == ["worker-0", str(tmp_path / "worker-0.bin")]
    assert "6 events are missing from all figures" in events["notes"][0]
    assert collector.summary()["per_worker"][0]["compute_s"] == 64e-9, "what is not on disk is in the totals"
    assert read_header(tmp_path / "worker-0.bin").dropped == 6
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= bound


def test_files_are_complete_after_an_exception(rings: dict[str, EventRing], tmp_path: Path) -> None:
    rings["worker-0"].record(EventKind.FAULT, 1)
    with pytest.raises(RuntimeError, match="training failed"), Collector(rings, directory=tmp_path):
        raise RuntimeError("training failed")
    assert len(read_events(tmp_path / "worker-0.bin")) == 1
    assert read_header(tmp_path / "worker-0.bin").ending is Ending.COMPLETE


def test_directory_that_can_not_be_made_leaves_nothing_open(
    rings: dict[str, EventRing], tmp_path: Path
) -> None:
    (tmp_path / "events").write_text("a file is in the way")
    descriptors = len(open_descriptors())
    collector = Collector(rings, directory=tmp_path / "events")
    with pytest.raises(FileExistsError):
        collector.start()
    collector.close()
    assert len(open_descriptors()) == descriptors


def test_collector_wants_one_ring_for_each_worker(rings: dict[str, EventRing]) -> None:
    with pytest.raises(UserError, match=r"rings=\[1\] is not allowed"):
        Collector({"worker-1": rings["worker-1"]})
    with pytest.raises(UserError, match=r"rings=\[\] is not allowed"):
        Collector({})
    with pytest.raises(UserError, match="max_bytes=-1 must be an integer of at least 0"):
        Collector(rings, max_bytes=-1)
