"""A group of real processes: more ranks than cores, and one that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import warm
from manyhands.native.group.shared_group import SharedGroupFiles

WORKER = Path(__file__).with_name("shared_group_worker.py")


def segments_held() -> list[str]:
    held = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            held.append(os.readlink(descriptor))
        except OSError:  # the one that lists the folder
            continue
    return [target for target in held if "manyhands:" in target]


@contextmanager
def started(task: str, world: int, timeout_s: float) -> Iterator[list[subprocess.Popen[str]]]:
    before = segments_held()
    with SharedGroupFiles.create(world) as files:
        workers = [
            warm.Popen(
                [
                    sys.executable,
                    str(WORKER),
                    task,
                    str(timeout_s),
                    *map(str, (rank, world, *files.descriptors)),
                ],
                pass_fds=files.descriptors,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            yield workers
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate(timeout=240)
    assert segments_held() == before


@pytest.mark.soak
def test_more_ranks_than_cores_agree_on_every_result() -> None:
    world = min(len(os.sched_getaffinity(0)) + 2, 6)
    with started("check", world, timeout_s=30) as workers:
        outputs = [worker.communicate(timeout=240)[0] for worker in workers]
        assert [(worker.returncode, output) for worker, output in zip(workers, outputs, strict=True)] == [
            (0, "")
        ] * world


def test_a_killed_rank_is_named_by_all_others() -> None:
    with started("forever", world=3, timeout_s=1) as workers:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "running\n"
        workers[1].send_signal(signal.SIGKILL)
        for rank in (0, 2):
            output, _ = workers[rank].communicate(timeout=240)
            assert output.startswith(f"PeerTimeout: timed out: rank {rank} waited 1."), output
            assert " for rank 1 to " in output
            assert workers[rank].returncode == 3
