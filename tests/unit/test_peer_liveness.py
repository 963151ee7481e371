"""Who on other hosts is still there: beats, data and times go in, and only who is really silent comes out."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from manyhands.transport.heartbeats import (
    BeatPlace,
    Heartbeats,
    address_of_interface,
    data_ages,
    exchange_places,
    is_stopped,
)
from manyhands.transport.liveness import BETWEEN_HOSTS, FRAME, HeartbeatKind, PeerLiveness, PeerLost

SECRET = b"s" * 32
B, C = "b (10.0.0.2)", "c (10.0.0.3)"
SILENCE_S = BETWEEN_HOSTS.silence_s


class World:
    """Rank 0 on one host, ranks 1 and 2 on B, rank 3 on C; rank 0 looks four times a second, as the driver does."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pulse = PeerLiveness(0, {1: B, 2: B, 3: C}, SECRET, self.now)
        self.others = {rank: PeerLiveness(rank, {0: "a"}, SECRET, self.now) for rank in (1, 2, 3)}
        self.counts = dict.fromkeys((1, 2, 3), 0)

    def beat(self, *ranks: int, progress: int = 7) -> None:
        for rank in ranks:
            self.counts[rank] += 1
            frame = self.others[rank].frame(0, HeartbeatKind.HEARTBEAT, self.counts[rank], progress)
            assert self.pulse.handle(frame, self.now) is None

    def run(self, seconds: float, *beating: int, data_of: str | None = None) -> PeerLost | None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            self.beat(*beating)
            if data_of is not None and self.pulse.suspects(self.now):
                self.pulse.data_came(data_of, self.now - 0.1, self.now)
            lost = self.pulse.look(self.now)
            if lost is not None:
                return lost
        return None


def test_a_rank_that_falls_silent_is_named_with_its_host_within_five_seconds_and_nobody_else() -> None:
    world = World()
    assert world.run(60.0, 1, 2, 3) is None
    silent_since = world.now
    lost = world.run(60.0, 1, 3)
    assert lost is not None
    assert lost.rank == 2
    assert SILENCE_S <= world.now - silent_since < 5.0
    assert f"rank 2 on {B} fell silent" in lost.sentence
    assert "last received in exchange 7" in lost.sentence
    assert world.run(60.0, 1, 3) is None, "it is told once"


def test_who_was_never_heard_is_never_judged_and_reported_once() -> None:
    world = World()
    assert world.run(20.0, 1, 2) is None
    assert world.pulse.unheard(world.now) == ()
    assert world.run(40.0, 1, 2) is None
    assert world.pulse.unheard(world.now) == (3,)
    assert world.pulse.unheard(world.now) == ()


def test_data_from_a_host_excuses_it_as_long_as_none_of_its_beats_come_through() -> None:
    world = World()
    assert world.run(5.0, 1, 2, 3) is None
    assert world.run(120.0, 3, data_of=B) is None, "a starved link makes progress"
    lost = world.run(60.0, 3)
    assert lost is not None, "and is named when it makes none any more"
    assert lost.rank in (1, 2)
    beside = World()
    assert beside.run(5.0, 1, 2, 3) is None
    stopped = beside.run(60.0, 1, 3, data_of=B)
    assert stopped is not None, "beats of another rank of the host pass, so the link is no excuse"
    assert stopped.rank == 2


def test_one_that_says_goodbye_is_not_missed() -> None:
    world = World()
    assert world.run(5.0, 1, 2, 3) is None
    assert world.pulse.handle(world.others[3].frame(0, HeartbeatKind.GOODBYE), world.now) is None
    assert world.run(60.0, 1, 2) is None
    assert world.pulse.unheard(world.now) == ()


def test_a_cut_in_one_direction_is_known_at_its_other_end() -> None:
    world = World()
    world.beat(1, 2, 3)
    report = world.pulse.handle(world.others[1].frame(0, HeartbeatKind.GIVEN_UP, blamed=0), world.now)
    assert report is not None
    assert report.rank == 1
    assert f"rank 1 on {B} no longer receives anything from rank 0, but still sends to it" in report.sentence
    report = world.pulse.handle(world.others[2].frame(0, HeartbeatKind.GIVEN_UP, blamed=3), world.now)
    assert report is not None
    assert f"rank 2 on {B} has left: it no longer receives anything from rank 3 on {C}" in report.sentence


def test_one_who_is_missed_here_too_is_named_and_not_the_one_who_gave_it_up_first() -> None:
    world = World()
    world.beat(1, 2, 3)
    assert world.run(3.0, 1, 2) is None
    report = world.pulse.handle(world.others[2].frame(0, HeartbeatKind.GIVEN_UP, blamed=3), world.now)
    assert report is not None
    assert report.rank == 3
    assert f"rank 3 on {C} fell silent: neither a heartbeat nor data from it for 3.0 s" in report.sentence


def test_one_who_is_known_to_live_is_not_given_up_until_it_is_not() -> None:
    world = World()
    world.beat(1, 2, 3)
    for _ in range(40):
        world.pulse.excuse(3, world.now)
        assert world.run(0.5, 1, 2) is None
    lost = world.run(SILENCE_S + 1.0, 1, 2)
    assert lost is not None
    assert lost.rank == 3


def test_a_process_that_was_stopped_is_told_from_one_that_runs() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert not is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            assert is_stopped(process.pid)
            process.send_signal(signal.SIGCONT)
            os.waitid(os.P_PID, process.pid, os.WCONTINUED)
            assert not is_stopped(process.pid)
        finally:
            process.kill()
    assert is_stopped(process.pid)


