"""Pipelines: measured steps beside the formula of their bubble and beside `torch.distributed.pipelining` on Gloo.

    python benchmarks/pipeline.py [--stages 2,4,8] [--schedules naive,gpipe,1f1b] [--rounds 3] [--json FILE]

On 16 cores: `--layers "" --schedules gpipe,1f1b --json benchmarks/results/pipeline-16.json`.

Everybody trains the same chain of eight equal transformer blocks on the same batches with the same cuts, one core and
one thread per stage, in processes that are pinned to as many cores as there are stages. Contenders take turns, round by
round; a round is the median of its steps, and the table has the median of the rounds.

`compute` is what the busiest stage computes in a step, from the run's own events; with the bubble of the formula it is
(m + p - 1) / m times that for m micro-batches on p stages, and p times that where the layers are split and nothing
overlaps (`naive`, for which torch has no schedule). `alone` is one process on one core: where `compute` is above a p-th
of it, cores that are busy at the same time slow each other down.

The wavefront is an LSTM of L layers over T time steps, with a worker and a thread for each layer, all on two cores: the
recurrent task under `pipeline schedule=wavefront`, beside the same workers layer by layer (one slice of time, so that a
layer is through with all of T before the next begins), and beside one process with both cores. Batches are so large
that a slice of time has enough to compute: `nn.LSTM` has a cost for every call, whatever it is given.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import manyhands as mh
from manyhands.observe.record.events import EventKind, to_events
from manyhands.observe.record.recorded import read_run_events
from manyhands.workloads.language.gpt import GPTBlock
from manyhands.workloads.tasks import build

RESULTS = Path(__file__).resolve().parent / "results" / "pipeline.json"
BLOCKS, WIDTH, HEADS, CONTEXT, SAMPLES = 8, 256, 4, 64, 32
WARM_UP, STEPS = 2, 16
TORCH_HAS = ("gpipe", "1f1b")
SCHEDULES = ("naive", *TORCH_HAS)
Paces = dict[str, float]
TIME_STEPS, SLICES, WAVE_CORES, WAVE_STEPS = 128, 16, 2, 4
RECURRENT = {"width": 256, "context": TIME_STEPS, "batch_size": 256}
WAVE_CONTENDERS = ("wavefront", "layer by layer", "one process")


def chain() -> nn.Sequential:
    return nn.Sequential(*(GPTBlock(width=WIDTH, heads=HEADS) for _ in range(BLOCKS)))


def distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batches() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES * 4, CONTEXT, WIDTH, generator=generator)
    return inputs, inputs.roll(1, dims=1)


def chain_task(microbatches: int = 1) -> mh.Task:
    return mh.Task(
        model=chain,
        loss=lambda model, batch: distance(model(batch[0]), batch[1]),
        data=batches(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch_size=SAMPLES,
        microbatches=microbatches,
    )


def pace(task: mh.Task, strategy: str, workers: int, out: Path | None = None, *, steps: int = STEPS) -> float:
    """Seconds of the median step of `fit` after the warm ones."""
    options = mh.Options(evaluate_every=10**9, checkpoint_every=10**9, progress="none")
    run = mh.fit(task, strategy, workers=workers, steps=WARM_UP + steps, options=options, out=out)
    ends = [row["at_s"] for row in run.history.steps]
    return statistics.median(b - a for a, b in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False))


def busiest(run: Path) -> float:
    """Seconds that the stage with the most to do computes in the median step after the warm ones."""
    computed: dict[int, dict[int, int]] = {}
    for role in read_run_events(run / "events").roles:
        for event in to_events(role.of(EventKind.COMPUTE)):
            if event.step >= WARM_UP:
                of_step = computed.setdefault(event.step, {})
                of_step[role.role] = of_step.get(role.role, 0) + event.duration_ns
    return statistics.median(max(of_step.values()) for of_step in computed.values()) / 1e9


def ours(stages: int, microbatches: int, schedule: str) -> Paces:
    cuts = ",".join(str(stage * BLOCKS // stages) for stage in range(1, stages))
    strategy = f"pipeline stages={stages} microbatches={microbatches} cuts={cuts}"
    paces = {}
    with tempfile.TemporaryDirectory() as folder:
        for word in SCHEDULES:
            if word in schedule.split("+"):
                out = Path(folder) / word
                paces[word] = pace(chain_task(), f"{strategy} schedule={word}", stages, out)
                paces[f"{word} compute"] = busiest(out)
    return paces


def alone(_: int, microbatches: int, __: str) -> Paces:
    torch.set_num_threads(1)
    return {"": pace(chain_task(microbatches), "single", 1)}


def peer(stages: int, microbatches: int, schedule: str) -> Paces:
    """torch's own, in a process per stage."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, __file__, "--stage", f"{stages},{microbatches},{schedule},{port}"]
    started = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(stages)
    ]
    try:
        report = [json.loads(process.communicate(timeout=300)[0]) for process in started]
    finally:
        for process in started:
            process.kill()
    return {word: max(one[word] for one in report) for word in report[0]}


