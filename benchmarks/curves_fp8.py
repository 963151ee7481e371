"""Loss over tokens of GPT-2 124M in bfloat16, and with the linear layers of its blocks in 8 bits, on one GPU.

    manyhands tokenize wiki-50mb.txt.gz --train bpe --vocabulary 16384 --out tokens
    python benchmarks/curves_fp8.py --tokens tokens --steps 400 --json benchmarks/results/curves-fp8.json
    python benchmarks/curves_fp8.py --tokens tokens --tiny --device cpu

Both begin with the same weights and take the same batches; the last of the text is held out. On a CPU, which has no
products in 8 bits, both are in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import manyhands as mh
from language_work import CLIP, SEED, adamw
from manyhands.task import Task
from manyhands.workloads.tasks import build

POINTS = 12  # of a curve
BATCH, MICROBATCHES, HELD_OUT, PEAK = 96, 1, 1 << 18, 6e-4
CURVES: dict[str, bool | str] = {"bfloat16": True, "fp8": "fp8"}


def scheduled(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Warm-up over a tenth of the steps, then a cosine to a tenth of the rate."""
    warm = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def task_of(tokens: Path, steps: int, *, tiny: bool) -> Task:
    sizes: dict[str, Any] = {"preset": "tiny", "context": 32} if tiny else {"preset": "gpt2", "context": 1024}
    batch, held_out = (8, 2048) if tiny else (BATCH, HELD_OUT)
    return replace(
        build("gpt", data=tokens, batch_size=batch, evaluation_bytes=held_out, **sizes),
        optimizer=partial(adamw, lr=PEAK),
        scheduler=partial(scheduled, steps=steps),
        microbatches=MICROBATCHES,
        clip_norm=CLIP,
        metrics={},  # each would be another forward over what is held out
    )


def curve(
    task: Task, steps: int, device: str, autocast: bool | str, say: Callable[[dict[str, Any]], None]
) -> None:
    losses: list[float] = []

    def hear(rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            if "loss" in row:
                losses.append(row["loss"])
            if "metrics" in row:
                at = {"step": row["step"], "seconds": row["at_s"], "loss": statistics.fmean(losses)}
                say({**at, "held_out": row["metrics"]["evaluation_loss"]})
                losses.clear()

    options = mh.Options(
        autocast=autocast if device != "cpu" else True,
        progress="none",
        evaluate_every=max(1, steps // POINTS),
        checkpoint_every=10**9,
        on_rows=hear,
    )
    mh.fit(task, "single", steps=steps, seed=SEED, device=device, options=options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=Path, required=True, help="a folder of `manyhands tokenize`")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--curves", default=",".join(CURVES), help="others in the file of --json stay")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes to try this with")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    task = task_of(asked.tokens, asked.steps, tiny=asked.tiny)
    with torch.device("meta"):
        parameters = sum(one.numel() for one in task.model().parameters())
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if asked.device != "cpu" else "CPU",
        "torch": torch.__version__,
        "parameters": parameters,
        "steps": asked.steps,
        "tokens_of_a_step": task.batch_size * (task.data[0].shape[-1] - 1),
        "curves": {},
    }
    if asked.json and asked.json.is_file():
        result["curves"] = json.loads(asked.json.read_text())["curves"]
    for name in asked.curves.split(","):
        points = result["curves"][name] = []

        def say(point: dict[str, Any], name: str = name, points: list[dict[str, Any]] = points) -> None:
            points.append(point)
            print(name, point, flush=True)
            if asked.json:  # what is measured stays, whatever comes
                asked.json.write_text(json.dumps(result, indent=1) + "\n")

        curve(task, asked.steps, asked.device, CURVES[name], say)


if __name__ == "__main__":
    main()
