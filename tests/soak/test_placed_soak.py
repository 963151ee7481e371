"""Two hosts for minutes: a cable that goes dead or loses packets, a stopped process, TLS on every link."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from certificates import HOSTS, folders
from hosts import BadCable, Hosts, Wiretap, bad_cable, two_hosts
from manyhands.data.store.rundir import RunDirectory
from roles import Cluster, cluster, free_ports

__all__ = ["bad_cable", "two_hosts"]

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[1] / "processes" / "roles_script.py"
NOTICED_S = 5.0
REPORT_S = 20.0
LOST = 0.01
BYTES_PER_S = 5e6
WAYS = {
    "hierarchical": ("allreduce", False),
    "hierarchical, tls": ("allreduce", True),
    "ring": ("allreduce algorithm=ring", False),
    "compressed": ("allreduce link=tcp codec=int8", False),
    "central": ("central", False),
    "sharded": ("sharded", False),
    "pipeline": ("pipeline stages=2", False),
    "local": ("local steps=2", False),
    "ps": ("ps", False),
    "ps, tls": ("ps", True),
}
"""Strategies by what carries them, and whether under TLS."""


def start_ranks(ranks: Cluster, hosts: Hosts, placed: Sequence[int], words: Sequence[Sequence[str]]) -> None:
    """One process for each entry of `placed`, which says its host, as torchrun would start it."""
    (port,) = free_ports(1)
    where = {"WORLD_SIZE": str(len(placed)), "MASTER_ADDR": hosts.address(0), "MASTER_PORT": str(port)}
    for rank, host in enumerate(placed):
        command = [SCRIPT, *words[rank]]
        ranks.start("rank", rank, command, before=hosts.inside(host), variables={**where, "RANK": str(rank)})


def steps_done(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def reported_silent(text: str) -> list[tuple[int, str, float]]:
    """Who is said to have fallen silent, at which address, for how many seconds."""
    found = re.findall(r"rank (\d+) on \S+ \(([\d.]+)\) fell silent: .* for ([\d.]+) s,", text)
    return [(int(rank), address, float(seconds)) for rank, address, seconds in found]


@pytest.mark.parametrize(
    ("strategy", "secure"),
    [
        ("allreduce", False),
        ("allreduce", True),
        ("central", False),
        ("sharded", False),
        ("pipeline stages=2", False),
        ("local steps=2", False),
    ],
)
def test_a_cable_that_goes_dead_is_named_on_both_sides_and_the_run_is_resumed(
    strategy: str, secure: bool, two_hosts: Hosts, tmp_path: Path
) -> None:
    """Every rank ends with a sentence within seconds, and the run goes on from its checkpoint, to the same weights."""
    run, placed = tmp_path / "run", (0, 0, 1, 1)
    safe = [f"tls={folders() / HOSTS[host]}" if secure else "insecure=yes" for host in placed]

    def start(steps: int, *words: str) -> None:
        start_ranks(ranks, two_hosts, placed, [[strategy, str(steps), *words, one] for one in safe])

    with cluster(tmp_path, {}) as ranks:
        start(300, "pause=0.05", f"out={run}")
        ranks.wait_for(lambda: steps_done(run) > 40, "step 40")
        for host in (0, 1):
            two_hosts.cut(host)
        began = time.monotonic()
        for rank in range(4):
            one = ranks.roles["rank", rank]
            ranks.wait_for(lambda one=one: bool(reported_silent(one.said)), f"word of rank {rank}", REPORT_S)
        print(f"{strategy}: named by all after {time.monotonic() - began:.1f} s")
        assert time.monotonic() - began < NOTICED_S + 1.0  # a beat, and a look at the files
        for rank in range(4):
            ended = ranks.roles["rank", rank]
            ranks.wait_for(
                lambda one=ended: "WorkerFailed: " in one.said, f"the end of rank {rank}", REPORT_S
            )
        assert time.monotonic() - began < REPORT_S
        for rank in range(4):
            ended = ranks.roles["rank", rank]
            assert ended.ended() == 1, ranks.report()
            for silent, address, seconds in reported_silent(ended.said):
                assert (silent < 2) is (rank >= 2), ranks.report()
                assert address == two_hosts.address(silent // 2)
                assert seconds <= NOTICED_S
    saved = RunDirectory.open(run, lock=False).checkpoints().load().step
    assert saved >= 20
    two_hosts.heal()
    with cluster(tmp_path, {}) as ranks:
        start(80, "pause=0.05", f"out={run}", "resume=yes")
        assert [one.ended() for one in ranks.roles.values()] == [0] * 4, ranks.report()
        resumed = {one.said.split("weights ")[1].split()[0] for one in ranks.roles.values()}
        start(80)
        assert [one.ended() for one in ranks.roles.values()] == [0] * 4, ranks.report()
        whole = {one.said.split("weights ")[1].split()[0] for one in ranks.roles.values()}
    assert resumed == whole
    assert len(whole) == 1


def test_a_stopped_process_of_one_host_is_named_in_seconds_and_a_busy_one_is_not(
    two_hosts: Hosts, tmp_path: Path
) -> None:
    """On one host: first a processor that three others fight for, then a process that is stopped."""
    run = tmp_path / "run"
    words = ["allreduce", "100000", "pause=0.01", f"out={run}"]
    with cluster(tmp_path, {}) as ranks:
        start_ranks(ranks, two_hosts, (0, 0, 0), [words] * 3)
        ranks.wait_for(lambda: steps_done(run) > 10, "step 10")
        burners = [
            subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
            for _ in range(4 * len(os.sched_getaffinity(0)))
        ]
        try:
            time.sleep(20.0)
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()
        assert all(one.process.poll() is None for one in ranks.roles.values()), ranks.report()
        stopped = ranks.roles["rank", 2]
        began = time.monotonic()
        stopped.process.send_signal(signal.SIGSTOP)
        for rank in (0, 1):
            one = ranks.roles["rank", rank]
            ranks.wait_for(lambda one=one: bool(reported_silent(one.said)), f"word of rank {rank}", REPORT_S)
            assert one.ended() == 1, ranks.report()
            assert reported_silent(one.said)[0][0] == 2
        print(f"a stopped process: all had ended after {time.monotonic() - began:.1f} s")
        stopped.process.send_signal(signal.SIGCONT)
        assert stopped.ended() == 1, ranks.report()


def test_two_hosts_under_tls_end_with_the_weights_of_local_processes_and_show_no_tensor(
    two_hosts: Hosts, tmp_path: Path
) -> None:
    """With the cable listened to: under TLS no weight passes in the clear, which `--insecure` shows at once."""
    steps, placed = "20", (0, 0, 1, 1)
    ways = {
        "tls": [f"tls={folders() / HOSTS[host]}" for host in placed],
        "insecure": ["insecure=yes"] * len(placed),
    }
    seen, weights = {}, {}
    for name, said in ways.items():
        run = tmp_path / name
        with cluster(tmp_path, {}) as ranks, Wiretap(two_hosts.names[0]) as tap:
            start_ranks(ranks, two_hosts, placed, [["allreduce", steps, one, f"out={run}"] for one in said])
            assert [one.ended() for one in ranks.roles.values()] == [0] * 4, ranks.report()
            heard = tap.heard()
            weights[name] = {one.said.split("weights ")[1].split()[0] for one in ranks.roles.values()}
        kept = RunDirectory.open(run, lock=False).checkpoints().load().model
        raw = b"".join(value.numpy().tobytes() for value in kept.values())
        pieces = [raw[at : at + 16] for at in range(0, len(raw) - 16, 16)]
        seen[name] = sum(piece in heard for piece in pieces)
        assert len(heard) > 20 * len(raw)
    assert seen["insecure"] > 0.9 * len(pieces)  # the result is given to all, as it is
    assert seen["tls"] == 0
    local = local_weights(tmp_path, steps)
    assert weights == {"tls": {local}, "insecure": {local}}


def local_weights(folder: Path, steps: str) -> str:
    """Of four processes on one machine, which sum in the same order."""
    with cluster(folder, {}) as alone:
        alone.start(
            "alone", 0, [SCRIPT, "allreduce algorithm=hierarchical group=2", steps, "workers=4"], variables={}
        )
        assert alone.roles["alone", 0].ended() == 0, alone.report()
        return alone.roles["alone", 0].said.split("weights ")[1].split()[0]


def weights_of(folder: Path, bad: BadCable, strategy: str, *, secure: bool, trouble: bool) -> set[str]:
    """Of all ranks at the end; with `trouble`, of a run in which the cable gets worse and worse."""
    bad.lost = bad.bytes_per_s = 0.0
    run, placed = folder / ("troubled" if trouble else "quiet"), (0, 0, 1, 1)
    words = [strategy, "60", f"out={run}", "width=20000"]
    safe = [f"tls={folders() / HOSTS[host]}" if secure else "insecure=yes" for host in placed]
    with cluster(folder, {}) as ranks:
        start_ranks(ranks, bad.hosts, placed, [[*words, one] for one in safe])
        if trouble:
            ranks.wait_for(lambda: steps_done(run) >= 10, "step 10")
            bad.lost = LOST
            ranks.wait_for(lambda: steps_done(run) >= 25, "step 25")
            bad.bytes_per_s = BYTES_PER_S
            ranks.wait_for(lambda: steps_done(run) >= 40, "step 40")
            assert bad.dropped > 5, "packets were lost"
            bad.lost = bad.bytes_per_s = 0.0
        assert [one.ended() for one in ranks.roles.values()] == [0] * 4, ranks.report()
        return {
            one.said.split("weights ")[1].split()[0] for one in ranks.roles.values() if "weights " in one.said
        }


@pytest.mark.parametrize("way", WAYS)
def test_lost_packets_and_a_slow_cable_cost_time_and_change_no_bit(
    way: str, bad_cable: BadCable, tmp_path: Path
) -> None:
    strategy, secure = WAYS[way]
    quiet = weights_of(tmp_path, bad_cable, strategy, secure=secure, trouble=False)
    began = time.monotonic()
    troubled = weights_of(tmp_path, bad_cable, strategy, secure=secure, trouble=True)
    print(f"{way}: {bad_cable.dropped} frames were lost, {time.monotonic() - began:.1f} s")
    assert troubled == quiet
    assert len(quiet) == 1
