"""Time to accuracy over a cable of 100 Mbit/s, 1 and 10 Gbit/s, codec by codec; needs root.

    python benchmarks/wire_time.py [--tasks mnist gpt] [--bandwidths 100Mbit 1Gbit 10Gbit] [--codecs raw fp16 …]

Two network namespaces stand for hosts, one worker on each, and a token bucket at each end of the cable for its speed.
Every codec trains until an evaluation first meets the target, and then in each further round, in turn with the others,
for a few steps. The table has the median step of all rounds, times how many there are to the target: the first steps
load code, which whoever is measured first would pay for. What all must beat is half precision:
`codec=fp16`, and DistributedDataParallel on Gloo with torch's own fp16 hook, whose exchange overlaps with backward (for
as many steps as `codec=fp16` needs). The result is kept after each pair of task and bandwidth, and what it has already
is not measured again, unless --fresh.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from cables import inside, places, run_ranks, two_namespaces
from manyhands.engine.callbacks import Callback
from manyhands.lab.compare.bandwidth import Rate
from manyhands.lab.compare.comparison import Target
from manyhands.workloads.language.gpt import GPTOptions, gpt
from manyhands.workloads.tasks.digits import digits
from manyhands.workloads.tasks.mnist import MnistOptions, mnist
from results_read import data_file

RESULT = Path(__file__).parent / "results" / "wire-time.json"
SUBNET = "10.231.80."
WORLD, PORT, LIMIT_S = 2, 29_700, 600
BANDWIDTHS = ("100Mbit", "1Gbit", "10Gbit")
DDP = "ddp fp16"
CODECS = ("raw", "fp16", DDP, "bf16", "int8", "qsgd", "sign", "topk:0.01", "dgc", "powersgd:2")
NAMED = {"dgc": "dgc:0.01,momentum=0,warmup=60"}  # AdamW has a momentum of its own
DDP_STEPS, DDP_WARM, ROUND_STEPS = 40, 10, 50
BUCKET_MB = 0.1  # of 25 MiB, all would be in one, and nothing overlap


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A task, what it is trained to, and in how many steps at most."""

    task: mh.Task
    data: str
    target: str
    steps: int
    evaluate_every: int = 10


def images() -> Trial:
    """MNIST, or scikit-learn's digits where its files are not there."""
    folder = data_file("mnist")
    task = digits() if folder is None else mnist(MnistOptions(path=folder, width=32, batch_size=64))
    assert task.evaluation is not None
    few = tuple(part[:1000] for part in task.evaluation)
    return Trial(
        task=replace(task, evaluation=few),
        data="mnist" if folder is not None else "scikit-learn's digits",
        target="accuracy=0.95",
        steps=500,
    )


def text() -> Trial:
    """A small transformer on Shakespeare, or Python's standard library."""
    name = "tinyshakespeare.txt.gz"
    sizes = {"layers": 2, "width": 64, "context": 32, "batch_size": 32, "evaluation_bytes": 16_384}
    return Trial(
        task=gpt(GPTOptions(path=data_file(name), **sizes)),
        data=name if data_file(name) is not None else "Python's standard library",
        target="evaluation_loss=2.75",
        steps=400,
    )


TRIALS = {"mnist": images, "gpt": text}


class Until(Callback):
    """Asks to stop when the target is met, and remembers the step."""

    def __init__(self, target: str) -> None:
        self.target = Target.parse(target)
        self.step: int | None = None

    def on_evaluate(self, row: Mapping[str, Any]) -> bool:
        if self.step is None and self.target.reached_by(row["metrics"][self.target.metric]):
            self.step = row["step"]
        return self.step is not None


def train_ours(trial: Trial, codec: str) -> dict[str, Any]:
    """Train to the target by `allreduce` in that codec."""
    until = Until(trial.target)
    options = mh.Options(
        evaluate_every=trial.evaluate_every, callbacks=[until], insecure=True, progress="none", check_every=0
    )
    strategy = (
        "allreduce link=tcp" if codec == "raw" else f"allreduce link=tcp codec={NAMED.get(codec, codec)}"
    )
    run = mh.fit(trial.task, strategy, steps=trial.steps, options=options)
    took = [row["seconds"] for row in run.history.steps]
    sent = max(worker["bytes_sent"] for worker in run.summary["per_worker"])
    return {
        "strategy": strategy,
        "steps": until.step,
        "seconds": sum(took[: until.step]) if until.step else None,
        "step_s": statistics.median(took),
        "busiest_bytes_per_step": sent / run.summary["steps"],
        "final": run.history.evaluations[-1]["metrics"][until.target.metric],
    }


