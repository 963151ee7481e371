"""Splits of a data set over clients: everything is somebody's, nobody has none, and the skew is what was asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import manyhands as mh
from manyhands.data.batches import BatchSource
from manyhands.errors import UserError
from manyhands.strategies.federated.client_data import Partition, held_back

LABELS = torch.arange(1000) % 10
DATA = (torch.arange(1000.0), LABELS)


def split(text: str, clients: int = 20, seed: int = 0) -> list[np.ndarray]:
    return Partition.parse(text).split(DATA, 1000, clients, seed)


@given(
    text=st.sampled_from(["iid", "shards:2", "shards:3", "dirichlet:0.1", "dirichlet:5", "quantity:0.2"]),
    clients=st.integers(1, 60),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_every_sample_is_one_clients_and_nobody_has_none(text: str, clients: int, seed: int) -> None:
    parts = split(text, clients, seed)
    assert len(parts) == clients
    assert min(map(len, parts)) >= 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))


def test_the_same_seed_makes_the_same_split() -> None:
    for one, again in zip(split("dirichlet:0.5", seed=3), split("dirichlet:0.5", seed=3), strict=True):
        assert np.array_equal(one, again)
    assert not all(map(np.array_equal, split("dirichlet:0.5", seed=3), split("dirichlet:0.5", seed=4)))


def test_the_skew_is_the_one_that_was_asked_for() -> None:
    def labels_each(text: str) -> float:
        return float(np.mean([len(np.unique(LABELS.numpy()[part])) for part in split(text)]))

    assert {len(part) for part in split("iid")} == {50}
    assert labels_each("iid") > 9.5
    assert labels_each("shards:2") <= 3, "two runs of sorted labels have few of them"
    assert labels_each("dirichlet:0.1") < labels_each("dirichlet:1") < labels_each("dirichlet:100")
    sizes = [len(part) for part in split("quantity:0.2")]
    assert max(sizes) > 4 * np.median(sizes)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("shard:2", "shards"),
        ("iid:3", "takes no number"),
        ("shards:1.5", "integer"),
        ("dirichlet:0", "above 0"),
        ("dirichlet:x", "above 0"),
    ],
)
def test_what_is_no_partition_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Partition.parse(text)


def test_data_without_labels_has_no_split_by_label() -> None:
    with pytest.raises(UserError, match="no labels"):
        Partition.parse("dirichlet:0.5").split(torch.zeros(30, 2), 30, 3, 0)
    with pytest.raises(UserError, match=r"give mh\.Parties"):
        Partition.parse("natural").split(torch.zeros(30, 2), 30, 3, 0)
    with pytest.raises(UserError, match="at most that many clients"):
        Partition.parse("iid").split(torch.zeros(30, 2), 30, 31, 0)


def test_parties_are_one_data_set_and_each_its_own() -> None:
    parties = mh.Parties({"a": (torch.tensor([1.0, 2.0]),), "b": (torch.tensor([3.0]),)})
    assert [part.tolist() for part in parties.split()] == [[0, 1], [2]]
    assert BatchSource(parties).fetch([2, 0])[0].tolist() == [3.0, 1.0]
    by_user = mh.Parties.by((torch.arange(5.0),), ["x", "y", "x", "y", "y"])
    assert by_user.names == ("x", "y")
    assert BatchSource(by_user).fetch(by_user.split()[0])[0].tolist() == [0.0, 2.0]
    for wrong in ({}, [1], {"a": (torch.zeros(0),)}):
        with pytest.raises(UserError, match=r"Parties|no samples|empty"):
            mh.Parties(wrong)
    with pytest.raises(UserError, match="one each"):
        mh.Parties.by((torch.arange(5.0),), ["x"])


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_what_is_held_back_is_a_part_of_every_clients_samples_and_never_all(
    sizes: list[int], share: float, seed: int
) -> None:
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    trained, held = held_back(parts, share, seed)
    for part, mine, tested in zip(parts, trained, held, strict=True):
        assert sorted([*mine, *tested]) == part.tolist()
        assert len(mine) >= 1
        assert (len(tested) > 0) == (len(part) > 1)
        assert abs(len(tested) - share * len(part)) <= 1
    again, _ = held_back(parts, share, seed)
    assert all(map(np.array_equal, trained, again))
    everything, same = held_back(parts, 0.0, seed)
    assert all(map(np.array_equal, everything, parts))
    assert all(map(np.array_equal, same, parts))