def peer_stage(rank: int, stages: int, microbatches: int, schedule: str, port: int) -> Paces:
    import torch.distributed as dist
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, stages, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=stages)
    kinds = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
    wanted = schedule.split("+")
    paces = {
        word: peer_pace(rank, stages, microbatches, kind) for word, kind in kinds.items() if word in wanted
    }
    dist.barrier()
    dist.destroy_process_group()
    return paces


def peer_pace(rank: int, stages: int, microbatches: int, kind: Any) -> float:
    from torch.distributed.pipelining import PipelineStage

    torch.manual_seed(0)
    blocks = list(chain())
    each = BLOCKS // stages
    part = nn.Sequential(*blocks[rank * each : (rank + 1) * each])
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-4)
    stage = PipelineStage(part, rank, stages, torch.device("cpu"))
    runner = kind(stage, microbatches, loss_fn=distance)
    inputs, targets = batches()
    ends = []
    for step in range(WARM_UP + STEPS):
        chosen = slice(step % 4 * SAMPLES, (step % 4 + 1) * SAMPLES)
        given = [inputs[chosen]] if rank == 0 else []
        more: dict[str, Any] = {"target": targets[chosen], "losses": []} if rank == stages - 1 else {}
        runner.step(*given, **more)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return statistics.median(b - a for a, b in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False))


def recurrent(layers: int) -> mh.Task:
    task = build("recurrent", layers=layers, **RECURRENT)
    return mh.Task(
        model=task.model,
        loss=task.loss,
        data=task.data,
        optimizer=task.optimizer,
        batch_size=task.batch_size,
    )


def wavefront(layers: int, slices: int, _: str) -> Paces:
    """A stage for each layer; the first has the embedding too, and the last the head."""
    cuts = ",".join(str(layer + 1) for layer in range(1, layers))
    strategy = f"pipeline stages={layers} microbatches={slices} schedule=wavefront cuts={cuts}"
    return {"": pace(recurrent(layers), strategy, layers, steps=WAVE_STEPS)}


def layer_by_layer(layers: int, _: int, __: str) -> Paces:
    return wavefront(layers, 1, "")


def one_process(layers: int, _: int, __: str) -> Paces:
    return {"": pace(recurrent(layers), "single", 1, steps=WAVE_STEPS)}


CONTENDERS: dict[str, Callable[[int, int, str], Paces]] = {
    "ours": ours,
    "torch": peer,
    "alone": alone,
    "wavefront": wavefront,
    "layer by layer": layer_by_layer,
    "one process": one_process,
}


def apart(cores: int) -> list[int]:
    """So many of the allowed cores, one hardware thread of each before the second of any."""
    allowed = sorted(os.sched_getaffinity(0))

    def siblings(cpu: int) -> str:
        file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        return file.read_text().strip() if file.exists() else str(cpu)

    first = {siblings(cpu): cpu for cpu in reversed(allowed)}
    ordered = [*sorted(first.values()), *(cpu for cpu in allowed if cpu not in first.values())]
    return ordered[:cores]


