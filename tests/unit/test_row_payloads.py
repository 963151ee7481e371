"""How rows travel: what is packed comes back, known sets cost their names alone, and garbage is refused as such."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.engine.computing import Computer, TrainingPlan
from manyhands.errors import UserError
from manyhands.optim import FTRL
from manyhands.strategies.common.tables.filter_setting import RowFilters
from manyhands.strategies.common.tables.row_tables import Given, Named, RowSets, name_of
from manyhands.strategies.ps.actions import Keep
from manyhands.strategies.ps.live.payloads import Gradients
from manyhands.strategies.ps.live.row_payloads import (
    PartOfSet,
    UnknownSets,
    least_bytes,
    most_bytes,
    pack,
    pack_rests,
    take_rests,
    take_sets,
    take_values,
)
from manyhands.strategies.ps.live.server_tables import ServerTables
from manyhands.strategies.ps.live.worker_tables import WorkerTables
from manyhands.strategies.ps.ps_messages import Push
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_store import ShardStore
from manyhands.task import Task
from manyhands.transport.messages import ProtocolError

SERVER, OTHER_SERVER = 1, 2
NO_ROWS = torch.empty(0, dtype=torch.int64)


class Tables(nn.Module):
    """Ten rows of 3 items in single precision, seven of 2 in double.

    Of two shards, the first has rows 1, 2, 5, 7 of the one and 1, 2, 5 of the other (see `placement`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(10, 3)
        self.b = nn.Embedding(7, 2, dtype=torch.float64)
        self.dense = nn.Linear(2, 2)


SPARSE = {"a.weight": lambda batch: batch["a"], "b.weight": lambda batch: batch["b"]}


def made() -> tuple[Tables, FlatLayout]:
    model = Tables()
    return model, FlatLayout.of(model, torch.optim.SGD(model.parameters(), lr=1.0), 2, SPARSE)


def joined(parts: list[Any]) -> memoryview:
    return memoryview(bytearray(b"".join(bytes(part) for part in parts)))


def given(*rows: int) -> Given:
    tensor = torch.tensor(rows, dtype=torch.int64)
    return Given(name=name_of(tensor), rows=tensor)


def sent(tables: WorkerTables, shard: int, member: int = SERVER) -> memoryview:
    return joined(tables.push(member, shard))


def with_gradients(model: Tables, tables: WorkerTables, **batch: list[int]) -> None:
    """Begin an update that reads these rows and has a gradient of row number + column in them."""
    tables.begin()
    tables.choose({name: torch.tensor(rows, dtype=torch.int64) for name, rows in batch.items()})
    for name, rows in batch.items():
        weight = getattr(model, name).weight
        weight.grad = torch.zeros_like(weight)
        for row in rows:
            weight.grad[row] = row + torch.arange(weight.shape[1])


def test_what_is_packed_comes_back() -> None:
    _, layout = made()
    values = [torch.rand(3, 3), torch.rand(1, 2, dtype=torch.float64)]
    payload = joined(pack([given(0, 4, 9), given(3)], values))
    rows, rest = take_sets(layout, 1, payload, RowSets(1024))
    assert [one.tolist() for one in rows if one is not None] == [[0, 4, 9], [3]]
    back = take_values(layout.tables, [3, 1], rest)
    assert all(torch.equal(one, other) for one, other in zip(back, values, strict=True) if one is not None)
    assert len(payload) <= most_bytes(layout, 1)


def test_a_table_that_was_not_reached_is_not_there() -> None:
    model, layout = made()
    server = ServerTables(layout)
    tables = WorkerTables(model, layout, SPARSE)
    with_gradients(model, tables, a=[1, 8], b=[])
    model.b.weight.grad = None
    tables.collect(1.0)
    first, second = server.gradients(0, sent(tables, 0)), server.gradients(1, sent(tables, 1))
    assert list(first) == list(second) == ["a.weight"]
    with_gradients(model, tables, a=[1], b=[])
    tables.collect(1.0)
    here = server.gradients(1, sent(tables, 1))
    assert {name: (one.rows.tolist(), tuple(one.values.shape)) for name, one in here.items()} == {
        "a.weight": ([], (0, 3)),
        "b.weight": ([], (0, 2)),
    }


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_arrive_with_their_rows_and_their_share(sparse: bool) -> None:
    model, layout = made()
    server, tables = ServerTables(layout), WorkerTables(model, layout, SPARSE)
    with_gradients(model, tables, a=[8, 1, 5, 8], b=[6])
    assert model.a.weight.grad is not None
    if sparse:
        model.a.weight.grad = model.a.weight.grad.to_sparse(1)
    tables.collect(0.5)
    assert tables.is_finite()
    assert model.a.weight.grad is None
    first, second = server.gradients(0, sent(tables, 0)), server.gradients(1, sent(tables, 1))
    assert first["a.weight"].rows.tolist() == [1, 5]
    assert first["a.weight"].values.tolist() == [[0.5, 1.0, 1.5], [2.5, 3.0, 3.5]]
    assert second["a.weight"].rows.tolist() == [8]
    assert second["b.weight"].values.tolist() == [[3.0, 3.5]]
    assert first["b.weight"].rows.tolist() == []


def test_a_gradient_that_is_not_finite_is_seen() -> None:
    model, layout = made()
    tables = WorkerTables(model, layout, SPARSE)
    with_gradients(model, tables, a=[3], b=[])
    assert model.a.weight.grad is not None
    model.a.weight.grad[3, 1] = torch.nan
    tables.collect(1.0)
    assert not tables.is_finite()


def test_a_set_that_was_sent_once_costs_its_name() -> None:
    model, layout = made()
    server, tables = ServerTables(layout), WorkerTables(model, layout, SPARSE)
    batch = {"a": torch.tensor([1, 2, 5, 7]), "b": torch.tensor([1, 2])}

    def request(member: int = SERVER) -> memoryview:
        tables.begin()
        assert tables.choose(batch) == [0]
        return joined(tables.request(member, 0))

    first, again = request(), request()
    assert (len(first), len(again)) == (128 + 64 + 64, 128)  # two heads fill two lines; each set is a line
    assert [one.tolist() for one in server.asked(0, first, False) if one is not None] == [
        [1, 2, 5, 7],
        [1, 2],
    ]
    assert [one.tolist() for one in server.asked(0, again, False) if one is not None] == [
        [1, 2, 5, 7],
        [1, 2],
    ]
    assert len(request(OTHER_SERVER)) == len(first), "another server was told nothing"
    tables.forget(SERVER)
    assert len(request()) == len(first)


def test_a_server_that_forgot_asks_and_is_reported() -> None:
    model, layout = made()
    tables = WorkerTables(model, layout, SPARSE)
    tables.begin()
    tables.choose({"a": torch.tensor([2]), "b": torch.tensor([1])})
    joined(tables.request(SERVER, 0))
    server = ServerTables(layout)  # as if it had forgotten everything
    with pytest.raises(UnknownSets) as unknown:
        server.asked(0, joined(tables.request(SERVER, 0)), False)
    assert unknown.value.names == (given(2).name.hex(), given(1).name.hex())
    tables.forgotten(unknown.value.names)
    report = server.asked(0, joined(tables.request(SERVER, 0)), False)
    assert [one.tolist() for one in report if one is not None] == [[2], [1]]
    tables.begin()
    tables.choose({"a": torch.tensor([2]), "b": torch.tensor([1])})
    server.asked(0, joined(tables.request(SERVER, 0)), False)  # and by name from then on
    assert len(joined(tables.request(SERVER, 0))) == 128


def test_values_reach_the_rows_that_were_asked_for_and_no_others() -> None:
    model, layout = made()
    tables = WorkerTables(model, layout, SPARSE)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    tables.begin()
    tables.choose({"a": torch.tensor([[9, 0], [0, 4]]), "b": torch.tensor([])})
    new = torch.arange(9.0).view(3, 3)
    tables.take(1, joined(pack((), [new, torch.empty(0, 2, dtype=torch.float64)])))
    expected = before["a.weight"].clone()
    expected[[0, 4, 9]] = new
    assert torch.equal(model.a.weight, expected)
    assert torch.equal(model.b.weight, before["b.weight"])
    assert list(tables.choose_whole()) == [0, 1]
    assert tables.request(SERVER, 1) == []
    whole = [torch.rand(6, 3), torch.rand(4, 2, dtype=torch.float64)]
    tables.take(1, joined(pack((), whole)))
    assert torch.equal(model.a.weight[[0, 3, 4, 6, 8, 9]], whole[0])
    assert torch.equal(model.b.weight[[0, 3, 4, 6]], whole[1])
    with pytest.raises(ProtocolError, match="192 bytes, not 64"):
        tables.take(1, memoryview(bytes(64)))


def test_what_lies_in_memory_of_the_sender_is_copied() -> None:
    _, layout = made()
    memory = joined(pack([given(1), given()], [torch.ones(1, 3), torch.empty(0, 2)]))
    taken = ServerTables(layout).gradients(0, memory.toreadonly())
    memory[:] = bytes(len(memory))
    assert taken["a.weight"].values.tolist() == [[1.0, 1.0, 1.0]]
    assert taken["a.weight"].rows.tolist() == [1]


# ── parts of sets, and answers without zeros ──────────────────────────────────────────────────────────────────────────


def test_a_part_of_a_set_costs_a_bit_a_row_once_the_set_is_known() -> None:
    _, layout = made()
    server, whole, sent = ServerTables(layout), given(1, 2, 5, 7), torch.tensor([False, True, False, True])
    values = torch.rand(2, 3)
    listed = joined(pack([PartOfSet(whole, sent), None], [values]))
    named = joined(pack([PartOfSet(Named(name=whole.name), sent), None], [values]))
    with pytest.raises(UnknownSets):
        server.gradients(0, named)
    for payload in (listed, named):
        found = server.gradients(0, payload)["a.weight"]
        assert found.rows.tolist() == [2, 7]
        assert torch.equal(found.values, values)
    assert len(listed) - len(named) == 64, "the rows themselves"


def test_a_part_of_another_number_of_rows_than_the_set_has_is_refused() -> None:
    _, layout = made()
    server, whole = ServerTables(layout), given(1, 2)
    server.asked(0, joined(pack([whole, None])), False)
    with pytest.raises(ProtocolError, match="a part of 3 rows is of a set of 2 rows"):
        server.gradients(0, joined(pack([PartOfSet(Named(name=whole.name), torch.ones(3).bool()), None])))


def test_zeros_travel_as_bits_and_keep_their_mark() -> None:
    _, layout = made()
    [table, _] = layout.tables
    values = torch.zeros(10, 3)
    values[3], values[8], values[6] = torch.tensor([0.0, 1.0, -0.0]), math.nan, -0.0
    parts: list[Any] = []
    pack_rests(parts, values)
    payload = joined(parts)
    assert len(payload) == least_bytes([10]) + 64
    found, rest = take_rests(table, 10, payload)
    assert not rest
    assert found.numpy().tobytes() == values.numpy().tobytes()
    with pytest.raises(ProtocolError, match="0 bytes are left, but"):
        take_rests(table, 10, payload[:-64])


def test_an_answer_without_zeros_is_bounded_before_it_is_read() -> None:
    model, layout = made()
    tables = WorkerTables(
        model, layout, SPARSE, filters=RowFilters(kkt=0.1), optimizer=FTRL(model.parameters(), l1=1.0)
    )
    tables.begin()
    tables.choose({"a": torch.arange(10), "b": NO_ROWS})
    for wrong in (0, 64, 1 << 20):
        with pytest.raises(ProtocolError, match="must have 128 to 192 bytes"):
            tables.require_size(0, wrong)


# ── garbage ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def head(kind: int, count: int, name: bytes = bytes(32)) -> bytes:
    return kind.to_bytes(8, "little", signed=True) + count.to_bytes(8, "little", signed=True) + name


ABSENT = head(0, 0)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "too few"),
        (bytes(127), "too few"),
        (head(5, 0) + ABSENT + bytes(32), "kind 5"),
        (head(3, 6) + ABSENT + bytes(96), "kind 3 with 6 rows"),
        (head(4, 2) + ABSENT + bytes(32), "0 bytes are left, but 64 were announced"),
        (
            bytes(joined(pack([PartOfSet(given(1, 2), torch.tensor([True, False])), None]))),
            "0 bytes are left, but 64 were announced",
        ),
        (head(-1, 0) + ABSENT + bytes(32), "kind -1"),
        (head(0, 1) + ABSENT + bytes(32), "kind 0 with 1 rows"),
        (head(1, 4) + ABSENT + bytes(32), "kind 1 with 4 rows"),
        (head(2, 6) + ABSENT + bytes(96), "kind 2 with 6 rows"),  # this shard has four
        (head(2, -1) + ABSENT + bytes(96), "kind 2 with -1 rows"),
        (head(2, 1 << 62) + ABSENT + bytes(96), "kind 2 with"),
        (head(2, 2) + ABSENT + bytes(32), "0 bytes are left, but 64 were announced"),
        (bytes(joined(pack([given(2, 1), None]))), "not in ascending order"),
        (bytes(joined(pack([given(5, 6), None]))), "row 6 of table 'a.weight' does not belong to shard 0"),
        (bytes(joined(pack([given(-1), None]))), "row -1 of table"),
        (bytes(joined(pack([Given(name=bytes(32), rows=torch.tensor([1])), None]))), "wrong name"),
        (bytes(joined(pack([None, None]))) + bytes(64), "64 bytes follow"),
        (bytes(joined(pack([given(1), None]))), "0 bytes are left, but 64 were announced"),
        (bytes(1 << 12), "at most"),
    ],
)
def test_garbage_is_named(payload: bytes, reason: str) -> None:
    _, layout = made()
    with pytest.raises(ProtocolError, match=reason):
        ServerTables(layout).gradients(0, memoryview(payload))


