"""All-reduce among more ranks than cores, on several hosts: `python benchmarks/many_ranks.py --out DIR [--rate 1gbit]`.

The ranks of a host share memory with each other and have a TCP connection to each rank of the others, over loopback:
nobody need be root. With `--rate`, two network namespaces with a cable between them are the hosts, which needs root.

Each way sums the same vectors in the same processes, and the ways alternate. Reported are the time of the slowest rank
and the processor time of all ranks together; besides, how long the ranks take to connect, and how long after a rank
was killed the last of the others has named it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from cables import two_namespaces
from manyhands.errors import WorkerFailed, format_bytes
from manyhands.lab.bench.harness import host_facts
from manyhands.places.external.links import open_heartbeats, open_links
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS, grouped
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.transport.link.interface import Link
from manyhands.transport.link.mesh import SharedMesh
from manyhands.transport.liveness import Alarm
from manyhands.transport.security import Security

SIZES = {1 << 16: 10, 1 << 20: 5, 25 << 20: 1}  # bytes, and sums per measurement
CLUSTERS = "8x2,16x4,32x8,64x16"  # ranks x hosts
TIMEOUT_S = 60.0
SUBNET, BUCKET = "10.231.80.", ["burst", "2mb", "limit", "16mb"]
TOKEN = b"a benchmark has no secrets"
_UNSHARED = "/var/run/netns/"


class Rank:
    """One rank: its links, its Gloo, and what it measured."""

    def __init__(self, rank: int, hosts: Sequence[range], addresses: Sequence[str], port: int) -> None:
        self.rank, self.world = rank, hosts[-1].stop
        self.here = next(ranks for ranks in hosts if rank in ranks)
        self.address = addresses[hosts.index(self.here)]
        timeout = timedelta(seconds=TIMEOUT_S)
        self.store = TCPStore(
            addresses[0], port, is_master=rank == 0, timeout=timeout, wait_for_workers=False
        )
        self.alarm = Alarm()

    def connect(self, near: Mapping[int, Link]) -> dict[str, float]:
        """Connect to all others, with heartbeats and with Gloo; when each began, and when all was done."""
        began = time.monotonic()
        far = [rank for rank in range(self.world) if rank not in self.here]
        common: Any = {"address": self.address, "timeout_s": TIMEOUT_S}
        security = Security.insecure()
        self.links = {
            **near,
            **open_links(
                self.rank, far, PrefixStore("links", self.store), token=TOKEN, security=security, **common
            ),
        }
        linked = time.monotonic()
        self.heartbeats = open_heartbeats(
            self.rank, self.world, PrefixStore("beats", self.store), on_lost=self.alarm.ring, **common
        )
        watched = time.monotonic()
        options: Any = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=self.address)]
        options._timeout = timedelta(seconds=TIMEOUT_S)
        self.gloo = ProcessGroupGloo(PrefixStore("gloo", self.store), self.rank, self.world, options)
        self.barrier()
        ended = time.monotonic()
        return {"links": began, "heartbeats": linked, "gloo": watched, "": ended}

    def ways(self) -> dict[str, Callable[[torch.Tensor], None]]:
        executors = {
            name: ScheduleExecutor(algorithm, self.rank, self.world, self.links, TIMEOUT_S, self.alarm)
            for name, algorithm in {
                "hierarchical": grouped(len(self.here)),
                "ring": ALGORITHMS["ring"],
            }.items()
        }
        return {
            **{name: executor.all_reduce for name, executor in executors.items()},
            "gloo": lambda vector: self.gloo.allreduce([vector]).wait(),
        }

    def barrier(self) -> None:
        self.gloo.barrier().wait()

    def measure(self, rounds: int, sizes: Mapping[int, int]) -> dict[str, list[tuple[float, float]]]:
        """By way and size, the seconds and the processor seconds of one sum in each round."""
        ways = self.ways()
        found: dict[str, list[tuple[float, float]]] = {}
        for num_bytes, times in sizes.items():
            begin = torch.arange(num_bytes // 4, dtype=torch.float32) % 1000 + self.rank
            total = (begin - self.rank) * self.world + self.world * (self.world - 1) / 2
            for name in [name for _ in range(rounds + 1) for name in ways]:
                vectors = [begin.clone() for _ in range(times)]
                self.barrier()
                began, cpu = time.monotonic(), time.process_time()
                for vector in vectors:
                    ways[name](vector)
                took = (time.monotonic() - began) / times, (time.process_time() - cpu) / times
                found.setdefault(f"{name} {num_bytes}", []).append(took)
                assert all(torch.equal(vector, total) for vector in vectors), f"{name} sums wrongly"
        return found

    def lose_one(self) -> dict[str, Any]:
        """The last rank dies between two sums; when it did, or when this one named it. All stay until all have."""
        self.barrier()
        executor = ScheduleExecutor(
            ALGORITHMS["direct"], self.rank, self.world, self.links, TIMEOUT_S, self.alarm
        )
        vector = torch.zeros(1 << 18)
        executor.all_reduce(vector)
        if self.rank == self.world - 1:
            return {"died": time.monotonic()}
        try:
            while True:
                executor.all_reduce(vector)
        except WorkerFailed as error:
            found = {"named": error.worker_rank, "at": time.monotonic()}
        self.store.add("named", 1)
        deadline = time.monotonic() + TIMEOUT_S
        while self.store.add("named", 0) < self.world - 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        return found


def be_rank(
    rank: int,
    hosts: Sequence[range],
    addresses: Sequence[str],
    port: int,
    near: Mapping[int, Link],
    options: argparse.Namespace,
    folder: str,
) -> None:
    """Measure, and leave a file with what was found; the last rank then kills itself."""
    torch.set_num_threads(1)
    one = Rank(rank, hosts, addresses, port)
    found: dict[str, Any] = {
        "connected": one.connect(near),
        "measured": one.measure(options.rounds, options.sizes),
    }
    found |= one.lose_one()
    one.heartbeats.close()
    if "died" in found:  # others may wait for it in vain from here on
        Path(folder, str(rank)).write_text(json.dumps(found))
        os.kill(os.getpid(), signal.SIGKILL)
    Path(folder, str(rank)).write_text(json.dumps(found))
    time.sleep(1.0 if rank == 0 else 0.0)  # it has the store


def run_cluster(
    world: int, num_hosts: int, options: argparse.Namespace, names: Sequence[str]
) -> dict[str, Any]:
    """Fork all ranks and combine what they found."""
    size = world // num_hosts
    hosts = [range(begin, begin + size) for begin in range(0, world, size)]
    addresses = [f"{SUBNET}{host + 1}" if names else "127.0.0.1" for host in range(num_hosts)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for host, ranks in enumerate(hosts):
                with SharedMesh(size) as mesh:
                    for place, rank in enumerate(ranks):
                        child = os.fork()
                        if child:
                            children.append(child)
                            continue
                        try:
                            if names:
                                with open(_UNSHARED + names[host]) as namespace:
                                    os.setns(namespace.fileno())
                            own = {
                                peer: [os.dup(one) for one in ends]
                                for peer, ends in mesh.descriptors(place).items()
                            }
                            mesh.close()  # what a process keeps hides a death
                            near = {ranks[peer]: link for peer, link in mesh.attach(place, own).items()}
                            be_rank(rank, hosts, addresses, port, near, options, folder)
                            os._exit(0)
                        except BaseException:
                            traceback.print_exc()
                            os._exit(1)
            statuses = [os.waitpid(child, 0)[1] for child in children]
            children.clear()
            assert not any(statuses[:-1]), f"ranks ended with {statuses}"
            found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(world)]
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    return combine(world, num_hosts, found)


def combine(world: int, num_hosts: int, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = []
    for key in found[0]["measured"]:
        way, num_bytes = key.split()
        rounds = list(zip(*(one["measured"][key][1:] for one in found), strict=True))  # the first warms up
        rows.append(
            {
                "way": way,
                "num_bytes": int(num_bytes),
                "seconds": statistics.median(max(took for took, _ in ranks) for ranks in rounds),
                "core_seconds": statistics.median(sum(cpu for _, cpu in ranks) for ranks in rounds),
            }
        )
    moments = {name: max(one["connected"][name] for one in found) for name in found[0]["connected"]}
    connected = {
        f"{name}_s": end - moments[name] for name, end in zip(moments, [*moments.values()][1:], strict=False)
    }
    *others, dead = found
    assert {one["named"] for one in others} == {world - 1}, "another rank was blamed"
    return {
        "ranks": world,
        "hosts": num_hosts,
        **connected,
        "named_s": max(one["at"] for one in others) - dead["died"],
        "rows": rows,
    }


def show(cluster: Mapping[str, Any]) -> None:
    print(
        f"{cluster['ranks']} ranks on {cluster['hosts']} hosts: connected in {cluster['links_s']:.2f} s, heartbeats "
        f"{cluster['heartbeats_s']:.2f} s, Gloo {cluster['gloo_s']:.2f} s; a killed rank is named by all others after "
        f"{cluster['named_s']:.2f} s"
    )
    for row in cluster["rows"]:
        print(
            f"  {format_bytes(row['num_bytes']):>9}  {row['way']:<13} {row['seconds'] * 1e3:9.1f} ms "
            f"{row['core_seconds']:8.3f} core-seconds"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clusters", default=CLUSTERS, help="ranks x hosts, separated by commas")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, separated by commas")
    parser.add_argument(
        "--rate", help="of a cable between two namespaces, as tc spells it; two hosts, needs root"
    )
    options = parser.parse_args()
    options.sizes = {int(size): SIZES.get(int(size), 1) for size in options.sizes.split(",")}
    facts, clusters = host_facts(), []
    with ExitStack() as stack:
        names = stack.enter_context(
            two_namespaces(SUBNET, options.rate, BUCKET) if options.rate else nullcontext([])
        )
        for words in options.clusters.split(","):
            world, hosts = map(int, words.split("x"))
            clusters.append(run_cluster(world, 2 if options.rate else hosts, options, names))
            show(clusters[-1])
    facts |= {"rounds": options.rounds, "rate": options.rate, "clusters": clusters}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"many-ranks-{facts['cores']}.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
