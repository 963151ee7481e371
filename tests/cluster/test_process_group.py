"""How processes find their leader, and links between hosts: threads that share a store, and addresses of this host."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from certificates import run_security
from manyhands.engine.external_workers import ControlListener
from manyhands.errors import ManyhandsError, PeerTimeout, UserError, WorkerFailed
from manyhands.places.external import process_group as groups
from manyhands.places.external.control_server import terms_of
from manyhands.places.external.links import _admit, open_links
from manyhands.places.external.process_group import join_group, lead_group
from manyhands.places.external.process_place import ProcessPlace, under_torchrun
from manyhands.places.external.run_store import KeyValueStore
from manyhands.places.local.host import host_identity
from manyhands.transport.hub.handshake import Credentials
from manyhands.transport.link.interface import Message, Received
from manyhands.transport.security import Security

TERMS = terms_of({"task": "toy"})
TOKEN = b"the secret of this run, 32 bytes"


def places(world: int, store: HashStore | None = None, master: str = "127.0.0.1") -> list[ProcessPlace]:
    shared = store or HashStore()
    return [
        ProcessPlace(rank=rank, world=world, kind="torchrun", open_store=lambda _: shared, master=master)
        for rank in range(world)
    ]


def seat(store: HashStore, run: str, rank: int, **fields: str) -> None:
    """A process that has come, as far as the store knows."""
    mine = {**groups._mine(ProcessPlace(rank=rank, world=rank + 1)), **fields}
    PrefixStore(f"manyhands/{run}", store).set(f"here/{rank}", json.dumps(mine))


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each gives or raises, all at the same time."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except ManyhandsError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def test_on_one_host_a_company_gathers_without_listening_on_the_network() -> None:
    first, second, third = places(3)

    def leads() -> tuple[str, tuple[int, ...]]:
        with lead_group(first, TERMS, "a", security=Security.loopback(), timeout_s=10.0) as process_group:
            process_group.gather()
            members = process_group.control_server.members
            process_group.give("run", lambda: [b"the ", b"result"])
            process_group.shutdown()
            return process_group.address, members

    def joins(place: ProcessPlace) -> bytes:
        with join_group(place, TERMS, "a", security=Security.loopback(), timeout_s=10.0) as member:
            return bytes(member.connection.take("run", 10.0))

    led, *joined = together(leads, lambda: joins(second), lambda: joins(third))
    assert led == ("", (1, 2)) or led == ("", (2, 1))
    assert joined == [b"the result"] * 2


def test_what_ends_the_leader_is_what_the_others_are_reported() -> None:
    first, second = places(2)

    def leads() -> None:
        with lead_group(first, TERMS, "a", security=Security.loopback(), timeout_s=10.0) as process_group:
            process_group.gather()
            raise UserError("out=x is taken")

    def joins() -> str:
        with join_group(second, TERMS, "a", security=Security.loopback(), timeout_s=10.0) as member:
            over = member.connection.wait_over(10.0)
            assert over is not None
            return over.sentence

    led, report = together(leads, joins)
    assert isinstance(led, UserError)
    assert report == str(led) == "out=x is taken"


def test_what_fails_in_the_thread_that_hears_the_others_ends_the_run_for_all() -> None:
    first, second = places(2)

    def chunks() -> Iterator[bytes]:
        yield b"some of it"
        raise ZeroDivisionError("of nothing")

    def leads() -> str:
        with lead_group(first, TERMS, "a", security=Security.loopback(), timeout_s=10.0) as process_group:
            process_group.gather()
            ended_waits: list[int] = []
            with ControlListener(process_group) as hearing:
                hearing.on_failure(lambda rank, sentence: ended_waits.append(rank))
                process_group.control_server.give(1, "start", chunks())
                failure = hearing.wait_for_failure(10.0)
            assert failure is not None
            assert ended_waits == [failure.rank] == [0]
            assert "test_process_group.py" in str(failure.error())
            raise failure.error()

    def joins() -> str:
        with join_group(second, TERMS, "a", security=Security.loopback(), timeout_s=10.0) as member:
            over = member.connection.wait_over(10.0)
            assert over is not None
            return over.sentence

    led, report = together(leads, joins)
    assert isinstance(led, WorkerFailed)
    assert "the leader, can no longer receive from the others: ZeroDivisionError('of nothing')" in str(led)
    assert report == str(led).partition("\n")[0]


def test_two_processes_of_one_rank_a_missing_rank_and_another_release_are_told_to_all() -> None:
    store = HashStore()
    seat(store, "twice", 1, process="process 1 (worker 1 on vm)")
    with pytest.raises(UserError, match=r"two processes have rank 1: process .* and process "):
        join_group(places(2, store)[1], TERMS, "twice", security=Security.loopback(), timeout_s=0.2)

    first, second, _ = places(3)
    call = {"security": Security.loopback(), "timeout_s": 0.3}
    led, followed = together(
        lambda: lead_group(first, TERMS, "late", **call), lambda: join_group(second, TERMS, "late", **call)
    )
    assert isinstance(led, PeerTimeout)
    assert "rank 2 of 3 did not connect within 0 s" in str(led)
    assert "cannot start: timed out: rank 2 of 3 did not connect" in str(followed)

    store = HashStore()
    seat(store, "old", 1, version="0.0.1", name="worker 1 on hostB")
    with pytest.raises(UserError, match=r"worker 1 on hostB runs manyhands 0\.0\.1, but worker 0 on "):
        lead_group(places(2, store)[0], TERMS, "old", **call)

    with pytest.raises(PeerTimeout, match=r"rank 0, the leader, did not connect within"):
        groups._read_leader(HashStore(), places(2)[1], timeout_s=-4.9)


@pytest.mark.parametrize(
    ("master", "security", "report"),
    [
        ("127.0.0.1", Security.insecure(), "MASTER_ADDR=127.0.0.1 is 127.0.0.1 on "),
        ("192.0.2.1", Security.loopback(), "--tls DIR"),
    ],
)
def test_a_leader_that_other_hosts_cannot_reach_or_must_not_says_so_to_all(
    master: str, security: Security, report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "address_towards", lambda host: host)
    store = HashStore()
    seat(store, "a", 1, host="another")
    first, second = places(2, store, master)
    with pytest.raises(UserError, match=report):
        lead_group(first, TERMS, "a", security=security, timeout_s=1.0)
    with pytest.raises(ManyhandsError, match=report):
        groups._read_leader(PrefixStore("manyhands/a", store), second, 1.0)


def test_a_process_without_a_certificate_is_told_that_the_leader_has_one() -> None:
    store = HashStore()
    led = {**groups._mine(places(2)[0]), "unix": "unix:nowhere", "host": host_identity()}
    PrefixStore("manyhands/a", store).set("leader", json.dumps(led))
    with pytest.raises(UserError, match="has no certificate, but the leader"):
        join_group(places(2, store)[1], TERMS, "a", security=Security.loopback(), timeout_s=1.0)


def test_a_port_in_use_and_a_store_that_nobody_opens_are_one_sentence_each() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with pytest.raises(
            ManyhandsError, match=f"MASTER_PORT={port} could not be opened .*another MASTER_PORT"
        ):
            under_torchrun(environment).open_store(1.0)
    began = time.monotonic()
    with pytest.raises(ManyhandsError, match=f"MASTER_PORT={port} could not be reached within 1 s"):
        under_torchrun({**environment, "RANK": "1"}).open_store(1.0)
    assert time.monotonic() - began < 60.0


def test_where_all_know_the_leaders_address_no_store_is_needed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    address = f"127.0.0.1:{port}"
    first, second = (replace(place, leader=address, kind="specification") for place in places(2))
    call = {"security": Security.loopback(), "timeout_s": 10.0}
    with ExitStack() as stack:
        leading = lead_group(first, TERMS, "a", **call)
        stack.callback(leading.control_server.close)

        def hears() -> int:
            while not leading.control_server.members:
                leading.control_server.poll(0.1)
            return 1

        following, _ = together(lambda: join_group(second, TERMS, "a", **call), hears)
        stack.callback(following.connection.close)
        assert leading.control_server.members == (1,)
        # On loopback no other user can connect: nothing listens at the port itself.
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 1.0):
            pass
        with pytest.raises(UserError, match="cannot listen there"):
            lead_group(first, TERMS, "a", **call)


def test_a_process_with_another_token_is_rejected_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    first, second = (replace(place, leader=address, kind="specification") for place in places(2))
    call = {"security": Security.loopback(), "timeout_s": 200.0}
    with lead_group(first, TERMS, "a", **call) as leading:
        monkeypatch.setattr(groups, "_token", lambda leader, security: TOKEN)
        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(lambda: join_group(second, TERMS, "a", **call))
            while not joining.done():
                leading.control_server.poll(0.05)
        with pytest.raises(UserError, match=r"cannot join the run of the leader at .*field 'token'"):
            joining.result()
        assert time.monotonic() - began < 100.0, "it tried again"


@pytest.mark.parametrize("tls", [False, True])
def test_links_between_hosts_carry_messages_and_let_nobody_else_in(tls: bool) -> None:
    store, world = KeyValueStore(), 4
    security = run_security() if tls else Security.loopback()
    far = {0: [2, 3], 1: [2, 3], 2: [0, 1], 3: [0, 1]}

    def opens(rank: int) -> Any:
        if rank == 3:  # somebody else comes first
            while not store.check(["link/0"]):
                time.sleep(0.005)
            port = int(store.get("link/0").decode().rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as foreign_row:
                foreign_row.sendall(b"x" * 64)
        return open_links(
            rank,
            far[rank],
            store,
            address="127.0.0.1",
            token=TOKEN,
            security=security,
            timeout_s=20.0,
        )

    ends = together(*[lambda rank=rank: opens(rank) for rank in range(world)])
    assert [sorted(links) for links in ends] == [far[rank] for rank in range(world)]
    ends[0][3].send(Message(kind=1, payload=torch.arange(5)))
    got = ends[3][0].receive(5.0)
    assert isinstance(got, Received)
    assert got.message.payload.tolist() == [0, 1, 2, 3, 4]
    for links in ends:
        for link in links.values():
            link.close()


def test_links_listen_where_a_name_only_leads_to_this_host() -> None:
    store = KeyValueStore()
    call = {"token": TOKEN, "security": Security.insecure(), "timeout_s": 0.1}
    with pytest.raises(PeerTimeout, match="rank 1 did not connect in time"):
        open_links(0, [1], store, address="192.0.2.1", **call)  # of no interface here
    assert store.get("link/0").startswith(b"192.0.2.1:")
    with pytest.raises(ManyhandsError, match=r"rank 0 cannot listen at nobody\.invalid: "):
        open_links(0, [1], store, address="nobody.invalid", **call)


def test_who_says_who_it_is_byte_by_byte_has_no_more_time_than_others() -> None:
    near, far = socket.socketpair()
    with near, far, ThreadPoolExecutor(1) as pool:
        mine = Credentials(member=0, role="rank 0", token=TOKEN, fingerprint="a link")
        admitted = pool.submit(_admit, near, mine, time.monotonic() + 0.2)
        sent = 0
        while not admitted.done() and sent < 39:  # one less than it must say; each comes well before 0.2 s
            sent += far.send(b"x")
            time.sleep(0.05)
        assert admitted.done()
        assert admitted.result() is None


def test_links_name_who_does_not_come_and_who_is_of_another_run() -> None:
    store = KeyValueStore()
    call = {"address": "127.0.0.1", "security": Security.loopback(), "timeout_s": 1.0}
    first, second = together(
        lambda: open_links(0, [1], store, token=TOKEN, **call),
        lambda: open_links(1, [0], store, token=b"another secret of 28 bytes..", **call),
    )
    assert isinstance(first, PeerTimeout)
    assert "rank 1 did not connect in time" in str(first)
    assert "the process at rank 0's address" in str(second)
    assert "is not part of this run" in str(second)
    with pytest.raises(PeerTimeout, match="rank 0 did not publish its address in time"):
        open_links(1, [0], KeyValueStore(), token=TOKEN, **{**call, "timeout_s": 0.1})
    with pytest.raises(UserError, match="--tls DIR"):
        open_links(0, [1], KeyValueStore(), token=TOKEN, **{**call, "address": "192.0.2.1"})


@pytest.mark.parametrize(
    ("security", "comes_again", "reached"),
    [
        (Security.insecure, True, True),
        (run_security, True, True),
        (Security.insecure, False, False),
        (Security.loopback, True, False),
    ],
)
def test_a_leader_is_reached_from_elsewhere_by_those_who_may_come_again_though_all_begin_on_its_host(
    security: Callable[[], Security], comes_again: bool, reached: bool
) -> None:
    """Where it may listen for other hosts at all: under TLS, or where the user trusts the network."""
    store, address = HashStore(), own_address()
    first, second = places(2, store, master=address)
    call = {"security": security(), "timeout_s": 10.0, "comes_again": comes_again}

    def leads() -> str:
        with lead_group(first, TERMS, "a", **call) as process_group:
            process_group.gather()
            deadline = time.monotonic() + 180
            for there in ((), (1,)) if reached else ():
                while process_group.control_server.members != there:
                    assert time.monotonic() < deadline
                    process_group.control_server.poll(0.05)
            return process_group.address

    def follows() -> bool:
        with join_group(second, TERMS, "a", **call):
            pass
        report = json.loads(PrefixStore("manyhands/a", store).get("leader"))
        if (
            "tcp" in report
        ):  # as another process in its place has it, which is elsewhere and so hears of TCP alone
            seat(store, "a", 1, process="process 1 (worker 1 on vm)")
            store.set("manyhands/a/leader", json.dumps({**report, "host": "elsewhere"}))
            with join_group(second, TERMS, "a", **call) as member:
                assert member.address == address
        return "tcp" in report

    assert together(leads, follows) == [address if reached else "", reached]


def own_address() -> str:
    """One of this machine's that is not on loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])
