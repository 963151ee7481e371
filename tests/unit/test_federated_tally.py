"""The tallies of a round, and clients' states, over workers that meet in a sum: what one worker alone would have."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from manyhands.strategies.federated.client_measures import spread_of, spread_over
from manyhands.strategies.federated.client_states import ClientStates, gathered, restored
from manyhands.strategies.federated.client_updates import ClientUpdate, TallySum
from manyhands.strategies.federated.update_tally import KeptTally, PlainTally

LIKE = [torch.zeros(2, 3), torch.zeros(4, dtype=torch.float64)]
CLIENTS = [1, 4, 6, 7, 9]
T = TypeVar("T")


def update(client: int) -> ClientUpdate:
    generator = torch.Generator().manual_seed(client)
    change = [torch.randn(one.shape, generator=generator, dtype=one.dtype) for one in LIKE]
    return ClientUpdate(client=client, change=change, samples=client + 1, steps=2, loss=0.5 * client)


def together(world: int, work: Callable[[int, Callable[[Tensor], Tensor]], T]) -> list[T]:
    """What each of so many workers makes of it, where `total` adds up what all of them gave."""
    barrier, given = Barrier(world, timeout=240), [torch.zeros(0)] * world

    def worker(rank: int) -> T:
        def total(values: Tensor) -> Tensor:
            given[rank] = values
            barrier.wait()
            found = torch.stack(given).sum(0)
            barrier.wait()
            return found

        return work(rank, total)

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(worker, range(world)))


@pytest.mark.parametrize("kind", ["plain", "kept"])
def test_three_workers_tally_what_one_does(kind: str) -> None:
    def played(world: int) -> list[TallySum]:
        def work(rank: int, total: Callable[[Tensor], Tensor]) -> TallySum:
            tally = PlainTally(total, LIKE) if kind == "plain" else KeptTally(total, CLIENTS, LIKE)
            for client in CLIENTS[rank::world]:
                if client != 6:  # it was not finite
                    tally.add(update(client), client + 1)
            return tally.total()

        return together(world, work)

    counted = [update(client) for client in CLIENTS if client != 6]
    [alone], three = played(1), played(3)
    for found in (alone, *three):
        assert found.weight == 2 + 5 + 8 + 10
        assert found.loss == pytest.approx(sum(one.loss * one.samples for one in counted))
        for at, total_of in enumerate(found.sums):
            assert total_of.dtype == torch.float64
            exact = torch.stack([one.samples * one.change[at].double() for one in counted]).sum(0)
            torch.testing.assert_close(total_of, exact, rtol=1e-14, atol=1e-14)
        if kind == "kept":
            for change, exact_one in zip(found.updates, counted, strict=True):
                assert all(map(torch.equal, change, exact_one.change))
        else:
            assert not found.updates
    assert sum(found.messages_sent for found in three) == alone.messages_sent == 4
    assert sum(found.bytes_sent for found in three) == alone.bytes_sent == 4 * (6 * 4 + 4 * 8)


def test_the_states_of_clients_go_into_a_checkpoint_and_to_other_workers() -> None:
    states: ClientStates = {client: list(update(client).change) for client in CLIENTS}

    def keep(rank: int, total: Callable[[Tensor], Tensor]) -> dict[str, object]:
        mine = {client: state for client, state in states.items() if client % 2 == rank}
        return gathered(mine, 12, LIKE, total)

    for kept in together(2, keep):
        assert kept["clients"] == CLIENTS
        dealt = [restored(kept, rank, 3, torch.device("cpu")) for rank in range(3)]
        assert [sorted(one) for one in dealt] == [[6, 9], [1, 4, 7], []]
        for one in dealt:
            for client, state in one.items():
                assert all(map(torch.equal, state, states[client]))
                assert [tensor.dtype for tensor in state] == [torch.float32, torch.float64]
    assert gathered({}, 12, LIKE, lambda values: values) == {}
    assert restored({}, 0, 1, torch.device("cpu")) == {}


def test_the_spread_over_parties_is_that_of_one_worker_who_has_measured_all() -> None:
    clients, names = [0, 2, 5, 7], ["accuracy", "loss", "odd"]
    values = {
        client: {"accuracy": 0.1 * client, "loss": 2.0 - client} for client in (0, 2, 7)
    }  # 5 has no samples

    def spread(rank: int, world: int, total: Callable[[Tensor], Tensor]) -> dict[str, dict[str, float]]:
        mine = {client: one for client, one in values.items() if client % world == rank}
        odd = {"odd": "TypeError"} if rank == 0 else {}
        return spread_over((mine, odd), clients, names, total)

    alone = spread(0, 1, lambda values: values)
    assert alone == {name: spread_of([one[name] for one in values.values()]) for name in ("accuracy", "loss")}
    assert alone["accuracy"]["mean"] == pytest.approx(0.3)
    for found in together(2, lambda rank, total: spread(rank, 2, total)):
        assert found == alone
