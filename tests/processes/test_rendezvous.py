"""Ranks that find each other through a store: in threads, where that is enough, and in processes."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import warm
from manyhands.errors import ManyhandsError, OutOfSharedMemory, PeerTimeout, UserError
from manyhands.places.local import rendezvous
from manyhands.places.local.rendezvous import RankEntry, Rendezvous, hosts_of, meet

TIMEOUT_S = 20.0


def stores(kind: str, folder: Path, world: int) -> list[Any]:
    """One client of the same store for each rank."""
    if kind == "tcp":
        host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return [host, *(dist.TCPStore("127.0.0.1", host.port, is_master=False) for _ in range(world - 1))]
    if kind == "file":
        return [dist.FileStore(str(folder / "store"), -1) for _ in range(world)]
    return [dist.HashStore()] * world


def all_ranks(world: int, act: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(world) as pool:
        return [future.result(TIMEOUT_S) for future in [pool.submit(act, rank) for rank in range(world)]]


@contextmanager
def met(world: int) -> Iterator[list[Rendezvous]]:
    store = dist.HashStore()
    meetings = all_ranks(
        world, lambda rank: meet(store, rank=rank, world=world, name="test", timeout_s=TIMEOUT_S)
    )
    try:
        yield meetings
    finally:
        for one in meetings:
            one.close()


def test_hosts_come_in_the_order_of_their_lowest_ranks() -> None:
    assert hosts_of(["b", "a", "b", "c", "a"]) == ((0, 2), (1, 4), (3,))
    assert hosts_of(["x"]) == ((0,),)


def test_a_seat_is_read_back_and_nothing_else_is() -> None:
    seat = RankEntry(host="a/1", pid=12, world=3, version="1.0")
    assert RankEntry.from_text(seat.to_text()) == seat
    for text in ("", "[]", '["a", 1, 2]', '{"a": 1}', "[1, 1, 1, 1]", "cos\nsystem\n(S'true'\ntR."):
        with pytest.raises(ManyhandsError, match="in place of a rank of manyhands"):
            RankEntry.from_text(text)


@pytest.mark.parametrize("kind", ["hash", "tcp", "file"])
def test_ranks_meet_share_and_meet_again_under_the_same_name(kind: str, tmp_path: Path) -> None:
    world = 3
    clients = stores(kind, tmp_path, world)
    reader, writer = os.pipe()

    def act(rank: int) -> tuple[Any, ...]:
        with meet(clients[rank], rank=rank, world=world, name="test", timeout_s=TIMEOUT_S) as one:
            mine = one.share(
                "pipes", lambda: [[writer] * (1 + 150 * local) for local in range(world)], TIMEOUT_S
            )
            for descriptor in mine:
                os.write(descriptor, bytes([rank]))
                assert not os.get_inheritable(descriptor)
                os.close(descriptor)
            return one.hosts, one.here, one.local_rank, one.world, len(mine)

    for _ in range(3):
        everyone = (0, 1, 2)
        assert all_ranks(world, act) == [
            ((everyone,), everyone, rank, world, 1 + 150 * rank) for rank in everyone
        ]
        said = os.read(reader, 1000)
        assert [said.count(rank) for rank in everyone] == [1, 151, 301]
    os.close(reader)
    os.close(writer)
    left = clients[0].num_keys() - (kind == "file")  # a file's own counter
    assert left == 0


def test_ranks_of_other_hosts_do_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_of = threading.local()
    monkeypatch.setattr(rendezvous, "host_identity", lambda: f"host {rank_of.value % 2}")
    store = dist.HashStore()

    def act(rank: int) -> tuple[Any, ...]:
        rank_of.value = rank
        with meet(store, rank=rank, world=5, name="test", timeout_s=TIMEOUT_S) as one:
            (mine,) = one.share("a file", lambda: [[0]] * len(one.here), TIMEOUT_S)
            os.close(mine)
            return one.hosts, one.here, one.local_rank

    hosts = ((0, 2, 4), (1, 3))
    assert all_ranks(5, act) == [(hosts, hosts[rank % 2], rank // 2) for rank in range(5)]


def test_missing_ranks_are_named() -> None:
    with pytest.raises(
        PeerTimeout, match=r"group 'g': ranks 0, 2 of 3 did not join the rendezvous within 0\."
    ) as late:
        meet(dist.HashStore(), rank=1, world=3, name="g", timeout_s=0.3)
    assert late.value.peer == 0
    store = dist.HashStore()
    with pytest.raises(PeerTimeout, match=r"ranks 0, 2"):
        meet(store, rank=1, world=3, name="g", timeout_s=0.1)
    assert store.num_keys() == 0, "a rank that gives up leaves its seat"


def test_two_groups_of_one_name_are_told_apart() -> None:
    store = dist.HashStore()
    ended = threading.Event()

    def wait_for_others() -> None:
        with pytest.raises(PeerTimeout):
            meet(store, rank=0, world=2, name="mine", timeout_s=4)
        ended.set()

    first = threading.Thread(target=wait_for_others)
    first.start()
    while not store.check(["rank/0"]):
        pass
    with pytest.raises(
        UserError, match=r"two groups are named 'mine': process \d+ of a group of 2 already has rank \d"
    ):
        meet(store, rank=0, world=3, name="mine", timeout_s=20)
    first.join()
    assert ended.is_set()


def test_ranks_that_expect_another_world_are_reported() -> None:
    store = dist.HashStore()
    store.set("rank/2", f"x {RankEntry(host='a', pid=1, world=3, version='0').to_text()}")

    def act(rank: int) -> str:
        with pytest.raises(UserError) as wrong:
            meet(store, rank=rank, world=2 + rank, name="g", timeout_s=TIMEOUT_S)
        return str(wrong.value)

    first, second = all_ranks(2, act)
    assert first.startswith("group 'g': rank 1 runs manyhands ")
    assert " in a group of 3, but rank 0 runs manyhands " in first
    assert second.startswith("group 'g': rank 0 runs manyhands ")


def test_bad_ranks_are_refused() -> None:
    with pytest.raises(UserError, match="rank=2 must be at least 0 and less than world=2"):
        meet(dist.HashStore(), rank=2, world=2, name="g", timeout_s=1)


def test_what_the_lowest_rank_can_not_make_nobody_waits_for() -> None:
    def refuse() -> list[list[int]]:
        raise OutOfSharedMemory("a test", 10, 5)

    def act(one: Rendezvous) -> str:
        with pytest.raises(ManyhandsError) as caught:
            one.share("memory", refuse, TIMEOUT_S)
        return str(caught.value)

    with met(2) as meetings:
        texts = all_ranks(2, lambda rank: act(meetings[rank]))
    assert texts[0].startswith("shared memory for a test needs")
    assert texts[1].startswith(
        "group 'test': rank 0 could not share memory: OutOfSharedMemory: shared memory for"
    )


def test_ranks_that_open_a_group_differently_are_reported() -> None:
    with met(2) as meetings:

        def act(rank: int) -> str:
            try:
                meetings[rank].share(f"memory of {rank}", lambda: [[0], [0]], TIMEOUT_S)
            except ManyhandsError as error:
                return str(error)
            return ""

        assert "rank 0 shares memory of 0, but rank 1 expects memory of 1" in all_ranks(2, act)[1]


def test_unknown_peers_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone of this host who knows the address but not the secret, before the one who is expected."""
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, "_PENDING_S", 0.2)

    def guest() -> Rendezvous:
        while not store.check(["address/0"]):
            pass
        address, _, secret = store.get("address/0").decode().partition(" ")
        assert len(bytes.fromhex(secret)) == 32
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        silent.connect(f"\0{address}")
        liar = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        liar.connect(f"\0{address}")
        liar.send((1).to_bytes(4, "big") + secrets.token_bytes(32))
        one = meet(store, rank=1, world=2, name="g", timeout_s=TIMEOUT_S)
        assert liar.recv(32) == b"", "its connection was closed"
        silent.close()
        liar.close()
        return one

    # The host's seat is there before the guest's, so the address comes once both sit: sit down for the guest first.
    store.set(
        "rank/1",
        f"x {RankEntry(host=rendezvous.host_identity(), pid=1, world=2, version=rendezvous.__version__).to_text()}",
    )
    with ThreadPoolExecutor(2) as pool:
        host = pool.submit(meet, store, rank=0, world=2, name="g", timeout_s=TIMEOUT_S)
        while not store.check(["address/0"]):
            pass
        store.delete_key("rank/1")
        for one in (pool.submit(guest).result(TIMEOUT_S), host.result(TIMEOUT_S)):
            one.close()


