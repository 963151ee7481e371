"""`central` on several hosts, whose workers are threads: a copy on each, all with the weights of the plain loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import manyhands as mh
from equality import TWICE, distance, make_task, same_bits, train_in_threads, train_plainly
from manyhands.engine.desync_check import Agreement
from manyhands.engine.exchange import Exchange, LocalStep, PeerTraffic
from manyhands.errors import Aborted, Desync, PeerTimeout, WorkerFailed
from manyhands.strategies.central.exchange import CentralExchange
from manyhands.transport.link.interface import Link
from manyhands.transport.link.shared_link import SharedLink
from manyhands.transport.link.tcp import TcpLink
from ways import in_threads, on_hosts, train_on, with_exchanges

STEPS = TWICE
SOON_S = 20.0
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: optim.Adam(p, lr=1e-2, weight_decay=1e-3),
    "whole-adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
}
PAIRS: dict[str, Callable[[], tuple[Link, Link]]] = {"tcp": TcpLink.pair, "memory": SharedLink.pair}


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


@cache
def task_and_reference(name: str) -> tuple[mh.Task, dict[str, torch.Tensor]]:
    task = make_task(OPTIMIZERS[name])
    return task, train_plainly(task, STEPS)


def train_on_hosts(
    task: mh.Task, places: str, pair: str = "tcp", steps: int = STEPS
) -> list[dict[str, torch.Tensor]]:
    with on_hosts("central", places, PAIRS[pair]) as connect:
        return train_in_threads(task, len(places), connect, steps)


@pytest.mark.parametrize(
    ("places", "pair"), [("abab", "tcp"), ("ab", "memory"), ("aaab", "memory"), ("abbcc", "memory")]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_host_ends_with_the_weights_of_the_plain_loop(name: str, places: str, pair: str) -> None:
    """Copies are compared on the way as well, as `check_every` has it."""
    task, expected = task_and_reference(name)
    weights = train_on_hosts(task, places, pair)
    assert distance(weights[0], expected) < 1e-9
    for other in weights:
        assert same_bits(weights[0], other)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_copies_of_unequal_hosts_have_the_same_bits_where_every_step_is_clipped(name: str) -> None:
    """In float32, where each host rounds its part of the norm in its own way, and cuts its slices elsewhere."""
    plain = make_task(OPTIMIZERS[name], torch.float32)
    fields = ("model", "loss", "data", "optimizer", "batch_size")
    clipped = mh.Task(**{field: getattr(plain, field) for field in fields}, clip_norm=1e-2)
    weights = train_on_hosts(clipped, "aaabb")
    assert all(same_bits(weights[0], other) for other in weights)
    assert distance(weights[0], train_plainly(clipped, STEPS)) < {"momentum": 1e-5, "adam": 1e-3}[name]
    assert distance(weights[0], train_plainly(plain, STEPS)) > 1e-3, "it makes a difference"
    assert same_bits(weights[0], train_on_hosts(clipped, "aaabb")[0]), "another run has the same bits"


def test_worker_0_s_values_win_on_every_host_and_each_host_has_one_copy() -> None:
    class Mixed(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(seed)
            self.frozen = nn.Parameter(torch.arange(seed, seed + 3), requires_grad=False)
            self.wide = nn.Parameter(torch.randn(3, 40, generator=generator, dtype=torch.float64))
            self.narrow = nn.Parameter(torch.randn(40, generator=generator).to(torch.bfloat16))
            self.empty = nn.Parameter(torch.empty(0, 4))
            self.register_buffer("offset", torch.full((2,), seed))

    def act(exchange: Exchange) -> list[torch.Tensor]:
        model = Mixed(seed=exchange.rank)
        exchange.attach(model, optim.AdamW(model.parameters()))
        found = [value.clone() for value in model.state_dict().values()]
        nothing = torch.zeros(1, dtype=torch.float64)
        exchange.total(nothing)
        if exchange.rank == 3:
            with torch.no_grad():
                model.wide.fill_(7)
        exchange.total(nothing)
        assert bool(model.wide.eq(7).all()) == (exchange.rank >= 2), "hosts are {0, 1} and {2, 3}"
        return found

    expected = list(Mixed(seed=0).state_dict().values())
    for found in with_exchanges("central on aabb", 4, act):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(("places", "leaders"), [("aab", [0, 2]), ("abcbc", [0, 1, 2])])
def test_a_host_sends_what_the_formula_says_and_only_its_leader_does(places: str, leaders: list[int]) -> None:
    def act(exchange: Exchange) -> tuple[Mapping[int, PeerTraffic], int]:
        model = nn.Linear(96, 96, bias=False)
        exchange.attach(model, optim.SGD(model.parameters(), lr=0.1))
        exchange.total(torch.zeros(1, dtype=torch.float64))
        status = sum(post.bytes_sent for post in exchange.meter.take_times().posts.values())
        exchange.backward(model(torch.ones(1, 96)).sum(), 1.0)
        exchange.agree(LocalStep(loss=0.0, share=1.0))
        posts = exchange.meter.take_times().posts
        exchange.apply()
        return posts, sum(post.bytes_sent for post in posts.values()) - status

    hosts, num_bytes = len(leaders), 96 * 96 * 4
    found = with_exchanges(f"central buckets=1MiB on {places}", len(places), act)
    for rank, (posts, sent) in enumerate(found):
        others = [leader for leader in leaders if leader != rank] if rank in leaders else []
        assert sorted(posts) == others
        assert sent == (2 * (hosts - 1) * num_bytes // hosts if rank in leaders else 0)


def test_a_bucket_leaves_for_other_hosts_while_backward_goes_on() -> None:
    """One layer's gradient has crossed and come back before the other's is there, on a host of two workers as well."""

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor, wait: Callable[[], None]) -> torch.Tensor:
            context.wait = wait
            return x.clone()

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            context.wait()
            return gradients[0], None

    def act(exchange: Exchange) -> list[bool]:
        assert isinstance(exchange, CentralExchange)
        first, last = nn.Linear(8, 64), nn.Linear(64, 64)
        exchange.attach(nn.Sequential(first, last), optim.SGD([*first.parameters(), *last.parameters()]))
        between, reducer, crossed = exchange._between, exchange.hooks, []
        assert between is not None

        def sent() -> int:
            return between.executor.mailbox.bytes_sent if between.executor is not None else 0

        before = sent()

        def wait() -> None:
            deadline = time.monotonic() + SOON_S
            while between.leads and not (sent() > before and between.background.is_idle):
                assert time.monotonic() < deadline, "nothing left"
                reducer._collective.poll()  # as the hooks of gradients in between do
            crossed.append(between.leads)

        output = last(Late.apply(first(torch.ones(1, 8)), wait))
        exchange.backward(output.sum(), 1 / 3)
        exchange.agree(LocalStep(loss=0.0, share=1 / 3))
        exchange.apply()
        return crossed

    assert with_exchanges("central on aab", 3, act) == [[True], [False], [True]]


@pytest.mark.parametrize("name", ["adam", "whole-adafactor"])
def test_a_checkpoint_is_gone_on_from_by_other_hosts_and_strategies(name: str, tmp_path: Path) -> None:
    task = make_task(OPTIMIZERS[name])
    start = None
    ways = [
        ("central on aaab", 4),
        ("single", 1),
        ("central on abb", 3),
        ("central", 2),
        ("central on ab", 2),
    ]
    for number, (way, world) in enumerate(ways, start=1):
        weights = train_on(task, way, world, tmp_path, 4 * number, start)[-1]
        start = 4 * number
    assert distance(weights, train_plainly(task, 20)) < 1e-9


def test_copies_that_came_apart_are_named_by_the_leaders_of_their_hosts() -> None:
    def act(exchange: Exchange) -> str:
        model = nn.Linear(3, 2)
        exchange.attach(model, optim.SGD(model.parameters(), lr=0.1))
        agreement = Agreement(
            partial(exchange.part.parameters, model),
            rank=exchange.rank,
            world=exchange.world,
            total=exchange.total,
            copies=exchange.part.copies,
        )
        agreement.check(1)
        if exchange.rank == 3:  # no leader: it writes to its host's copy
            model.bias.data.add_(1)
        exchange.total(torch.zeros(1, dtype=torch.float64))
        with pytest.raises(Desync) as raised:
            agreement.check(2)
        return str(raised.value)

    for said in with_exchanges("central on aabb", 4, act):
        assert "ranks 0 and 2 differ in 'bias'" in said


def test_who_is_lost_on_another_host_is_named_by_its_own_number() -> None:
    def act(exchange: Exchange) -> tuple[str, int]:
        assert isinstance(exchange, CentralExchange)
        model = nn.Linear(3, 2)
        exchange.attach(model, optim.SGD(model.parameters(), lr=0.1))
        if exchange.rank == 2:
            exchange.close()
            return "left", 2
        kind = WorkerFailed if exchange.rank == 0 else Aborted
        with pytest.raises(kind) as raised:
            exchange.total(torch.zeros(1, dtype=torch.float64))
        exchange._group.abort(exchange.rank)  # as whoever watches over a host does
        return str(raised.value), getattr(raised.value, "worker_rank", -1)

    (first, lost), (second, _), _ = with_exchanges("central on aab", 3, act)
    assert lost == 2
    assert first.startswith("rank 0, all-reduce by direct")
    assert "lost rank 2" in first
    assert second == "rank 1 stopped its exchange: rank 0 failed first"


def test_who_is_late_on_this_host_is_named_by_its_own_number() -> None:
    def act(exchange: Exchange) -> int | None:
        with closing(exchange):
            model = nn.Linear(3, 2)
            exchange.attach(model, optim.SGD(model.parameters(), lr=0.1))
            if exchange.rank != 2:
                return None  # and comes to no other sum
            with pytest.raises(PeerTimeout, match=r"rank 2 waited .* for rank 1 to arrive") as raised:
                exchange.total(torch.zeros(1, dtype=torch.float64))
            return raised.value.peer

    with on_hosts("central", "abb", timeout_s=1.0) as connect:
        found = in_threads(3, lambda rank: act(connect(rank)))
    assert found == [None, None, 1]
