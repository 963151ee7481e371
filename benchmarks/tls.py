"""What encryption costs: a link and a hub between two processes, with TLS and without, at three sizes.

    python benchmarks/tls.py [--rounds 15] [--sizes 67108864] [--out benchmarks/results/tls-16core.json]

One process sends several messages of a size, the other says when it has them all. The carriers take turns within each
round, so that a busy moment of the machine meets all of them; the median over rounds is reported, with what each end
took of a core for a gigabyte, and what was the limit: the network, the core of one end, or all cores. Bare sockets
stand beside ours, one and four of them: what Python's ssl can do at all, and what more connections would bring where
there are cores for them.

Over loopback; over loopback where the kernel paces each connection to a network's rate, for which nobody need be root;
and, where network namespaces are permitted, between two of them over a cable that a token bucket holds to a rate.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cables import inside, two_namespaces, why_no_namespaces
from manyhands.errors import format_bytes
from manyhands.transport.certificates import make_certificates
from tls_carriers import TIMEOUT_S, Carrier, OverSockets, Rendezvous, hold_to

SIZES = {1 << 16: 200, 1 << 20: 32, 1 << 26: 2}  # bytes, and messages per measurement
SUBNET = "10.231.78."
BUCKET = ["burst", "2mb", "limit", "16mb"]
PACED = {"loopback paced to 10 Gbit/s": 1.25e9, "loopback paced to 25 Gbit/s": 3.125e9}  # bytes per second
CABLES = {"10 Gbit/s": ("10gbit", 1.25e9), "1 Gbit/s": ("1gbit", 0.125e9)}
NEARLY = 0.85  # of a rate, or of a core, is as good as all of it


@dataclass(slots=True)
class Turns:
    """What one carrier did with messages of one size, a value per round."""

    rates: list[float] = field(default_factory=list)
    senders: list[float] = field(default_factory=list)
    receivers: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def take(self, carrier: Carrier, tensor: torch.Tensor, times: int) -> None:
        """One more round."""
        num_bytes = times * tensor.nbytes
        busy, begin, cpu_ns = _busy_and_all_ticks(), time.perf_counter(), time.process_time_ns()
        theirs_ns = carrier.send(tensor, times)
        self.rates.append(num_bytes / (time.perf_counter() - begin))
        self.senders.append((time.process_time_ns() - cpu_ns) / num_bytes)
        self.receivers.append(theirs_ns / num_bytes)
        worked, passed = (now - then for now, then in zip(_busy_and_all_ticks(), busy, strict=True))
        self.busy += [worked / passed] if passed else []

    def row(self, link_bytes_per_s: float | None) -> dict[str, Any]:
        """The medians without the first round, which warms up, and what they say about the limit."""
        rate, sender, receiver = (
            statistics.median(values[1:]) for values in (self.rates, self.senders, self.receivers)
        )
        busy = statistics.fmean(self.busy[1:]) if len(self.busy) > 1 else 0.0
        return {
            "bytes_per_s": rate,
            "best_bytes_per_s": max(self.rates[1:]),
            "core_seconds_per_gb": sender + receiver,
            "sender_core_seconds_per_gb": sender,
            "receiver_core_seconds_per_gb": receiver,
            "machine_busy": busy,
            "limit": limit(rate, link_bytes_per_s, sender * rate / 1e9, receiver * rate / 1e9, busy),
        }


def limit(
    bytes_per_s: float, link_bytes_per_s: float | None, sender: float, receiver: float, machine: float
) -> str:
    """What kept a carrier from being faster, from the cores that each end and the share that all programs used."""
    if link_bytes_per_s is not None and bytes_per_s >= NEARLY * link_bytes_per_s:
        return "link"
    if machine >= NEARLY:
        return "all cores"
    if max(sender, receiver) >= NEARLY:
        return "receiver's core" if receiver > sender else "sender's core"
    return "waiting for each other"


def _busy_and_all_ticks() -> tuple[int, int]:
    """What all cores together have worked, and what has passed for them, since the machine started."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)


