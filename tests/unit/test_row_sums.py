"""Sums of row-sparse gradients over simulated links: the union of rows, the same bits on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from manyhands.errors import ManyhandsError, UserError
from manyhands.strategies.allreduce.elastic.exchange import ElasticCollective
from manyhands.strategies.allreduce.exchange import AllReduceExchange
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.strategies.common.collectives.row_sums import GradientRows, row_sparse
from manyhands.strategies.common.collectives.schedule_collective import ScheduleCollective
from manyhands.transport.link.simulated_network import SimulatedNetwork

TABLE = 50


def rows_of(rank: int, dtype: torch.dtype = torch.float64) -> GradientRows:
    generator = torch.Generator().manual_seed(rank)
    count = 0 if rank == 2 else 3 + 2 * rank
    numbers = torch.randperm(TABLE, generator=generator)[:count].sort().values
    return GradientRows(numbers, torch.randn(count, 4, generator=generator, dtype=torch.float64).to(dtype))


def summed(world: int, give: Callable[[int], GradientRows] = rows_of) -> list[tuple[GradientRows, int]]:
    network = SimulatedNetwork()

    def role(rank: int) -> Callable[[], tuple[GradientRows, int]]:
        links = {peer: network.link(str(rank), str(peer)) for peer in range(world) if peer != rank}
        executor = ScheduleExecutor(ALGORITHMS["ring"], rank, world, links, 20.0)

        def work() -> tuple[GradientRows, int]:
            total = executor.sum_rows(give(rank), TABLE)
            executor.all_reduce(torch.ones(3))  # what comes after it is not disturbed
            return total, executor.mailbox.bytes_sent

        return work

    found = network.run({str(rank): role(rank) for rank in range(world)})
    return [found[str(rank)] for rank in range(world)]


@pytest.mark.parametrize("world", range(1, 10))
def test_every_rank_has_the_union_of_all_rows(world: int) -> None:
    dense = torch.zeros(TABLE, 4, dtype=torch.float64)
    for rank in range(world):
        dense[rows_of(rank).numbers] += rows_of(rank).items
    results = summed(world)
    for total, _ in results:
        assert torch.equal(total.numbers, results[0][0].numbers)
        assert torch.equal(total.items, results[0][0].items)
        assert torch.equal(total.numbers, dense.abs().sum(1).nonzero().flatten())
        gradient = total.as_gradient(torch.zeros(TABLE, 4, dtype=torch.float64))
        assert torch.allclose(gradient.to_dense(), dense, atol=1e-14)


def test_floats_have_the_same_bits_on_every_rank() -> None:
    for world in (3, 6, 8):
        results = summed(world, lambda rank: rows_of(rank, torch.float32))
        assert all(torch.equal(total.items, results[0][0].items) for total, _ in results)


def test_rows_that_are_none_are_refused_by_name() -> None:
    for numbers in ([3, 3], [5, 1], [-1, 2], [7, TABLE]):

        def lie(rank: int, numbers: list[int] = numbers) -> GradientRows:
            return (
                GradientRows(torch.tensor(numbers), torch.ones(2, 4, dtype=torch.float64))
                if rank
                else rows_of(0)
            )

        with pytest.raises(ManyhandsError, match=r"rank 0, sum of rows, .*: from rank 1: row numbers must"):
            summed(2, lie)
    with pytest.raises(ManyhandsError, match=r"from rank 1: 51 rows for a table of 50"):
        summed(
            2,
            lambda rank: (
                GradientRows(torch.arange(51), torch.ones(51, 4, dtype=torch.float64)) if rank else rows_of(0)
            ),
        )


def test_which_parameters_have_gradients_of_rows() -> None:
    model = nn.ModuleList([nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2), nn.Linear(2, 2)])
    assert row_sparse(model) == {model[0].weight}
    rows = GradientRows.of(
        torch.sparse_coo_tensor(
            [[3, 1, 3]], torch.tensor([[1.0], [2.0], [5.0]]), (5, 1), check_invariants=True
        )
    )
    assert (rows.numbers.tolist(), rows.items.flatten().tolist()) == ([1, 3], [2.0, 6.0])
    assert rows.times(0.0).numbers.tolist() == []


@pytest.mark.parametrize("elastic", [False, True])
def test_where_rows_are_not_summed_the_sentence_says_what_would_help(elastic: bool) -> None:
    inner = ScheduleCollective(ScheduleExecutor(ALGORITHMS["ring"], 0, 1, {}, 1.0), {})
    collective = ElasticCollective(inner, None, lambda: False, lambda: None) if elastic else inner
    model = nn.Embedding(5, 2, sparse=True)
    exchange = AllReduceExchange(collective, 1 << 20)
    exchange.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    total = model(torch.tensor([1, 3])).sum()
    if elastic:
        with pytest.raises(
            UserError, match="not summed with elastic=yes; leave that out, or build it with sparse"
        ):
            exchange.backward(total, 1.0)
    else:
        exchange.backward(total, 1.0)
    exchange.close()