def test_a_set_of_another_shard_by_name_is_refused() -> None:
    _, layout = made()
    server = ServerTables(layout)
    foreign = given(3, 4)
    server.gradients(1, joined(pack([foreign, None], [torch.zeros(2, 3)])))
    with pytest.raises(ProtocolError, match=r"row 3 of table .* does not belong to shard 0"):
        server.asked(0, joined(pack([Named(name=foreign.name), None])), False)


@pytest.mark.parametrize(
    "first", [given(1, 2, 7), PartOfSet(given(1, 2, 5, 7), torch.tensor([1, 1, 0, 1]).bool())]
)
def test_no_bytes_whatever_bring_anything_but_a_refusal(first: Given | PartOfSet) -> None:
    _, layout = made()
    server, draw = ServerTables(layout), random.Random(5)
    good = bytearray(
        joined(pack([first, given(1)], [torch.rand(3, 3), torch.rand(1, 2, dtype=torch.float64)]))
    )
    server.gradients(0, memoryview(good))
    taken = 0
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            bad[draw.randrange(256)] = draw.randrange(256)
        bad = bad[: draw.randint(0, len(bad))] if draw.random() < 0.3 else bad
        try:
            server.gradients(0, memoryview(bad))
            taken += 1
        except (ProtocolError, UnknownSets):
            pass
    assert taken < 1500, "most of it must have been refused"


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (torch.tensor([10]), r"returned row 10; .*from 0 to 9"),
        (torch.tensor([3, -1]), r"returned row -1"),
        (torch.tensor([0.5]), r"returned items of torch.float32"),
        (torch.tensor([True]), r"returned items of torch.bool"),
        ("words", r"returned a str"),
    ],
)
def test_rows_that_no_table_has_are_the_task_s_mistake(rows: Any, sentence: str) -> None:
    model, layout = made()
    tables = WorkerTables(model, layout, SPARSE)
    tables.begin()
    with pytest.raises(UserError, match=rf"sparse\['a.weight'\] {sentence}"):
        tables.choose({"a": rows, "b": NO_ROWS})