def be_receiver(options: argparse.Namespace) -> None:
    used = Rendezvous(options.certificates / "b", options.receive, None).carriers()
    for num_bytes in options.sizes:
        target = torch.zeros(num_bytes // 4)
        for _ in range(options.rounds + 1):
            for carrier in used:
                carrier.receive(target, SIZES[num_bytes])
    for carrier in used:
        carrier.close()


def be_sender(options: argparse.Namespace) -> dict[str, Any]:
    used = Rendezvous(options.certificates / "a", "", json.loads(options.send)).carriers()
    if options.paced:
        hold_to(int(options.link_bytes_per_s), used)
    rows: list[dict[str, Any]] = []
    for num_bytes in options.sizes:
        tensor = torch.from_numpy(np.random.default_rng(num_bytes).random(num_bytes // 4, np.float32))
        turns = {carrier.name: Turns() for carrier in used}
        for _ in range(options.rounds + 1):
            for carrier in used:
                turns[carrier.name].take(carrier, tensor, SIZES[num_bytes])
        rows += [
            {"carrier": name, "num_bytes": num_bytes, **one.row(options.link_bytes_per_s)}
            for name, one in turns.items()
        ]
    [cipher] = {
        end.cipher()
        for carrier in used
        if isinstance(carrier, OverSockets)
        for end in carrier.ends
        if isinstance(end, ssl.SSLSocket)
    }
    for carrier in used:
        carrier.close()
    return {"cipher": cipher[0] if cipher else "", "rows": rows}


def compare(
    options: argparse.Namespace, words: Sequence[str], ends: Sequence[Sequence[str]], host: str
) -> dict[str, Any]:
    """Measure between two processes, each started by what stands in `ends`; the second listens at `host`."""
    sizes = ",".join(map(str, options.sizes))
    command = [sys.executable, __file__, "--rounds", str(options.rounds), "--sizes", sizes, *words]
    receiver = subprocess.Popen([*ends[1], *command, "--receive", host], stdout=subprocess.PIPE, text=True)
    try:
        assert receiver.stdout is not None
        addresses = receiver.stdout.readline()
        sender = subprocess.run(
            [*ends[0], *command, "--send", addresses],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=3600,
        )
        receiver.wait(TIMEOUT_S)
    finally:
        receiver.kill()
        receiver.wait()
    measured: dict[str, Any] = json.loads(sender.stdout)
    return measured


def places(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Every network that can be had here, measured."""
    files = ["--certificates", str(folder)]
    here: tuple[list[str], list[str]] = ([], [])
    yield {"place": "loopback", **compare(options, files, here, "127.0.0.1")}
    for name, rate in PACED.items():
        words = [*files, "--link-bytes-per-s", str(rate), "--paced"]
        yield {"place": name, "link_bytes_per_s": rate, **compare(options, words, here, "127.0.0.1")}
    if why := why_no_namespaces():
        print(f"no cables here: {why}")
        return
    for name, (tc_rate, rate) in CABLES.items():
        words = [*files, "--link-bytes-per-s", str(rate)]
        with two_namespaces(SUBNET, tc_rate, BUCKET) as names:
            ends = [inside(one) for one in names]
            yield {"place": name, "link_bytes_per_s": rate, **compare(options, words, ends, f"{SUBNET}2")}


def show(place: dict[str, Any]) -> None:
    print(f"{place['place']}, {place['cipher']}")
    plain = {}
    for row in place["rows"]:
        way, _, how = row["carrier"].partition(", ")
        if how == "plain":
            plain[row["num_bytes"], way] = row["bytes_per_s"]
        cost = 1 - row["bytes_per_s"] / plain[row["num_bytes"], way]
        print(
            f"{format_bytes(row['num_bytes']):>10}  {row['carrier']:<16} {row['bytes_per_s'] / 1e9:6.2f} GB/s"
            f"  best {row['best_bytes_per_s'] / 1e9:6.2f}  cost {100 * cost:4.0f} %  core s/GB: sender "
            f"{row['sender_core_seconds_per_gb']:.2f}, receiver {row['receiver_core_seconds_per_gb']:.2f}"
            f"  limit: {row['limit']}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--sizes", type=_sizes, default=list(SIZES), help=f"some of {','.join(map(str, SIZES))}, in bytes"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tls.json")
    parser.add_argument("--certificates", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    parser.add_argument("--send", help=argparse.SUPPRESS)
    parser.add_argument("--link-bytes-per-s", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--paced", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.receive:
        be_receiver(options)
        return
    if options.send:
        print(json.dumps(be_sender(options)))
        return
    load = os.getloadavg()[0]
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        make_certificates(Path(folder) / "run", ["a", "b"])
        for place in places(options, Path(folder) / "run"):
            show(place)
            measured.append(place)
    facts = {
        "cores": len(os.sched_getaffinity(0)),
        "load_before": load,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "openssl": ssl.OPENSSL_VERSION,
        "torch": torch.__version__,
        "rounds": options.rounds,
        "places": measured,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts, indent=1) + "\n")


def _sizes(text: str) -> list[int]:
    sizes = [int(word) for word in text.split(",")]
    if unknown := set(sizes) - set(SIZES):
        raise argparse.ArgumentTypeError(f"{unknown}: must be some of {', '.join(map(str, SIZES))}")
    return sizes


if __name__ == "__main__":
    main()
