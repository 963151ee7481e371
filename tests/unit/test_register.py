"""Who may take which rank of a run, the store its leader keeps, and letters that wait: pure, or one thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore

from manyhands.errors import PeerTimeout, UserError
from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import RECORD
from manyhands.places.external.control_messages import PIECE_BYTES, ControlHello, SendQueue, StoreCall, pieces
from manyhands.places.external.control_server import Register, clock_notice, terms_of
from manyhands.places.external.process_place import ProcessPlace, SpecificationPlace, TorchrunPlace
from manyhands.places.external.run_store import KeyValueStore
from manyhands.places.place import find_place, using_place
from manyhands.transport.messages import ProtocolError

TERMS = {"task": "digits", "strategy": "allreduce", "steps": 10, "seed": 0, "manyhands": "1.0"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def hello(rank: int, **fields: Any) -> ControlHello:
    made = ControlHello(
        rank=rank,
        world=3,
        role="worker",
        name=f"worker {rank} on host{rank}",
        host=f"id{rank}",
        pid=100 + rank,
        unix_s=0.0,
        terms=terms_of(TERMS),
    )
    return made._replace(**fields)


def test_a_rank_is_taken_once_and_free_again_when_its_process_has_left() -> None:
    register = Register(hello(0))
    assert register.missing == (1, 2)
    assert register.arrive(hello(1)) is None
    refused = register.arrive(hello(1, pid=999, name="worker 1 on hostX"))
    assert refused is not None
    assert refused.field == "rank"
    assert (
        "two processes have rank 1: process 101 (worker 1 on host1) and process 999 (worker 1 on hostX)"
        in (refused.reason)
    )
    assert register.missing == (2,)
    late = register.late("join", 3.0)
    assert late.startswith("rank 2 of 3 did not join within 3.0 s")
    assert "process 999" in late
    register.leave(1)
    assert register.arrive(hello(1)) is None


@pytest.mark.parametrize("field", TERMS)
def test_a_term_that_differs_is_named_with_both_values(field: str) -> None:
    other = hello(2, terms=terms_of({**TERMS, field: "another"}))
    refused = Register(hello(0)).arrive(other)
    assert refused is not None
    assert refused.field == field
    assert f"worker 2 on host2 has {field}=another" in refused.reason
    assert f"the leader, worker 0 on host0, has {field}={TERMS[field]}" in refused.reason


@pytest.mark.parametrize(
    ("said", "report"),
    [
        (hello(0), "claims rank 0"),
        (hello(3), "the ranks of this run are 0"),
        (hello(1, world=4), "worker 1 on host1 has world size 4"),
        (hello(1, terms=()), "worker 1 on host1 has task=nothing"),
    ],
)
def test_a_process_of_another_run_is_refused_in_a_sentence(said: ControlHello, report: str) -> None:
    refused = Register(hello(0)).arrive(said)
    assert refused is not None
    assert report in refused.reason


def test_long_terms_are_told_apart_by_a_digest() -> None:
    first, second = (terms_of({"options": f"{'x' * 500}{end}"})[0].value for end in "ab")
    assert first != second
    assert len(first) < 80


@pytest.mark.parametrize(
    ("off_s", "report"),
    [(30.0, None), (3 * 3600.0, "3.0 h ahead of"), (-600.0, "10 min behind")],
)
def test_a_wall_clock_that_is_off_is_remarked(off_s: float, report: str | None) -> None:
    notice = clock_notice("worker 1 on hostB", 1e9 + off_s, 1e9)
    assert (notice is None) if report is None else (notice is not None and report in notice)


@pytest.mark.parametrize("make", [KeyValueStore, HashStore])
def test_a_shelf_answers_as_a_store_of_torch_does(make: Any) -> None:
    store = make()
    assert store.compare_set("seat", "", "a") == b"a"
    assert store.compare_set("seat", "", "b") == b"a"
    assert store.compare_set("seat", "a", "b") == b"b"
    assert store.compare_set("nobody", "x", "y") == b"x"
    assert store.check(["seat"])
    assert not store.check(["seat", "other"])
    assert (store.add("read", 1), store.add("read", 2)) == (1, 3)
    store.set("k", "v")
    assert store.get("k") == b"v"
    assert store.multi_get(["seat", "k", "read"]) == [b"b", b"v", b"3"]
    assert store.delete_key("k")
    assert not store.delete_key("k")
    assert not store.check(["k"])


@pytest.mark.parametrize(
    ("call", "keys", "values"),
    [
        ("get", ("a", "b"), ("1",)),
        ("fly", ("a",), ()),
        ("add", ("a",), ("x",)),
        ("set", ("a",), ("v" * 70_000,)),
    ],
)
def test_what_is_no_call_of_a_store_breaks_the_rules_of_the_line(
    call: str, keys: tuple[str, ...], values: tuple[str, ...]
) -> None:
    with pytest.raises(ProtocolError):
        KeyValueStore().answer(StoreCall(number=1, call=call, keys=keys, values=values))


def test_several_values_come_in_one_answer_of_bounded_length() -> None:
    store = KeyValueStore()
    store.set("long", "v" * 60_000)
    store.set("short", "s")
    found = store.answer(StoreCall(number=1, call="get", keys=("short", "long"), values=()))
    assert found.found
    assert found.values == ("s", "v" * 60_000)
    assert not store.answer(StoreCall(number=2, call="get", keys=("short", "absent"), values=())).found
    with pytest.raises(ProtocolError, match="the values have more than"):
        store.answer(StoreCall(number=3, call="get", keys=("long",) * 300, values=()))


def test_letters_leave_in_order_as_there_is_room_and_large_things_in_pieces() -> None:
    woken: list[int] = []
    bag = SendQueue(lambda: woken.append(1))
    data = bytes(range(256)) * (3 * PIECE_BYTES // 256)
    bag.put("first", [b"1"])
    bag.put_all(pieces("large", [data[: PIECE_BYTES + 5], data[PIECE_BYTES + 5 :]]))
    bag.put("last")
    taken: list[Any] = []

    def send(message: object, payload: list[Any]) -> bool:
        if len(taken) in (1, 3) and (not taken or taken[-1] is not None):
            taken.append(None)  # no room this time
            return False
        taken.append((message, b"".join(payload)))
        return True

    while not bag.empty(send):
        pass
    sent = [one for one in taken if one is not None]
    assert [sent[0][0], sent[-1][0]] == ["first", "last"]
    assert b"".join(payload for _, payload in sent[1:-1]) == data
    assert [message.last for message, _ in sent[1:-1]] == [False] * (len(sent) - 3) + [True]
    assert all(len(payload) <= PIECE_BYTES for _, payload in sent)
    assert len(woken) == 3


def test_who_takes_nothing_is_named() -> None:
    bag = SendQueue(lambda: None)
    for _ in range(4096):
        bag.put("x")
    with pytest.raises(PeerTimeout, match="worker 0 on hostA has read nothing"):
        bag.put_when_room("y", 0.01, "worker 0 on hostA")


def test_a_ring_takes_events_that_were_recorded_elsewhere_and_counts_what_finds_no_room() -> None:
    records = np.zeros(5, RECORD)
    records["start_ns"], records["role"], records["id"] = np.arange(5), 9, np.arange(10, 15)
    with EventRing.create(role=2, capacity=8) as ring:
        for turn in range(3):  # around the end of the ring
            ring.append(records, lost=1)
            drained = ring.drain()
            assert drained["start_ns"].tolist() == [0, 1, 2, 3, 4]
            assert drained["id"].tolist() == [6 * turn + 1 + place for place in range(5)]
            assert set(drained["role"].tolist()) == {2}
        ring.append(records)
        ring.append(records)
        assert len(ring.drain()) == 8
        assert (ring.written, ring.dropped) == (23, 3 + 2)


def test_fit_is_alone_unless_somebody_else_starts_processes() -> None:
    assert find_place(environment={}).world is None
    found = find_place(environment=TORCHRUN)
    assert isinstance(found, TorchrunPlace)
    place = found.process
    assert (place.rank, place.world, place.kind, place.leads) == (1, 2, "torchrun", False)
    assert place.name == f"worker 1 on {place.host}"
    given = ProcessPlace(rank=0, world=3, kind="specification", role="chief", index=0, host="a", leader="a:1")
    with using_place(SpecificationPlace(given)) as declared:
        assert find_place(environment=TORCHRUN) is declared
        assert (given.name, declared.leads, declared.world) == ("chief 0 on a", True, 3)
    assert find_place(environment={**TORCHRUN, "MANYHANDS_LAUNCHER": "1"}).world is None


@pytest.mark.parametrize(
    ("change", "report"),
    [
        ({"MASTER_ADDR": ""}, "not MASTER_ADDR"),
        ({"RANK": "2"}, "RANK=2 and WORLD_SIZE=2"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http"),
    ],
)
def test_an_environment_that_says_it_by_halves_is_refused(change: dict[str, str], report: str) -> None:
    with pytest.raises(UserError, match=report):
        find_place(environment={**TORCHRUN, **change})


def test_a_place_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="rank=3"):
        ProcessPlace(rank=3, world=3)