@pytest.mark.parametrize("sparse", [False, True])
def test_a_gradient_in_a_row_that_was_not_named_is_the_task_s_mistake(sparse: bool) -> None:
    model, layout = made()
    tables = WorkerTables(model, layout, SPARSE)
    with_gradients(model, tables, a=[2, 4], b=[])
    gradient: Tensor | None = model.a.weight.grad
    assert gradient is not None
    gradient[7] = 1
    model.a.weight.grad = gradient.to_sparse(1) if sparse else gradient
    with pytest.raises(UserError, match=r"sparse\['a.weight'\] did not return row 7"):
        tables.collect(1.0)


# ── what a server holds ───────────────────────────────────────────────────────────────────────────────────────────────

PUSH = Push(shard=0, slot=0, member=5, clock=3, read_version=0, batch=3, part=0, parts=1, weight=1.0)


def pushed(layout: FlatLayout) -> bytes:
    """Flags, a dense gradient of fours, and rows 1 and 5 of the first table."""
    flags = layout.flags(0, ["dense.weight", "dense.bias"])
    gradient = torch.full((layout.range_bytes(0) // 4,), 4.0)
    rows = pack([given(1, 5), None], [torch.arange(6.0).view(2, 3)])
    return flags.numpy().tobytes() + gradient.numpy().tobytes() + bytes(joined(rows))


def held(copy: bool) -> tuple[Gradients, memoryview, FlatLayout]:
    """A server that holds the gradient, and where the next push of the same worker goes."""
    _, layout = made()
    gradients, sent = Gradients(layout, inline=True), pushed(layout)
    room = gradients.room_for(PUSH, len(sent))
    assert room is not None
    room[:] = sent
    contribution = gradients.of(PUSH, room)
    assert contribution is not None
    gradients.keep(Keep(shard=0, slot=0, clock=3, copy=copy), contribution)
    gradients.secure()
    again = gradients.room_for(PUSH, len(sent))
    assert again is not None
    return gradients, again, layout


def assert_held(gradients: Gradients) -> None:
    taken = gradients.take(0, 0, 3)
    assert list(taken.rows) == ["a.weight"]
    assert taken.rows["a.weight"].rows.tolist() == [1, 5]
    assert taken.rows["a.weight"].values.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert all(bool((run == 4).all()) for run in taken.gradient.runs)


def test_a_gradient_that_outlives_its_turn_keeps_its_rows() -> None:
    gradients, room, _ = held(copy=True)
    room[:] = bytes(len(room))
    assert_held(gradients)


def test_rows_go_with_a_snapshot_and_to_a_backup() -> None:
    gradients, _, layout = held(copy=False)
    restored = Gradients(layout, inline=True)
    restored.replace(0, gradients.held(0))
    assert_held(restored)
    forwarded = joined(gradients.forwarded(PUSH))
    backup = Gradients(layout, inline=True)
    room = backup.room_for(PUSH, len(forwarded))
    assert room is not None
    room[:] = forwarded
    contribution = backup.of(PUSH, room)
    assert contribution is not None
    backup.keep(Keep(shard=0, slot=0, clock=3, copy=False), contribution)
    assert_held(backup)


def test_a_push_of_the_wrong_size_is_refused_before_it_is_read() -> None:
    _, layout = made()
    gradients, dense = Gradients(layout, inline=True), layout.flag_bytes(0) + layout.range_bytes(0)
    for num_bytes in (dense - 1, dense + most_bytes(layout, 0) + 1):
        with pytest.raises(ProtocolError, match="bytes, not"):
            gradients.room_for(PUSH, num_bytes)
    beside = Gradients(layout, inline=False)
    assert beside.room_for(PUSH, 128) is None, "rows beside shared memory lie wherever the link puts them"
    with pytest.raises(ProtocolError, match="at most"):
        beside.room_for(PUSH, 1 << 20)


def test_a_set_that_is_known_for_one_table_is_looked_at_for_another() -> None:
    """The tables have 10 and 7 rows: a name says which rows they are, and not of which table."""
    _, layout = made()
    mine = [row for row in layout.tables[0].placed(2).rows(0).tolist() if row >= 7]
    assert mine, "rows that the second table does not have"
    server = ServerTables(layout)
    for _ in range(2):  # given, and by its name
        rows = server.asked(0, joined(pack([given(*mine), None])), whole=False)
        assert [None if one is None else one.tolist() for one in rows] == [mine, None]
        named = Named(name=given(*mine).name)
        assert server.asked(0, joined(pack([named, None])), whole=False)[0] is not None
    with pytest.raises(ProtocolError, match=f"row {mine[0]} of table 'b.weight' does not belong to shard 0"):
        server.asked(0, joined(pack([None, named])), whole=False)


def test_values_that_are_borrowed_stay_where_they_lie() -> None:
    _, layout = made()
    values = [torch.rand(3, 3), torch.rand(1, 2, dtype=torch.float64)]
    payload = joined(pack((), values))
    for borrow in (False, True):
        first, _ = take_values(layout.tables, [3, 1], payload.toreadonly(), borrow=borrow)
        assert first is not None
        assert torch.equal(first, values[0])
        before = payload[0]
        payload[0] ^= 1
        assert torch.equal(first, values[0]) is not borrow
        payload[0] = before


def test_the_memory_of_an_answer_is_used_again_once_it_has_left() -> None:
    _, layout = made()
    task = Task(
        model=Tables,
        loss=lambda one, _: one.a.weight.sum(),
        data=torch.zeros(1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        sparse=SPARSE,
    )
    plan = TrainingPlan(task=task, steps=1, seed=0, evaluate_every=0, checkpoint_every=0)
    store = ShardStore(Computer(plan, worker_rank=0).build(), layout, 0)
    server, rows = ServerTables(layout), layout.tables[0].placed(2).rows(0)
    places = []
    for has_all in (True, True, False, True):
        (values, *_) = server.values(store, [rows, None], SERVER, has_all=has_all)
        assert bytes(values) == store.tables["a.weight"].gather(rows).numpy().tobytes()
        places.append(values.ctypes.data)
    assert places[0] == places[1] != places[2] == places[3]
    server.forget(SERVER)
    assert not server._rooms
