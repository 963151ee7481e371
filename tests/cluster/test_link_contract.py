"""One contract for all links: every implementation passes the same tests.

The torch links are real: two Gloo process groups of one process, connected over loopback TCP.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from certificates import run_security
from manyhands.errors import UserError
from manyhands.native.dtypes import LINKED
from manyhands.native.segment import PAGE, Segment
from manyhands.transport.link import byte_ring, tcp
from manyhands.transport.link.interface import (
    Closed,
    Flushed,
    Full,
    Header,
    Link,
    Message,
    PeerDied,
    Queued,
    Received,
    TimedOut,
)
from manyhands.transport.link.mesh import SharedMesh, TcpMesh
from manyhands.transport.link.shared_link import LinkDescriptors, SharedLink, SharedLinkFiles
from manyhands.transport.link.simulated_network import SimulatedNetwork
from manyhands.transport.link.tcp import TcpLink
from manyhands.transport.link.torch_p2p import TorchLink
from manyhands.transport.messages import ProtocolError

QUEUE_BYTES = 1 << 20
RING_BYTES = 1 << 16
MIB = 1 << 20
PATIENCE_S = 120.0  # for what must happen; nothing here waits this long unless it is broken


class Rig(ABC):
    """A pair of connected ends, and how to run code at both."""

    first: Link
    second: Link
    glimpse_s = 0.0  # a deadline that no large message meets

    def run(self, at_first: Callable[[], Any], at_second: Callable[[], Any]) -> tuple[Any, Any]:
        """Each function in a thread of its own; what they return."""
        with ThreadPoolExecutor(2) as pool:
            futures = pool.submit(at_first), pool.submit(at_second)
            return futures[0].result(PATIENCE_S), futures[1].result(PATIENCE_S)

    @abstractmethod
    def kill_first(self) -> None:
        """The first role goes without a word."""

    def tear_down(self) -> None:
        self.first.close()
        self.second.close()


class SharedRig(Rig):
    def __init__(self) -> None:
        self.first, self.second = SharedLink.pair(
            ("alice", "bob"), capacity_bytes=RING_BYTES, queue_bytes=QUEUE_BYTES
        )

    def kill_first(self) -> None:
        assert isinstance(self.first, SharedLink)
        self.first.close(silently=True)


class TcpRig(Rig):
    def __init__(self) -> None:
        self.first, self.second = TcpLink.pair(("alice", "bob"), queue_bytes=QUEUE_BYTES)

    def kill_first(self) -> None:
        assert isinstance(self.first, TcpLink)
        self.first.close(silently=True)

    def tear_down(self) -> None:
        self.run(self.first.close, self.second.close)  # each waits a second for the other's goodbye


class TlsRig(TcpRig):
    def __init__(self) -> None:
        accepted, connected = tcp.connected()
        security = run_security()
        ends = self.run(
            lambda: security.wrap(accepted, "bob", server_side=True),
            lambda: security.wrap(connected, "alice", server_side=False),
        )
        self.first = TcpLink(ends[0], peer="bob", queue_bytes=QUEUE_BYTES)
        self.second = TcpLink(ends[1], peer="alice", queue_bytes=QUEUE_BYTES)


class TorchRig(Rig):
    def __init__(self) -> None:
        store = dist.HashStore()  # type: ignore[attr-defined]

        def connect(rank: int) -> Any:
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=PATIENCE_S)
            return dist.ProcessGroupGloo(store, rank, 2, options)

        with ThreadPoolExecutor(2) as pool:
            self.groups = list(pool.map(connect, (0, 1)))
        self.first = TorchLink(self.groups[0], 1, queue_bytes=QUEUE_BYTES)
        self.second = TorchLink(self.groups[1], 0, queue_bytes=QUEUE_BYTES)

    def kill_first(self) -> None:
        # A wait that times out makes Gloo close all connections of the group: for the peer, a crash.
        with pytest.raises(RuntimeError, match="Timed out"):
            self.groups[0].recv([torch.zeros(1)], 1, 999).wait(timedelta(milliseconds=1))

    def tear_down(self) -> None:
        # Neither close ends before the other has said goodbye, unless one waits for it in vain.
        self.run(self.first.close, self.second.close)
        self.run(
            self.first.break_off, self.second.break_off
        )  # who lost its peer does not wait for its threads
        del self.groups


class SimulatedRig(Rig):
    glimpse_s = 1e-4  # looking takes no virtual time, so whoever only looks sees nothing new

    def __init__(self) -> None:
        self.network = SimulatedNetwork(
            latency_s=1e-4, bandwidth_bytes_per_s=1e9, jitter_s=1e-5, queue_bytes=QUEUE_BYTES
        )
        self.first = self.network.link("alice", "bob")
        self.second = self.network.link("bob", "alice")

    def run(self, at_first: Callable[[], Any], at_second: Callable[[], Any]) -> tuple[Any, Any]:
        results = self.network.run({"alice": at_first, "bob": at_second})
        return results["alice"], results["bob"]

    def kill_first(self) -> None:
        self.network.kill("alice")


def open_files() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:  # the descriptor of the listing itself
            pass
    return found


@pytest.fixture(
    params=[SharedRig, TcpRig, TlsRig, pytest.param(TorchRig, marks=pytest.mark.gloo), SimulatedRig],
    ids=["shared", "tcp", "tls", "torch", "simulated"],
)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    files, threads = open_files(), set(threading.enumerate())
    made: Rig = request.param()
    yield made
    made.tear_down()
    assert set(threading.enumerate()) <= threads
    if not isinstance(made, TorchRig):  # the sockets are the groups', which torch frees when it likes
        assert open_files() <= files


def receive(link: Link, into: torch.Tensor | None = None, timeout_s: float = PATIENCE_S) -> Message:
    outcome = link.receive(timeout_s, into)
    assert isinstance(outcome, Received), outcome
    return outcome.message


def receive_payload(link: Link) -> torch.Tensor:
    payload = receive(link).payload
    assert payload is not None
    return payload


def send(link: Link, message: Message) -> None:
    """Send, waiting out back-pressure."""
    while isinstance(outcome := link.send(message), Full):
        link.flush(0.01)
    assert isinstance(outcome, Queued), outcome


def random_payload(num_bytes: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> torch.Tensor:
    drawn = np.random.default_rng(seed + num_bytes).bytes(num_bytes + 1)  # ten times as fast as by torch
    return torch.from_numpy(np.frombuffer(drawn, np.uint8)[:num_bytes] & 1).view(dtype)


def test_messages_arrive_whole_and_in_order(rig: Rig) -> None:
    sizes = [0, 1, 63, 64, 65, 4096, RING_BYTES, 2 * RING_BYTES + 1, 3 * MIB, 5, 4 * MIB + 3]
    payloads = [random_payload(size, seed=number) for number, size in enumerate(sizes)]

    def talk() -> None:
        for number, payload in enumerate(payloads):
            send(rig.first, Message(kind=number, step=2**40 + number, tag=2**31 + number, payload=payload))
        assert rig.first.flush(PATIENCE_S) == Flushed()

    def listen() -> list[Message]:
        return [receive(rig.second) for _ in payloads]

    _, messages = rig.run(talk, listen)
    for number, (message, payload) in enumerate(zip(messages, payloads, strict=True)):
        assert (message.kind, message.step, message.tag) == (number, 2**40 + number, 2**31 + number)
        assert torch.equal(message.payload, payload)


@pytest.mark.parametrize("dtype", list(LINKED), ids=str)
def test_every_dtype_keeps_its_bits(rig: Rig, dtype: torch.dtype) -> None:
    payload = random_payload(64 * dtype.itemsize, dtype)
    assert isinstance(rig.first.send(Message(kind=0, payload=payload)), Queued)
    arrived = receive_payload(rig.second)
    assert arrived.dtype == dtype
    assert torch.equal(arrived.view(torch.uint8), payload.view(torch.uint8))


def test_no_payload_is_not_an_empty_payload(rig: Rig) -> None:
    def talk() -> None:
        send(rig.first, Message(kind=1))
        send(rig.first, Message(kind=2, payload=torch.empty(0, dtype=torch.bfloat16)))

    _, (nothing, empty) = rig.run(talk, lambda: (receive(rig.second), receive(rig.second)))
    assert nothing.payload is None
    assert empty.payload is not None
    assert (empty.payload.numel(), empty.payload.dtype) == (0, torch.bfloat16)


def test_a_receive_ends_at_its_deadline_and_loses_nothing(rig: Rig) -> None:
    assert isinstance(rig.second.receive(0), TimedOut)
    outcome = rig.second.receive(0.05)
    assert isinstance(outcome, TimedOut)
    assert 0.05 <= outcome.waited_s < PATIENCE_S
    rig.first.send(Message(kind=9))
    assert receive(rig.second).kind == 9


@pytest.mark.parametrize("same_tensor", [True, False])
def test_a_receive_goes_on_where_a_deadline_stopped_it(rig: Rig, same_tensor: bool) -> None:
    payload = random_payload(4 * MIB)
    target = torch.zeros_like(payload)

    def listen() -> tuple[int, Message]:
        stopped = 0
        while True:
            outcome = rig.second.receive(rig.glimpse_s, target if same_tensor else torch.empty_like(payload))
            if isinstance(outcome, Received):
                return stopped, outcome.message
            assert isinstance(outcome, TimedOut)
            stopped += 1

    _, (stopped, message) = rig.run(lambda: send(rig.first, Message(kind=0, payload=payload)), listen)
    assert stopped > 0
    assert torch.equal(message.payload, payload)
    if same_tensor:
        assert message.payload.data_ptr() == target.data_ptr()


def test_a_payload_goes_where_the_receiver_wants_it(rig: Rig) -> None:
    payload, target = torch.arange(100.0), torch.full((150,), -1.0)
    rig.first.send(Message(kind=0, payload=payload))
    message = receive(rig.second, into=target)
    assert message.payload is not None
    assert message.payload.data_ptr() == target.data_ptr()
    assert torch.equal(message.payload, payload)
    assert torch.equal(target[100:], torch.full((50,), -1.0))


@pytest.mark.parametrize(
    "target", [torch.zeros(100, dtype=torch.float64), torch.zeros(99)], ids=["dtype", "room"]
)
def test_a_payload_that_does_not_fit_stays_for_the_next_receive(rig: Rig, target: torch.Tensor) -> None:
    rig.first.send(Message(kind=0, payload=torch.arange(100.0)))
    with pytest.raises(ProtocolError, match="does not fit"):
        rig.second.receive(PATIENCE_S, target)
    assert torch.equal(receive_payload(rig.second), torch.arange(100.0))


def test_a_send_never_waits_and_back_pressure_shows_and_clears(rig: Rig) -> None:
    payload = random_payload(QUEUE_BYTES // 4)
    taken = 0
    while isinstance(outcome := rig.first.send(Message(kind=taken, payload=payload)), Queued):
        assert outcome.pending_bytes <= QUEUE_BYTES
        taken += 1
        assert taken < 100, "nobody reads, and yet the link is never full"
    assert isinstance(outcome, Full)
    assert 0 < outcome.pending_bytes <= outcome.capacity_bytes == QUEUE_BYTES
    assert rig.first.counters.full_count == 1

    def talk() -> None:
        assert rig.first.flush(PATIENCE_S) == Flushed()
        assert isinstance(rig.first.send(Message(kind=taken, payload=payload)), Queued)

    _, messages = rig.run(talk, lambda: [receive(rig.second) for _ in range(taken + 1)])
    assert [message.kind for message in messages] == list(range(taken + 1))


def test_an_empty_queue_takes_a_message_of_any_size(rig: Rig) -> None:
    payload = random_payload(3 * QUEUE_BYTES)
    assert isinstance(rig.first.send(Message(kind=0, payload=payload)), Queued)
    assert torch.equal(receive_payload(rig.second), payload)


def test_flush_ends_at_its_deadline(rig: Rig) -> None:
    rig.first.send(Message(kind=0, payload=random_payload(4 * MIB)))
    assert isinstance(rig.first.flush(1e-3), TimedOut)
    assert receive(rig.second).payload_bytes == 4 * MIB
    assert rig.first.flush(PATIENCE_S) == Flushed()


def test_large_messages_in_both_directions_do_not_block_each_other(rig: Rig) -> None:
    # Both ends send before they receive: a send that needed the other's receive would stop here.
    def exchange(link: Link, seed: int) -> list[Message]:
        messages = []
        for number in range(3):
            send(link, Message(kind=number, payload=random_payload(4 * MIB, seed=seed + number)))
            messages.append(receive(link))
        return messages

    at_first, at_second = rig.run(lambda: exchange(rig.first, 10), lambda: exchange(rig.second, 20))
    for messages, seed in ((at_first, 20), (at_second, 10)):
        for number, message in enumerate(messages):
            assert torch.equal(message.payload, random_payload(4 * MIB, seed=seed + number))


def test_what_was_sent_is_received_before_the_close(rig: Rig) -> None:
    def talk() -> None:
        for number in range(3):
            send(rig.first, Message(kind=number, payload=random_payload(MIB)))
        assert rig.first.flush(PATIENCE_S) == Flushed()
        rig.first.close()

    def listen() -> list[int]:
        kinds = [receive(rig.second).kind for _ in range(3)]
        assert rig.second.receive(PATIENCE_S) == Closed()
        assert rig.second.receive(0) == Closed()
        assert rig.second.send(Message(kind=0)) == Closed()
        assert rig.second.flush(0) == Flushed()
        return kinds

    _, kinds = rig.run(talk, listen)
    assert kinds == [0, 1, 2]


def test_an_end_that_closed_says_so_to_its_own_side(rig: Rig) -> None:
    rig.first.close()
    rig.first.close()
    assert rig.first.send(Message(kind=0)) == Closed()
    assert rig.first.receive(PATIENCE_S) == Closed()


def test_closing_ends_a_receive_in_another_thread(rig: Rig) -> None:
    waiting = threading.Event()

    def listen() -> object:
        waiting.set()
        return rig.second.receive(PATIENCE_S)

    def close() -> None:
        assert waiting.wait(PATIENCE_S)
        rig.second.close()

    assert rig.run(close, listen)[1] == Closed()


def test_a_peer_that_dies_is_told_from_one_that_closes(rig: Rig) -> None:
    rig.kill_first()
    outcome = rig.second.receive(PATIENCE_S)
    assert isinstance(outcome, PeerDied)
    assert rig.second.peer in outcome.reason
    assert isinstance(rig.second.receive(0), PeerDied)
    assert isinstance(rig.second.send(Message(kind=0)), PeerDied)
    assert rig.second.flush(0) in (Flushed(), outcome)


def test_counters_count_messages_and_bytes_of_payload(rig: Rig) -> None:
    def talk() -> None:
        for count in (0, 10, 1000):
            send(rig.first, Message(kind=0, payload=torch.zeros(count)))
        receive(rig.first)

    def listen() -> None:
        for _ in range(3):
            receive(rig.second)
        send(rig.second, Message(kind=0))

    rig.run(talk, listen)
    first, second = rig.first.counters, rig.second.counters
    assert (first.messages_sent, first.bytes_sent) == (3, 4040)
    assert (second.messages_received, second.bytes_received) == (3, 4040)
    assert (second.messages_sent, second.bytes_sent) == (1, 0)
    assert (first.messages_received, first.bytes_received) == (1, 0)


def test_a_payload_above_the_limit_is_refused_before_it_is_sent() -> None:
    first, second = SharedLink.pair(max_payload_bytes=1000)
    with first, second:
        with pytest.raises(ProtocolError, match="payload_bytes"):
            first.send(Message(kind=0, payload=torch.zeros(251)))
        first.send(Message(kind=1, payload=torch.zeros(250)))
        assert receive(second).kind == 1


@pytest.mark.parametrize(
    ("header", "field"),
    [(bytes(64), "magic"), (Header.of(Message(kind=0), sequence=1).encode(), "sequence")],
)
def test_a_peer_that_speaks_something_else_is_refused_for_good(header: bytes, field: str) -> None:
    with SharedLinkFiles.create(PAGE) as files:
        mine = LinkDescriptors(*map(os.dup, files.descriptors(0)))
        with (
            SharedLink.attach(mine, end=0, peer="mallory") as link,
            Segment.attach(os.dup(files.descriptors(1).segment)) as segment,
        ):
            source = ctypes.create_string_buffer(header, 64)
            byte_ring.write(
                segment.address + segment.num_bytes // 2, ctypes.addressof(source), 64, 0, 0, 0, 0, 0
            )
            for _ in range(2):
                with pytest.raises(ProtocolError) as caught:
                    link.receive(PATIENCE_S)
                assert caught.value.field == field


def test_what_can_not_be_a_link_is_refused() -> None:
    with pytest.raises(UserError, match="capacity_bytes=100"):
        SharedLinkFiles.create(100)
    with SharedLinkFiles.create() as files, pytest.raises(UserError, match="end=2"):
        SharedLink.attach(files.descriptors(0), end=2, peer="nobody")
    for kind in (SharedMesh, TcpMesh):
        with pytest.raises(UserError, match="world=0"):
            kind(0)


def test_what_is_dropped_by_a_close_is_no_clean_close() -> None:
    first, second = SharedLink.pair(("alice", "bob"), capacity_bytes=RING_BYTES)
    with first, second:
        first.send(Message(kind=0, payload=random_payload(MIB)))
        first.close()
        outcome = second.receive(PATIENCE_S)
        assert isinstance(outcome, PeerDied)
        assert "alice closed the link with messages still queued" in outcome.reason


def test_what_a_close_cuts_off_is_a_death_to_a_peer_over_tcp() -> None:
    first, second = TcpLink.pair(("alice", "bob"))
    with first, second:
        first.send(Message(kind=0, payload=random_payload(8 * MIB)))  # more than the kernel takes
        first.close()
        outcome = second.receive(PATIENCE_S)
        assert isinstance(outcome, PeerDied)
        assert "alice is gone" in outcome.reason


def test_what_is_unread_at_a_close_cuts_nothing_off_over_tcp() -> None:
    first, second = TcpLink.pair(("alice", "bob"))
    with first, second:
        second.send(Message(kind=9, payload=random_payload(1000)))
        first.send(Message(kind=1, payload=random_payload(1000)))
        first.close()  # with kind 9 unread
        assert receive(second).kind == 1
        assert second.receive(PATIENCE_S) == Closed()


def test_a_peer_over_tcp_that_speaks_something_else_is_refused_for_good() -> None:
    first, second = TcpLink.pair(("mallory", "bob"))
    with first, second:
        first._end.send(bytes(64))
        for _ in range(2):
            with pytest.raises(ProtocolError) as caught:
                second.receive(PATIENCE_S)
            assert caught.value.field == "magic"


@pytest.mark.parametrize("seed", range(3))
def test_many_messages_of_all_sizes_through_a_small_ring(seed: int) -> None:
    first, second = SharedLink.pair(capacity_bytes=4096, queue_bytes=1 << 15)
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 20_000, (150,), generator=generator).tolist()

    def talk() -> None:
        for number, size in enumerate(sizes):
            send(first, Message(kind=number, payload=random_payload(size, seed=number)))

    def listen() -> None:
        for number, size in enumerate(sizes):
            assert torch.equal(receive_payload(second), random_payload(size, seed=number))

    with first, second, ThreadPoolExecutor(2) as pool:
        for future in (pool.submit(talk), pool.submit(listen)):
            future.result(PATIENCE_S)


@pytest.mark.parametrize("leaves", [TcpLink.close, partial(TcpLink.close, silently=True)])
def test_closing_does_not_linger_for_a_peer_that_is_gone(leaves: Callable[[TcpLink], None]) -> None:
    ours, theirs = TcpLink.pair()
    leaves(theirs)
    begin = time.monotonic()
    ours.close()
    assert time.monotonic() - begin < 0.5
