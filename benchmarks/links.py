"""Round trips between two processes of one host: our links beside raw TCP on loopback and Gloo.

    python benchmarks/links.py [--rounds 15] [--out benchmarks/results/links.json]

The peer echoes what it receives. Carriers take turns within each round, so that a busy moment of the machine
meets all of them; the median over rounds is reported. A rate counts the bytes both ways.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from manyhands.errors import format_bytes
from manyhands.transport.link.interface import Flushed, Link, Message, Queued, Received
from manyhands.transport.link.shared_link import LinkDescriptors, SharedLink, SharedLinkFiles
from manyhands.transport.link.torch_p2p import TorchLink

SIZES = {1 << 10: 200, 1 << 16: 100, 1 << 20: 10, 1 << 26: 2}  # bytes, and round trips per measurement
TIMEOUT_S = 60.0


class Carrier(ABC):
    """One way to send a tensor to the other process and to receive one of the same size."""

    name: str

    @abstractmethod
    def send(self, tensor: torch.Tensor) -> None: ...

    @abstractmethod
    def receive(self, tensor: torch.Tensor) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class OverLink(Carrier):
    def __init__(self, name: str, link: Link) -> None:
        self.name = name
        self.link = link

    def send(self, tensor: torch.Tensor) -> None:
        outcome = self.link.send(Message(kind=0, payload=tensor))
        assert isinstance(outcome, Queued), outcome

    def receive(self, tensor: torch.Tensor) -> None:
        assert isinstance(self.link.flush(TIMEOUT_S), Flushed)  # the tensor may be the one just sent
        outcome = self.link.receive(TIMEOUT_S, tensor)
        assert isinstance(outcome, Received), outcome

    def close(self) -> None:
        self.link.close()


class OverTcp(Carrier):
    name = "TCP"

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection

    def send(self, tensor: torch.Tensor) -> None:
        self.connection.sendall(tensor.numpy().data)

    def receive(self, tensor: torch.Tensor) -> None:
        room = tensor.numpy().data.cast("B")
        while room:
            room = room[self.connection.recv_into(room) :]

    def close(self) -> None:
        self.connection.close()


class OverGloo(Carrier):
    name = "Gloo"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.peer = 1 - group.rank()

    def send(self, tensor: torch.Tensor) -> None:
        self.group.send([tensor], self.peer, 0).wait()

    def receive(self, tensor: torch.Tensor) -> None:
        self.group.recv([tensor], self.peer, 0).wait()

    def close(self) -> None:
        pass


def connect_gloo(store_path: str, rank: int) -> dist.ProcessGroup:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    group = dist.group.WORLD
    assert group is not None
    return group


def carriers(descriptors: LinkDescriptors, end: int, tcp: socket.socket, store_path: str) -> list[Carrier]:
    group = connect_gloo(store_path, end)
    shared = SharedLink.attach(descriptors, end=end, peer="the peer")
    return [
        OverLink("shared memory", shared),
        OverTcp(tcp),
        OverGloo(group),
        OverLink("torch p2p", TorchLink(group, 1 - end)),
    ]


def measure(carrier: Carrier, tensor: torch.Tensor, target: torch.Tensor, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        carrier.send(tensor)
        carrier.receive(target)
    return (time.perf_counter() - start) / times


def echo(carrier: Carrier, target: torch.Tensor, times: int) -> None:
    for _ in range(times):
        carrier.receive(target)
        carrier.send(target)


def be_the_peer(rounds: int, arguments: list[str]) -> None:
    segment, lifeline, port, store_path = arguments
    tcp = socket.create_connection(("127.0.0.1", int(port)), TIMEOUT_S)
    used = carriers(LinkDescriptors(int(segment), int(lifeline)), 1, tcp, store_path)
    for num_bytes, times in SIZES.items():
        target = torch.zeros(num_bytes // 4)
        for _ in range(rounds + 1):
            for carrier in used:
                echo(carrier, target, times)
    for carrier in used:
        carrier.close()


def compare(rounds: int) -> list[dict[str, float | int | str]]:
    """Measure every carrier at every size, against a peer started for it."""
    rows: list[dict[str, float | int | str]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        SharedLinkFiles.create() as files,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        store_path = f"{folder}/store"
        theirs = files.descriptors(1)
        port = server.getsockname()[1]
        command = [sys.executable, __file__, "--rounds", str(rounds), "--peer", *map(str, theirs), str(port)]
        peer = subprocess.Popen([*command, store_path], pass_fds=theirs)
        server.settimeout(TIMEOUT_S)
        mine = LinkDescriptors(*map(os.dup, files.descriptors(0)))
        files.close()
        try:
            used = carriers(mine, 0, server.accept()[0], store_path)
            for num_bytes, times in SIZES.items():
                tensor, target = torch.randn(num_bytes // 4), torch.zeros(num_bytes // 4)
                taken: dict[str, list[float]] = {carrier.name: [] for carrier in used}
                for _ in range(rounds + 1):
                    for carrier in used:
                        taken[carrier.name].append(measure(carrier, tensor, target, times))
                        assert torch.equal(tensor, target)
                for name, seconds in taken.items():
                    typical = statistics.median(seconds[1:])  # the first round warms up
                    rows.append({"link": name, "num_bytes": num_bytes, "round_trip_s": typical})
            for carrier in used:
                carrier.close()
            peer.wait(TIMEOUT_S)
        finally:
            peer.kill()
            peer.wait()
    return rows


def print_table(rows: list[dict[str, float | int | str]]) -> None:
    print(f"{'size':>10}  {'link':<14} {'round trip':>12} {'rate':>12} {'TCP ÷ this':>11}")
    tcp = {row["num_bytes"]: float(row["round_trip_s"]) for row in rows if row["link"] == "TCP"}
    for row in rows:
        num_bytes, seconds = int(row["num_bytes"]), float(row["round_trip_s"])
        rate = f"{2 * num_bytes / seconds / 2**30:.2f} GiB/s"
        print(
            f"{format_bytes(num_bytes):>10}  {row['link']:<14} {seconds * 1e6:>9.1f} µs {rate:>12}"
            f" {tcp[num_bytes] / seconds:>10.1f}x"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "links.json")
    parser.add_argument("--peer", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peer:
        be_the_peer(options.rounds, options.peer)
        return
    load = os.getloadavg()[0]
    rows = compare(options.rounds)
    print_table(rows)
    facts = {
        "cores": len(os.sched_getaffinity(0)),
        "load_before": load,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": options.rounds,
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