def test_an_end_in_peace_is_told_from_a_death() -> None:
    report: dict[tuple[int, int], bool] = {}
    changed = threading.Condition()

    def watch(one: Rendezvous) -> None:
        def on_end(rank: int, in_peace: bool) -> None:
            with changed:
                report[one.rank, rank] = in_peace
                changed.notify_all()

        one.watch(on_end)

    with met(3) as meetings:
        for one in meetings:
            watch(one)
        meetings[1].close()
        with changed:
            assert changed.wait_for(lambda: (0, 1) in report, TIMEOUT_S)
        assert report == {(0, 1): True}
        for end in meetings[2]._sockets.values():
            end.shutdown(socket.SHUT_RDWR)  # as the kernel does when a process is gone
        with changed:
            assert changed.wait_for(lambda: (0, 2) in report, TIMEOUT_S)
        assert report[0, 2] is False
    assert not any(thread.name == "manyhands rendezvous" for thread in threading.enumerate())


PROGRAM = """
import os, signal, sys
import torch.distributed as dist
from manyhands.places.local.rendezvous import meet
one = meet(dist.FileStore(sys.argv[1], -1), rank=1, world=2, name="g", timeout_s=60)
(mine,) = one.share("a pipe", lambda: [], 60)
os.write(mine, b"hello")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_another_process_gets_a_descriptor_and_its_death_is_seen(tmp_path: Path) -> None:
    store = tmp_path / "store"
    reader, writer = os.pipe()
    with warm.Popen([sys.executable, "-c", PROGRAM, str(store)]) as process:
        with meet(dist.FileStore(str(store), -1), rank=0, world=2, name="g", timeout_s=50) as one:
            os.close(one.share("a pipe", lambda: [[writer], [writer]], 50)[0])
            gone = threading.Event()
            peace: list[bool] = []
            one.watch(lambda rank, in_peace: (peace.append(in_peace), gone.set()))
            assert os.read(reader, 100) == b"hello"
            assert gone.wait(TIMEOUT_S)
            assert peace == [False]
        process.wait(TIMEOUT_S)
    os.close(reader)
    os.close(writer)
