"""The executor: every algorithm, world, reduction, dtype and length, over simulated and shared links."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.errors import ManyhandsError, PeerTimeout, UserError, WorkerFailed
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS, all_to_all, grouped
from manyhands.strategies.common.collectives.executor import Op, ScheduleExecutor
from manyhands.strategies.common.collectives.schedule import Algorithm, How, Receive, Send, Step, Table
from manyhands.strategies.common.collectives.schedule_proof import cost, prove
from manyhands.transport.link.shared_link import SharedLink
from manyhands.transport.link.simulated_network import SimulatedNetwork

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OPS = get_args(Op)
TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}
REFERENCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stack: stack.sum(dim=0),
    "mean": lambda stack: stack.mean(dim=0),
    "max": lambda stack: stack.amax(dim=0),
}

Work = Callable[[ScheduleExecutor], Any]
EVERY = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda algorithm: algorithm.name)


def simulate(
    algorithm: Algorithm,
    world: int,
    work: Work,
    network: SimulatedNetwork | None = None,
    timeout_s: float = 5.0,
) -> list[Any]:
    """Run `work` on every rank in virtual time; what each returned."""
    network = network or SimulatedNetwork()

    def role(rank: int) -> Callable[[], Any]:
        peers = (peer for peer in range(world) if peer != rank)
        links = {peer: network.link(str(rank), str(peer)) for peer in peers}
        executor = ScheduleExecutor(algorithm, rank, world, links, timeout_s)
        return lambda: work(executor)

    results = network.run({str(rank): role(rank) for rank in range(world)})
    return [results[str(rank)] for rank in range(world)]


@contextmanager
def shared_links(world: int, **options: int) -> Iterator[list[dict[int, SharedLink]]]:
    links: list[dict[int, SharedLink]] = [{} for _ in range(world)]
    with ExitStack() as stack:
        for high in range(world):
            for low in range(high):
                ends = SharedLink.pair((f"rank {low}", f"rank {high}"), **options)
                links[low][high], links[high][low] = (stack.enter_context(end) for end in ends)
        yield links


def in_threads(algorithm: Algorithm, links: list[dict[int, SharedLink]], work: Work) -> list[Any]:
    """Run `work` on every rank in real time, one thread each."""
    results: list[Any] = [None] * len(links)

    def role(rank: int) -> None:
        try:
            results[rank] = work(ScheduleExecutor(algorithm, rank, len(links), links[rank], timeout_s=20.0))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=role, args=(rank,)) for rank in range(len(links))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
        assert not thread.is_alive(), "a rank hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def vectors(world: int, count: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """New ones, of the same values in every call."""
    return [one.clone() for one in drawn_vectors(world, count, dtype, seed)]


@cache
def drawn_vectors(world: int, count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world)]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def check(results: list[torch.Tensor], inputs: list[torch.Tensor], op: Op) -> None:
    """Near the float64 reference of torch, and the same bits on every rank."""
    expected = REFERENCES[op](torch.stack([one.double() for one in inputs]))
    tolerance = TOLERANCES[inputs[0].dtype] * len(inputs)
    torch.testing.assert_close(results[0].double(), expected, rtol=tolerance, atol=tolerance)
    assert {bits(result) for result in results} == {bits(results[0])}


@EVERY
@pytest.mark.parametrize("world", range(1, 9))
def test_every_length_dtype_and_reduction(algorithm: Algorithm, world: int) -> None:
    lengths = (0, 1, max(world - 1, 0), 13)
    cases: list[tuple[int, torch.dtype, Op]] = [(length, torch.float32, "sum") for length in lengths]
    cases += [(29, dtype, op) for dtype in DTYPES for op in OPS]

    def work(executor: ScheduleExecutor) -> list[tuple[torch.Tensor, int, int]]:
        done = []
        for length, dtype, op in cases:
            mine = drawn_vectors(world, length, dtype, 0)[executor.rank].clone()
            messages, num_bytes = executor.mailbox.messages_sent, executor.mailbox.bytes_sent
            executor.all_reduce(mine, op)
            done.append(
                (mine, executor.mailbox.messages_sent - messages, executor.mailbox.bytes_sent - num_bytes)
            )
        return done

    by_rank = simulate(algorithm, world, work)
    for index, (length, dtype, op) in enumerate(cases):
        check([done[index][0] for done in by_rank], vectors(world, length, dtype), op)
        expected = cost(algorithm, world, length * dtype.itemsize, dtype.itemsize)
        assert [done[index][1] for done in by_rank] == list(expected.messages)
        assert [done[index][2] for done in by_rank] == list(expected.bytes_sent)


@EVERY
@pytest.mark.parametrize("world", [2, 5, 8])
def test_sums_of_integers_are_exact(algorithm: Algorithm, world: int) -> None:
    def work(executor: ScheduleExecutor) -> list[torch.Tensor]:
        mine = [(torch.arange(17) % 7 - 3 + executor.rank).to(dtype) for dtype in DTYPES]
        for tensor in mine:
            executor.all_reduce(tensor)
        return mine

    expected = (torch.arange(17) % 7 - 3) * world + world * (world - 1) // 2
    for tensors in simulate(algorithm, world, work):
        assert all(tensor.double().equal(expected.double()) for tensor in tensors)


@EVERY
@pytest.mark.parametrize("world", [3, 4, 7])
def test_two_runs_give_the_same_bits_whatever_the_timing(algorithm: Algorithm, world: int) -> None:
    def work(executor: ScheduleExecutor) -> bytes:
        total = b""
        for dtype in DTYPES:
            mine = drawn_vectors(world, 101, dtype, 0)[executor.rank].clone()
            executor.all_reduce(mine)
            total += bits(mine)
        return total

    networks = [SimulatedNetwork(seed=seed, latency_s=1e-4, jitter_s=1e-2) for seed in range(2)]
    first, second = (simulate(algorithm, world, work, network) for network in networks)
    assert len({*first, *second}) == 1
    assert networks[0].trace() != networks[1].trace()  # the timing did differ


@EVERY
@pytest.mark.parametrize("world", [2, 3, 6])
def test_the_maximum_has_one_sign_of_zero_and_spreads_nan(algorithm: Algorithm, world: int) -> None:
    def work(executor: ScheduleExecutor) -> torch.Tensor:
        mine = torch.zeros(67) if executor.rank % 2 else -torch.zeros(67)
        mine[5] = float("nan") if executor.rank == world - 1 else 1.0
        executor.all_reduce(mine, "max")
        return mine

    results = simulate(algorithm, world, work)
    assert {bits(result) for result in results} == {bits(results[0])}
    assert results[0].isnan().nonzero().flatten().tolist() == [5]


# Where no rank comes early: the model starts a transfer when both sides are there, the simulated wire before.
BALANCED = [
    (name, world) for name in ("ring", "round-robin", "butterfly", "doubling", "tree") for world in (2, 4, 8)
]


@pytest.mark.parametrize(("name", "world"), [*BALANCED, ("ring", 5), ("round-robin", 7)])
def test_the_simulated_network_takes_the_time_that_the_cost_model_says(name: str, world: int) -> None:
    latency_s, bandwidth, header_bytes, count = 1e-3, 1e6, 64, 8 * 5 * 7
    network = SimulatedNetwork(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
    simulate(ALGORITHMS[name], world, lambda executor: executor.all_reduce(torch.ones(count)), network)
    found = cost(ALGORITHMS[name], world, 4 * count, 4)
    expected_s = found.time(latency_s + header_bytes / bandwidth, 1 / bandwidth, 0.0)
    assert max(network.clock_s(str(rank)) for rank in range(world)) == pytest.approx(expected_s, rel=1e-9)


@EVERY
@pytest.mark.parametrize("world", [2, 3, 5])
def test_over_shared_memory_with_messages_larger_than_the_ring(algorithm: Algorithm, world: int) -> None:
    def work(executor: ScheduleExecutor) -> torch.Tensor:
        mine = drawn_vectors(world, 20_011, torch.float64, 0)[executor.rank].clone()
        executor.all_reduce(mine)
        executor.all_reduce(
            mine, "mean"
        )  # what the first call left in flight must not be overwritten by this
        return mine

    with shared_links(world, capacity_bytes=4096) as links:
        results = in_threads(algorithm, links, work)
    check(results, vectors(world, 20_011, torch.float64), "sum")


def in_pieces(rank: int, world: int, pieces: int = 6) -> Table:
    """`all_to_all` with each vector in several messages, so that a link must take many in one round."""
    table = all_to_all(rank, world)
    spans = [range(piece, piece + 1) for piece in range(pieces)]
    return tuple(
        Step(
            sends=tuple(Send(to=send.to, chunks=span) for send in step.sends for span in spans),
            receives=tuple(
                Receive(source=receive.source, chunks=span, how=How.KEEP)
                for receive in step.receives
                for span in spans
            ),
            folds=tuple(spans),
        )
        for step in table
    )


PIECES = Algorithm(
    name="pieces", schedule=in_pieces, chunks=lambda world: 6, description="as a user may write it", source=""
)


def test_links_that_are_full_are_tried_again() -> None:
    def work(executor: ScheduleExecutor) -> torch.Tensor:
        mine = vectors(3, 30_000, torch.float64)[executor.rank]
        executor.all_reduce(mine)
        return mine

    prove(PIECES, 3)
    with shared_links(3, capacity_bytes=4096, queue_bytes=1) as links:
        check(in_threads(PIECES, links, work), vectors(3, 30_000, torch.float64), "sum")
        assert all(link.counters.full_count > 0 for ends in links for link in ends.values())

    network = SimulatedNetwork(bandwidth_bytes_per_s=1e6, queue_bytes=1)
    check(simulate(PIECES, 3, work, network), vectors(3, 30_000, torch.float64), "sum")
    assert any(event.what == "full" for event in network.trace())


class CalledOperators(TorchDispatchMode):
    """The names of the operators that torch computes meanwhile, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@EVERY
