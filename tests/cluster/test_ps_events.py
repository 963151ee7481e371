"""What a parameter server of threads records: both ends of every message, every update once, who was kept back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.observe.record.events import NOBODY, EventKind, Records
from manyhands.strategies.ps.live.reports import ShardsLeft
from manyhands.transport.link.wire import Wire
from threaded_ps import ThreadedRun, job_for

STEPS, WORKERS, SERVERS = 12, 2, 2


def plain() -> mh.Task:
    x = torch.arange(64, dtype=torch.float64).view(32, 2) / 64

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        difference: Tensor = model(batch[0]) - batch[1]
        return difference.square().mean()

    return mh.Task(
        model=lambda: nn.Linear(2, 1, dtype=torch.float64),
        loss=loss,
        data=(x, x.sum(1, keepdim=True)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch_size=8,
    )


def recorded(strategy: str, task: mh.Task | None = None, evaluate_every: int = 0) -> dict[int, Records]:
    """The events of a whole run, by role."""
    job = job_for(task or plain(), strategy, steps=STEPS, workers=WORKERS, evaluate_every=evaluate_every)
    with ThreadedRun(job) as run:
        run.start_workers()
        run.await_joined(WORKERS)
        run.publish(1, (1, 2))
        run.finish()
        return {role: ring.drain() for role, ring in run.rings.items()}


def ends(events: dict[int, Records], kind: EventKind) -> Counter[tuple[int, int, int]]:
    """How often each message, named by sender, receiver and number, was recorded at this end."""
    found: Counter[tuple[int, int, int]] = Counter()
    for role, records in events.items():
        for record in records[records["kind"] == kind]:
            peer, number = int(record["peer"]), int(record["message"])
            found[(role, peer, number) if kind is EventKind.SEND else (peer, role, number)] += 1
    return found


@pytest.mark.parametrize("link", ["shared", "tcp"])
def test_every_message_has_two_ends_with_one_number(link: str) -> None:
    events = recorded(f"ps servers={SERVERS} consistency=async link={link}")
    sent, received = ends(events, EventKind.SEND), ends(events, EventKind.RECEIVE)
    assert sent == received
    assert set(sent.values()) == {1}
    # a push and an answer for each update and shard, and the answer that tells each worker that all is done
    assert len(sent) == SERVERS * (2 * STEPS + WORKERS)
    wires = {int(wire) for records in events.values() for wire in records["wire"][records["message"] > 0]}
    assert wires == {Wire.TCP if link == "tcp" else Wire.MEMORY}


def test_an_evaluation_is_recorded_when_it_begins_and_when_it_ends() -> None:
    data = plain().data
    events = recorded(f"ps servers={SERVERS}", replace(plain(), evaluation=data), evaluate_every=4)
    found = np.concatenate([records[records["kind"] == EventKind.EVALUATE] for records in events.values()])
    found = found[np.argsort(found["step"], kind="stable")]
    assert found["step"].tolist() == [3, 3, 7, 7]
    assert found["count"].tolist() == [0, len(data[0])] * 2
    assert (found["duration_ns"][::2] == 0).all()
    assert found["start_ns"][::2].tolist() == found["start_ns"][1::2].tolist()
    nothing = recorded(f"ps servers={SERVERS}", evaluate_every=4)
    assert not any((records["kind"] == EventKind.EVALUATE).any() for records in nothing.values())


def test_every_update_is_applied_once_by_each_shard_with_the_staleness_that_the_server_reports() -> None:
    with ThreadedRun(job_for(plain(), "ps servers=2 consistency=async", steps=STEPS, workers=WORKERS)) as run:
        run.start_workers()
        run.await_joined(WORKERS)
        run.publish(1, (1, 2))
        run.finish()
        reported = {
            shard.shard: dict(shard.staleness) for said in run.said(ShardsLeft) for shard in said.shards
        }
        for shard in range(SERVERS):
            records = run.rings[WORKERS + shard].drain()
            applied = records[records["kind"] == EventKind.APPLY]
            assert sorted(applied["step"].tolist()) == list(range(STEPS))
            assert set(applied["count"].tolist()) == {shard}
            assert Counter(applied["value"].astype(int).tolist()) == reported[shard]


def test_in_a_sync_step_the_duration_counts_once_and_all_are_held_for_the_last() -> None:
    events = recorded(f"ps servers={SERVERS}")
    for server in range(WORKERS, WORKERS + SERVERS):
        records = events[server]
        applied = records[records["kind"] == EventKind.APPLY]
        assert len(applied) == STEPS * WORKERS
        assert (applied["value"] == 0).all()
        assert np.count_nonzero(applied["duration_ns"]) == STEPS
        held = records[records["kind"] == EventKind.HOLD]
        assert (held["peer"] != held["value"]).all()
        assert set(held["value"].tolist()) <= {0.0, 1.0, float(NOBODY)}
