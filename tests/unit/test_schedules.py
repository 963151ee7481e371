"""Schedules: every algorithm is proven for every world, and every kind of broken schedule is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

from manyhands.errors import UserError
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS, broadcast, grouped, ring
from manyhands.strategies.common.collectives.collective_drawing import EXAMPLE, watch
from manyhands.strategies.common.collectives.schedule import (
    Algorithm,
    How,
    Receive,
    ScheduleError,
    Send,
    Step,
    Table,
    chunk_bounds,
    span_bounds,
)
from manyhands.strategies.common.collectives.schedule_proof import prove

EVERY = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda algorithm: algorithm.name)
WHOLE = range(1)


@EVERY
def test_is_proven_for_every_world_up_to_64(algorithm: Algorithm) -> None:
    for world in range(1, 65):
        prove(algorithm, world)


@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 8, 40])
def test_hierarchical_is_proven_for_every_group_size(group_size: int) -> None:
    for world in (*range(1, 18), 31, 40, 64):
        prove(grouped(group_size), world)


@EVERY
def test_worked_example_of_four_workers(algorithm: Algorithm) -> None:
    last = watch(algorithm, EXAMPLE).rows[-1]
    expected = np.array(EXAMPLE).sum(axis=0).tolist()
    assert expected == [37, 37, 36, 43]
    assert [[item.number for item in items] for items in last] == [expected] * 4


def test_the_table_of_a_ring_of_three() -> None:
    def step(send: int, receive: int, how: How) -> Step:
        return Step(
            sends=(Send(to=1, chunks=range(send, send + 1)),),
            receives=(Receive(source=2, chunks=range(receive, receive + 1), how=how),),
        )

    assert ring(0, 3) == (
        step(0, 2, How.ADD),
        step(2, 1, How.ADD),
        step(1, 0, How.COPY),
        step(0, 2, How.COPY),
    )


@pytest.mark.parametrize("world", [1, 2, 3, 6, 8])
def test_broadcast_reaches_everyone_once_from_any_root(world: int) -> None:
    for root in range(world):
        tables = [broadcast(rank, world, root) for rank in range(world)]
        informed = {root}
        for steps in zip(*tables, strict=True):
            links = {(rank, send.to) for rank, step in enumerate(steps) for send in step.sends}
            assert links == {(got.source, rank) for rank, step in enumerate(steps) for got in step.receives}
            assert all(source in informed and to not in informed for source, to in links)
            informed |= {to for _, to in links}
        assert informed == set(range(world))
        assert len(tables[0]) == (world - 1).bit_length()


@pytest.mark.parametrize("count", [0, 1, 5, 7, 64, 101])
@pytest.mark.parametrize("chunks", [1, 2, 7, 8])
def test_chunks_cut_as_numpy_cuts(count: int, chunks: int) -> None:
    expected = [part.tolist() for part in np.array_split(np.arange(count), chunks)]
    assert [list(range(*chunk_bounds(count, chunks, index))) for index in range(chunks)] == expected
    assert span_bounds(count, chunks, range(chunks)) == (0, count)


@pytest.mark.parametrize(("rank", "world"), [(0, 0), (-1, 2), (2, 2)])
def test_a_rank_outside_the_world_is_refused(rank: int, world: int) -> None:
    with pytest.raises(UserError, match=f"rank={rank}, world={world}"):
        ALGORITHMS["ring"].table(rank, world)


def test_a_group_of_none_is_refused() -> None:
    with pytest.raises(UserError, match="group_size=0"):
        grouped(0)


@pytest.mark.parametrize("chunks", [range(0), range(0, 4, 2), range(-1, 1)])
def test_a_message_is_a_run_of_chunks(chunks: range) -> None:
    with pytest.raises(ScheduleError, match="must carry consecutive chunks"):
        Send(to=1, chunks=chunks)
    with pytest.raises(ScheduleError, match="must carry consecutive chunks"):
        Receive(source=1, chunks=chunks, how=How.ADD)


# Broken on purpose: a correct schedule with one change must be caught, and with the right sentence.


def altered(base: Algorithm, rank: int, number: int, change: Callable[[Step], Step]) -> Algorithm:
    """`base` with the step of one rank in one round changed."""

    def schedule(this: int, world: int) -> Table:
        table = list(base.schedule(this, world))
        if this == rank:
            table[number] = change(table[number])
        return tuple(table)

    return replace(base, name=f"broken {base.name}", schedule=schedule)


def by_hand(steps: Mapping[int, Table], chunks: int = 1) -> Algorithm:
    return Algorithm(
        name="by hand",
        schedule=lambda rank, world: steps[rank],
        chunks=lambda world: chunks,
        description="",
        source="",
    )


def test_a_dropped_send_is_a_wait_for_ever() -> None:
    broken = altered(ALGORITHMS["ring"], 1, 2, lambda step: replace(step, sends=()))
    with pytest.raises(ScheduleError, match=r"ring on 4 ranks, round 3: rank 2 waits forever .* from rank 1"):
        prove(broken, 4)


def test_a_dropped_receive_leaves_a_message_over() -> None:
    broken = altered(ALGORITHMS["tree"], 0, 0, lambda step: replace(step, receives=()))
    with pytest.raises(ScheduleError, match="rank 1 sends chunks 0 to rank 0, which receives none"):
        prove(broken, 2)


def test_a_double_add_is_caught() -> None:
    def add_instead(step: Step) -> Step:
        return replace(step, receives=tuple(replace(receive, how=How.ADD) for receive in step.receives))

    with pytest.raises(ScheduleError, match=r"rank 1 ends with chunk 0 .* those of \[1\] more than once"):
        prove(altered(ALGORITHMS["master-worker"], 1, 1, add_instead), 3)


def test_a_wrong_chunk_is_caught_where_one_side_errs() -> None:
    broken = altered(
        ALGORITHMS["direct"],
        2,
        0,
        lambda s: replace(s, sends=(replace(s.sends[0], chunks=WHOLE), *s.sends[1:])),
    )
    with pytest.raises(ScheduleError, match="rank 2 sends chunks 0 to rank 3, which expects chunks 3"):
        prove(broken, 4)


def test_a_wrong_chunk_is_caught_where_both_sides_agree_on_it() -> None:
    swap = {
        rank: (
            Step(
                sends=(Send(to=1 - rank, chunks=WHOLE),),
                receives=(Receive(source=1 - rank, chunks=WHOLE, how=How.ADD),),
            ),
        )
        for rank in range(2)
    }
    prove(by_hand(swap, chunks=1), 2)
    with pytest.raises(ScheduleError, match=r"rank 0 ends with chunk 1 lacking the contributions of \[1\]"):
        prove(by_hand(swap, chunks=2), 2)


def test_messages_out_of_order_are_caught() -> None:
    def exchange(rank: int, order: tuple[range, range]) -> Step:
        return Step(
            sends=tuple(Send(to=1 - rank, chunks=chunks) for chunks in order),
            receives=tuple(Receive(source=1 - rank, chunks=c, how=How.ADD) for c in (range(1), range(1, 2))),
        )

    in_order, swapped = (range(1), range(1, 2)), (range(1, 2), range(1))
    prove(by_hand({0: (exchange(0, in_order),), 1: (exchange(1, in_order),)}, chunks=2), 2)
    with pytest.raises(ScheduleError, match="rank 1 sends chunks 1 to rank 0, which expects chunks 0"):
        prove(by_hand({0: (exchange(0, in_order),), 1: (exchange(1, swapped),)}, chunks=2), 2)


def add_in_order(order: tuple[int, ...]) -> Callable[[Step], Step]:
    """Instead of keeping and folding, add at once, in this order of sources."""
    adds = tuple(Receive(source=source, chunks=WHOLE, how=How.ADD) for source in order)
    return lambda step: replace(step, receives=adds, folds=())


def test_another_order_of_summation_is_caught() -> None:
    broken = altered(ALGORITHMS["all-to-all"], 2, 0, add_in_order((1, 0)))
    with pytest.raises(ScheduleError, match=r"ranks 0 and 2 add .* \(r0\+r1\+r2\) and \(r0\+\(r1\+r2\)\)"):
        prove(broken, 3)


def test_a_fold_is_not_the_same_as_additions_one_by_one() -> None:
    broken = altered(ALGORITHMS["all-to-all"], 0, 0, add_in_order((1, 2)))
    with pytest.raises(ScheduleError, match=r"\(\(r0\+r1\)\+r2\) and \(r0\+r1\+r2\)"):
        prove(broken, 3)


def test_a_missing_round_a_message_to_oneself_and_forgotten_slots_are_caught() -> None:
    with pytest.raises(ScheduleError, match="rank 1 has 0 rounds, rank 0 has 1"):
        prove(by_hand({0: (Step(),), 1: ()}), 2)
    with pytest.raises(ScheduleError, match="rank 0 sends to rank 0, which is not a peer"):
        prove(by_hand({0: (Step(sends=(Send(to=0, chunks=WHOLE),)),)}), 1)
    with pytest.raises(ScheduleError, match="rank 0 sends chunks 0 to 3 of 2"):
        prove(by_hand({0: (Step(sends=(Send(to=1, chunks=range(4)),)),), 1: (Step(),)}, chunks=2), 2)
    with pytest.raises(ScheduleError, match="rank 1 never folds chunks 0 kept from rank 0"):
        prove(altered(ALGORITHMS["all-to-all"], 1, 0, lambda step: replace(step, folds=())), 4)
    keep = (Step(receives=(Receive(source=1, chunks=WHOLE, how=How.KEEP),)),) * 2
    with pytest.raises(ScheduleError, match="round 2: rank 0 still keeps chunks 0 of rank 1"):
        prove(by_hand({0: keep, 1: (Step(sends=(Send(to=0, chunks=WHOLE),)),) * 2}), 2)


def mutations(step: Step) -> Iterator[Step]:
    """Every schedule that differs from this step by one careless change."""
    for at in range(len(step.sends)):
        yield replace(step, sends=step.sends[:at] + step.sends[at + 1 :])
    for at, receive in enumerate(step.receives):
        yield replace(step, receives=step.receives[:at] + step.receives[at + 1 :])
        if receive.how is not How.KEEP:
            flipped = replace(receive, how=How.COPY if receive.how is How.ADD else How.ADD)
            yield replace(step, receives=(*step.receives[:at], flipped, *step.receives[at + 1 :]))
    if any(receive.how is How.KEEP for receive in step.receives):
        yield replace(step, folds=())


@EVERY
@pytest.mark.parametrize("world", [2, 3, 5])
def test_every_single_careless_change_is_caught(algorithm: Algorithm, world: int) -> None:
    tried = 0
    for rank, table in enumerate(algorithm.tables(world)):
        for number, step in enumerate(table):
            for mutation in mutations(step):
                with pytest.raises(ScheduleError):
                    prove(altered(algorithm, rank, number, lambda _, new=mutation: new), world)  # type: ignore[misc]
                tried += 1
    assert tried >= 2 * world