@pytest.mark.parametrize("op", ["sum", "max"])
def test_torch_adds_nothing_whose_threads_would_spin_on_the_cores_of_others(
    algorithm: Algorithm, op: Op
) -> None:
    def work(executor: ScheduleExecutor) -> tuple[torch.Tensor, set[str]]:
        mine = vectors(4, 1000, torch.float32)[executor.rank]
        with CalledOperators() as called:
            executor.all_reduce(mine, op)
        return mine, called.names

    results = simulate(algorithm, 4, work)
    check([mine for mine, _ in results], vectors(4, 1000, torch.float32), op)
    assert all(names.isdisjoint({"add", "maximum", "sum", "amax"}) for _, names in results)


@pytest.mark.parametrize("name", ["direct", "all-to-all"])
@pytest.mark.parametrize(("dtype", "tiny"), [(torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)])
def test_a_fold_of_halves_rounds_once(name: str, dtype: torch.dtype, tiny: float) -> None:
    """1 + tiny + tiny + tiny is 1 if every sum is rounded, the next number after 1 if only the last is."""

    def work(executor: ScheduleExecutor) -> torch.Tensor:
        mine = torch.full((4,), tiny if executor.rank else 1.0, dtype=dtype)
        executor.all_reduce(mine)
        return mine

    after_one = torch.full((4,), 1.0 + torch.finfo(dtype).eps, dtype=dtype)
    assert all(result.equal(after_one) for result in simulate(ALGORITHMS[name], 4, work))


