"""`Whole again` is said when whoever was found is connected, and not before."""

from __future__ import annotations

from manyhands.strategies.ps.live.ps_launcher import Recoveries


def test_a_slot_is_whole_when_its_new_worker_is_welcome_everywhere() -> None:
    recoveries = Recoveries()
    assert recoveries.found("slot 1", 7) == []
    assert recoveries.welcomed(5, epoch=3) == []  # somebody else
    assert recoveries.welcomed(7, epoch=3) == [("slot 1", 7)]
    assert recoveries.welcomed(7, epoch=4) == []  # said once


def test_a_successor_that_died_before_its_welcome_was_never_there() -> None:
    recoveries = Recoveries()
    assert recoveries.found("slot 1", 7) == []
    assert recoveries.found("slot 1", 9) == []
    assert recoveries.welcomed(7, epoch=3) == []
    assert recoveries.welcomed(9, epoch=4) == [("slot 1", 9)]


def test_shards_with_a_copy_are_whole_at_once() -> None:
    assert Recoveries().found("every shard", 4) == [("every shard", 4)]


def test_a_shard_from_a_snapshot_is_whole_when_its_server_has_met_somebody() -> None:
    recoveries = Recoveries()
    recoveries.welcomed(5, epoch=2)
    recoveries.restored(epoch=4)
    assert recoveries.found("every shard", 8) == []
    assert recoveries.welcomed(5, epoch=3) == []  # it speaks of the view before
    assert recoveries.welcomed(5, epoch=4) == [("every shard", 8)]


def test_a_welcome_that_is_heard_before_the_shard_is_known_to_be_back_counts() -> None:
    recoveries = Recoveries()
    recoveries.restored(epoch=4)
    assert recoveries.welcomed(5, epoch=4) == []
    assert recoveries.found("every shard", 8) == [("every shard", 8)]


def test_at_the_end_there_is_nobody_left_to_meet() -> None:
    recoveries = Recoveries()
    recoveries.restored(epoch=4)
    recoveries.found("every shard", 8)
    recoveries.found("slot 1", 9)
    assert recoveries.over() == [("every shard", 8)]
    assert recoveries.over() == []
