"""On one GPU with two ranks: sums by NCCL held against one process, and the time of a step beside DDP's.

    python benchmarks/gpu_nccl.py [--json benchmarks/results/gpu-nccl.json] [--checks]

Two ranks on one GPU are two hosts to NCCL (NCCL_HOSTID), which then goes through sockets of the loopback: slower than
between GPUs, and the same for everybody who is timed here. `--checks` leaves the timing out. It ends by itself within
three minutes, with status 1 where something is not as it should be.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyhands as mh
from manyhands.data.batches import BatchPlan, BatchSource
from manyhands.engine.device import moved
from manyhands.workloads.tasks import build

DEVICE = "cuda:0"
RANKS = 2
SMALL = {"layers": 2, "width": 64, "heads": 2, "context": 64, "batch_size": 16}
LARGE = {"layers": 8, "width": 512, "heads": 8, "context": 256, "batch_size": 32}
WARM_UP, TIMED = 4, 10
OURS = ("allreduce link=nccl", "allreduce link=tcp", "allreduce")
DEADLINE_S = 170.0


def options(**more: Any) -> mh.Options:
    return mh.Options(progress="none", evaluate_every=10**9, timeout_s=60.0, **more)


def steady(task: mh.Task, dtype: torch.dtype) -> mh.Task:
    """The task without evaluation, by momentum SGD: AdamW would magnify differences of rounding."""
    return mh.Task(
        model=lambda: task.model().to(dtype),
        loss=task.loss,
        data=task.data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        batch_size=task.batch_size,
    )


def tasks() -> dict[str, tuple[mh.Task, int, float]]:
    """By name: the task, for how many steps, and how far two ranks may be from one process."""
    gpt, digits = build("gpt", **SMALL), build("digits")
    double = steady(gpt, torch.float64)
    return {
        "gpt, float64": (double, 20, 1e-9),
        "gpt, float64, clipped, 2 micro-batches": (
            replace(double, clip_norm=0.5, microbatches=2),
            20,
            1e-9,
        ),
        "gpt, float32": (steady(gpt, torch.float32), 20, 1e-4),
        # In float64: cuDNN chooses how it convolves by the size of the batch, which two ranks halve.
        "digits, float64": (steady(digits, torch.float64), 20, 1e-9),
    }


def digest(model: nn.Module) -> str:
    values = [value.detach().cpu().double().flatten() for value in model.state_dict().values()]
    return hashlib.sha256(torch.cat(values).numpy().tobytes()).hexdigest()[:16]


def distance(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    return max(
        float((ours[name].double() - one.double()).norm() / one.double().norm().clamp(min=1e-30))
        for name, one in reference.items()
    )


# What each rank does.


def rank_checks(folder: Path) -> None:
    """Every task by NCCL, whole and resumed."""
    rank = int(os.environ["RANK"])
    report: dict[str, Any] = {}
    for name, (task, steps, _) in tasks().items():
        run = mh.fit(task, "allreduce link=nccl", steps=steps, device=DEVICE, options=options())
        report[name] = {
            "digest": digest(run.model),
            "sums": run.summary["sums"],
            "notes": run.summary["notes"],
        }
        torch.save(run.model.state_dict(), folder / f"{name}.{rank}")
    task, steps, _ = tasks()["gpt, float64"]
    out = folder / f"run-{rank}"
    asked = {"device": DEVICE, "out": out, "options": options(checkpoint_every=5)}
    mh.fit(task, "allreduce link=nccl", steps=steps // 2, **asked)
    run = mh.fit(task, "allreduce link=nccl", steps=steps, resume=True, **asked)
    torch.save(run.model.state_dict(), folder / f"resumed.{rank}")
    report["shared"] = mh.fit(task, "mirrored", steps=2, device=DEVICE, options=options()).summary["sums"]
    (folder / f"told-{rank}.json").write_text(json.dumps(report))


def rank_killed(folder: Path) -> None:
    """Rank 1 is killed in its fifth step; rank 0 tells what it heard, and when."""
    rank = int(os.environ["RANK"])
    task, _, _ = tasks()["gpt, float32"]
    calls = [0]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 5:
            (folder / f"fifth-{rank}").write_text(str(time.time()))
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return task.loss(model, batch)

    try:
        mh.fit(replace(task, loss=loss), "allreduce link=nccl", steps=50, device=DEVICE, options=options())
        said = "came to its end"
    except mh.ManyhandsError as error:
        said = str(error).splitlines()[0]
    since = time.time() - float((folder / "fifth-1").read_text())
    (folder / "killed.json").write_text(json.dumps({"said": said, "seconds": since}))


def rank_speed(folder: Path) -> None:
    """Seconds of each timed step: ours, and DDP's on NCCL, in turns."""
    rank = int(os.environ["RANK"])
    task = build("gpt", **LARGE)
    task = mh.Task(model=task.model, loss=task.loss, data=task.data, optimizer=task.optimizer, batch_size=32)
    steps = WARM_UP + TIMED
    paces: dict[str, list[float]] = {}
    for turn in range(2):
        for strategy in OURS if turn == 0 else OURS[:1]:
            run = mh.fit(task, strategy, steps=steps, device=DEVICE, options=options(autocast=True))
            ends = [row["at_s"] for row in run.history.steps]
            paces.setdefault(strategy, []).append((ends[-1] - ends[WARM_UP - 1]) / TIMED)
        paces.setdefault("DDP on NCCL", []).append(ddp_pace(task, steps, rank))
    torch.distributed.destroy_process_group()
    if rank == 0:
        parameters = sum(parameter.numel() for parameter in task.model().parameters())
        (folder / "speed.json").write_text(json.dumps({"parameters": parameters, "seconds_per_step": paces}))