def measured(name: str, stages: int, microbatches: int, schedule: str, cores: int) -> Paces:
    """One contender in a process of its own, pinned to so many cores: its paces by schedule."""
    allowed = apart(cores)
    done = subprocess.run(
        [sys.executable, __file__, "--contender", name, "--case", f"{stages},{microbatches},{schedule}"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
        preexec_fn=lambda: os.sched_setaffinity(0, allowed),
    )
    paces: Paces = json.loads(done.stdout.splitlines()[-1])
    return paces


def stage_rows(
    stages: list[int],
    schedules: list[str],
    microbatches: int,
    rounds: int,
    keep: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """The rows; `keep` gets those so far after each round."""
    wanted = "+".join(schedules)
    seen: dict[tuple[int, str, str], list[float]] = {}
    rows: list[dict[str, Any]] = []
    for _ in range(rounds if stages else 0):
        seen.setdefault((1, "", "alone"), []).append(measured("alone", 1, microbatches, "", 1)[""])
        for count in stages:
            for name in ("ours", "torch"):
                for schedule, found in measured(name, count, microbatches, wanted, count).items():
                    seen.setdefault((count, schedule, name), []).append(found)
        whole = statistics.median(seen[1, "", "alone"])
        rows = [
            stage_row(count, schedule, microbatches, whole, seen)
            for count in stages
            for schedule in schedules
        ]
        keep(rows)
    return rows


def stage_row(
    count: int,
    schedule: str,
    microbatches: int,
    whole: float,
    seen: dict[tuple[int, str, str], list[float]],
) -> dict[str, Any]:
    bubble = (count - 1) / (count if schedule == "naive" else microbatches + count - 1)
    mine, compute = (
        statistics.median(seen[count, word, "ours"]) for word in (schedule, f"{schedule} compute")
    )
    rounds = seen.get((count, schedule, "torch"))
    torchs = statistics.median(rounds) if rounds is not None else None
    return {
        "schedule": schedule,
        "stages": count,
        "microbatches": microbatches,
        "alone_s": whole,
        "compute_s": compute,
        "ours_s": mine,
        "torch_s": torchs,
        "over_formula": mine / (compute / (1 - bubble)),
        "torch_over_ours": torchs / mine if torchs is not None else None,
        "bubble_formula": bubble,
        "bubble_measured": 1 - compute / mine,
        "rounds": {"ours": seen[count, schedule, "ours"], "torch": rounds},
    }


def wave_rows(layers: list[int], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for count in layers:
        found: dict[str, list[float]] = {name: [] for name in WAVE_CONTENDERS}
        for _ in range(rounds):
            for name, times in found.items():
                times.append(measured(name, count, SLICES, "", WAVE_CORES)[""])
        rows.append(wave_row(count, found))
    return rows


def wave_row(layers: int, rounds: dict[str, list[float]]) -> dict[str, Any]:
    wave, layered, alone_s = (statistics.median(rounds[name]) for name in WAVE_CONTENDERS)
    return {
        "layers": layers,
        "time_steps": TIME_STEPS,
        "slices": SLICES,
        "width": RECURRENT["width"],
        "batch_size": RECURRENT["batch_size"],
        "workers": layers,
        "cores": WAVE_CORES,
        "wavefront_s": wave,
        "layer_by_layer_s": layered,
        "one_process_s": alone_s,
        "speed_up": layered / wave,
        "rounds": rounds,
    }


def show(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    names = [name for name in rows[0] if name != "rounds"] if rows else []
    for name in names:
        table.add_column(name)
    for row in rows:
        cells = (row[name] for name in names)
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell or "–") for cell in cells))
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", default="2,4,8")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--layers", default="2,3,4", help="of the LSTM; empty: none")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        count, microbatches, schedule, port = options.stage.split(",")
        print(json.dumps(peer_stage(options.rank, int(count), int(microbatches), schedule, int(port))))
        return
    if options.contender:
        count, microbatches, schedule = options.case.split(",")
        print(json.dumps(CONTENDERS[options.contender](int(count), int(microbatches), schedule)))
        return
    cores = len(os.sched_getaffinity(0))
    stages = [int(word) for word in options.stages.split(",") if word]
    layers = [int(word) for word in options.layers.split(",") if word]
    about = {"cores": cores, "python": platform.python_version(), "torch": torch.__version__}

    before = json.loads(options.json.read_text()) if options.json.exists() else {}

    def keep(**rows: list[dict[str, Any]]) -> None:
        """Write these; what is not measured this time stays as it was."""
        before.update(about, **rows)
        options.json.write_text(json.dumps(before, indent=1) + "\n")

    schedules = [word for word in SCHEDULES if word in options.schedules.split(",")]
    pipelines = stage_rows(
        stages, schedules, options.microbatches, options.rounds, lambda rows: keep(pipelines=rows)
    )
    wavefronts = wave_rows(layers, options.rounds)
    if layers:
        keep(wavefronts=wavefronts)
    show(pipelines, f"pipelines: seconds a step, {cores} cores, median of {options.rounds} rounds")
    show(wavefronts, f"LSTM over {TIME_STEPS} time steps")


if __name__ == "__main__":
    main()
