"""What becomes of a process group whose ranks die, leave, dawdle or never come: everyone is told who, and soon."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from processes.c10d_launch import started

PATIENCE_S = 180.0


@contextmanager
def scene(name: str, world: int, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    commands = [
        ["-m", "processes.c10d_failures", name, *map(str, (rank, world, folder / "store"))]
        for rank in range(world)
    ]
    with started(commands) as processes:
        yield processes


def lines(process: subprocess.Popen[str], stdin: str = "") -> list[str]:
    output, _ = process.communicate(stdin, timeout=PATIENCE_S)
    assert process.returncode == 0, output
    return output.splitlines()


def test_a_killed_rank_is_named_though_its_child_lives_on(tmp_path: Path) -> None:
    with scene("killed", 3, tmp_path) as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
        processes[1].send_signal(signal.SIGKILL)
        began = time.monotonic()
        for rank in (0, 2):
            assert processes[rank].stdout is not None
            first = processes[rank].stdout.readline()
            assert first.startswith("WorkerFailed: all_reduce(sum) of float32[1000] #"), first
            assert "rank 1 died: its process ended without leaving the group" in first
        assert time.monotonic() - began < 60
        for rank in (0, 2):
            assert processes[rank].stdout is not None
            barrier, late = processes[rank].stdout.read().splitlines()
            assert processes[rank].wait(PATIENCE_S) == 0
            assert barrier.startswith("WorkerFailed: barrier #")
            assert late.startswith("WorkerFailed: all_reduce(sum) of float32[1000] #")


def test_the_death_of_the_first_rank_ends_every_kind_of_wait(tmp_path: Path) -> None:
    with scene("killed_first", 3, tmp_path) as processes:
        (message,) = lines(processes[1])
        assert message.startswith("WorkerFailed: recv of float32[3] from rank 0 (tag 0): rank 0 died"), (
            message
        )
        (message,) = lines(processes[2])
        assert message.startswith("WorkerFailed: all_reduce(sum) of float32[3] #2: rank 0 died"), message


def test_a_rank_that_just_ends_is_named_by_those_who_wait_for_it(tmp_path: Path) -> None:
    with scene("ends", 2, tmp_path) as processes:
        assert lines(processes[1]) == []
        (message,) = lines(processes[0])
        assert message.startswith("WorkerFailed: all_reduce(sum) of float32[1] #2: "), message
        assert "rank 1 has left the group" in message, message


def test_ranks_on_several_hosts_go_through_gloo_and_groups_can_be_opened_again(tmp_path: Path) -> None:
    with scene("several_hosts", 2, tmp_path) as processes:
        ended = [lines(process) for process in processes]
        assert ended == [["[0, 1]", "['MainThread']"]] * 2
