"""Where rows lie: every row once, shares even, and a new shard takes its own share and moves nothing else."""

from __future__ import annotations

import pytest
import torch

from manyhands.strategies.common.tables.row_tables import place


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_every_row_is_somewhere_once_and_found_there(shards: int) -> None:
    placement = place(1000, shards)
    rows = torch.cat([placement.rows(shard) for shard in range(shards)])
    assert sorted(rows.tolist()) == list(range(1000))
    asked = torch.tensor([999, 0, 7, 7, 500])
    split = placement.split(asked)
    assert sorted(torch.cat(split).tolist()) == sorted(asked.tolist())
    for shard, own in enumerate(split):
        assert torch.equal(placement.rows(shard)[placement.local(own)], own)
        assert placement.count(shard) == len(placement.rows(shard))
        assert placement.foreign_row(own, shard) is None


@pytest.mark.parametrize("shards", [2, 3, 7])
def test_shares_are_even_for_all_rows_and_for_the_first_ones(shards: int) -> None:
    placement = place(100_000, shards)
    for rows in (torch.arange(100_000), torch.arange(2000)):
        share = len(rows) / shards
        deviation = (share * (1 - 1 / shards)) ** 0.5  # of a binomial draw
        for own in placement.split(rows):
            assert abs(len(own) - share) < 5 * deviation


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_one_shard_more_moves_its_share_and_nothing_else(shards: int) -> None:
    before, after = place(50_000, shards), place(50_000, shards + 1)
    moved = 0
    for shard in range(shards):
        kept = set(after.rows(shard).tolist())
        assert kept <= set(before.rows(shard).tolist()), "nothing comes to an old shard"
        moved += before.count(shard) - len(kept)
    assert moved == after.count(shards)
    assert moved == pytest.approx(50_000 / (shards + 1), rel=0.05)


def test_a_stranger_is_named() -> None:
    placement = place(10, 2)
    other = int(placement.rows(1)[0])
    assert placement.foreign_row(torch.tensor([int(placement.rows(0)[0]), other]), 0) == other
    for row in (-1, 10):
        assert placement.foreign_row(torch.tensor([row]), 0) == row
        assert place(10, 1).foreign_row(torch.tensor([3, row]), 0) == row
    assert place(10, 1).foreign_row(torch.empty(0, dtype=torch.int64), 0) is None
