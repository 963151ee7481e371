"""Orders of compiled steps, in threads: every step is taken once, and whoever stops leaves no gap, nobody waiting."""

from __future__ import annotations

import pytest

from manyhands.native.decorators import njit
from manyhands.native.group.gate import FREE, enter, leave, require_admitted
from manyhands.native.group.shared_group import SharedGroupFiles
from manyhands.native.group.step_order import ORDERS, Order
from ways import in_threads, join

END = 40


@njit(nogil=True)
def _enter(gate, step):  # type: ignore[no-untyped-def]
    return enter(gate, step)


@njit(nogil=True)
def _leave(gate, number):  # type: ignore[no-untyped-def]
    leave(gate, number)


def taken(name: str, world: int, stop_after: int | None = None) -> tuple[list[list[int]], list[int]]:
    """Which steps each worker took, and where each says that all are; one asks to stop after a step of its own."""
    with SharedGroupFiles.create(world) as files:

        def work(rank: int) -> tuple[list[int], int]:
            with join(files, rank) as group:
                segment = group.share(Order.NUM_BYTES, "an order")
                order, mine = ORDERS[name](segment, 0, group, lambda step: step), []
                order.begin(0, END)
                group.barrier()
                while (step := order.claim()) is not None:
                    mine.append(step)
                    if name == "together":
                        group.barrier()
                    elif order.compiled_gate.order != FREE:
                        number, status = _enter(tuple(order.compiled_gate), step)
                        require_admitted(status, order.compiled_gate)
                        _leave(tuple(order.compiled_gate), number)
                    if stop_after is not None and step >= stop_after and rank == 0:
                        order.stop(step)
                group.barrier()
                done = order.done()
                segment.close()
                return mine, done

        ended = in_threads(world, work)
    return [mine for mine, _ in ended], [done for _, done in ended]


@pytest.mark.parametrize("name", ["free", "locked", "turns"])
@pytest.mark.parametrize("stop_after", [None, 0, 17])
def test_every_step_up_to_the_end_is_taken_by_one_worker(name: str, stop_after: int | None) -> None:
    steps, done = taken(name, 3, stop_after)
    assert len(set(done)) == 1
    assert sorted(step for mine in steps for step in mine) == list(range(done[0]))
    assert done[0] <= END
    if stop_after is None:
        assert done[0] == END
    if name == "turns":
        assert all(step % 3 == rank for rank, mine in enumerate(steps) for step in mine)


@pytest.mark.parametrize("stop_after", [None, 0, 17])
def test_together_all_take_every_step(stop_after: int | None) -> None:
    steps, done = taken("together", 3, stop_after)
    assert len(set(done)) == 1
    assert all(mine == list(range(done[0])) for mine in steps)
    assert done[0] == (END if stop_after is None else stop_after + 2)
