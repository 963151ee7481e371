"""What a resumed run will compute, said beforehand, is what it computes; and its history keeps the rest."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.data.store.atomic import MetricsLog
from manyhands.strategies.common.consistency import parse_consistency
from manyhands.strategies.ps.actions import Action, SendMessage
from manyhands.strategies.ps.live.reports import Evaluated, LossBook, StepComputed
from manyhands.strategies.ps.live.snapshots import ShardSnapshot, ShardSnapshots, ToCome, batches_to_come
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.ps_messages import Parameters, Push, Read, ShardView, SlotView, View, WorkKind
from manyhands.strategies.ps.shard_core import ShardCore
from manyhands.strategies.ps.shard_layout import ShardState
from manyhands.strategies.ps.shard_replica import ShardReplica
from manyhands.strategies.ps.update_files import clear_records

SLOTS, STEPS = (0, 1, 2, 3), 40


class Shard:
    """A shard alone, whose workers push in an order drawn from a seed."""

    def __init__(self, consistency: str, state: dict[str, Any] | None = None) -> None:
        policy = parse_consistency(consistency)
        config = ShardConfig(shard=0, num_shards=1, policy=policy, steps=STEPS, slots=SLOTS)
        self.replica = ShardReplica(config, 1)
        if state is not None:
            self.replica.restore(state)
        self.work: dict[int, Parameters] = {}
        self.computed: list[int] = []
        places = tuple(SlotView(slot=slot, member=slot + 2) for slot in SLOTS)
        view = View(epoch=1, shards=(ShardView(shard=0, epoch=1, primary=1),), slots=places)
        self._take(self.replica.view(view))
        for slot in SLOTS:
            self._read(slot, self.replica.core.next_clock(slot) or 0)

    def push(self, slot: int) -> None:
        """Let a worker compute what it has, if it has anything."""
        answer = self.work.pop(slot, None)
        if answer is None or answer.work.kind is not WorkKind.TRAIN:
            return
        work = answer.work
        self.computed.append(work.batch)
        push = Push(
            shard=0,
            slot=slot,
            member=slot + 2,
            clock=work.clock,
            read_version=answer.version,
            read_term=answer.term,
            batch=work.batch,
            part=work.part,
            parts=work.parts,
            weight=1 / work.parts,
        )
        self._take(self.replica.handle(push, slot + 2))
        self._read(slot, work.clock + 1)

    def finish(self) -> None:
        while any(answer.work.kind is WorkKind.TRAIN for answer in self.work.values()):
            for slot in SLOTS:
                self.push(slot)

    def _read(self, slot: int, clock: int) -> None:
        self._take(self.replica.handle(Read(shard=0, slot=slot, member=slot + 2, clock=clock), slot + 2))

    def _take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, SendMessage) and isinstance(action.message, Parameters):
                self.work[action.message.slot] = action.message


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("consistency", ["sync", "sync:1", "bounded:1", "bounded:5", "async", "softsync:2"])
def test_what_will_be_computed_is_known_beforehand(consistency: str, seed: int) -> None:
    draw = random.Random(seed)
    shard = Shard(consistency)
    slots = [*SLOTS, *SLOTS, *SLOTS[:3], *SLOTS[:3]]  # one is slower than the others
    for _ in range(draw.randint(5, 60)):
        shard.push(draw.choice(slots))
    state = json.loads(json.dumps(shard.replica.state()))
    to_come = batches_to_come(parse_consistency(consistency), [state["core"]])
    resumed = Shard(consistency, state)
    resumed.finish()
    assert sorted(set(resumed.computed)) == [batch for batch in range(STEPS) if batch in to_come]
    done = set(range(STEPS)) - set(resumed.computed)
    assert done <= set(shard.computed), "what is not computed again was computed before"
    rows = [{"step": batch + 1, "loss": 0.0} for batch in shard.computed]
    assert {row["step"] - 1 for row in rows if to_come.wants(row)} == done


@pytest.mark.parametrize("consistency", ["sync", "sync:1", "bounded:1", "bounded:5", "async", "softsync:2"])
def test_a_shard_goes_on_where_another_strategy_stopped(consistency: str) -> None:
    policy = parse_consistency(consistency)
    config = ShardConfig(shard=0, num_shards=1, policy=policy, steps=STEPS, slots=SLOTS)
    state = {"shard": 0, "core": json.loads(json.dumps(ShardCore(config, 13).state()))}
    assert batches_to_come(policy, [state["core"]]) == ToCome(start=13)
    shard = Shard(consistency, state)
    shard.finish()
    assert sorted(set(shard.computed)) == list(range(13, STEPS))
    parts = len(SLOTS) if policy.stepwise else 1
    assert len(shard.computed) == parts * (STEPS - 13), "each once"
    assert shard.replica.core.version <= STEPS
    if not policy.chosen_by_lead:
        assert shard.replica.core.version == STEPS, "versions count on"


def test_a_lead_gives_out_nothing_that_another_shard_has_seen() -> None:
    lead, other = Shard("async"), Shard("async")
    for slot in (0, 1):
        lead.push(slot)
    for slot in (0, 1, 2, 3, 0, 1):
        other.push(slot)
    cores = [shard.replica.state()["core"] for shard in (lead, other)]
    to_come = batches_to_come(parse_consistency("async"), cores)
    assert to_come.start == other.replica.state()["core"]["next_batch"]
    assert to_come.before == {2, 3, 4, 5}, "given out, and not settled at the lead"


def test_rows_of_the_history_that_stay(tmp_path: Path) -> None:
    to_come = ToCome(start=8, before=frozenset({5}))
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 11):
        log.append({"step": step, "loss": 1.0})
    for step in (5, 6, 8, 10):
        log.append({"step": step, "metrics": {}})
    assert log.keep(to_come.wants) == 3 + 2
    rows = log.read()
    log.close()
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 7, 8]
    assert [row["step"] for row in rows if "metrics" in row] == [5, 6], (
        "that after 5 was made of all 5 before it"
    )
    book = LossBook(rows)
    part = StepComputed(clock=4, batch=4, part=0, parts=1, loss=2.0, share=1.0, seconds=0.1)
    assert book.add(part, 1.0) is None, "its row is there"
    assert book.add(part._replace(batch=5), 1.0) is not None
    assert book.add_evaluation(Evaluated(step=5, metrics={}), 1.0) is None
    assert book.add_evaluation(Evaluated(step=8, metrics={}), 1.0) == {"step": 8, "metrics": {}, "at_s": 1.0}
    assert book.add_evaluation(Evaluated(step=8, metrics={}), 2.0) is None


def test_snapshots_of_a_life_that_did_not_go_on_are_removed(tmp_path: Path) -> None:
    snapshots = ShardSnapshots(tmp_path, 2, 9)
    for shard, version in ((0, 10), (0, 20), (0, 30), (1, 10), (1, 20)):
        state = ShardState(model={"w": torch.ones(2)}, optimizer={}, batches=version)
        snapshots.save(shard, ShardSnapshot(version=version, state=state, held={}, core="{}"))
    snapshots.remove_after(20)
    assert [snapshots.versions(shard) for shard in (0, 1)] == [{10, 20}, {10, 20}]
    newest = snapshots.load(0)
    assert newest is not None
    assert newest.version == 20, "a shard never goes back to what came later in another life"
    snapshots.remove_after(-1)
    assert snapshots.load(0) is None
    ShardSnapshots(tmp_path / "nothing", 2).remove_after(-1)


def test_shards_that_lost_updates_keep_a_version_in_common(tmp_path: Path) -> None:
    """The first shard went back by 40 updates; without what the second spares for it, nothing could be resumed."""
    snapshots = ShardSnapshots(tmp_path, 2, 3)
    for version in range(10, 200, 10):
        for shard, reached in ((1, version), (0, version - 40)):
            if reached > 0:
                state = ShardState(
                    model={"w": torch.full((2,), float(reached))}, optimizer={}, batches=reached
                )
                snapshots.save(shard, ShardSnapshot(version=reached, state=state, held={}, core="{}"))
        if version > 50:
            whole = snapshots.newest_whole()
            assert whole is not None
            assert [one.version for one in whole] == [version - 40] * 2
    assert snapshots.versions(0) == {130, 140, 150}, "who is behind keeps three, as always"
    assert snapshots.versions(1) == {140, 150, 160, 170, 180, 190}, "from what both had when it last saved"
    ended = snapshots.at([150, 190])
    assert ended is not None
    assert [float(one.state.model["w"][0]) for one in ended] == [150.0, 190.0]
    assert snapshots.at([150, 191]) is None


def test_records_are_cleared_whole(tmp_path: Path) -> None:
    clear_records(tmp_path)
    for folder in ("updates", "updates.removing"):  # the second of a clearing that was cut short
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shard-0.member-1.jsonl").write_text("old\n")
    clear_records(tmp_path)
    assert list(tmp_path.iterdir()) == []
