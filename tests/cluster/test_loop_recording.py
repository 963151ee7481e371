"""Events of workers that no launcher looks at, and clocks of several hosts on one axis."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from manyhands.errors import Aborted, UserError
from manyhands.interop.own_loop.connect import align
from manyhands.interop.own_loop.join import open_group
from manyhands.interop.own_loop.worker_group import WorkerGroup
from manyhands.observe.analyse.explain import explain
from manyhands.observe.analyse.timeline import build_timeline
from manyhands.observe.record.clocks import Bracket, Offset, offset_from
from manyhands.observe.record.event_files import EventFileWriter
from manyhands.observe.record.events import RECORD, EventKind
from manyhands.observe.record.recorded import read_run_events
from manyhands.places.external.process_place import ProcessPlace
from own_loop import mlp, on_workers, regression, shuffled

HOUR_NS = 3_600 * 10**9


@pytest.mark.parametrize("seed", range(20))
def test_the_truth_is_in_the_narrowest_bracket_whatever_the_network_did(seed: int) -> None:
    draw = random.Random(seed)
    true_ns = draw.randrange(-HOUR_NS, HOUR_NS)
    brackets, now_ns = [], 10**12
    for _ in range(8):
        there, back = draw.randrange(1, 10**7), draw.randrange(1, 10**7)
        theirs_ns = now_ns + there + true_ns
        brackets.append(Bracket(before_ns=now_ns, theirs_ns=theirs_ns, after_ns=now_ns + there + back))
        now_ns += 10**8
    found = offset_from(brackets)
    assert abs(found.ns - true_ns) <= found.error_ns
    assert found.error_ns == (min(one.after_ns - one.before_ns for one in brackets) + 1) // 2


@pytest.mark.parametrize("strategy", ["mirrored", "allreduce algorithm=ring"])
def test_workers_with_clocks_apart_find_how_far(strategy: str) -> None:
    shifts = [0, 7 * HOUR_NS, -3 * HOUR_NS]

    def body(group: WorkerGroup) -> Offset:
        shift = shifts[group.rank]
        return align(group._rounds.words, lambda: time.monotonic_ns() + shift)[0]

    for found, shift in zip(on_workers(3, body, strategy=strategy), shifts, strict=True):
        assert abs(found.ns + shift) <= found.error_ns


def test_files_of_one_clock_are_moved_alike_and_those_of_another_by_their_own_offset(tmp_path: Path) -> None:
    # Two hosts: the second's clock is an hour ahead, and worker 3's own look at it was 5 ms off.
    offsets = {0: 0, 1: 2_000_000, 2: -HOUR_NS, 3: -HOUR_NS + 5_000_000}
    for role, offset in offsets.items():
        writer = EventFileWriter.create(
            tmp_path, name=f"worker-{role}", role=role, max_bytes=1 << 20, wall_offset_ns=10**15 + offset
        )
        writer._header["clock"] = 1 + role // 2
        records = np.zeros(1, RECORD)
        records["kind"], records["role"] = EventKind.STEP, role
        records["start_ns"] = 10**13 + (HOUR_NS if role > 1 else 0)
        writer.append(records)
        writer.close(0)
    starts = [int(events.records["start_ns"][0]) for events in read_run_events(tmp_path).roles]
    assert starts == [10**13] * 4


def test_each_worker_keeps_its_events_where_it_is_reported(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def body(group: WorkerGroup) -> int:
        model = mlp()
        loader = shuffled(regression())
        model, optimizer, loader = group.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return group.rank

    assert on_workers(2, body, strategy="allreduce algorithm=ring", out=out) == [0, 1]
    events = read_run_events(out / "events")
    assert [role.name for role in events.roles] == ["worker-0", "worker-1"]
    for role in events.roles:
        kinds = role.records["kind"].tolist()
        assert (kinds[0], kinds[-1]) == (EventKind.JOIN, EventKind.LEAVE)
        assert [len(role.of(kind)) for kind in (EventKind.STEP, EventKind.INPUT, EventKind.SEND)] == [4, 4, 4]
    assert explain(events.roles, synchronous=True).steps == 4
    messages = [arrow for arrow in build_timeline(events.roles, max_slices=1000).arrows if arrow.is_message]
    assert len(messages) == 2 * 4


def test_a_directory_that_is_taken_is_refused_and_the_others_do_not_wait(tmp_path: Path) -> None:
    (tmp_path / "something").write_text("here")
    first, second = on_workers(2, lambda group: None, out=tmp_path, errors=True)
    assert isinstance(first, UserError)
    assert "is not empty" in str(first)
    assert isinstance(second, Aborted)


def test_workers_that_do_not_all_keep_their_events_are_told_so(tmp_path: Path) -> None:
    store = HashStore()
    raised: list[BaseException | None] = [None, None]

    def work(rank: int) -> None:
        place = ProcessPlace(rank=rank, world=2, open_store=lambda _: store)
        out = tmp_path / "run" if rank == 0 else None
        try:
            with open_group(place, "test", timeout_s=20.0, out=out) as group:
                group.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive()
    assert all(isinstance(error, UserError | Aborted) for error in raised)
    assert any("worker 0 joins with out=, worker 1 is in prepare()" in str(error) for error in raised)
