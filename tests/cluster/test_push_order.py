"""Pushes of a worker leave one after another, and those of a host's workers too: nobody waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from select import select

import pytest

from hubs import Number, Party
from manyhands.strategies.ps.live.push_order import HostGate, PushOrder
from manyhands.strategies.ps.ps_messages import Push
from manyhands.transport.hub.hub import Hub
from manyhands.transport.hub.hub_events import Arrived, Drained, Settings

GRADIENT = bytes(40 << 20)  # more than sockets take from somebody whose peer does not read
SETTINGS = Settings(unsent_bytes=64 << 10, queue_bytes=1 << 30)
ONE, OTHER, SERVER, SECOND = 2, 3, 1, 4


@pytest.fixture
def party() -> Iterator[Party]:
    party = Party()
    yield party
    party.close()


@pytest.fixture
def gate_name() -> str:
    return f"manyhands-{os.getpid()}-{time.monotonic_ns()}"


def push(shard: int) -> Push:
    return Push(shard, 0, ONE, 0, 0, 0, 0, 1, 1.0, pulls=True)


def connected(party: Party, worker: int) -> Hub:
    """A worker's hub, connected to both servers."""
    hub = party.add(worker, settings=SETTINGS)
    for server in (SERVER, SECOND):
        known = party.hubs.get(server) or party.add(server)
        hub.connect(server, known.listen("tcp"))
    party.until(lambda: set(hub.members()) == {SERVER, SECOND})
    return hub


def sender(hub: Hub, sent: list[int]) -> Callable[[int, Push], None]:
    def send(to: int, push: Push) -> None:
        sent.append(push.shard)
        assert hub.send(to, Number(value=push.shard), [GRADIENT])

    return send


def until(party: Party, done: Callable[[], bool], *orders: PushOrder) -> None:
    def look() -> bool:
        for order in orders:
            order.go_on()
        return done()

    party.until(look)


def test_the_next_shard_is_sent_to_once_the_push_before_has_left(party: Party, gate_name: str) -> None:
    hub, sent = connected(party, ONE), []
    order = PushOrder(hub, sender(hub, sent), HostGate(gate_name), workers=1)
    order.add(SERVER, push(0))
    order.add(SECOND, push(1))
    for _ in range(20):
        party.events[ONE] += hub.poll(0.01)  # the first server does not read
        order.go_on()
    assert sent == [0]
    until(party, lambda: bool(party.of(SECOND, Arrived)), order)
    assert sent == [0, 1]
    assert party.of(SERVER, Arrived)
    assert {event.member for event in party.of(ONE, Drained)} == {SERVER, SECOND}
    order.close()


def test_a_worker_waits_for_another_of_its_host_as_long_as_all_need(party: Party, gate_name: str) -> None:
    sent: dict[int, list[int]] = {ONE: [], OTHER: []}
    orders = {
        worker: PushOrder(
            connected(party, worker),
            sender(party.hubs[worker], sent[worker]),
            HostGate(gate_name),
            workers=1 << 20,  # so that one push, however short, makes them patient
        )
        for worker in sent
    }
    first, second = orders.values()
    for order, shards in zip(
        orders.values(), sent.values(), strict=True
    ):  # alone, each learns what a push takes
        order.add(SERVER, push(0))
        until(party, lambda shards=shards, order=order: bool(shards) and not _is_leaving(order), order)
    first.add(SERVER, push(1))
    second.add(SECOND, push(1))
    party.events[OTHER] += party.hubs[OTHER].poll(0.01)
    second.go_on()
    assert sent == {ONE: [0, 1], OTHER: [0]}
    until(party, lambda: sent[OTHER] == [0, 1], first, second)
    assert not _is_leaving(first)
    first.add(SERVER, push(2))
    assert sent[ONE] == [0, 1], "the other one has passed now"
    second.close()  # as if it ended
    until(party, lambda: sent[ONE] == [0, 1, 2], first)
    first.close()


def _is_leaving(order: PushOrder) -> bool:
    return order._begun_s is not None


def test_who_waits_in_vain_pushes_beside_the_other(party: Party, gate_name: str) -> None:
    hub, sent = connected(party, ONE), []
    other = HostGate(gate_name)
    assert other.enter()
    order = PushOrder(hub, sender(hub, sent), HostGate(gate_name), workers=2)
    order.add(SERVER, push(0))
    assert sent == [0], "it does not know yet how long a push takes"
    until(party, lambda: not _is_leaving(order), order)
    order._is_patient = True
    order.add(SERVER, push(1))  # as long as two pushes took, and no longer
    until(party, lambda: sent == [0, 1], order)
    until(party, lambda: not _is_leaving(order), order)
    order.add(SERVER, push(2))
    assert sent == [0, 1, 2], "once in vain, it does not wait again"
    other.leave()
    order.close()


def test_the_gate_opens_when_who_passed_is_killed(gate_name: str) -> None:
    program = (
        "import sys, signal\n"
        "from manyhands.strategies.ps.live.push_order import HostGate\n"
        "gate = HostGate(sys.argv[1])\n"
        "print(gate.enter(), flush=True)\n"
        "signal.pause()\n"
    )
    words = [sys.executable, "-c", program, gate_name]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "True\n"
            gate = HostGate(gate_name)
            assert not gate.enter()
            descriptor = gate.wait()
            assert select([descriptor], [], [], 0)[0] == []
        finally:
            process.send_signal(signal.SIGKILL)
        assert select([descriptor], [], [], 60)[0] == [descriptor]
    gate.stop_waiting()
    assert gate.wait() == -1
    assert gate.enter()
    gate.leave()
