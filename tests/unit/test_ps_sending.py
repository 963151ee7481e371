"""What members of other hosts send as a whole: it comes back as it was, and nothing else is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.data.store.atomic import LineFile
from manyhands.engine.computing import Computer, TrainingPlan
from manyhands.strategies.ps.live.remote import (
    BUFFERS,
    Shipment,
    final_chunks,
    pack_snapshot,
    take_final,
    unpack_snapshot,
)
from manyhands.strategies.ps.live.server_tables import final_bytes, final_tables
from manyhands.strategies.ps.live.snapshots import ShardSnapshot
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_store import ShardStore
from manyhands.strategies.ps.update_files import record_files, record_mark, take_record
from manyhands.task import Task
from manyhands.transport.messages import ProtocolError

SHARDS = 2


class Mixed(nn.Module):
    """Dense parameters of two types, and tables of two, one of which is of double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(10, 3)
        self.b = nn.Embedding(7, 2, dtype=torch.float64)
        self.dense = nn.Linear(5, 4)
        self.wide = nn.Linear(3, 3, dtype=torch.float64)


def task() -> Task:
    return Task(
        model=Mixed,
        loss=lambda model, batch: model.dense.weight.sum(),
        data=[torch.zeros(1)],
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        sparse={"a.weight": lambda batch: batch, "b.weight": lambda batch: batch},
    )


def stores() -> tuple[nn.Module, FlatLayout, list[ShardStore]]:
    plan = TrainingPlan(task=task(), steps=1, seed=3, evaluate_every=0, checkpoint_every=0)
    built = Computer(plan, 0).build()
    layout = FlatLayout.of(built.model, built.optimizer, SHARDS, plan.task.sparse)
    made = [ShardStore(Computer(plan, 0).build(), layout, shard) for shard in range(SHARDS)]
    return built.model, layout, made


def joined(chunks: Any) -> bytearray:
    return bytearray(b"".join(memoryview(one).cast("B") for one in chunks))


def test_the_shards_of_a_model_arrive_where_children_leave_theirs() -> None:
    model, layout, made = stores()
    memory = torch.zeros(final_bytes(layout), dtype=torch.uint8)
    for shard, store in enumerate(made):
        take_final(layout, shard, joined(final_chunks(layout, shard, store)), memory)
    values = layout.views(memory[: layout.num_bytes]) | final_tables(layout, memory)
    for name, parameter in model.named_parameters():
        assert torch.equal(values[name], parameter.detach()), name


def test_a_shard_of_another_size_is_refused() -> None:
    _, layout, made = stores()
    memory = torch.zeros(final_bytes(layout), dtype=torch.uint8)
    data = joined(final_chunks(layout, 0, made[0]))
    for wrong in (data[:-1], data + b"x", bytearray()):
        with pytest.raises(ProtocolError, match="bytes, but"):
            take_final(layout, 0, wrong, memory)
    assert not memory.any()


def test_a_snapshot_comes_back() -> None:
    _, _, made = stores()
    held = {(1, 7): torch.arange(5)}
    snapshot = ShardSnapshot(
        version=12, state=made[1].state(), held=held, core=json.dumps({"slots": [1, "é"]})
    )
    found = unpack_snapshot(joined(pack_snapshot(snapshot)))
    assert (found.version, found.core) == (12, snapshot.core)
    assert torch.equal(found.held[1, 7], held[1, 7])
    assert found.state.batches == snapshot.state.batches
    assert found.state.model.keys() == snapshot.state.model.keys()
    for name, value in snapshot.state.model.items():
        assert torch.equal(found.state.model[name], value)


@pytest.mark.parametrize("length", [0, 3, 16, 40, 200])
def test_a_cut_snapshot_is_refused(length: int) -> None:
    _, _, made = stores()
    whole = joined(pack_snapshot(ShardSnapshot(version=1, state=made[0].state(), held={}, core="{}")))
    with pytest.raises(ProtocolError, match=r"not (a snapshot|the state) of a shard"):
        unpack_snapshot(whole[:length])


def test_shipments_have_names() -> None:
    for shipment in (
        Shipment("final", shard=1),
        Shipment("snapshot", shard=0),
        BUFFERS,
        Shipment("record", file="worker.process-3.jsonl"),
        Shipment("record", file="shard-0.member-12.jsonl"),
    ):
        assert Shipment.parse(str(shipment), SHARDS) == shipment


@pytest.mark.parametrize(
    "name",
    [
        *("", "final", "final 2", "final -1", "snapshot x", "buffers 1", "record run.json", "code 1"),
        *("record ../a.jsonl", "record /etc/passwd", "record shard-0.member-1.jsonl/x", "final 0\n"),
    ],
)
def test_nothing_else_is_taken(name: str) -> None:
    with pytest.raises(ProtocolError):
        Shipment.parse(name, SHARDS)


def test_records_are_added_to_those_of_an_earlier_life(tmp_path: Path) -> None:
    name = "worker.process-3.jsonl"
    (tmp_path / "updates").mkdir()
    assert take_record(tmp_path, name, b"1\n2\nhalf") == 0
    log = LineFile(tmp_path / "updates" / name)
    log.append(b"3\n")
    log.close()
    assert take_record(tmp_path, name, b"4\n") == 3
    assert take_record(tmp_path, name, b"") == 4
    (found,) = record_files(tmp_path)
    assert found.read_bytes() == b"1\n2\n3\n4\n"


def test_two_paths_to_one_directory_are_told_from_two_directories(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        (folder / "updates").mkdir(parents=True)
        (folder / "updates" / "run.json").write_text("{}")
    assert record_mark(first) == record_mark(first) is not None
    assert record_mark(first) != record_mark(second)
    assert record_mark(tmp_path) is None