def train_ddp(trial: Trial, rank: int) -> dict[str, Any]:
    """The time of a step, overlapped, in torch's half precision."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    task = trial.task
    model = DistributedDataParallel(task.model(), bucket_cap_mb=BUCKET_MB)
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = task.optimizer(model.parameters())
    data = [np.asarray(part) for part in (task.data if isinstance(task.data, tuple) else (task.data,))]
    share = task.batch_size // WORLD
    took = []
    for step in range(DDP_STEPS):
        begin = time.perf_counter()
        first = (step * WORLD + rank) * share
        batch = [torch.as_tensor(part[first : first + share].copy()) for part in data]
        optimizer.zero_grad()
        task.loss(model, batch if len(batch) > 1 else batch[0]).backward()
        optimizer.step()
        took.append(time.perf_counter() - begin)
    dist.destroy_process_group()
    return {"strategy": "DDP on Gloo, fp16_compress_hook", "step_s": statistics.median(took[DDP_WARM:])}


def work(name: str, result: Path, most_steps: int, rounds: int, codecs: list[str]) -> None:
    """One of the two processes: every codec, one after the other, round by round."""
    rank, cores = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(
        0, {cores[rank % len(cores)]}
    )  # a host of its own has a core of its own, and one thread
    torch.set_num_threads(1)
    trial = TRIALS[name]()
    for number, codec in product(range(rounds), codecs):
        steps = min(trial.steps, most_steps, ROUND_STEPS if number else most_steps)
        trained = replace(trial, steps=steps)
        measured = train_ddp(trained, rank) if codec == DDP else train_ours(trained, codec)
        if rank == 0:
            with result.open("a") as file:
                file.write(json.dumps({"codec": codec, **measured}) + "\n")
            print(f"{name:9s} {number + 1} {codec:12s} {measured}", flush=True)


def of_all_rounds(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a codec: of its first round, with the time of a step in each and their median."""
    first: dict[str, dict[str, Any]] = {}
    for line in lines:
        row = first.setdefault(line["codec"], {**line, "step_s_rounds": []})
        row["step_s_rounds"].append(line["step_s"])
        row["step_s"] = statistics.median(row["step_s_rounds"])
    return list(first.values())


def bucket(rate: Rate) -> list[str]:
    """A burst is short, or small gradients would cross the cable at no cost."""
    return ["burst", f"{max(16 * 1024, round(rate.bits_per_s / 8 * 0.00025))}b", "latency", "100ms"]


def measure(
    task: str, codecs: list[str], names: list[str], port: int, options: list[str]
) -> list[dict[str, Any]]:
    """What two processes, started once, found of these codecs; of a pair that failed, what it had by then."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "lines"
        own = [sys.executable, __file__, *options, "--work", task, str(result), *codecs]
        environments = [places(SUBNET, port, rank, WORLD) for rank in range(WORLD)]
        try:
            run_ranks([[*inside(host), *own] for host in names], environments, LIMIT_S)
        except SystemExit as error:
            print(f"{task}: {error}", flush=True)
        lines = result.read_text().splitlines() if result.exists() else []
        return of_all_rounds([json.loads(line) for line in lines])


def main() -> None:
    """Measure what is missing, bandwidth by bandwidth, and keep it after each pair."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--tasks", nargs="+", choices=TRIALS, default=list(TRIALS))
    reader.add_argument("--bandwidths", nargs="+", choices=BANDWIDTHS, default=list(BANDWIDTHS))
    reader.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    reader.add_argument("--fresh", action="store_true", help="measure again what is known")
    reader.add_argument("--most-steps", type=int, default=10**6, help="fewer steps, to try it out")
    reader.add_argument("--rounds", type=int, default=3, help="how often each is timed")
    reader.add_argument("--json", type=Path, default=RESULT)
    reader.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    asked = reader.parse_args()
    if asked.work:
        task, result, *codecs = asked.work
        work(task, Path(result), asked.most_steps, asked.rounds, codecs)
        return
    known = json.loads(asked.json.read_text())["rows"] if asked.json.exists() else []
    rows = {(row["task"], row["bandwidth"], row["codec"]): row for row in known}
    trials = {name: TRIALS[name]() for name in TRIALS}
    about = {
        "benchmark": "wire time",
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "workers": WORLD,
        "tasks": {
            name: {
                "data": trial.data,
                "target": str(Target.parse(trial.target)),
                "most_steps": trial.steps,
                "gradient_bytes": sum(parameter.nbytes for parameter in trial.task.model().parameters()),
            }
            for name, trial in trials.items()
        },
    }
    options = ["--most-steps", str(asked.most_steps), "--rounds", str(asked.rounds)]
    port, begin, lost = PORT, time.monotonic(), False
    for bandwidth in asked.bandwidths:
        rate = Rate.parse(bandwidth)
        with two_namespaces(SUBNET, f"{rate.bits_per_s}bit", bucket(rate)) as names:
            for task in asked.tasks:
                due = [one for one in asked.codecs if asked.fresh or (task, bandwidth, one) not in rows]
                load, found = os.getloadavg()[0], []
                for torchs in (False, True):  # which processes of ours do not share
                    start = [codec for codec in due if (codec == DDP) is torchs]
                    found += measure(task, start, names, port, options) if start else []
                    port += 1
                for row in found:
                    key = (task, bandwidth, row["codec"])
                    rows[key] = {"task": task, "bandwidth": bandwidth, "load_before": load, **row}
                lost = lost or len(found) < len(due)
                asked.json.write_text(json.dumps({**about, "rows": list(rows.values())}, indent=1) + "\n")
                took_s = time.monotonic() - begin
                print(f"{task} at {bandwidth}: {len(found)} of {len(due)}, {took_s:.0f} s", flush=True)
    if lost:
        raise SystemExit("some were lost; the same command again measures what is missing")


if __name__ == "__main__":
    main()
