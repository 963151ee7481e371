"""Elastic all-reduce, part by part: state through memory, files over a socket, cut exchanges, rows, the story."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.data.store.state_tree import restore_optimizer
from manyhands.engine.exchange import Times, Traffic
from manyhands.engine.training import training_class
from manyhands.engine.worker_processes import exchanging
from manyhands.errors import Aborted, PeerTimeout, UserError
from manyhands.facts import Answer
from manyhands.strategies.allreduce.elastic.elastic_membership import (
    ArrivedInEpoch,
    ElasticMembership,
    EpochSeat,
    EpochView,
)
from manyhands.strategies.allreduce.elastic.elastic_training import ElasticLog, ElasticTraining, FirstRows
from manyhands.strategies.allreduce.elastic.epochs import (
    EpochFiles,
    read_state,
    receive_files,
    restore_buffers,
    send_files,
    state_tree,
    write_file,
    write_state,
)
from manyhands.strategies.allreduce.elastic.exchange import (
    ElasticCollective,
    MembersChanged,
    StepChannel,
)
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.strategy import Strategy
from manyhands.wire.parcels import Parcel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 3), nn.BatchNorm1d(3)
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


def trained(seed: int, steps: int) -> tuple[Model, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@contextmanager
def memory_files(count: int) -> Iterator[list[int]]:
    descriptors = [os.memfd_create("test") for _ in range(count)]
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def test_newcomers_that_read_at_once_do_not_move_each_others_place_in_the_memory() -> None:
    donor, optimizer = trained(1, 3)
    with memory_files(2) as (tensors, tree):
        write_state(tensors, tree, state_tree(donor, optimizer, 3, {}))
        for descriptor in (tensors, tree):
            os.lseek(descriptor, 7, os.SEEK_SET)  # where another one is, that was sent the same descriptor
        assert read_state(tensors, tree).step == 3
        assert [os.lseek(descriptor, 0, os.SEEK_CUR) for descriptor in (tensors, tree)] == [7, 7]


def test_a_newcomer_goes_on_with_the_very_bits_of_its_donor() -> None:
    donor, optimizer = trained(1, 3)
    donor.passing.fill_(7)
    extra = {"samples": 12, "evaluated": {"loss": float("inf")}}
    with memory_files(2) as (tensors, tree):
        write_file(tensors, [b"what a donor had begun to write before it was lost" * 1000])
        write_state(tensors, tree, state_tree(donor, optimizer, 3, extra))
        loaded = read_state(tensors, tree)
    newcomer, its_optimizer = trained(2, 0)
    newcomer.load_state_dict(loaded.model)
    restore_optimizer(its_optimizer, loaded.optimizer)
    restore_buffers(newcomer, loaded)
    assert (loaded.step, loaded.extra["samples"], loaded.extra["evaluated"]["loss"]) == (3, 12, float("inf"))
    for model, stepping in ((donor, optimizer), (newcomer, its_optimizer)):
        torch.manual_seed(9)
        stepping.zero_grad()
        model(torch.randn(4, 5)).sum().backward()
        stepping.step()
    for (name, one), other in zip(donor.named_parameters(), newcomer.parameters(), strict=True):
        assert torch.equal(one, other), name
    for one, other in zip(donor.buffers(), newcomer.buffers(), strict=True):
        assert torch.equal(one, other)


def test_files_of_an_epoch_reach_a_member_and_those_of_earlier_ones_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("manyhands.strategies.allreduce.elastic.epochs._MOST_IN_A_PACKET", 5)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    strategy = Strategy.parse("allreduce algorithm=ring elastic=yes")
    with ours, theirs:
        for epoch, world in ((1, 2), (2, 6)):  # so many links that one packet does not hold them
            files = EpochFiles(world, strategy, with_state=epoch == 2)
            send_files(ours, epoch, files.of(0))
            expected = set(files.of(0))
            files.close()
        before = len(os.listdir("/proc/self/fd"))
        found = receive_files(theirs, 2, 5.0)
        assert len(found) > 10
        assert found.keys() == expected
        assert len(os.listdir("/proc/self/fd")) == before + len(found)
        for descriptor in found.values():
            os.close(descriptor)
        with pytest.raises(PeerTimeout, match="did not send the memory of epoch 3"):
            receive_files(theirs, 3, 0.01)


class Cut(Collective):
    """A collective whose exchanges raise."""

    rank, world = 0, 2

    def allocate(self, parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        return []

    def launch(self, index: int) -> None:
        raise Aborted("another is lost")

    def finish(self) -> None:
        raise Aborted("another is lost")

    def broadcast(self, index: int, root: int = 0) -> None:
        raise Aborted("another is lost")

    def take_times(self) -> Times:
        return Times()

    def traffic(self) -> Traffic:
        return Traffic()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("act", [lambda one: one.finish(), lambda one: one.broadcast(0)])
def test_an_exchange_that_was_cut_counts_exactly_if_the_launcher_says_so(act: Callable[[Any], None]) -> None:
    passage = StepChannel(1)
    seats = (EpochSeat(slot=0, member=0), EpochSeat(slot=1, member=1))
    passage.begin(EpochView(epoch=1, seats=seats))
    for _ in range(3):
        passage.passes()

    def collective(passed: int) -> ElasticCollective:
        view = EpochView(epoch=2, seats=seats[1:], donor=1, passed=passed)
        return ElasticCollective(Cut(), None, lambda: passage.learn(view), passage.passes)

    with pytest.raises(MembersChanged):
        act(collective(3))
    assert passage.passed == 3
    act(collective(4))
    assert passage.passed == 4
    with pytest.raises(AssertionError, match="has passed 4 exchanges of epoch 1, and the survivors 6"):
        act(collective(6))
    with pytest.raises(MembersChanged):
        collective(5).launch(0)  # nobody can have passed what was not launched


def test_settings_lead_to_the_training_and_what_cannot_be_elastic_is_refused() -> None:
    elastic = Strategy.parse("allreduce algorithm=ring elastic=yes")
    assert str(elastic) == "allreduce algorithm=ring elastic=yes"
    assert training_class(elastic) is ElasticTraining
    assert training_class(Strategy.parse("allreduce elastic=no")) is not ElasticTraining
    assert elastic.facts.can_change_workers
    assert not Strategy.parse("allreduce").facts.can_change_workers
    assert (
        elastic.facts.promises.worker_dies.answer is elastic.facts.promises.workers_join.answer is Answer.YES
    )
    with pytest.raises(UserError, match=r"elastic=yes is not for a loop of your own; .* give mh.fit a Task"):
        exchanging(elastic)
    with pytest.raises(UserError, match="elastic=yes: a compiled step cannot be undone"):
        elastic.check(2, "cpu", compiled=True)


def test_rows_that_are_told_twice_count_once() -> None:
    first = FirstRows()
    report = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "metrics": {}}]
    assert first.of(report) == report
    again = [{"step": 2, "loss": 2.1}, {"step": 2, "metrics": {}}, {"step": 3, "loss": 1.0}]
    assert first.of(again) == [{"step": 3, "loss": 1.0}]
    assert first.of([{"step": 6}, {"step": 6}]) == [{"step": 6}]
    late = [{"step": 4}, {"step": 5}]  # of another, whose words took longer
    assert first.of(late) == late
    assert first.of([*late, {"step": 6}, {"step": 7}]) == [{"step": 7}]


def test_the_story_says_who_was_lost_who_came_and_how_long_it_took() -> None:
    events: list[dict[str, Any]] = []
    now = [100.0]
    story = ElasticLog(events.append, clock=lambda: now[0])
    core = ElasticMembership(3)
    story.names |= {0: "worker 0", 1: "worker 1", 2: "worker 2", 3: "worker 1"}
    all_three = tuple(EpochSeat(slot=slot, member=slot) for slot in range(3))
    story.published(EpochView(epoch=1, seats=all_three))
    for member in range(3):
        story.arrived(ArrivedInEpoch(member=member, epoch=1, step=0), core.redone)
    now[0] += 2
    story.lose("died", 1, "worker 1 was killed")
    story.lose("died", 2, "worker 2 was killed")
    core.redone = 1
    now[0] += 0.25
    story.published(EpochView(epoch=2, seats=all_three[:1], donor=0))
    story.arrived(ArrivedInEpoch(member=0, epoch=2, step=7), core.redone)
    joined = EpochSeat(slot=1, member=3, fresh=True)
    story.published(EpochView(epoch=3, seats=(all_three[0], joined), donor=0))
    story.arrived(ArrivedInEpoch(member=0, epoch=2, step=7), core.redone)  # of an epoch that is over
    story.arrived(ArrivedInEpoch(member=3, epoch=3, step=9), core.redone)
    sentences = [event["sentence"] for event in events if "sentence" in event]
    assert sentences == [
        "worker 1 was killed",
        "worker 2 was killed",
        "1 worker continues after step 7, 0.25 s after worker 1 and worker 2 were lost; step 8 is computed again",
        "worker 1 joined after step 9, with the state of worker 0",
    ]
    assert story.recoveries == [{"what": "worker 1 and worker 2", "seconds": 0.25}]
    assert story.summary(core)["lost"] == 2
    assert story.summary(core)["joined"] == 1