def ddp_pace(task: mh.Task, steps: int, rank: int) -> float:
    device = torch.device(DEVICE)
    if not torch.distributed.is_initialized():
        torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(task.model().to(device), device_ids=[device.index])
    optimizer = task.optimizer(model.parameters())
    source = BatchSource(task.data)
    plan = BatchPlan(len(source), task.batch_size, 0)
    began = 0.0
    for step in range(steps):
        if step == WARM_UP:
            torch.cuda.synchronize()
            began = time.perf_counter()
        indices = plan.indices(step)
        half = len(indices) // RANKS
        batch = moved(source.fetch(indices[rank * half : (rank + 1) * half]), device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / (steps - WARM_UP)


# What the caller does.


def torchrun(deed: str, folder: Path, deadline: float) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*launcher, __file__, "--rank", deed, "--folder", str(folder)]
    process = subprocess.Popen(command)
    try:
        status = process.wait(timeout=max(1.0, deadline - time.monotonic()))
    finally:
        process.terminate()  # and it ends its ranks
        process.wait(timeout=40)
    if status != 0:
        sys.exit(f"WRONG: {deed} ended with status {status}")


def by_hand(deed: str, folder: Path, deadline: float) -> None:
    """As torchrun would start them, which ends all of them when one dies."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS)}
    command = [sys.executable, __file__, "--rank", deed, "--folder", str(folder)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)}) for rank in range(RANKS)
    ]
    try:
        for rank in ranks:
            rank.wait(timeout=max(1.0, deadline - time.monotonic()))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(timeout=10)


def checks(folder: Path, deadline: float) -> tuple[dict[str, Any], list[str]]:
    """What was found, and what is wrong with it."""
    reference = {
        name: mh.fit(task, "single", steps=steps, device=DEVICE, options=options()).model.state_dict()
        for name, (task, steps, _) in tasks().items()
    }
    torchrun("checks", folder, deadline)
    report = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(RANKS)]
    found: dict[str, Any] = {"distance": {}}
    wrong = []
    for name, (_, _, allowed) in tasks().items():
        ours = [torch.load(folder / f"{name}.{rank}", weights_only=True) for rank in range(RANKS)]
        far = found["distance"][name] = distance(ours[0], reference[name])
        if not far <= allowed:
            wrong.append(f"{name}: differs from one process by {far:.1e}, more than {allowed:.0e}")
        if len({one[name]["digest"] for one in report}) != 1:
            wrong.append(f"{name}: the ranks have different weights")
        if report[0][name]["sums"]["by"] != "nccl":
            wrong.append(f"{name}: {report[0][name]['sums']}")
    found["notes"] = report[0]["gpt, float32"]["notes"]
    resumed = torch.load(folder / "resumed.0", weights_only=True)
    far = found["distance"]["gpt, float64, resumed"] = distance(resumed, reference["gpt, float64"])
    if not far <= 1e-9:
        wrong.append(f"a resumed run differs from one process by {far:.1e}")
    found["on one GPU without being asked"] = report[0]["shared"]
    if report[0]["shared"]["by"] != "links":
        wrong.append(f"ranks that share a GPU: {report[0]['shared']}")
    by_hand("killed", folder, deadline)
    found["killed"] = json.loads((folder / "killed.json").read_text())
    if "worker 1 on" not in found["killed"]["said"] or found["killed"]["seconds"] > 20:
        wrong.append(f"rank 1 was killed: {found['killed']}")
    return found, wrong


def speed(folder: Path, deadline: float) -> dict[str, Any]:
    torchrun("speed", folder, deadline)
    timed = json.loads((folder / "speed.json").read_text())
    medians = {name: statistics.median(turns) for name, turns in timed["seconds_per_step"].items()}
    return {**timed, "times_ddp": {name: pace / medians["DDP on NCCL"] for name, pace in medians.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--rank", choices=("checks", "killed", "speed"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if arguments.rank is not None:
        os.environ["NCCL_HOSTID"] = f"rank-{os.environ['RANK']}"  # before NCCL is used
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
        {"checks": rank_checks, "killed": rank_killed, "speed": rank_speed}[arguments.rank](arguments.folder)
        return
    deadline = time.monotonic() + DEADLINE_S
    with tempfile.TemporaryDirectory() as name:
        found, wrong = checks(Path(name), deadline)
        result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **found}
        print(json.dumps(found, indent=1), flush=True)
        if not arguments.checks:
            result["speed"] = speed(Path(name), deadline)
            for strategy, times in result["speed"]["times_ddp"].items():
                paces = ", ".join(
                    f"{1e3 * pace:.1f} ms" for pace in result["speed"]["seconds_per_step"][strategy]
                )
                print(f"{strategy:<22} {paces}: {times:.2f} × DDP on NCCL")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    for sentence in wrong:
        print(f"WRONG: {sentence}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
