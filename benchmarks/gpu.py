"""On a GPU: our loop beside the plain PyTorch loop, and every strategy beside the plain result.

    python benchmarks/gpu.py [--json benchmarks/results/gpu.json]

The two loops train the same model of about 100 M parameters on the same batches with bfloat16 autocast, taking turns;
the median turn counts. The strategies train a small model in float32 with momentum SGD on the same GPU and are held
against the single process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import manyhands as mh
from manyhands.data.batches import BatchPlan, BatchSource
from manyhands.engine.device import moved
from manyhands.workloads.tasks import build

LARGE = {"layers": 14, "width": 768, "heads": 12, "context": 512, "batch_size": 32}
SMALL = {"layers": 2, "width": 64, "heads": 2, "context": 64, "batch_size": 16}
WARM_UP = 5


def plain_pace(task: mh.Task, steps: int) -> float:
    """Seconds per step of the loop that a reader of PyTorch's tutorials would write, which never waits for the GPU."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = task.model().to(device)
    optimizer = task.optimizer(model.parameters())
    source = BatchSource(task.data)
    plan = BatchPlan(len(source), task.batch_size, 0)
    began = 0.0
    for step in range(steps):
        if step == WARM_UP:
            torch.cuda.synchronize()
            began = time.perf_counter()
        batch = moved(source.fetch(plan.indices(step)), device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / (steps - WARM_UP)


def our_pace(task: mh.Task, steps: int, strategy: str) -> float:
    """The same of `fit`, from the end of the last warm step to the end of the last."""
    run = mh.fit(
        task,
        strategy,
        workers=1,
        steps=steps,
        device="cuda",
        options=mh.Options(autocast=True, evaluate_every=10**9),
    )
    ends = [row["at_s"] for row in run.history.steps]
    return (ends[-1] - ends[WARM_UP - 1]) / (steps - WARM_UP)


def speed(turns: int, steps: int) -> dict[str, Any]:
    task = build("gpt", **LARGE)
    task = mh.Task(model=task.model, loss=task.loss, data=task.data, optimizer=task.optimizer, batch_size=32)
    tokens = task.batch_size * LARGE["context"]
    parameters = sum(parameter.numel() for parameter in task.model().parameters())
    paces: dict[str, list[float]] = {"plain": [], "single": [], "mirrored": []}
    for _ in range(turns):
        paces["plain"].append(plain_pace(task, steps))
        for strategy in ("single", "mirrored"):
            paces[strategy].append(our_pace(task, steps, strategy))
    rows = {
        name: {
            "tokens_per_s": tokens / statistics.median(values),
            "turns_tokens_per_s": [tokens / value for value in values],
        }
        for name, values in paces.items()
    }
    for row in rows.values():
        row["times_plain"] = row["tokens_per_s"] / rows["plain"]["tokens_per_s"]
    return {"parameters": parameters, "tokens_per_step": tokens, "steps_per_turn": steps, "loops": rows}


def equality(steps: int) -> dict[str, float]:
    """The largest ‖ours − single‖ / ‖single‖ over all tensors, after `steps` steps in float32."""
    task = build("gpt", **SMALL)
    task = mh.Task(
        model=task.model,
        loss=task.loss,
        data=task.data,
        # AdamW would magnify differences of rounding: two orders of magnitude in twenty steps of float32.
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        batch_size=16,
    )
    options = mh.Options(evaluate_every=10**9)
    reference = mh.fit(task, "single", steps=steps, device="cuda", options=options).model.state_dict()
    distances = {}
    for strategy, workers in (
        ("mirrored", 2),
        ("central", 1),
        ("central", 2),
        ("allreduce algorithm=ring", 2),
    ):
        ours = mh.fit(
            task, strategy, workers=workers, steps=steps, device="cuda", options=options
        ).model.state_dict()
        distances[f"{strategy}, {workers} workers"] = max(
            float((ours[name] - reference[name]).norm() / reference[name].norm().clamp(min=1e-30))
            for name in reference
        )
    return distances


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/gpu.json"))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "equality": equality(20),
        "speed": speed(arguments.turns, arguments.steps),
    }
    for name, distance in result["equality"].items():
        print(f"{name:<36} differs from single by {distance:.1e}")
    print(
        f"gpt of {result['speed']['parameters'] / 1e6:.0f} M parameters, bfloat16 autocast, {result['gpu']}"
    )
    for name, row in result["speed"]["loops"].items():
        print(f"{name:<10} {row['tokens_per_s']:>12,.0f} tokens/s  {row['times_plain']:.3f} × plain")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
