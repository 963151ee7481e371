"""The ring between real processes: a writer that hammers, and a writer that is killed in the middle of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import warm
from manyhands.observe.analyse.collect import Collector
from manyhands.observe.record.event_files import read_events
from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import EventKind, Records

# Every field of an event follows from its id: a record with a part of another event in it gives itself away.
# The loop is compiled, so that the writer spends its time inside records: any moment may well be amid one.
WRITER = """
import select
import sys
from numba import njit
from manyhands.observe.record.event_ring import EventRing, _record

@njit
def hammer(address, first, last):
    for i in range(first, last):
        _record(address, 3, 3 * i, i, i + 7, i % 1000, 5 * i, i % 997, i / 2)

ring = EventRing.attach(int(sys.argv[1]))
hammer(ring._address, 0, 0)
print("ready", flush=True)
total = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    hammer(ring._address, total, total + 1_000_000)
    total += 1_000_000
print(total, flush=True)
"""


@contextmanager
def writer(ring: EventRing) -> Iterator[subprocess.Popen[str]]:
    """A process that records events as fast as it can until its input closes, and then says how many."""
    process = warm.Popen(
        [sys.executable, "-c", WRITER, str(ring.descriptor)],
        pass_fds=[ring.descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
    finally:
        process.kill()


def assert_whole(records: Records, role: int = 5) -> None:
    ids = records["id"]
    np.testing.assert_array_equal(records["start_ns"], 3 * ids)
    np.testing.assert_array_equal(records["duration_ns"], ids)
    np.testing.assert_array_equal(records["step"], ids + 7)
    np.testing.assert_array_equal(records["peer"], ids % 1000)
    np.testing.assert_array_equal(records["num_bytes"], 5 * ids)
    np.testing.assert_array_equal(records["count"], ids % 997)
    np.testing.assert_array_equal(records["value"], ids / 2)
    assert (records["kind"] == EventKind.WAIT).all()
    assert (records["role"] == role).all()
    assert (np.diff(ids.astype(np.int64)) > 0).all(), "in order, and none twice"


class Account:
    """What a reader has seen: every record whole, in order, none twice; the gaps between are the losses."""

    def __init__(self) -> None:
        self.count = 0
        self.next_id = 0
        self.lost = 0

    def take(self, records: Records) -> None:
        if not len(records):
            return
        assert_whole(records)
        first, last = int(records["id"][0]), int(records["id"][-1])
        assert first >= self.next_id, "in order, and none twice"
        self.lost += first - self.next_id + (last - first + 1 - len(records))
        self.count += len(records)
        self.next_id = last + 1


def freeze(process: subprocess.Popen[str]) -> None:
    """Stop the process between two of its instructions, wherever it is."""
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "the writer died"


def test_reader_never_sees_half_a_record_and_accounts_for_every_one() -> None:
    capacity = 1 << 14
    account = Account()
    rounds = looked_at = 0
    with EventRing.create(role=5, capacity=capacity) as ring, writer(ring) as process:
        # The ring goes around more than twenty times, however few of the events find room on a busy machine.
        while ring.written + ring.dropped < 20_000_000 or ring.written <= 20 * capacity:
            rounds += 1
            drained = [ring.drain()]
            look = ring.last(capacity)  # the writer has room, and is overwriting what is being looked at
            drained.append(ring.drain())
            freeze(process)  # it still has room: it stops amid a record, and not at a full ring
            drained.append(ring.drain())
            process.send_signal(signal.SIGCONT)
            assert_whole(look)
            looked_at += len(look)
            for records in drained:
                account.take(records)
        total = int(process.communicate(timeout=240)[0])
        account.take(ring.drain())
        written, dropped = ring.written, ring.dropped
        assert len(ring.drain()) == 0
    assert account.count == written
    assert written + dropped == total
    assert account.lost + (total - account.next_id) == dropped
    assert dropped > 0, "the ring was never full: this shows nothing about losses"
    assert looked_at > 0
    assert rounds > 5


def test_events_of_a_killed_writer_are_all_there(tmp_path: Path) -> None:
    with (
        EventRing.create(role=0, capacity=1 << 12) as ring,
        Collector({"worker-0": ring}, directory=tmp_path, interval_s=0.001) as collector,
        writer(ring) as process,
    ):
        deadline = time.monotonic() + 180
        while ring.written < 20_000:
            assert time.monotonic() < deadline, "nothing is written or nothing is read"
            os.sched_yield()
        process.send_signal(signal.SIGKILL)
        assert process.wait(240) == -signal.SIGKILL
        black_box = ring.last(100)
        collector.close()
        summary = collector.summary()
    records = read_events(tmp_path / "worker-0.bin")
    assert_whole(records, role=0)
    assert len(records) == summary["events"]["recorded"] >= 20_000
    assert summary["per_worker"][0]["wait_s"] == records["duration_ns"].sum() / 1e9
    assert len(black_box) == 100
    np.testing.assert_array_equal(black_box, records[-100:])
