"""How many workers fit on a host: the estimate from figures, the reading of limits, and every way in refusing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path, PurePosixPath

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import manyhands as mh
from manyhands.cli.main import app
from manyhands.engine.footprint import PER_LINK, Sizes, cost_of, sizes_of
from manyhands.engine.request import Length, Request
from manyhands.engine.session import check_capacity_for
from manyhands.errors import Overload
from manyhands.interop.own_loop.launch_script import launch
from manyhands.lab.bench import allreduce as bench_allreduce
from manyhands.lab.bench import step as bench_step
from manyhands.lab.compare.run_comparison import CompareSettings, compare
from manyhands.places.local.host import (
    PROCESS_BYTES,
    Amount,
    MemoryCost,
    Room,
    check_room,
    free_memory,
    free_tasks,
    group_folders,
    most_workers,
    of_processes,
    read_room,
)
from manyhands.strategy import Strategy
from manyhands.workloads.glove.learning import GloveOptions, Learning
from manyhands.workloads.logreg.options import LogregOptions
from manyhands.workloads.logreg.training import train_logreg

GIB = 1 << 30
TOO_MANY = 100_000
"""Workers that no machine has room for: 24 TiB for Python and torch alone."""


def task() -> mh.Task:
    x = torch.randn(64, 8)
    return mh.Task(
        model=lambda: nn.Linear(8, 1),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(x, x.sum(1, keepdim=True)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    )


def test_the_largest_number_that_fits_is_exact_for_each_thing_that_runs_out() -> None:
    cost = of_processes(memory_bytes=GIB - PROCESS_BYTES, threads=2)
    assert most_workers(cost, Room()) >= TOO_MANY
    assert most_workers(cost, Room(memory_bytes=8 * GIB)) == 8
    assert most_workers(cost, Room(memory_bytes=8 * GIB - 1)) == 7
    assert most_workers(cost, Room(memory_bytes=8 * GIB, tasks=20)) == 6  # three tasks each
    assert most_workers(cost, Room(memory_bytes=GIB - 1)) == 0
    pairs = MemoryCost(per_pair=Amount(descriptors=3))
    assert most_workers(pairs, Room(descriptors=3 * 45)) == 10
    assert most_workers(pairs, Room(descriptors=3 * 45 - 1)) == 9


def test_who_fits_is_not_refused_and_who_does_not_is_told_the_figure_and_the_number_that_fits() -> None:
    room = Room(memory_bytes=20 * GIB, tasks=30_000, descriptors=1000)
    for workers in (1, 2, 4, 8, 64):  # more workers than cores are nobody's business
        check_room(of_processes(), workers, room)
    with pytest.raises(
        Overload, match=r"workers=1000: the run needs about 250\.0 GiB of memory, but 20\.0 GiB is free"
    ) as report:
        check_room(of_processes(), 1000, room)
    assert report.value.most_workers == 80
    assert "at most 80 workers fit" in str(report.value)
    assert "6,032 open files in the launcher, but 1,000 more are allowed (ulimit -n)" in str(report.value)
    assert "Options(allow_overload=True) or --allow-overload" in str(report.value)
    with pytest.raises(Overload, match="not even one fits"):
        check_room(of_processes(), 1, Room(memory_bytes=1))
    with pytest.raises(Overload, match=r"not even one fits; use fewer, or raise the limit: ulimit -n 4096$"):
        check_room(of_processes(), 2, Room(descriptors=13))
    with pytest.raises(Overload, match=r"use fewer, or raise the limit: ulimit -n 8192$"):
        check_room(of_processes(), 1000, Room(descriptors=13))


@pytest.mark.parametrize(
    ("strategy", "own", "once"),
    [
        ("mirrored", 100 + 1 + 90 + 180, 0),
        ("allreduce", 100 + 1 + 90 + 180, 0),
        ("central", 1 + 90, 100 + 180),
        ("hogwild", 1 + 90, 100 + 180),
        ("sharded", 100 + 1, 100 + 90 + 180),
        # The parameters that all read, and two copies of what servers keep, with the sum of a step's gradients
        ("ps servers=2 replicas=1", 1 + 90, 100 + 2 * (100 + 90 + 180)),
    ],
)
def test_who_holds_how_many_copies_follows_from_the_strategy(strategy: str, own: int, once: int) -> None:
    mib = 1 << 20
    sizes = Sizes(parameters=100 * mib, gradients=90 * mib, buffers=mib, state=180 * mib, data=7 * mib)
    cost = cost_of(Strategy.parse(strategy), sizes, threads=1)
    assert cost.per_worker.memory_bytes == PROCESS_BYTES + (own + 1) * mib  # and its events
    processes = cost.once.tasks // 2
    assert processes == (3 if strategy.startswith("ps") else 1)  # two servers, and the template of all
    assert cost.once.memory_bytes == processes * PROCESS_BYTES + (once + 7) * mib
    assert cost.per_pair == (PER_LINK if strategy == "sharded" else Amount())


def test_single_costs_nothing_and_links_cost_by_pairs() -> None:
    sizes = Sizes(parameters=1, gradients=1)
    assert cost_of(Strategy.parse("single"), sizes, threads=1).of(1) == Amount()
    ring = cost_of(Strategy.parse("allreduce algorithm=ring"), sizes, threads=1)
    assert ring.per_pair.memory_bytes > 2 << 20
    assert most_workers(ring, Room(descriptors=1024)) == 24  # 32 + 24 · 6 + 276 · 3 = 1004


def test_the_sizes_of_a_task_count_every_storage_once_and_the_optimizers_state() -> None:
    shared = nn.Linear(10, 10, bias=False)  # 400 bytes
    frozen = nn.Linear(5, 1, bias=False).requires_grad_(False)  # 20 bytes
    model = nn.Sequential(shared, shared, frozen, nn.BatchNorm1d(4, affine=False))
    x = torch.zeros(16, 8)

    def of(optimizer: Callable[..., torch.optim.Optimizer]) -> Sizes:
        made = mh.Task(
            model=lambda: model, loss=lambda m, b: b.sum(), data=x, evaluation=x[:4], optimizer=optimizer
        )
        return sizes_of(made, model)

    plain = of(lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    assert (plain.parameters, plain.gradients, plain.buffers, plain.state, plain.data) == (
        420,
        400,
        40,
        0,
        640,
    )
    assert of(lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9)).state == 400
    assert of(torch.optim.AdamW).state == 800
    assert of(lambda parameters: torch.optim.Adam(parameters, amsgrad=True)).state == 1200
    assert of(lambda parameters: 1 / 0).state == 0  # type: ignore[arg-type, return-value]  # the worker says so


def test_control_groups_of_both_versions_are_found_with_those_above_them() -> None:
    mixed = "4:memory:/jobs/a\n8:pids:/\n1:cpu:/jobs/b\n0::/\n"
    mounts = (
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "39 31 0:36 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    )
    top = PurePosixPath("/sys/fs/cgroup")
    assert group_folders(mixed, mounts) == {
        "memory": [top / "memory/jobs/a", top / "memory/jobs", top / "memory"],
        "pids": [top / "pids"],
    }
    unified = "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    folders = [top / "user/x", top / "user", top]
    assert group_folders("0::/user/x\n", unified) == {"memory": folders, "pids": folders}
    inside = "29 23 0:26 /kube/pod /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"  # a container sees its own part
    assert group_folders("0::/kube/pod\n", inside)["memory"] == [top]
    assert group_folders("0::/../other\n", unified)["memory"][-1] == top
    assert group_folders("", "") == {}


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")
    return folder


def test_what_a_control_group_leaves_counts_file_caches_as_free(tmp_path: Path) -> None:
    two = write(
        tmp_path / "v2", memory__max=1000, memory__current=700, memory__stat="anon 500\ninactive_file 150"
    )
    assert free_memory(two) == 450
    assert free_memory(write(tmp_path / "none", memory__max="max", memory__current=700)) is None
    one = write(
        tmp_path / "v1",
        memory__limit_in_bytes=1000,
        memory__usage_in_bytes=1000,
        memory__stat="total_inactive_file 30",
    )
    assert free_memory(one) == 30
    endless = write(
        tmp_path / "v1-none", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5
    )
    assert free_memory(endless) is None
    assert free_tasks(write(tmp_path / "pids", pids__max=100, pids__current=98)) == 2
    assert free_tasks(write(tmp_path / "any", pids__max="max", pids__current=98)) is None
    assert free_memory(tmp_path / "nothing") is None


def test_the_tightest_limit_of_a_whole_machine_counts(tmp_path: Path) -> None:
    write(
        tmp_path / "proc",
        meminfo="MemTotal: 9 kB\nMemAvailable:   1000000 kB",
        loadavg="0.1 0.1 0.1 2/300 77",
    )
    write(tmp_path / "proc/sys/kernel", pid_max=32768)
    mounts = "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    write(tmp_path / "proc/self", cgroup="0::/a/b", mountinfo=mounts)
    assert (read_room(tmp_path).memory_bytes, read_room(tmp_path).tasks) == (1_024_000_000, 32468)
    group = tmp_path / "sys/fs/cgroup/a"
    write(group, memory__max=5000, memory__current=1000, pids__max=50, pids__current=8)
    write(group / "b", memory__max="max", memory__current=10, pids__max="max", pids__current=1)
    assert (read_room(tmp_path).memory_bytes, read_room(tmp_path).tasks) == (4000, 42)
    assert read_room(tmp_path / "elsewhere").memory_bytes is None


def test_this_machine_has_room_for_what_always_worked() -> None:
    room = read_room()
    assert room.memory_bytes is not None
    assert room.memory_bytes > 0
    check_room(of_processes(), 2, room)


@pytest.mark.parametrize(
    "strategy",
    [
        "mirrored",
        "allreduce",
        "allreduce algorithm=ring",
        "central",
        "sharded",
        "ps",
        "ps servers=2 replicas=1",
        "hogwild",
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fit_refuses_too_many_workers_under_every_strategy_before_anything_is_made(
    strategy: str, tmp_path: Path
) -> None:
    with pytest.raises(Overload, match=rf"workers={TOO_MANY}: the run needs about .* of memory"):
        mh.fit(task(), strategy, workers=TOO_MANY, steps=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_other_way_in_refuses_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)")
    rows = tmp_path / "rows.libsvm"
    rows.write_text("1 1:1\n-1 2:1\n")
    ways: dict[str, Callable[[], object]] = {
        "launch": lambda: launch(script, workers=TOO_MANY),
        "compare": lambda: compare(
            task(),
            "mirrored; ps",
            out=tmp_path / "compared",
            settings=CompareSettings(workers=TOO_MANY, steps=1),
        ),
        "glove": lambda: Learning(workers=TOO_MANY, strategy="hogwild hands=processes"),
        "glove ps": lambda: Learning(workers=TOO_MANY, strategy="ps", glove=GloveOptions(batch=2)),
        "logreg": lambda: train_logreg(rows, strategy="hogwild hands=processes", workers=TOO_MANY),
        "logreg ps": lambda: train_logreg(rows, strategy="ps", workers=TOO_MANY),
        "bench allreduce": lambda: bench_allreduce.run_bench(TOO_MANY),
        "bench backend": lambda: bench_allreduce.run_backend_bench(TOO_MANY),
        "bench step": lambda: bench_step.run_bench(TOO_MANY),
    }
    for name, way in ways.items():
        with pytest.raises(Overload, match=f"workers={TOO_MANY}: the run needs about"):
            pytest.fail(f"{name} started: {way()}")
    assert not (tmp_path / "compared").exists()


def test_whoever_insists_is_let_through_and_the_command_line_can_insist() -> None:
    Learning(workers=TOO_MANY, strategy="hogwild hands=processes", glove=GloveOptions(allow_overload=True))
    assert LogregOptions(allow_overload=True).allow_overload
    for insists in (False, True):
        options = mh.Options(allow_overload=insists)
        with warnings.catch_warnings(action="ignore"):
            request = Request.make(task(), Strategy.parse("ps"), TOO_MANY, Length(steps=1), 0, options, "cpu")
        with nullcontext() if insists else pytest.raises(Overload):
            check_capacity_for(request, nn.Linear(8, 1))
    commands = ("train digits", "train glove", "train logreg", "compare digits", "launch", "bench allreduce")
    for command in (*commands, "bench backend", "bench step"):
        text = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"}).output
        assert "--allow-overload" in text, command
