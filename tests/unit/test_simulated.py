"""The simulated network: its arithmetic by hand, its faults, and the same story at every run."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch

from manyhands.errors import ManyhandsError, UserError
from manyhands.transport.link.interface import (
    HEADER_BYTES,
    Closed,
    Flushed,
    Full,
    Message,
    PeerDied,
    Queued,
    Received,
    TimedOut,
)
from manyhands.transport.link.simulated_network import SimulatedNetwork, TraceEvent


def payload(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def test_a_message_takes_its_time_on_the_wire_and_a_latency() -> None:
    network = SimulatedNetwork(latency_s=0.5, bandwidth_bytes_per_s=1000)
    alice, bob = network.link("alice", "bob"), network.link("bob", "alice")
    alice.send(Message(kind=0, payload=payload(1000 - HEADER_BYTES)))
    alice.send(Message(kind=1, payload=payload(2000 - HEADER_BYTES)))
    assert network.clock_s("alice") == 0
    assert isinstance(bob.receive(10), Received)
    assert network.clock_s("bob") == pytest.approx(1.5)
    assert isinstance(bob.receive(10), Received)
    assert network.clock_s("bob") == pytest.approx(3.5)  # the second waited for the wire
    assert bob.receive(10) == TimedOut(10)
    assert network.clock_s("bob") == pytest.approx(13.5)


def test_a_late_message_is_not_received_early() -> None:
    network = SimulatedNetwork(latency_s=2.0)
    alice, bob = network.link("alice", "bob"), network.link("bob", "alice")
    alice.send(Message(kind=0))
    assert bob.receive(1.5) == TimedOut(1.5)
    assert isinstance(bob.receive(1.5), Received)
    assert network.clock_s("bob") == pytest.approx(2.0)


def test_the_queue_drains_at_the_speed_of_the_wire() -> None:
    network = SimulatedNetwork(bandwidth_bytes_per_s=100, queue_bytes=250)
    alice = network.link("alice", "bob")
    message = Message(kind=0, payload=payload(100 - HEADER_BYTES))
    assert [alice.send(message) for _ in range(3)] == [Queued(100), Queued(200), Full(200, 250)]
    network.spend("alice", 1.0)
    assert alice.send(message) == Queued(200)
    assert alice.flush(1.0) == TimedOut(1.0)
    assert alice.flush(5.0) == Flushed()
    assert network.clock_s("alice") == pytest.approx(3.0)


def test_about_the_asked_fraction_is_lost_and_the_rest_keeps_its_order() -> None:
    network = SimulatedNetwork(seed=3, loss=0.25, jitter_s=1.0)
    alice, bob = network.link("alice", "bob"), network.link("bob", "alice")
    for number in range(2000):
        alice.send(Message(kind=number))
    kinds = []
    while isinstance(outcome := bob.receive(5), Received):
        kinds.append(outcome.message.kind)
    assert kinds == sorted(kinds)
    assert 1500 - 80 < len(kinds) < 1500 + 80  # four standard deviations of a binomial


def test_a_partition_is_silent_and_can_heal() -> None:
    network = SimulatedNetwork(latency_s=0.1)
    alice, bob = network.link("alice", "bob"), network.link("bob", "alice")
    network.partition("alice", "bob")
    alice.send(Message(kind=1))
    assert bob.receive(1.0) == TimedOut(1.0)
    network.heal("alice", "bob")
    network.spend("alice", 1.0)
    alice.send(Message(kind=2))
    outcome = bob.receive(1.0)
    assert isinstance(outcome, Received)
    assert outcome.message.kind == 2


def test_a_death_behind_a_partition_is_noticed_when_it_heals() -> None:
    network = SimulatedNetwork(latency_s=0.1)
    bob = network.link("bob", "alice")
    network.partition("alice", "bob", at_s=1.0)
    network.heal("alice", "bob", at_s=5.0)
    network.kill("alice", at_s=2.0)
    assert bob.receive(4.0) == TimedOut(4.0)
    assert isinstance(bob.receive(4.0), PeerDied)
    assert network.clock_s("bob") == pytest.approx(5.1)


def test_a_killed_role_stops_there_and_its_last_words_are_heard() -> None:
    network = SimulatedNetwork(latency_s=0.1)
    alice, bob = network.link("alice", "bob"), network.link("bob", "alice")
    network.kill("alice", at_s=2.5)

    def talk() -> list[object]:
        for number in range(10):
            network.spend("alice", 1.0)
            alice.send(Message(kind=number))
        pytest.fail("alice outlived her death")

    def listen() -> list[object]:
        return [bob.receive(10.0) for _ in range(3)]

    roles: dict[str, Callable[[], list[object]]] = {"alice": talk, "bob": listen}
    results = network.run(roles)
    assert "alice" not in results
    first, second, end = results["bob"]
    assert isinstance(first, Received)
    assert isinstance(second, Received)
    assert isinstance(end, PeerDied)
    assert network.clock_s("bob") == pytest.approx(2.6)


def test_an_error_of_one_role_is_a_death_for_its_peer_and_reaches_the_caller() -> None:
    network = SimulatedNetwork()
    seen: list[object] = []

    def fail() -> None:
        raise ZeroDivisionError("alice")

    roles: dict[str, Callable[[], None]] = {
        "alice": fail,
        "bob": lambda: seen.append(network.link("bob", "alice").receive(5.0)),
    }
    with pytest.raises(ZeroDivisionError, match="alice"):
        network.run(roles)
    assert isinstance(seen[0], PeerDied)


def test_when_all_wait_the_earliest_deadline_passes_first() -> None:
    network = SimulatedNetwork(latency_s=0.1)
    alice, bob = network.link("alice", "bob"), network.link("bob", "alice")

    def impatient() -> object:
        outcome = alice.receive(1.0)
        alice.send(Message(kind=7))
        return outcome

    results = network.run({"alice": impatient, "bob": lambda: bob.receive(100.0)})
    assert results["alice"] == TimedOut(1.0)
    assert isinstance(results["bob"], Received)
    assert network.clock_s("bob") == pytest.approx(1.1)


def chatter(seed: int, roles: int = 4, rounds: int = 30) -> tuple[TraceEvent, ...]:
    """Roles that send, compute and listen as their own generator says, over a bad network."""
    network = SimulatedNetwork(
        seed=seed, latency_s=0.01, bandwidth_bytes_per_s=1e5, jitter_s=0.02, loss=0.1, queue_bytes=2000
    )
    names = [f"role {number}" for number in range(roles)]
    network.partition(names[0], names[1], at_s=0.5)
    network.heal(names[0], names[1], at_s=1.0)
    network.kill(names[2], at_s=1.5)

    def act(me: str) -> None:
        choices = random.Random(f"{seed} {me}")
        others = [network.link(me, peer) for peer in names if peer != me]
        for number in range(rounds):
            choices.choice(others).send(Message(kind=number, payload=payload(choices.randrange(900))))
            network.spend(me, choices.random() * 0.05)
            for link in choices.sample(others, 2):
                link.receive(choices.random() * 0.05)
        for link in others:
            link.close()

    network.run({me: (lambda me=me: act(me)) for me in names})  # type: ignore[misc]
    return network.trace()


def test_one_seed_gives_one_story_and_another_seed_another() -> None:
    first = chatter(11)
    assert {event.what for event in first} >= {"sent", "lost", "received", "timed out"}
    assert len(first) > 200
    for _ in range(4):
        assert chatter(11) == first
    assert chatter(12) != first


def test_a_role_that_neither_waits_nor_ends_is_reported() -> None:
    network = SimulatedNetwork(stall_s=0.05)
    bob = network.link("bob", "alice")
    over = threading.Event()

    def listen() -> None:
        try:
            bob.receive(1.0)
        finally:
            over.set()

    with pytest.raises(ManyhandsError, match=r"bob waited 0\.05 s of real time for \['alice'\]"):
        network.run({"alice": lambda: over.wait(240), "bob": listen})


def test_a_role_that_waits_for_another_by_other_means_keeps_it_back_for_a_moment_only() -> None:
    network, heard = SimulatedNetwork(), threading.Event()
    alice, bob = network.link("alice", "bob"), network.link("bob", "alice")

    def speaks() -> bool:
        alice.send(Message(kind=1))
        return heard.wait(240)

    def hears() -> bool:
        came = isinstance(bob.receive(1.0), Received)
        heard.set()
        return came

    assert network.run({"alice": speaks, "bob": hears}) == {"alice": True, "bob": True}
    heard.clear()
    assert network.run({"bob": hears, "alice": speaks}) == {"alice": True, "bob": True}


def test_a_close_is_received_after_everything_sent_before() -> None:
    network = SimulatedNetwork(latency_s=0.1, bandwidth_bytes_per_s=1000)
    alice, bob = network.link("alice", "bob"), network.link("bob", "alice")
    with alice:
        alice.send(Message(kind=0, payload=payload(1000 - HEADER_BYTES)))
    assert isinstance(bob.receive(5.0), Received)
    assert bob.receive(5.0) == Closed()
    assert network.clock_s("bob") == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("latency_s", -1.0),
        ("jitter_s", float("inf")),
        ("bandwidth_bytes_per_s", 0.0),
        ("loss", 1.5),
        ("stall_s", 0.0),
    ],
)
def test_a_network_that_can_not_be_is_refused(setting: str, value: float) -> None:
    with pytest.raises(UserError, match=setting):
        SimulatedNetwork(**{setting: value})  # type: ignore[arg-type]
