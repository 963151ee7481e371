"""Sums by a process group of torch, as NCCL takes them on GPUs: here Gloo's on the CPU, with ranks that are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore, Store

from cluster.test_exchange import MAX_NORM, momentum, train_plainly
from cluster.test_exchange import train as train_own
from equality import OPTIMIZERS, Awkward, distance, make_task, same_bits, train_in_threads
from equality import train_plainly as fitted_plainly
from manyhands.engine.exchange import Exchange, LocalStep, Resources
from manyhands.errors import Aborted, ManyhandsError, PeerTimeout, WorkerFailed
from manyhands.native.group.shared_group import SharedGroupFiles
from manyhands.places.external.links import no_group
from manyhands.places.external.run_store import KeyValueStore, RunStore
from manyhands.strategies.allreduce import gpu_sums
from manyhands.strategies.allreduce.exchange import AllReduceExchange
from manyhands.strategies.allreduce.gpu_sums import GpuSeat, TorchCollective, done_in_time
from manyhands.strategies.allreduce.strategy import Mirrored
from manyhands.strategies.allreduce.training import AllReduceTraining
from manyhands.strategies.common.collectives.collective import SharedCollective
from manyhands.transport.link.tcp import TcpLink
from manyhands.transport.link.torch_p2p import SumGroup
from manyhands.transport.liveness import Alarm
from ways import BUCKET_BYTES, in_threads, join

CPU = torch.device("cpu")
SOON_S = 40.0
_T = TypeVar("_T")


def connect(
    files: SharedGroupFiles, store: Store, rank: int, alarm: Alarm | None = None, timeout_s: float = 30.0
) -> TorchCollective:
    group = SumGroup(CPU, store, rank, files.world, timeout_s)
    return TorchCollective(group, CPU, SharedCollective(join(files, rank)), timeout_s, alarm)


def with_exchanges(world: int, act: Callable[[AllReduceExchange], _T]) -> list[_T]:
    store = HashStore()
    with SharedGroupFiles.create(world) as files:

        def work(rank: int) -> _T:
            exchange = AllReduceExchange(connect(files, store, rank), BUCKET_BYTES)
            try:
                return act(exchange)
            finally:
                exchange.close()

        return in_threads(world, work)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_the_loop_ends_with_the_weights_of_one_process_and_the_same_bits_on_all(
    world: int, optimizer: str
) -> None:
    """Tied weights, weights that no sample or only some reach, workers without samples, buffers."""
    task = make_task(OPTIMIZERS[optimizer])
    reference = fitted_plainly(task)
    store = HashStore()
    with SharedGroupFiles.create(world) as files:
        found = train_in_threads(
            task, world, lambda rank: AllReduceExchange(connect(files, store, rank), BUCKET_BYTES)
        )
    for weights in found:
        assert distance(weights, reference) < 1e-9
        assert same_bits(weights, found[0])


def test_accumulation_and_clipping_equal_torchs() -> None:
    reference, norms = train_plainly(momentum, steps=12, micro=5, max_norm=MAX_NORM)
    assert min(norms) < MAX_NORM < max(norms)
    results = with_exchanges(
        3, lambda exchange: train_own(exchange, momentum, steps=12, micro=5, max_norm=MAX_NORM)
    )
    for weights, found in results:
        assert distance(weights, reference) < 1e-9
        assert found == pytest.approx(norms, rel=1e-9)
        assert same_bits(weights, results[0][0])


def test_a_full_bucket_is_on_its_way_before_backward_ends_and_bytes_are_counted() -> None:
    sizes: list[int] = []

    def act(exchange: AllReduceExchange) -> tuple[int, int]:
        model = Awkward(torch.float64)
        exchange.attach(model, momentum(model))
        collective = exchange._collective
        assert isinstance(collective, TorchCollective)
        before = exchange.meter.traffic()
        begun: list[int] = []
        model.embed.weight.register_hook(lambda _: begun.append(len(collective._under_way)))
        assert exchange.hooks is not None
        exchange.hooks.begin_step(0)
        tokens = torch.zeros(2, 4, dtype=torch.int64)
        exchange.backward(model(tokens).sum(), 0.5)
        exchange.agree(LocalStep(loss=0.0, share=0.5))
        sent = exchange.meter.traffic() - before
        if exchange.rank == 0:
            sizes.extend(bucket.nbytes for bucket in collective._buckets)
        return begun[0], sent.bytes_sent

    found = with_exchanges(2, act)
    *gradients, status = sizes
    ring = sum(gradients)  # 2 (n - 1) / n of them
    for begun, sent in found:
        assert begun >= 1, "the embedding is the last to have its gradient"
        assert sent == ring + status


def test_what_only_the_words_need_is_not_on_the_device() -> None:
    def act(exchange: AllReduceExchange) -> Any:
        model = Awkward(torch.float64)
        optimizer = momentum(model)
        exchange.attach(model, optimizer)
        total = exchange.total(torch.full((200,), float(exchange.rank + 1), dtype=torch.float64))
        assert exchange.model_state(model) is None or exchange.rank == 0
        return total.tolist(), exchange.optimizer_state() is not None

    assert with_exchanges(3, act) == [([6.0] * 200, True), ([6.0] * 200, False), ([6.0] * 200, False)]


def test_weights_of_any_layout_and_type_become_those_of_worker_0() -> None:
    def act(exchange: AllReduceExchange) -> list[torch.Tensor]:
        collective = exchange._collective
        rank = exchange.rank
        tensors = [
            torch.full((3, 4), rank + 1.5).t(),
            torch.tensor(rank),
            torch.tensor([rank == 0]),
            torch.empty(0),
            torch.full((2,), rank + 0.5, dtype=torch.bfloat16),
        ]
        assert collective.spread(tensors)
        return tensors

    found = with_exchanges(3, act)
    for tensors in found:
        assert all(torch.equal(one, first) for one, first in zip(tensors, found[0], strict=True))
    assert found[2][0].eq(1.5).all()
    assert found[2][2].item() is True


def test_torchs_engines_find_each_other_in_the_store_that_a_leader_keeps() -> None:
    key_value_store = KeyValueStore()

    def act(rank: int) -> list[float]:
        store = RunStore(key_value_store, "torch", 30.0)
        store.set("name", b"\x00\xff")
        assert store.get("name") == b"\x00\xff"
        assert store.compare_set(f"mine/{rank}", "", b"\xfe") == b"\xfe"
        assert store.add("count", 1) in (1, 2)
        group = SumGroup(CPU, store, rank, 2, 30.0)
        del store  # the group keeps it
        values = torch.tensor([1.0, rank + 1.0])
        group.allreduce(values).wait()
        group.broadcast(values, 0).wait()
        return values.tolist()

    assert in_threads(2, act) == [[2.0, 3.0], [2.0, 3.0]]
    late = RunStore(key_value_store, "torch", 0.05)
    with pytest.raises(ManyhandsError, match="no process set 'nothing' in the run's store within 0 s"):
        late.wait(["nothing"])
    with pytest.raises(ManyhandsError, match="no process set"):
        late.get("nothing")
    assert late.delete_key("name")
    assert not late.check(["name"])


@pytest.mark.parametrize(("in_the_clear", "by"), [(True, "nccl"), (False, "links")])
def test_on_two_hosts_words_go_over_links_and_sums_too_where_the_network_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, in_the_clear: bool, by: str
) -> None:
    monkeypatch.setattr(gpu_sums, "seat_of", _seat_of_thread)
    task = make_task(OPTIMIZERS["momentum"])
    reference = fitted_plainly(task, 20)
    store, ends = HashStore(), TcpLink.pair()
    report: dict[int, Any] = {}

    def connected(rank: int) -> Exchange:
        resources = Resources(
            rank=rank,
            world=2,
            timeout_s=30.0,
            group=no_group,
            links=lambda: {1 - rank: ends[rank]},
            hosts=[[0], [1]],
            torch_store=lambda: store,
            in_the_clear=in_the_clear,
            alarm=Alarm(),
        )
        exchange = AllReduceTraining.end(Mirrored(buckets=BUCKET_BYTES), resources)
        report[rank] = exchange.summary()["sums"]
        assert isinstance(exchange, AllReduceExchange)
        assert isinstance(exchange._collective, TorchCollective) == (by == "nccl")
        return exchange

    found = train_in_threads(task, 2, connected, 20)
    for rank, weights in enumerate(found):
        assert report[rank]["by"] == by
        assert distance(weights, reference) < 1e-9
        assert same_bits(weights, found[0])


def _seat_of_thread(_: torch.device) -> GpuSeat:
    rank = threading.current_thread().name
    return GpuSeat(host=f"host of {rank}", gpu=f"GPU of {rank}", nccl="0.0")


class Stuck:
    """A work that never ends, as that of a GPU whose peer is gone."""

    def is_completed(self) -> bool:
        return False


class StuckGroup(SumGroup):
    def __init__(self) -> None:
        self.aborted = threading.Event()

    def allreduce(self, tensor: torch.Tensor) -> Stuck:
        return Stuck()

    def abort(self) -> None:
        self.aborted.set()


def stuck(files: SharedGroupFiles, timeout_s: float, alarm: Alarm | None = None) -> tuple[Any, StuckGroup]:
    group = StuckGroup()
    return TorchCollective(group, CPU, SharedCollective(join(files, 0)), timeout_s, alarm), group


def one_step(collective: TorchCollective) -> None:
    exchange = AllReduceExchange(collective, BUCKET_BYTES)
    model = nn.Linear(3, 3, bias=False)
    hooks = exchange.lay_out(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        hooks.begin_step(0)
        exchange.backward(model(torch.ones(1, 3)).sum(), 1.0)
        exchange.agree(LocalStep(loss=0.0, share=1.0))
    finally:
        exchange.close()


def test_sums_that_do_not_come_end_the_wait_naming_the_others_and_leave_the_group() -> None:
    with SharedGroupFiles.create(1) as files:
        collective, group = stuck(files, 0.2)
        collective.world = 3  # two others, who are there for the words and then hang
        with pytest.raises(PeerTimeout, match=r"from the GPUs of workers 1, 2 within 0\.2 s") as raised:
            one_step(collective)
    assert raised.value.peer == 1
    assert group.aborted.wait(SOON_S)


def test_an_alarm_ends_a_wait_at_once_naming_who_was_lost() -> None:
    alarm = Alarm()
    with SharedGroupFiles.create(1) as files:
        collective, group = stuck(files, 60.0, alarm)
        ringing = threading.Timer(0.1, alarm.ring, (2, "worker 2 on hostB is lost"))
        ringing.start()
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match="worker 2 on hostB is lost") as raised:
            one_step(collective)
        ringing.join()
    assert time.monotonic() - began < SOON_S
    assert raised.value.worker_rank == 2
    assert group.aborted.is_set(), "whatever else waits for the GPU is freed by the alarm itself"


def test_gloo_that_lost_a_peer_ends_as_aborted_where_nobody_says_who() -> None:
    class Broken(StuckGroup):
        def allreduce(self, tensor: torch.Tensor) -> Any:
            raise RuntimeError("connection closed by peer\nwith a stack")

    with SharedGroupFiles.create(1) as files:
        collective = TorchCollective(Broken(), CPU, SharedCollective(join(files, 0)), 5.0)
        with pytest.raises(
            Aborted, match=r"worker 0: .* can no longer communicate: connection closed by peer$"
        ):
            one_step(collective)


def test_what_waits_in_foreign_code_has_a_deadline_and_hears_the_alarm() -> None:
    free = threading.Event()
    assert done_in_time(lambda: 7, "quick", timeout_s=5.0) == 7
    with pytest.raises(ZeroDivisionError):
        done_in_time(lambda: 1 // 0, "wrong", timeout_s=5.0)
    with pytest.raises(PeerTimeout, match=r"slow: not all workers connected within 0\.1 s"):
        done_in_time(lambda: free.wait(240), "slow", timeout_s=0.1)
    alarm = Alarm()
    alarm.ring(3, "worker 3 is lost")
    with pytest.raises(WorkerFailed, match="cut: worker 3 is lost"):
        done_in_time(lambda: free.wait(240), "cut", timeout_s=30.0, alarm=alarm)
    free.set()


def test_an_alarm_calls_who_listens_once_and_at_once_after_it_rang() -> None:
    alarm, heard = Alarm(), []
    alarm.on_ring(lambda: heard.append("before"))
    alarm.ring(1, "first")
    alarm.ring(2, "second")
    assert heard == ["before"]
    assert alarm.lost() == (1, "first")
    alarm.on_ring(lambda: heard.append("after"))
    assert heard == ["before", "after"]
