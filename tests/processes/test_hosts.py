"""Workers on two hosts whose network fails: a silent partition, a cut in one direction, a starved link."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import warm
from hosts import Hosts, two_hosts

__all__ = ["two_hosts"]


SCRIPT = Path(__file__).with_name("join_script.py")
PATIENCE_S = 170.0  # to start; how long it takes to be named is measured apart


class Worker:
    """One rank, and what it has said."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.said = ""

    def read(self, timeout_s: float) -> bool:
        """Whether there was something to read, or the end."""
        assert self.process.stdout is not None
        ready = bool(select.select([self.process.stdout], [], [], timeout_s)[0])
        if ready:
            self.said += os.read(self.process.stdout.fileno(), 1 << 16).decode()
        return ready

    def steps(self) -> int:
        """How many steps it has said by now, what waits in its pipe included."""
        while self.process.poll() is None and self.read(0.0):
            pass
        return self.said.count("step")


@contextmanager
def working(hosts: Hosts, ranks_of: Sequence[int], *arguments: object) -> Iterator[list[Worker]]:
    """`ranks_of[host]` workers on each host, running the script; killed at the end."""
    with socket.socket() as probe:  # a port that is free here is free in a namespace that was just made
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    workers: list[Worker] = []
    places = [host for host, count in enumerate(ranks_of) for _ in range(count)]
    try:
        for rank, host in enumerate(places):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(len(places)), "OMP_NUM_THREADS": "1"}
            where = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": port}
            process = warm.Popen(
                hosts.script(host, SCRIPT, *arguments),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables, **where},
            )
            workers.append(Worker(process))
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait(timeout=240)
            assert worker.process.stdout is not None
            worker.process.stdout.close()


def wait_for(workers: Sequence[Worker], found: Callable[[str], bool], within_s: float) -> list[float]:
    """Wait until all have said what is looked for; when each was first seen to have, in seconds from now."""
    began = time.monotonic()
    seen: dict[int, float] = {}
    while len(seen) < len(workers):
        for number, worker in enumerate(workers):
            worker.read(0.05)
            if number not in seen and found(worker.said):
                seen[number] = time.monotonic() - began
        if time.monotonic() - began > within_s:
            pytest.fail("\n\n".join(f"rank {n} said:\n{worker.said}" for n, worker in enumerate(workers)))
    return [seen[number] for number in range(len(workers))]


def ended(said: str) -> bool:
    return "ended: " in said


@pytest.mark.soak
def test_a_silent_partition_is_named_with_host_and_rank_within_seconds_on_both_sides(
    two_hosts: Hosts,
) -> None:
    with working(two_hosts, [2, 1], 100, 100_000, 0.01) as workers:
        wait_for(workers, lambda said: "step 20\n" in said, PATIENCE_S)
        two_hosts.cut(0)
        two_hosts.cut(1)
        took = wait_for(workers, ended, 30.0)
        assert max(took) < 10.0, took  # 5 s, and what a crowded machine adds; it was 300 s
        for near in workers[:2]:  # one of them waits for the other, and still names the right one
            assert "rank 2 on " in near.said.partition("ended: ")[2]
            assert "(10.231.77.2) fell silent: neither a heartbeat nor data from it for" in near.said
        assert "(10.231.77.1) fell silent" in workers[2].said
        for worker in workers:
            assert worker.process.wait(timeout=240) == 1, worker.said  # leaving torch takes its time, too


@pytest.mark.soak
def test_a_cut_in_one_direction_is_named_at_both_ends(two_hosts: Hosts) -> None:
    with working(two_hosts, [1, 1], 100, 100_000, 0.01) as (first, second):
        wait_for([first, second], lambda said: "step 20\n" in said, PATIENCE_S)
        two_hosts.cut(0)
        took = wait_for([first, second], ended, 30.0)
        assert max(took) < 10.0, took
        assert "rank 0 on " in second.said
        assert "(10.231.77.1) fell silent" in second.said
        assert "no longer receives anything from rank 0, but still sends to it" in first.said
        assert "(10.231.77.2)" in first.said


def test_a_starved_link_is_slow_and_not_dead_until_it_is_cut_in_one_direction(two_hosts: Hosts) -> None:
    """One exchange takes longer than the silence that is allowed, and every beat waits behind its data."""
    with working(two_hosts, [1, 1], 600_000, 100_000, 0.0) as (first, second):
        wait_for([first, second], lambda said: "step 0\n" in said, PATIENCE_S)
        for host in range(2):
            two_hosts.starve(host, "3mbit", "4mb")
        # the steps of the time before wait in the pipes; of those that come, the first may have been on its way
        steps = max(first.steps(), second.steps())
        began = time.monotonic()
        wait_for([first, second], lambda said: said.count("step") >= steps + 2, 180.0)
        assert time.monotonic() - began > 5.0, "the link was not starved, so nothing was tested"
        assert "ended" not in first.said + second.said
        two_hosts.cut(0)
        took = wait_for([first, second], ended, 120.0)
        assert max(took) < 60.0, took  # 5 s, what waits in the queues, and what a crowded machine adds
        assert "rank 0 on " in second.said.partition("ended: ")[2]
        assert "(10.231.77.1) fell silent" in second.said
        assert "no longer receives anything from rank 0, but still sends to it" in first.said
        for worker in (first, second):
            assert worker.process.wait(timeout=240) == 1, worker.said  # leaving torch takes its time, too


@pytest.mark.soak
def test_a_stopped_worker_of_another_host_is_named_and_one_that_is_only_slow_is_not(two_hosts: Hosts) -> None:
    with working(two_hosts, [1, 2], 100, 100_000, 0.01) as workers:
        wait_for(workers, lambda said: "step 20\n" in said, PATIENCE_S)
        stopped = workers[2].process
        children = Path(f"/proc/{stopped.pid}/task/{stopped.pid}/children").read_text().split()
        for pid in (stopped.pid, *map(int, children)):
            os.kill(pid, signal.SIGSTOP)
        try:
            took = wait_for(workers[:2], ended, 30.0)
            assert max(took) < 10.0, took
            assert "rank 2 on " in workers[0].said
            assert "rank 2" in workers[1].said.partition("ended: ")[2]
        finally:
            for pid in (stopped.pid, *map(int, children)):
                os.kill(pid, signal.SIGCONT)
