"""Helpers: the split against a linear program, the schedule proven and counted, sums and orders on simulated links."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from equality import OPTIMIZERS, Awkward, distance, loss
from manyhands.engine.exchange import LocalStep, Resources, Traffic
from manyhands.errors import ManyhandsError, UserError
from manyhands.places.external.links import no_group
from manyhands.places.ray.ray_place import RankAssignment
from manyhands.strategies.allreduce.exchange import AllReduceExchange
from manyhands.strategies.allreduce.helpers import (
    HelperSplit,
    help_workers,
    helped,
    helped_collective,
    segments_for,
    split_load,
)
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.strategies.common.collectives.schedule_proof import cost, prove
from manyhands.strategy import Strategy
from manyhands.transport.link.interface import Message
from manyhands.transport.link.simulated_network import SimulatedNetwork

NUMBERS = [(n, k) for n in (2, 3, 4, 5, 8, 16) for k in (*range(n + 1), n + 3)]


def sent_by_each(shares: list[Any], workers: int) -> list[Any]:
    """What each process sends for each byte of the vector, where they sum these shares of it: counted one by one."""
    world = len(shares)
    sent: list[Any] = [0] * world
    for summer, share in enumerate(shares):
        for worker in range(workers):
            if worker != summer:
                sent[worker] += share  # its part of the piece
                sent[summer] += share  # the sum, back
    return sent


def shares_of(split: HelperSplit) -> list[Fraction]:
    pieces = [split.worker_pieces] * split.workers + [split.helper_pieces] * split.helpers
    return [Fraction(one, split.pieces) for one in pieces]


@pytest.mark.parametrize(("n", "k"), NUMBERS)
def test_the_split_is_the_published_one_and_all_links_carry_the_same(n: int, k: int) -> None:
    split = split_load(n, k)
    shares = shares_of(split)
    assert sum(shares) == 1
    sent = sent_by_each(shares, n)
    assert max(sent) == split.busiest
    if k <= n:
        assert shares[0] == Fraction(n - k, n * n + k * n - 2 * k)
        assert k == 0 or shares[-1] == Fraction(2 * (n - 1), n * n + k * n - 2 * k)
        assert set(sent) == {Fraction(2 * n * (n - 1), n * n + k * n - 2 * k)}
    else:
        assert (shares[0], shares[-1], split.busiest) == (0, Fraction(1, k), 1)


@pytest.mark.parametrize(("n", "k"), NUMBERS)
def test_no_other_split_loads_the_busiest_link_less(n: int, k: int) -> None:
    world = n + k
    unit = np.eye(world)
    loads = np.array([sent_by_each(list(row), n) for row in unit]).T  # of each process, by the shares
    found = linprog(
        [*[0.0] * world, 1.0],
        A_ub=np.hstack([loads, -np.ones((world, 1))]),
        b_ub=np.zeros(world),
        A_eq=[[*[1.0] * world, 0.0]],
        b_eq=[1.0],
    )
    assert found.status == 0
    assert float(split_load(n, k).busiest) == pytest.approx(found.fun, abs=1e-9)


@pytest.mark.parametrize("workers", range(2, 8))
def test_is_proven_for_helpers_and_segments(workers: int) -> None:
    for helpers in range(workers + 3):
        for segments in (1, 2, 3):
            prove(helped(workers, helpers, segments), workers + helpers)
    prove(helped(16, 5, 2), 21)


@pytest.mark.parametrize(("n", "k"), [(4, 0), (4, 1), (4, 2), (4, 4), (8, 3), (8, 8), (8, 11)])
def test_the_busiest_sends_what_the_formula_says(n: int, k: int) -> None:
    split = split_load(n, k)
    num_bytes = 4 * split.pieces * 8 * 5  # every piece of 8 segments has 5 items
    found = cost(helped(n, k, 8), n + k, num_bytes, 4)
    assert max(found.bytes_sent) == split.busiest * num_bytes
    assert list(found.bytes_sent) == [share * num_bytes for share in sent_by_each(shares_of(split), n)]


@pytest.mark.parametrize("n", [4, 8])
def test_helpers_are_ahead_of_a_ring_where_bandwidth_is_all(n: int) -> None:
    num_bytes, segments = 4 * 10**6, 32
    ring = cost(ALGORITHMS["ring"], n, num_bytes, 4).time(0, 1, 0)
    assert ring == pytest.approx(2 * (n - 1) / n * num_bytes, rel=1e-3)
    times = [cost(helped(n, k, segments), n + k, num_bytes, 4).time(0, 1, 0) for k in range(1, n + 1)]
    for k, took in enumerate(times, start=1):
        best = float(split_load(n, k).busiest) * num_bytes
        assert best <= took <= 1.2 * best, "ports are idle for at most a sixth of the time"
        assert took < ring
    assert times[-1] == pytest.approx(num_bytes * (segments + 1) / segments, rel=1e-3)


def roles_of(
    network: SimulatedNetwork, workers: int, helpers: int, job: Callable[[Resources], Any]
) -> list[Any]:
    """Run `job` as every worker and every helper in virtual time; what each returned, by rank."""
    world = workers + helpers

    def role(rank: int) -> Callable[[], Any]:
        links = {peer: network.link(str(rank), str(peer)) for peer in range(world) if peer != rank}
        resources = Resources(
            rank=rank,
            world=workers,
            helpers=helpers,
            timeout_s=5.0,
            group=no_group,
            links=lambda: links,
            shares_memory=False,
        )
        return lambda: job(resources)

    results = network.run({str(rank): role(rank) for rank in range(world)})
    return [results[str(rank)] for rank in range(world)]


class Quiet:
    """WorkerContext of a role that nobody looks at; what it records is kept."""

    def __init__(self) -> None:
        self.recorded: list[tuple[Any, ...]] = []

    def record(self, *event: Any, **fields: Any) -> bool:
        self.recorded.append((*event, fields))
        return True

    def mark(self, step: int, state: Any, *, place: Any = None) -> None:
        pass

    def note(self, note: Any) -> None:
        raise AssertionError(f"a helper has nothing to tell: {note}")

    def stop_requested(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("workers", "helpers", "segments", "dtype"),
    [(3, 2, 4, torch.float64), (4, 1, 1, torch.float32), (2, 5, 3, torch.bfloat16), (5, 3, 2, torch.float32)],
)
def test_sums_have_the_bits_of_adding_in_worker_order(
    workers: int, helpers: int, segments: int, dtype: torch.dtype
) -> None:
    algorithm = helped(workers, helpers, segments)
    generator = torch.Generator().manual_seed(1)
    for count in (0, 1, 7, 1000):
        given = [torch.randn(count, generator=generator).to(dtype) for _ in range(workers)]

        def work(resources: Resources, given: list[torch.Tensor] = given, count: int = count) -> torch.Tensor:
            world, rank = workers + helpers, resources.rank
            executor = ScheduleExecutor(algorithm, rank, world, resources.links(), 5.0)
            mine = given[rank].clone() if rank < workers else torch.full((count,), torch.nan, dtype=dtype)
            executor.all_reduce(mine)
            return mine

        found = roles_of(SimulatedNetwork(), workers, helpers, work)[:workers]
        wide = torch.float32 if dtype is torch.bfloat16 else dtype
        expected = given[0].to(wide)
        for one in given[1:]:
            expected = expected + one
        for one in found:
            assert torch.equal(one, expected.to(dtype))


@pytest.mark.parametrize(("workers", "helpers", "codec"), [(3, 2, "raw"), (2, 3, "raw"), (4, 2, "fp32")])
def test_a_step_with_helpers_is_that_of_one_process(workers: int, helpers: int, codec: str) -> None:
    batch = 12
    tokens = torch.randint(0, 11, (batch, 4), generator=torch.Generator().manual_seed(0))
    targets = tokens.sum(1) % 11
    steps = 4

    def train(resources: Resources) -> Any:
        torch.set_num_threads(1)
        if resources.rank >= workers:
            worker_context = Quiet()
            sent = help_workers(resources, codec, worker_context)
            return sent, worker_context.recorded
        exchange = AllReduceExchange(helped_collective(resources, codec), 1 << 9)
        model = Awkward(torch.float64)
        exchange.attach(model, OPTIMIZERS["momentum"](model.parameters()))
        mine = torch.arange(batch)[resources.rank :: workers]
        for step in range(steps):
            share = len(mine) / batch
            exchange.backward(loss(model, (tokens[mine], targets[mine])), share)
            assert not exchange.agree(LocalStep(loss=0.0, share=share, step=step)).bad_workers
            exchange.apply()
        assert exchange.total(torch.ones(2, dtype=torch.float64)).tolist() == [workers] * 2
        traffic = exchange.meter.traffic()
        exchange.close()
        return model.state_dict(), traffic

    plain = Awkward(torch.float64)
    optimizer = OPTIMIZERS["momentum"](plain.parameters())
    for _ in range(steps):
        loss(plain, (tokens, targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = roles_of(SimulatedNetwork(), workers, helpers, train)
    for state, _ in results[:workers]:
        assert distance(state, plain.state_dict()) < (1e-9 if codec == "raw" else 1e-5)
        assert distance(state, results[0][0]) == 0
    for sent, recorded in results[workers:]:
        assert isinstance(sent, Traffic)
        assert sent.bytes_sent > 0
        assert {event[-1]["step"] for event in recorded} == set(range(steps))


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (Message(kind=6, payload=torch.tensor([1, 5, 99]).view(torch.uint8)), "5 items of type 99"),
        (Message(kind=6, payload=torch.tensor([1, -1, 1]).view(torch.uint8)), "-1 items"),
        (Message(kind=6, payload=torch.zeros(3, dtype=torch.uint8)), "3 bytes of kind 6"),
        (Message(kind=2, payload=torch.tensor([1, 5, 1]).view(torch.uint8)), "24 bytes of kind 2"),
        (Message(kind=6, payload=torch.tensor([1, 5, 1, 3]).view(torch.uint8)), "not two for each"),
    ],
)
def test_orders_that_make_no_sense_are_refused(message: Message, sentence: str) -> None:
    def job(resources: Resources) -> str:
        if resources.rank < 2:
            if resources.rank == 0:
                resources.links()[2].send(message)
            return ""
        with pytest.raises(ManyhandsError) as caught:
            help_workers(resources, "raw", Quiet())
        return str(caught.value)

    assert sentence in roles_of(SimulatedNetwork(), 2, 1, job)[2]


def test_a_bucket_that_nobody_told_of_is_refused() -> None:
    def job(resources: Resources) -> str:
        if resources.rank < 2:
            if resources.rank == 0:
                for numbers in ([1, 5, 1], [0, 1]):
                    payload = torch.tensor(numbers).view(torch.uint8)
                    resources.links()[2].send(Message(kind=6, payload=payload))
            return ""
        with pytest.raises(ManyhandsError) as caught:
            help_workers(resources, "raw", Quiet())
        return str(caught.value)

    assert "bucket 1, but there are 1" in roles_of(SimulatedNetwork(), 2, 1, job)[2]


def test_longer_vectors_have_more_segments() -> None:
    assert [segments_for(num_bytes) for num_bytes in (0, 4, 300 << 10, 25 << 20)] == [1, 1, 2, 32]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("allreduce helpers=2 algorithm=ring", "their own algorithm; leave the algorithm out"),
        ("allreduce helpers=2 elastic=yes", "leave one out"),
        ("allreduce helpers=2 link=tcp codec=topk:0.01", "use a codec that only rounds, such as bf16"),
        ("allreduce helpers=two", "not an integer"),
    ],
)
def test_settings_that_do_not_go_together(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Strategy.parse(text)


def test_what_a_strategy_with_helpers_says_of_itself() -> None:
    strategy = Strategy.parse("allreduce helpers=2 link=tcp codec=bf16")
    assert strategy.processes(3) == {"worker": 3, "helper": 2}
    assert [strategy.role_of(rank, 3) for rank in (0, 2, 3, 4)] == [
        ("worker", 0), ("worker", 2), ("helper", 0), ("helper", 1),
    ]  # fmt: skip
    assert strategy.placed(6, {}) == (strategy, 4)
    assert strategy.facts.uses_links
    assert "use helpers with three workers or more" in strategy.advice(2, sparse=False)
    assert strategy.advice(3, sparse=False) == ""
    for refused, sentence in (
        (lambda: strategy.check(1, "cpu"), "helpers need at least 2 workers"),
        (lambda: strategy.check(3, "cpu", compiled=True), "compiled step"),
        (lambda: strategy.placed(3, {}), "start at least 4"),
        (lambda: strategy.placed(4, {"worker": 4}), "no type for helpers"),
        (lambda: RankAssignment.of(strategy, 3), "helpers do not run on Ray"),
    ):
        with pytest.raises(UserError, match=sentence):
            refused()
    assert "mh.fit a Task" in strategy.facts.instead_of_own_loop
