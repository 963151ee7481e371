"""What recording an event costs the worker, and how fast the parent reads, adds up and writes them.

Run: `python benchmarks/events.py`. Times are CPU time of the calling thread per event, a whole call as a
training loop makes it, the loop around it included. The cases are interleaved, round by round; the median is
shown with the best and the worst round, because a busy machine swings.

Then what that is of a training step: the digits under every strategy with two workers, the events of all roles
(servers, too) for each global batch counted from the event files, times the nanoseconds of one, over the median
step. That takes them as if one worker had recorded them all.
"""

import argparse
import json
import os
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from manyhands.engine.fitting import fit
from manyhands.observe.analyse.totals import Totals
from manyhands.observe.record.event_files import EventFileWriter
from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import RECORD, EventKind, Records
from manyhands.observe.record.recorded import read_run_events
from manyhands.workloads.tasks import TASKS

RESULTS = Path(__file__).resolve().parent / "results" / "events.json"
BATCH = 5_000
CAPACITY = 1 << 13
STRATEGIES = ("mirrored", "central", "allreduce algorithm=ring", "ps", "ps consistency=async", "hogwild")
WORKERS = 2
TARGET_PERCENT = 1.0
STEP = EventKind.STEP  # bound once, as a tight loop does: looking a member of an enum up costs 0.1 µs

# Another process that drains the ring fifty times as often as a collector does.
READER = """
import sys, time
from manyhands.observe.record.event_ring import EventRing

ring = EventRing.attach(int(sys.argv[1]))
print("ready", flush=True)
while True:
    ring.drain()
    time.sleep(0.001)
"""


def record(ring: EventRing) -> None:
    for i in range(BATCH):
        ring.record(STEP, 1_000_000_000 + i, 1000, step=i, count=64, value=0.5)


def clock() -> None:
    for _ in range(BATCH):
        time.monotonic_ns()


def pack(slots: memoryview, layout: struct.Struct) -> None:
    """The bytes alone, without order or bound."""
    for i in range(BATCH):
        layout.pack_into(slots, 64 * i, 1_000_000_000 + i, 1000, 4, 0, -1, i, 0, 0.5, i, 64, 0)


def sample() -> Records:
    records = np.zeros(BATCH, RECORD)
    index = np.arange(BATCH)
    records["kind"] = index % 4 + 1
    records["id"] = index
    records["step"] = index // 4
    records["start_ns"] = index * 100_000
    records["duration_ns"] = 100_000
    records["peer"] = -1
    return records


def ns_per_event(run: Callable[[], object]) -> float:
    begin = time.thread_time_ns()
    run()
    return (time.thread_time_ns() - begin) / BATCH


def measure(rounds: int, read_elsewhere: EventRing) -> dict[str, list[float]]:
    """Nanoseconds per event of every case, one figure a round."""
    figures: dict[str, list[float]] = {}
    records, totals = sample(), Totals(1)
    slots, layout = memoryview(bytearray(64 * BATCH)), struct.Struct("<QQHHiqQdQII")
    with EventRing.create(role=0, capacity=CAPACITY) as ring, tempfile.TemporaryDirectory() as folder:
        file = EventFileWriter.create(Path(folder), name="bench", role=0, max_bytes=1 << 40)
        for _ in range(rounds):
            ring.drain()
            took = {
                "record": ns_per_event(lambda: record(ring)),
                "drain": ns_per_event(ring.drain),
                "record, with a reader in another process": ns_per_event(lambda: record(read_elsewhere)),
                "time.monotonic_ns, for comparison": ns_per_event(clock),
                "struct.pack_into, for comparison": ns_per_event(lambda: pack(slots, layout)),
                "add to totals": ns_per_event(lambda: totals.update(records)),
                "append to file": ns_per_event(lambda: file.append(records)),
            }
            while ring.record(STEP, 0):
                pass
            took["record, ring full: dropped"] = ns_per_event(lambda: record(ring))
            for name, value in took.items():
                figures.setdefault(name, []).append(value)
        file.close(0)
    return figures


def summarise(figures: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "median_ns": round(statistics.median(values), 1),
            "best_ns": round(min(values), 1),
            "worst_ns": round(max(values), 1),
        }
        for name, values in figures.items()
    }


def overhead(strategy: str, steps: int, ns: float) -> dict[str, float]:
    """What recording is of a step of the digits."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # hogwild says that a dense model is not what it is for
        out = Path(folder) / "run"
        fit(TASKS["digits"].build(), strategy, workers=WORKERS, steps=steps, out=out)
        roles = read_run_events(out / "events").roles
    step_ns = np.concatenate([role.of(STEP)["duration_ns"] for role in roles])
    batches = len(np.unique(np.concatenate([role.of(STEP)["step"] for role in roles])))
    events = sum(len(role.records) for role in roles) / batches
    step_ms = float(np.median(step_ns)) / 1e6
    return {
        "roles": len(roles),
        "events_per_step": round(events, 1),
        "step_ms": round(step_ms, 3),
        "percent": round(100 * events * ns / (step_ms * 1e6), 3),
    }


def show_overhead(rows: dict[str, dict[str, float]], ns: float, steps: int) -> None:
    table = Table(
        title=f"recording as a share of a step, digits, {WORKERS} workers, {steps} steps, {ns:,.0f} ns per event"
    )
    for heading in (
        "strategy",
        "roles",
        "events per step",
        "median step",
        "share",
        f"at most {TARGET_PERCENT:g} %",
    ):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for strategy, row in rows.items():
        table.add_row(
            strategy,
            f"{row['roles']:.0f}",
            f"{row['events_per_step']:.1f}",
            f"{row['step_ms']:.2f} ms",
            f"{row['percent']:.2f} %",
            "yes" if row["percent"] <= TARGET_PERCENT else "NO",
        )
    Console().print(table)


def main() -> None:
    """Measure, print the table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--steps", type=int, default=200, help="of each strategy's run")
    arguments = parser.parse_args()
    with EventRing.create(role=0, capacity=CAPACITY) as ring:
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(ring.descriptor)],
            pass_fds=[ring.descriptor],
            stdout=subprocess.PIPE,
        )
        try:
            assert reader.stdout is not None
            reader.stdout.readline()
            cases = summarise(measure(arguments.rounds, ring))
        finally:
            reader.kill()
            reader.communicate()

    cores = len(os.sched_getaffinity(0))
    table = Table(title=f"nanoseconds per event, {arguments.rounds} rounds of {BATCH}, {cores} cores")
    for heading in ("", "median", "best", "worst"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, row in cases.items():
        table.add_row(name, *(f"{value:,.0f}" for value in row.values()))
    Console().print(table)

    ns = cases["record, with a reader in another process"]["median_ns"]
    shares = {strategy: overhead(strategy, arguments.steps, ns) for strategy in STRATEGIES}
    show_overhead(shares, ns, arguments.steps)

    machine = {"cores": cores, "machine": platform.machine(), "python": platform.python_version()}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(
        json.dumps(
            machine
            | {
                "rounds": arguments.rounds,
                "cases": cases,
                "overhead": {
                    "workers": WORKERS,
                    "steps": arguments.steps,
                    "ns_per_event": ns,
                    "strategies": shares,
                },
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