@EVERY
@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_broadcast_and_barrier(algorithm: Algorithm, world: int) -> None:
    network = SimulatedNetwork(latency_s=1e-6)

    def work(executor: ScheduleExecutor) -> float:
        for root in range(world):
            mine = torch.full((11,), float(executor.rank))
            executor.broadcast(mine, root)
            assert mine.eq(root).all()
        network.spend(str(executor.rank), 0.5 * executor.rank)
        executor.barrier()
        return network.clock_s(str(executor.rank))

    assert min(simulate(algorithm, world, work, network)) >= 0.5 * (
        world - 1
    )  # nobody leaves before the last came


@EVERY
def test_a_silent_peer_is_named(algorithm: Algorithm) -> None:
    def work(executor: ScheduleExecutor) -> None:
        if executor.rank == 2:
            network.spend("2", 100.0)
        else:
            executor.all_reduce(torch.ones(8))

    network = SimulatedNetwork()
    with pytest.raises(PeerTimeout) as caught:
        simulate(algorithm, 3, work, network, timeout_s=2.0)
    assert f"all-reduce by {algorithm.name}, call 0, round" in str(caught.value)
    assert f"rank {caught.value.peer} sent nothing within 2 s" in str(caught.value)


@EVERY
def test_a_dead_peer_is_named(algorithm: Algorithm) -> None:
    network = SimulatedNetwork(latency_s=1e-3)
    network.kill("1", at_s=0.0)
    with pytest.raises(WorkerFailed) as caught:
        simulate(algorithm, 2, lambda executor: executor.all_reduce(torch.ones(8)), network)
    assert caught.value.worker_rank == 1
    assert str(caught.value).startswith(f"rank 0, all-reduce by {algorithm.name}, call 0, round ")
    assert "lost rank 1: 1 died" in str(caught.value)


