"""What programs do with a backend beside plain collectives: asynchronous works, messages, groups, threads, mistakes."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

import manyhands.c10d
from manyhands.errors import Aborted, PeerTimeout, UserError, WorkerFailed
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from processes.c10d_worker import Ranks


def total(ranks: Ranks) -> float:
    return ranks.world * (ranks.world + 1) / 2


def check_asynchronous_works_in_any_order(ranks: Ranks) -> None:
    tensors = [torch.full((count,), float(ranks.rank + 1)) for count in (1, 50_000, 10, 200_000, 0)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    extra = torch.ones(3)
    dist.all_reduce(extra)  # waits its turn behind the others
    assert torch.equal(extra, torch.full((3,), float(ranks.world)))
    for tensor, work in reversed(list(zip(tensors, works, strict=True))):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert torch.equal(tensor, torch.full_like(tensor, total(ranks)))
    assert torch.equal(works[1].get_future().value()[0], tensors[1])
    assert torch.equal(works[2].result()[0], tensors[2])


def check_an_asynchronous_call_returns_before_the_others_come(ranks: Ranks) -> None:
    """Else a gradient hook would stall backward: rank 0 tells the others only after its call that they may call."""
    tensor = torch.ones(100_000)
    if ranks.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        for other in range(1, ranks.world):
            dist.send(torch.ones(1), other)
    else:
        dist.recv(torch.empty(1), 0)
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert tensor.eq(ranks.world).all()


def check_futures_run_their_callbacks(ranks: Ranks) -> None:
    tensor = torch.full((4,), float(ranks.rank + 1))

    def again(future: Future[list[torch.Tensor]]) -> torch.Tensor:
        """As the hooks of DDP do: a call of the same group from a callback, waited for there."""
        (first,) = future.value()
        return dist.all_reduce(first, async_op=True).get_future().wait()[0]

    chained = dist.all_reduce(tensor, async_op=True).get_future().then(again).then(lambda f: f.value() * 2)
    assert torch.equal(chained.wait(), torch.full((4,), 2 * ranks.world * total(ranks)))


def check_a_failed_work_raises_wherever_it_is_waited_for(ranks: Ranks) -> None:
    work = dist.all_reduce(torch.ones(ranks.rank + 1), async_op=True)
    if ranks.world == 1:
        work.wait()
        return
    for wait in (work.wait, work.get_future().wait):
        with pytest.raises(Exception, match=r"rank 0 passes float32\[1\]"):
            wait()
    assert isinstance(work.exception(), UserError)
    assert work.is_completed()
    assert not work.is_success()


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def check_mistakes_are_named_on_every_rank_and_cost_nothing(ranks: Ranks) -> None:
    if ranks.world == 1:
        return
    odd = ranks.rank == 1
    others = "rank 0" if ranks.world == 2 else f"ranks 0, {', '.join(map(str, range(2, ranks.world)))}"
    s = "s" if ranks.world == 2 else ""
    es = "es" if ranks.world == 2 else ""

    text = refused(lambda: dist.all_reduce(torch.ones(4, dtype=torch.float64 if odd else torch.float32)))
    assert f"{others} pass{es} float32[4], rank 1 passes float64[4]" in text, text
    assert text.startswith("all_reduce(sum) #"), text
    text = refused(lambda: dist.all_reduce(torch.ones((3, 2) if odd else (2, 3))))
    assert f"{others} pass{es} float32[2, 3], rank 1 passes float32[3, 2]" in text, text
    text = refused(lambda: dist.broadcast(torch.ones(5 if odd else 4), 0))
    assert f"{others} pass{es} float32[4], rank 1 passes float32[5]" in text, text
    text = refused(lambda: dist.barrier() if odd else dist.all_reduce(torch.ones(2)))
    assert f"{others} call{s} all_reduce(sum) of float32[2], rank 1 calls barrier" in text, text
    text = refused(lambda: dist.broadcast(torch.ones(2), int(odd)))
    assert f"{others} call{s} broadcast(root 0) of float32[2], rank 1 calls broadcast(root 1)" in text, text
    text = refused(lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM))
    assert "all_reduce(sum) of float32[2], rank 1 calls all_reduce(max)" in text, text
    splits = [1] * ranks.world
    wrong = [2, *splits[1:]] if odd else splits
    text = refused(
        lambda: dist.all_to_all_single(torch.ones(sum(splits)), torch.ones(sum(wrong)), splits, wrong)
    )
    assert "rank 1 sends 8 bytes to rank 0, which expects 4" in text, text
    outputs = [torch.ones(5 if odd else 4) for _ in range(ranks.world)]
    text = refused(lambda: dist.all_gather(outputs, outputs[0]))
    assert f"{others} pass{es} float32[4], rank 1 passes float32[5]" in text, text

    same = torch.ones(4) if odd else torch.ones(4, 1)  # sizes of 1 do not count
    dist.all_reduce(same)
    assert same.sum() == 4 * ranks.world, "the group must go on"


def check_what_one_rank_can_see_alone_it_refuses_alone(ranks: Ranks) -> None:
    ones = torch.ones(4, dtype=torch.int64)
    assert "no mean" in refused(lambda: dist.all_reduce(ones.bool(), dist.ReduceOp.AVG))
    assert "torch does not support it" in refused(lambda: dist.all_reduce(ones.to(torch.uint16)))
    assert "need integers" in refused(lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.BXOR))
    assert "one for each of" in refused(
        lambda: ranks.ours.alltoall([ones], [ones] * (ranks.world + 1)).wait()
    )
    assert "PREMUL_SUM" in refused(lambda: dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(2.0)))
    assert "did you mean 'ring'" in refused(lambda: manyhands.c10d.Options(algorithm="rign"))
    if ranks.world > 1:
        other = (ranks.rank + 1) % ranks.world
        assert "tag=-1" in refused(lambda: dist.send(ones, other, tag=-1))
        assert "contiguous" in refused(lambda: dist.recv(torch.ones(4, 4).t(), other))


def check_missing_ranks_are_named_with_the_call_each_is_in(ranks: Ranks) -> None:
    """Rank 0 calls, rank 1 waits for a message, rank 2 has stopped making calls in this group."""
    if ranks.world < 3:
        return
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    dist.broadcast(torch.ones(4), 0, group=group)
    if ranks.rank == 0:
        with pytest.raises(PeerTimeout) as caught:
            dist.all_reduce(torch.ones(2, 3), group=group)
        text = str(caught.value)
        assert text.startswith("timed out: all_reduce(sum) of float32[2, 3] #2: waited 1."), text
        assert "for ranks 1, 2: rank 1 waits in recv from rank 2 (tag 5); " in text, text
        assert "rank 2 is in no call since broadcast(root 0) of float32[4] #1" in text, text
    elif ranks.rank == 1:
        group.set_timeout(timedelta(seconds=30))  # so that rank 0 gives up first
        with pytest.raises(PeerTimeout, match=r"recv of float32\[3\] from rank 2 \(tag 5\): "):
            dist.recv(torch.ones(3), 2, tag=5, group=group)
    dist.barrier()
    with pytest.raises(PeerTimeout, match="did not arrive in time"):
        dist.barrier(group=group)
    dist.destroy_process_group(group)


def check_a_rank_that_leaves_is_named_by_those_who_wait_for_it(ranks: Ranks) -> None:
    group = dist.new_group()
    dist.barrier(group=group)
    if ranks.rank == 1:
        dist.destroy_process_group(group)
    elif ranks.world > 1:
        with pytest.raises(
            WorkerFailed, match=r"all_reduce\(sum\) of float32\[1\] #2: .*rank 1 .*left the group"
        ):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    if ranks.rank != 1:
        dist.destroy_process_group(group)


def check_an_interrupted_rank_lets_the_others_go(ranks: Ranks) -> None:
    if ranks.world == 1:
        return
    group = dist.new_group()
    if ranks.rank == 0:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(1), group=group)
        timer.join()
    dist.barrier()
    with pytest.raises(Aborted, match="stopped because rank 0 failed or was interrupted"):
        dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)


def check_calls_under_way_when_a_group_is_closed(ranks: Ranks) -> None:
    """A message that never came is failed; calls that can end do."""
    group = dist.new_group()
    never = (
        dist.irecv(torch.ones(1), (ranks.rank + 1) % ranks.world, group=group) if ranks.world > 1 else None
    )
    tensors = [torch.ones(100_000) for _ in range(3)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    dist.destroy_process_group(group)
    for tensor, work in zip(tensors, works, strict=True):
        work.wait()
        assert tensor.eq(ranks.world).all()
    if never is not None:
        with pytest.raises(UserError, match="was closed"):
            never.wait()
    with pytest.raises(UserError, match="closed"):
        group.barrier().wait()


def check_messages_around_a_ring(ranks: Ranks) -> None:
    if ranks.world == 1:
        return
    right, left = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world
    for dtype in (torch.float32, torch.bool, torch.complex64, torch.bfloat16):
        for count in (0, 1, 1001, 600_000):
            mine, theirs = ranks.values(count, dtype), torch.empty(count, dtype=dtype)
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, theirs, left)]
            )
            for work in works:
                work.wait()
            assert torch.equal(theirs, ranks.values(count, dtype, rank=left)), (dtype, count)


def check_messages_by_tag_and_from_anyone(ranks: Ranks) -> None:
    if ranks.world == 1:
        return
    if ranks.rank == 0:
        for source in range(1, ranks.world):
            for tag in (2, 1, 3):  # sent in the order 1, 2, 3
                got = torch.empty(100_000 * tag)
                assert dist.recv(got, source, tag=tag) == source
                assert got.eq(10 * source + tag).all()
        sources = set()
        for _ in range(1, ranks.world):
            got = torch.empty(3)
            source = dist.recv(got, tag=9)
            assert got.eq(source).all()
            sources.add(source)
        assert sources == set(range(1, ranks.world))
    else:
        for tag in (1, 2, 3):
            dist.send(torch.full((100_000 * tag,), 10.0 * ranks.rank + tag), 0, tag=tag)
        dist.send(torch.full((3,), float(ranks.rank)), 0, tag=9)


def check_messages_move_while_nobody_waits(ranks: Ranks) -> None:
    if ranks.world == 1:
        return
    if ranks.rank == 0:
        work = dist.isend(torch.arange(1_000_000.0), 1)  # larger than what is between them
        dist.recv(torch.empty(1), 1, tag=7)  # sent when rank 1 has got all of it
        work.wait()
    elif ranks.rank == 1:
        got = torch.empty(1_000_000)
        work = dist.irecv(got, 0)
        while not work.is_completed():
            pass
        assert torch.equal(got, torch.arange(1_000_000.0))
        dist.send(torch.ones(1), 0, tag=7)


def check_a_message_that_does_not_fit_is_refused_and_forgotten(ranks: Ranks) -> None:
    if ranks.rank == 0 and ranks.world > 1:
        dist.send(torch.ones(5), 1)
        dist.send(torch.ones(4), 1)
    elif ranks.rank == 1:
        text = refused(lambda: dist.recv(torch.empty(4), 0))
        assert "rank 0 sends float32[5] (tag 0), but the receiver expects float32[4]" in text, text
        got = torch.empty(4)
        dist.recv(got, 0)
        assert got.eq(1).all()


def check_several_groups(ranks: Ranks) -> None:
    groups = []
    for low in range(ranks.world):
        for high in range(low + 1, ranks.world):
            groups.append(([low, high], dist.new_group([low, high])))
    everyone = dist.new_group()
    for members, group in groups:
        if ranks.rank in members:
            tensor = torch.tensor([float(ranks.rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(members), members
            dist.broadcast(tensor.fill_(ranks.rank), members[1], group=group)
            assert tensor.item() == members[1]
            if ranks.rank == members[0]:
                dist.send(tensor, members[1], group=group)
            else:
                dist.recv(tensor, members[0], group=group)
    dist.barrier(group=everyone)
    for members, group in groups:
        if ranks.rank in members:
            dist.destroy_process_group(group)
    dist.all_reduce(torch.ones(1), group=everyone)
    dist.destroy_process_group(everyone)


def check_ranks_of_a_subgroup_are_named_with_their_global_ranks(ranks: Ranks) -> None:
    if ranks.world < 3:
        return
    group = dist.new_group([1, 2])
    if ranks.rank in (1, 2):
        text = refused(lambda: dist.all_reduce(torch.ones(ranks.rank), group=group))
        assert "rank 0 (global 1) passes float32[1], rank 1 (global 2) passes float32[2]" in text, text
        dist.destroy_process_group(group)


def check_a_group_for_each_thread(ranks: Ranks) -> None:
    groups = [dist.new_group() for _ in range(3)]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for turn in range(40):
                tensor = torch.full((1 + 5_000 * index,), float(turn + index))
                dist.all_reduce(tensor, group=groups[index], async_op=turn % 2 == 0) and dist.barrier(
                    groups[index]
                )
                dist.barrier(groups[index])
                assert tensor.eq(ranks.world * (turn + index)).all(), (index, turn)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for group in groups:
        dist.destroy_process_group(group)


def check_every_algorithm(ranks: Ranks) -> None:
    for name in ALGORITHMS:
        group = manyhands.c10d.new_group(algorithm=name)
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for count in (0, 5, 70_001):
                ours, wanted = ranks.values(count, dtype), ranks.values(count, dtype)
                dist.all_reduce(ours, group=group)
                dist.all_reduce(wanted, group=ranks.gloo)
                assert torch.equal(ours, wanted), (name, dtype, count)
        if ranks.world > 1:
            text = refused(lambda: dist.all_reduce(torch.ones(ranks.rank + 1), group=group))  # noqa: B023
            assert "rank 0 passes float32[1], rank 1 passes float32[2]" in text
        dist.destroy_process_group(group)


def check_a_forked_child_can_neither_use_nor_leave_the_group(ranks: Ranks) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which is the point
        child = os.fork()
    if child == 0:
        status = 1
        try:
            for call in (dist.barrier, lambda: ranks.ours.recv_anysource([torch.ones(1)], 0)):
                with pytest.raises(UserError, match="of the parent process is closed"):
                    call()
            atexit._run_exitfuncs()  # as a child does that ends like a program of its own
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.all_reduce(torch.ones(1))


def check_names_and_devices(ranks: Ranks) -> None:
    assert dist.get_backend() == "manyhands"
    assert ranks.ours.name() == "manyhands"
    assert ranks.ours.rank() == ranks.rank
    assert ranks.ours.size() == ranks.world
    group = dist.new_group(group_desc="for a test")
    assert group.group_desc == "for a test"
    assert group.group_name != ranks.ours.group_name
    assert dist.distributed_c10d._get_object_coll_device(group) == "cpu"
    dist.destroy_process_group(group)
