"""Exchanges through shared memory that one thread carries: the same bytes as over links, and who is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch

from manyhands.errors import ManyhandsError, PeerTimeout, WorkerFailed
from manyhands.native.segment import PAGE
from manyhands.strategies.common.collectives.mailbox import Mailbox
from manyhands.transport.link.interface import Closed, Flushed, Message, Queued, Received
from manyhands.transport.link.shared_link import SharedLink

RING, PATIENCE_S = 4 * PAGE, 20.0
KIND, CALL, ROUND = 7, 3, 1


@contextmanager
def links_between(world: int) -> Iterator[list[dict[int, SharedLink]]]:
    links: list[dict[int, SharedLink]] = [{} for _ in range(world)]
    with ExitStack() as stack:
        for high in range(world):
            for low in range(high):
                ends = SharedLink.pair((f"rank {low}", f"rank {high}"), capacity_bytes=RING)
                links[low][high], links[high][low] = (stack.enter_context(end) for end in ends)
        yield links


def mailbox(rank: int, links: dict[int, SharedLink], timeout_s: float = PATIENCE_S) -> Mailbox:
    made = Mailbox(rank, links, timeout_s)
    made.enter("exchange", KIND, CALL, ROUND)
    return made


def given(source: int, to: int) -> torch.Tensor:
    count = (50_000, 0, 123_457)[(source + to) % 3]
    return torch.arange(count, dtype=torch.int32) * (10 * source + to + 1)


def read_the_begin(link: SharedLink) -> None:
    """Return once a part of a message has come: the exchange at the other end is under way."""
    deadline = time.monotonic() + PATIENCE_S
    while link.is_between:
        assert time.monotonic() < deadline
        assert not isinstance(link.receive(0.0), Received), "one look does not take all of it"


@pytest.mark.parametrize("by_itself", [set(), {2}], ids=["all carry", "one has a thread write"])
def test_tensors_of_any_length_cross_rings_that_hold_none_of_them(by_itself: set[int]) -> None:
    world, times = 3, 4

    def work(rank: int) -> list[bool]:
        box, same = mailbox(rank, links[rank]), []
        peers = [peer for peer in range(world) if peer != rank]
        for _ in range(times):
            sends = {peer: given(rank, peer) for peer in peers}
            rooms = {peer: torch.full_like(given(peer, rank), -1) for peer in peers}
            if rank in by_itself:
                refused = box.post(sends.items())
                for peer, room in rooms.items():
                    refused, _ = box.receive(peer, room, refused)
                box.flush(refused, peers)
            else:
                assert box.exchange(sends, rooms)
            same += [torch.equal(room, given(peer, rank)) for peer, room in rooms.items()]
        assert box.messages_sent == times * len(peers)
        assert box.bytes_sent == times * sum(given(rank, peer).nbytes for peer in peers)
        counted = [links[rank][peer].counters for peer in peers]
        assert sum(one.messages_received for one in counted) == times * len(peers)
        return same

    before = threading.active_count()
    with links_between(world) as links, ThreadPoolExecutor(world) as pool:
        found = list(pool.map(work, range(world)))
        if not by_itself:
            assert threading.active_count() - world <= before, "no thread but those that exchange"
    assert all(all(same) for same in found)


def test_one_may_only_send_and_another_only_receive() -> None:
    with links_between(2) as (first, second), ThreadPoolExecutor(2) as pool:
        room = torch.zeros(123_457, dtype=torch.int32)
        sent = pool.submit(mailbox(0, first).exchange, {1: given(0, 2)}, {})
        came = pool.submit(mailbox(1, second).exchange, {}, {0: room})
        assert sent.result(PATIENCE_S)
        assert came.result(PATIENCE_S)
    assert torch.equal(room, given(0, 2))


def test_a_peer_that_goes_in_the_middle_is_named_at_once() -> None:
    with links_between(2) as (first, second), ThreadPoolExecutor(1) as pool:
        work = mailbox(0, first).exchange
        going_on = pool.submit(work, {1: given(0, 2)}, {1: torch.zeros(50_000, dtype=torch.int32)})
        assert isinstance(second[0].send(Message(kind=KIND, payload=given(0, 2)[:9])), Queued)
        read_the_begin(second[0])
        began = time.monotonic()
        second[0].close(silently=True)
        with pytest.raises(WorkerFailed, match="lost rank 1: rank 1 is gone") as failure:
            going_on.result(PATIENCE_S)
        assert failure.value.worker_rank == 1
        assert time.monotonic() - began < 1.0


def test_a_link_that_is_closed_here_ends_the_exchange() -> None:
    with links_between(2) as (first, second), ThreadPoolExecutor(1) as pool:
        going_on = pool.submit(mailbox(0, first).exchange, {1: given(0, 2)}, {})
        read_the_begin(second[0])
        first[1].close()
        with pytest.raises(WorkerFailed, match="the link was closed"):
            going_on.result(PATIENCE_S)
        outcome = second[0].receive(PATIENCE_S)
        assert not isinstance(outcome, Received | Closed), "a message was cut off"


def test_who_sends_nothing_is_named_and_what_was_begun_goes_on() -> None:
    with links_between(2) as (first, second):
        room = torch.zeros(123_457, dtype=torch.int32)
        with pytest.raises(PeerTimeout, match=r"rank 1 sent nothing.* within 0.1 s"):
            mailbox(0, first, 0.1).exchange({1: given(0, 2)}, {1: room})
        outcome = second[0].receive(PATIENCE_S)
        assert isinstance(outcome, Received)
        assert torch.equal(outcome.message.payload, given(0, 2))
        assert first[1].flush(PATIENCE_S) == Flushed()


@pytest.mark.parametrize(("count", "why"), [(50_001, "does not fit"), (49_999, "expected 200000 bytes")])
def test_another_length_is_refused_by_name(count: int, why: str) -> None:
    with links_between(2) as (first, second), ThreadPoolExecutor(2) as pool:
        room = torch.zeros(50_000, dtype=torch.int32)
        came = pool.submit(mailbox(1, second).exchange, {}, {0: room})
        pool.submit(mailbox(0, first, 0.5).exchange, {1: torch.zeros(count, dtype=torch.int32)}, {})
        with pytest.raises(ManyhandsError, match=f"rank 0.*{why}"):
            came.result(PATIENCE_S)


def test_other_links_and_links_with_something_to_finish_are_left_alone() -> None:
    with links_between(2) as (first, second):
        assert isinstance(first[1].send(Message(kind=KIND, payload=given(0, 2))), Queued)
        assert not mailbox(0, first).exchange({1: given(0, 2)}, {})
        assert isinstance(second[0].receive(PATIENCE_S), Received)