def test_a_closed_link_is_named() -> None:
    with shared_links(2) as links:
        links[1][0].close()
        with pytest.raises(WorkerFailed, match=r"rank 0, .* lost rank 1: the link was closed"):
            ScheduleExecutor(ALGORITHMS["ring"], 0, 2, links[0], 5.0).all_reduce(torch.ones(2))


def test_ranks_that_go_different_ways_are_reported() -> None:
    def lengths(executor: ScheduleExecutor) -> None:
        return executor.all_reduce(torch.ones(4 + executor.rank))

    def calls(executor: ScheduleExecutor) -> None:
        return executor.barrier() if executor.rank else executor.all_reduce(torch.ones(0))

    def dtypes(executor: ScheduleExecutor) -> None:
        return executor.all_reduce(torch.ones(4, dtype=torch.float64 if executor.rank else torch.float32))

    for work in (lengths, calls, dtypes):
        with pytest.raises(
            ManyhandsError, match=r"rank [01], (all-reduce|barrier) by doubling, call 0, round 1"
        ):
            simulate(ALGORITHMS["doubling"], 2, work)


def test_a_buffer_with_history_is_reduced_in_place() -> None:
    def work(executor: ScheduleExecutor) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.ones(3))
        executor.all_reduce(parameter)
        return parameter

    assert all(one.requires_grad and one.eq(2).all() for one in simulate(ALGORITHMS["direct"], 2, work))


def test_what_cannot_be_reduced_is_refused() -> None:
    executor = ScheduleExecutor(grouped(2), 0, 2, {}, 1.0)
    with pytest.raises(UserError, match=r"buffer of shape \(2, 2\)"):
        executor.all_reduce(torch.ones(2, 2))
    with pytest.raises(UserError, match=r"buffer of shape \(2,\) on cpu: must be .* contiguous"):
        executor.all_reduce(torch.ones(4)[::2])
    with pytest.raises(UserError, match=r"buffer of torch\.int64: allowed are torch\.float32"):
        executor.all_reduce(torch.ones(4, dtype=torch.int64))
    with pytest.raises(UserError, match=r"op=summ: .* did you mean 'sum'"):
        executor.all_reduce(torch.ones(4), "summ")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="root=2: must be between 0 and 1"):
        executor.broadcast(torch.ones(4), root=2)
    with pytest.raises(UserError, match=r"no link to rank 1, only to \[\]"):
        executor.all_reduce(torch.ones(4))
    with pytest.raises(UserError, match="timeout_s=0"):
        ScheduleExecutor(grouped(2), 0, 2, {}, 0)
    with pytest.raises(UserError, match="rank=3, world=2"):
        ScheduleExecutor(grouped(2), 3, 2, {}, 1.0)
