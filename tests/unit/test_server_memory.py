"""Whose memory a server reads gradients in, how long, and what it does not listen to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from manyhands.native.segment import Segment
from manyhands.strategies.ps.actions import Keep
from manyhands.strategies.ps.live.area import WorkerArea
from manyhands.strategies.ps.live.payloads import Gradients
from manyhands.strategies.ps.live.server_process import require_sense
from manyhands.strategies.ps.ps_messages import Hello, Install, Push, Welcome, Yield
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.transport.messages import ProtocolError

OLD, NEW = 5, 8
SERVERS: list[Gradients] = []


def layout_of_two_shards() -> FlatLayout:
    model = nn.Linear(64, 64)
    return FlatLayout.of(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)


def push(member: int, shard: int, clock: int = 3) -> Push:
    return Push(
        shard=shard,
        slot=1,
        member=member,
        clock=clock,
        read_version=0,
        batch=clock,
        part=0,
        parts=1,
        weight=1.0,
    )


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """What a server holds goes with the test."""
    yield
    while SERVERS:
        SERVERS.pop().close()


def server(*members: int) -> Gradients:
    """A server with which these members share memory, all of them holders of slot 1, one after the other."""
    layout = layout_of_two_shards()
    gradients = Gradients(layout, inline=False)
    SERVERS.append(gradients)
    for member in members:
        share(gradients, layout, member)
    return gradients


def share(gradients: Gradients, layout: FlatLayout, member: int) -> Segment:
    area = WorkerArea.create(layout)
    gradients.add_area(member, area.segment)
    return area.segment


def hold(gradients: Gradients, message: Push) -> None:
    contribution = gradients.of(message, memoryview(b""))
    assert contribution is not None
    gradients.keep(Keep(shard=message.shard, slot=1, clock=message.clock, copy=False), contribution)
    gradients.taken(message)


def test_who_lost_a_slot_has_no_memory_at_the_shards_that_know() -> None:
    gradients = server(OLD, NEW)
    hold(gradients, push(OLD, 0))
    gradients.take(0, 1, 3)
    gradients.succeed(1, NEW, [0])
    assert gradients.of(push(OLD, 0), memoryview(b"")) is None
    assert gradients.of(push(OLD, 1), memoryview(b"")) is not None, "of shard 1 this server is the backup"
    assert OLD in gradients.areas
    gradients.taken(push(NEW, 1))
    assert gradients.of(push(OLD, 1), memoryview(b"")) is None, "its primary has heard of the new one"
    assert OLD not in gradients.areas, "nobody needs it"
    assert gradients.of(push(NEW, 0), memoryview(b"")) is not None


def test_memory_that_is_pointed_to_stays_until_it_is_not() -> None:
    gradients = server(OLD, NEW)
    hold(gradients, push(OLD, 0))
    gradients.succeed(1, NEW, [0, 1])
    assert OLD in gradients.areas, "its gradient may have to go to a backup that is not there yet"
    gradients.take(0, 1, 3)
    gradients.succeed(1, NEW, [0, 1])
    assert OLD not in gradients.areas


def test_memory_of_somebody_who_never_had_a_slot_goes_with_its_connection() -> None:
    gradients = server(OLD, NEW)
    gradients.succeed(1, NEW, [0, 1])
    gradients.lost(OLD)
    gradients.lost(NEW)
    assert OLD not in gradients.areas
    assert NEW in gradients.areas, "what it pushed may still be on its way to a backup"


def test_a_vacant_slot_takes_nothing_from_anybody() -> None:
    gradients = server(OLD)
    gradients.succeed(1, OLD, [0, 1])
    gradients.succeed(1, 0, [0, 1])
    assert gradients.of(push(OLD, 0), memoryview(b"")) is not None


def test_buffers_of_a_connection_go_with_the_slot_too() -> None:
    layout = layout_of_two_shards()
    gradients = Gradients(layout, inline=True)
    num_bytes = layout.flag_bytes(0) + layout.range_bytes(0)
    room = gradients.room_for(push(OLD, 0), num_bytes)
    assert room is not None
    gradients.succeed(1, OLD, [0, 1])
    assert gradients.of(push(OLD, 0), room) is not None
    gradients.succeed(1, NEW, [0, 1])
    assert gradients.of(push(OLD, 0), room) is None


def test_memory_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="shared memory must have"):
        server().add_area(OLD, Segment.create(4096, "a test"))


@pytest.mark.parametrize(
    ("message", "role", "report"),
    [
        (Welcome(shard=0, slot=0, next_clock=0, version=0), "server", "Welcome"),
        (Install(shard=0, epoch=1, sequence=0, state="{}"), "worker", "Install from a worker"),
        (Yield(shard=0, epoch=9), "worker", "Yield from a worker"),
        (Hello(shard=2, slot=0, member=3, settled=0), "worker", "no shard 2 of 2"),
        (Hello(shard=-1, slot=0, member=3, settled=0), "worker", "no shard -1 of 2"),
    ],
)
def test_what_makes_no_sense_is_its_senders_mistake(message: object, role: str, report: str) -> None:
    with pytest.raises(ProtocolError, match=report):
        require_sense(message, role, 2)


def test_what_makes_sense_is_heard() -> None:
    require_sense(Hello(shard=1, slot=0, member=3, settled=0), "worker", 2)
    require_sense(Install(shard=0, epoch=1, sequence=0, state="{}"), "server", 2)
