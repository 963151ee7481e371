"""A set that is sent again is a name; whatever is forgotten, the server ends with the right rows."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyhands.errors import UserError
from manyhands.strategies.common.tables.row_tables import Given, Named, RowSetNames, RowSets, Unknown, name_of


def rows(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def exchange(names: RowSetNames, sets: RowSets, wanted: Tensor) -> tuple[Tensor, list[str]]:
    """Send a set as worker and server do; the rows that arrive, and what was said."""
    said = names.name(wanted)
    if isinstance(said, Given):
        return sets.learn(said), ["given"]
    found = sets.find(said)
    if isinstance(found, Tensor):
        return found, ["named"]
    return sets.learn(names.give(found, wanted)), ["named", "unknown", "given"]


def test_the_name_is_the_sha256_of_the_bytes() -> None:
    assert name_of(rows(1, 2)) == hashlib.sha256(bytes([1, *[0] * 7, 2, *[0] * 7])).digest()
    assert name_of(rows(1, 2)) != name_of(rows(2, 1))
    assert name_of(torch.arange(10)[::2]) == name_of(rows(0, 2, 4, 6, 8))
    for wrong in (torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="a row set must be int64 in one dimension"):
            name_of(wrong)


def test_a_set_travels_once_and_again_when_it_was_forgotten() -> None:
    names, sets = RowSetNames(10), RowSets(2 * 16)
    one, two, three = rows(1, 2), rows(3, 4), rows(5, 6)
    assert [exchange(names, sets, one)[1] for _ in range(2)] == [["given"], ["named"]]
    exchange(names, sets, two)
    exchange(names, sets, one)  # used again: two is now the older one
    assert exchange(names, sets, three)[1] == ["given"]
    assert (len(sets), sets.nbytes) == (2, 32)
    assert exchange(names, sets, one)[1] == ["named"]
    assert exchange(names, sets, two)[1] == ["named", "unknown", "given"]


@given(
    asked=st.lists(st.integers(0, 9), max_size=60),
    worker_room=st.integers(1, 6),
    server_room=st.integers(1, 200),
)
@settings(deadline=None)
def test_the_right_rows_arrive_whatever_was_forgotten(
    asked: list[int], worker_room: int, server_room: int
) -> None:
    names, sets = RowSetNames(worker_room), RowSets(server_room)
    for number in asked:
        wanted = torch.arange(number)
        arrived, _ = exchange(names, sets, wanted)
        assert torch.equal(arrived, wanted)
        assert sets.nbytes <= server_room


def test_what_is_kept_is_a_copy() -> None:
    sets = RowSets(100)
    mine = rows(1, 2, 3)
    sets.learn(Given(name=name_of(mine), rows=mine))
    name = name_of(mine)
    mine.zero_()
    found = sets.find(Named(name=name))
    assert isinstance(found, Tensor)
    assert found.tolist() == [1, 2, 3]


def test_another_server_knows_nothing() -> None:
    names = RowSetNames(3)
    names.name(rows(1))
    names.forget()
    assert isinstance(names.name(rows(1)), Given)


def test_a_false_name_is_refused() -> None:
    with pytest.raises(ValueError, match="under the wrong name"):
        RowSets(100).learn(Given(name=name_of(rows(1)), rows=rows(2)))
    with pytest.raises(ValueError, match="these rows are not the set"):
        RowSetNames(3).give(Unknown(name=name_of(rows(1))), rows(2))
    with pytest.raises(UserError, match="capacity for row sets is 0 bytes"):
        RowSets(0)
