"""Plans: nothing is written while it may still be leaving, and no two things share scratch space."""

from __future__ import annotations

import pytest

from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.schedule import (
    Algorithm,
    Fold,
    How,
    Plan,
    Receive,
    Send,
    Step,
    lay_plan,
)


def plans(algorithm: Algorithm, world: int, count: int) -> list[Plan]:
    chunks = algorithm.chunks(world)
    return [lay_plan(algorithm.table(rank, world), rank, chunks, count) for rank in range(world)]


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda algorithm: algorithm.name)
@pytest.mark.parametrize("world", [2, 5, 8])
def test_nothing_is_written_where_it_could_do_harm(algorithm: Algorithm, world: int) -> None:
    for plan in plans(algorithm, world, 41):
        kept: set[int] = set()
        for work in plan.rounds:
            leaving = {item for send in work.departures for item in range(send.begin, send.end)}
            deferred: set[int] = set()
            for landing in work.landings:
                items = range(landing.begin, landing.end)
                if not landing.deferred and landing.how is not How.KEEP:
                    assert leaving.isdisjoint(items)
                if landing.scratch is not None:
                    place = set(range(landing.scratch, landing.scratch + len(items)))
                    assert place.isdisjoint(kept | deferred)
                    assert not place or max(place) < plan.scratch_count
                    kept |= place if landing.how is How.KEEP else set()
                    deferred |= place if landing.deferred else set()
            for fold in work.folds:
                length = fold.end - fold.begin
                kept -= {at + k for at in fold.addends if at is not None for k in range(length)}
        assert not kept


def test_scratch_is_no_more_than_the_algorithm_needs() -> None:
    count, world = 64, 8
    needs = {
        "all-to-all": (world - 1) * count,
        "direct": (world - 1) * count // world,
        "ring": count // world,
        "round-robin": count // world,
        "doubling": count,
    }
    for name, need in needs.items():
        assert max(plan.scratch_count for plan in plans(ALGORITHMS[name], world, count)) == need
    master = plans(ALGORITHMS["master-worker"], world, count)
    assert [plan.scratch_count for plan in master] == [count] + [0] * (world - 1)  # results land in place


def test_what_follows_a_deferred_message_for_the_same_chunk_waits_too() -> None:
    whole, half = range(2), range(1)
    step = Step(
        sends=(Send(to=1, chunks=range(1, 2)),),
        receives=(
            Receive(source=1, chunks=whole, how=How.ADD),
            Receive(source=2, chunks=half, how=How.COPY),
            Receive(source=3, chunks=half, how=How.ADD),
        ),
    )
    (work,) = lay_plan((step,), rank=0, chunks=2, count=10).rounds
    assert [landing.deferred for landing in work.landings] == [True, True, True]
    assert [landing.scratch for landing in work.landings] == [0, 10, 15]


def test_a_fold_is_in_rank_order_with_the_own_items_in_their_place() -> None:
    plan = lay_plan(ALGORITHMS["all-to-all"].table(1, 4), rank=1, chunks=1, count=3)
    assert plan.rounds[0].folds == (
        Fold(begin=0, end=3, addends=(0, None, 6, 3)),
    )  # 0 arrives first, 3 second
