"""Groups over links: sums, pieces and copies as torch has them, the same bits everywhere, and who is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from manyhands.errors import UserError, WorkerFailed
from manyhands.strategies.common.grid.grid_group import LinkGroup
from manyhands.transport.link.simulated_network import SimulatedNetwork

LARGE = 70_000  # float32 items: above what is sent at once


def together(world: int, work: Callable[[LinkGroup], Any], members: list[int] | None = None) -> list[Any]:
    """Run `work` on the members of a group among `world` workers, in virtual time."""
    members = members if members is not None else list(range(world))
    network = SimulatedNetwork()

    def role(rank: int) -> Callable[[], Any]:
        links = {peer: network.link(str(rank), str(peer)) for peer in members if peer != rank}
        return lambda: work(LinkGroup(rank, members, links, 5.0, kind=7))

    results = network.run({str(rank): role(rank) for rank in members})
    return [results[str(rank)] for rank in members]


def values(index: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(index)).to(dtype)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 7, LARGE])
def test_sum_is_that_of_the_members_in_their_order(world: int, dtype: torch.dtype, count: int) -> None:
    brought = [(values(index, count) * 100).to(dtype) for index in range(world)]
    found = together(world, lambda group: group.all_reduce(brought[group.index].clone()))
    exact = torch.stack([one.to(torch.float64) for one in brought]).sum(dim=0)
    tolerance = {torch.float32: 2e-4, torch.float64: 1e-12, torch.bfloat16: 1.0, torch.int64: 0}[dtype]
    for one in found:
        assert torch.equal(one, found[0])
        assert torch.allclose(
            one.double(), exact, atol=tolerance, rtol=1e-2 if dtype is torch.bfloat16 else 0
        )


def test_sum_has_the_same_bits_whatever_is_summed_beside_it() -> None:
    few = together(3, lambda group: group.all_reduce(values(group.index, LARGE)[:1000].clone()))
    many = together(3, lambda group: group.all_reduce(values(group.index, LARGE)))
    assert torch.equal(few[0], many[0][:1000])


def test_sum_is_in_place_whatever_the_strides() -> None:
    def work(group: LinkGroup) -> torch.Tensor:
        whole = torch.full((4, 6), float(group.index + 1))
        group.all_reduce(whole[:, ::2])
        return whole

    for index, whole in enumerate(together(2, work)):
        assert torch.equal(whole[:, ::2], torch.full((4, 3), 3.0))
        assert torch.equal(whole[:, 1::2], torch.full((4, 3), index + 1.0))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_pieces_of_any_sizes_are_gathered(world: int) -> None:
    shapes = [(index + 1, 3) for index in range(world)]
    brought = [values(index, *shape) for index, shape in enumerate(shapes)]
    found = together(world, lambda group: group.all_gather(brought[group.index], shapes))
    assert all(
        torch.equal(one, mine) for gathered in found for one, mine in zip(gathered, brought, strict=True)
    )


@pytest.mark.parametrize("root", [0, 2])
def test_one_members_tensor_becomes_everyones(root: int) -> None:
    found = together(3, lambda group: group.broadcast(values(group.index, 2, 5), root))
    assert all(torch.equal(one, values(root, 2, 5)) for one in found)


def test_members_are_named_by_their_numbers_among_all_workers() -> None:
    def work(group: LinkGroup) -> Any:
        if group.index == 1:
            raise WorkerFailed("on purpose", 5)
        try:
            group.all_reduce(torch.zeros(1))
        except WorkerFailed as error:
            return error
        raise AssertionError("a member is missing")

    network = SimulatedNetwork()

    def role(rank: int) -> Callable[[], Any]:
        peer = 8 - rank
        link = network.link(str(rank), str(peer))
        group = LinkGroup(rank, [3, 5], {peer: link}, 5.0, kind=1)
        if rank == 5:
            return link.close
        return lambda: work(group)

    results = network.run({"3": role(3), "5": role(5)})
    assert isinstance(results["3"], WorkerFailed)
    assert "rank 5" in str(results["3"])


def test_traffic_is_counted() -> None:
    def work(group: LinkGroup) -> Any:
        group.all_reduce(torch.zeros(LARGE))
        return group.traffic()

    sent = together(2, work)
    assert [one.bytes_sent for one in sent] == [LARGE * 4, LARGE * 4]
    assert [one.messages_sent for one in sent] == [2, 2]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match=r"rank=4: must be one of the members \[0, 1\]"):
        LinkGroup(4, [0, 1], {}, 1.0, kind=0)