def test_one_who_did_not_look_blames_nobody_before_reading_what_came_meanwhile() -> None:
    world = World()
    assert world.run(5.0, 1, 2, 3) is None
    world.now += 3600.0  # this process was stopped
    assert world.pulse.look(world.now) is None
    assert world.run(60.0, 1, 2, 3) is None


@pytest.mark.parametrize("change", ["length", "magic", "token", "rank", "own", "secret", "replay", "kind"])
def test_strangers_and_other_jobs_are_not_heard(change: str) -> None:
    world = World()
    good = world.others[1].frame(0, HeartbeatKind.HEARTBEAT, 1)
    foreign_row = {
        "length": good[:-1],
        "magic": b"x" + good[1:],
        "token": good[:8] + bytes(16) + good[24:],
        "rank": PeerLiveness(9, {0: "a"}, SECRET, 0.0).frame(0, HeartbeatKind.HEARTBEAT, 1),
        "own": world.pulse.frame(1, HeartbeatKind.HEARTBEAT, 1),
        "secret": PeerLiveness(1, {0: "a"}, b"t" * 32, 0.0).frame(0, HeartbeatKind.GIVEN_UP, blamed=0),
        "replay": world.others[1].frame(0, HeartbeatKind.HEARTBEAT, 5),
        "kind": FRAME.pack(*FRAME.unpack(good)[:2], 77, *FRAME.unpack(good)[3:]),
    }[change]
    if change == "replay":
        world.pulse.handle(foreign_row, world.now)
        world.now += SILENCE_S
        for _ in range(20):  # the same again and again proves nothing
            assert world.pulse.handle(foreign_row, world.now) is None
            world.now += 0.25
            if world.pulse.look(world.now) is not None:
                return
        pytest.fail("a datagram that was seen before passed for a beat")
    assert world.pulse.handle(foreign_row, world.now) is None
    assert world.pulse.suspects(world.now + 1000.0) == {}


class Table:
    """A store for ranks in threads."""

    def __init__(self) -> None:
        self._kept: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._kept[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._kept, 30.0), key
            return self._kept[key].encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            self._kept[key] = str(int(self._kept.get(key, "0")) + amount)
            return int(self._kept[key])

    def delete_key(self, key: str) -> bool:
        with self._changed:
            return self._kept.pop(key, None) is not None

    @property
    def is_empty(self) -> bool:
        return not self._kept


class CountingTable(Table):
    """Counts the calls, several values in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def set(self, key: str, value: str) -> None:
        self.calls += 1
        super().set(key, value)

    def add(self, key: str, amount: int) -> int:
        self.calls += 1
        return super().add(key, amount)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls += 1
        return super().multi_get(keys)


@pytest.mark.parametrize("world", [2, 9])
def test_each_rank_calls_the_store_as_often_whatever_the_number_of_ranks(world: int) -> None:
    table = CountingTable()
    with ThreadPoolExecutor(world) as ranks:
        met = list(ranks.map(lambda rank: exchange_places(table, rank, world, "127.0.0.1"), range(world)))
    for own, places, _ in met:
        assert list(places) == list(range(world))
        own.close()
    assert table.is_empty
    assert table.calls == 3 * world + 1  # rank 0 also sets the secret


def test_beats_go_on_while_the_interpreter_lock_is_held_and_a_goodbye_ends_the_watch() -> None:
    table = Table()
    met: dict[int, tuple[socket.socket, dict[int, BeatPlace], bytes]] = {}

    def meet(rank: int) -> None:
        met[rank] = exchange_places(table, rank, 2, "127.0.0.1")

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert met[0][1:] == met[1][1:]
    assert table.is_empty, "a later group of this name must not find these"
    own, places, secret = met[0]
    lost: list[int] = []
    heartbeats = Heartbeats(0, own, {1: places[1]}, secret, on_lost=lambda rank, _: lost.append(rank))
    listener, seen = PeerLiveness(1, {0: "x"}, secret, time.monotonic()), []
    other = met[1][0]
    other.settimeout(30.0)
    heartbeats.mark(41)
    try:
        while len(seen) < 3:
            frame = other.recv(100)
            assert listener.handle(frame, time.monotonic()) is None
            seen.append(FRAME.unpack(frame)[4:6])
        assert [b - a for (a, _), (b, _) in pairwise(seen)] == [1, 1]
        assert seen[-1][1] == 41
        other.sendto(b"nonsense", own.getsockname())
        other.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while other.recv(100):
                pass
        other.setblocking(True)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 30, 0))
        frame, receive = (
            ctypes.create_string_buffer(100),
            ctypes.PyDLL(None).recv,
        )  # which keeps the interpreter's lock
        assert [receive(other.fileno(), frame, 100, 0) for _ in range(3)] == [FRAME.size] * 3
        other.settimeout(30.0)
    finally:
        heartbeats.close()
        heartbeats.close()
    kinds = set()
    while HeartbeatKind.GOODBYE not in kinds:
        kinds.add(FRAME.unpack(other.recv(100))[2])
    other.close()
    assert lost == []


def test_the_kernel_tells_when_data_last_came_over_any_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as one:
        other, _ = door.accept()
        with other:
            assert data_ages(["10.99.99.99"]) == {}
            other.sendall(b"data")
            assert one.recv(10) == b"data"
            assert 0.0 <= data_ages(["127.0.0.1"])["127.0.0.1"] < 60.0
    assert address_of_interface("lo") in ("127.0.0.1", None)
    assert address_of_interface(f"none{os.getpid()}") is None
