"""On a GPU: a GPT of 7 billion parameters within `device_memory`, beside the same layers in memory.

    python benchmarks/offload.py [--clip 1.0] [--json benchmarks/results/offload.json]

The model is trained by AdamW with weights, gradients and moments in float32, products in bfloat16, and its blocks
computed again in backward. What it takes is more than a GPU has, so the same step is measured there with few layers,
at two depths, and a layer more is taken to cost what one cost between these. A model of the smaller depth is trained
both ways, and its losses are compared. Seconds are of the median step; peaks are of one run each.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import resource
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyhands as mh
from manyhands.strategy import parse_size, show_size
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.next_token import next_byte_loss

WARM_UP = 2
GIB = 1 << 30
BYTES_OF_STATES = 4 * 4  # of a parameter: its value, gradient and two moments


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int

    def on_meta(self) -> GPT:
        with torch.device("meta"):
            return GPT(**vars(self))

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.on_meta().parameters())


def build(shape: Shape) -> GPT:
    """The model, its weights drawn by a thread for each core: torch draws on one."""
    model = shape.on_meta().to_empty(device="cpu")
    model.lm_head.weight = model.transformer.wte.weight
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(partial(_draw, shape), enumerate(model.named_parameters())))
    return model


@torch.no_grad()
def _draw(shape: Shape, numbered: tuple[int, tuple[str, nn.Parameter]]) -> None:
    number, (name, parameter) = numbered
    if parameter.ndim > 1:
        std = 0.02 / (math.sqrt(2 * shape.layers) if name.endswith("c_proj.weight") else 1)
        parameter.normal_(0, std, generator=torch.Generator().manual_seed(number))
    else:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def make_task(shape: Shape, asked: argparse.Namespace) -> mh.Task:
    """The task; its samples are random, which costs what text costs."""
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, shape.vocabulary, (8 * asked.batch, shape.context + 1), generator=drawn)
    return mh.Task(
        model=partial(build, shape),
        loss=next_byte_loss,
        data=tokens,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch_size=asked.batch,
        clip_norm=asked.clip,
    )


def measure(shape: Shape, strategy: str, asked: argparse.Namespace, compiled: bool = False) -> dict[str, Any]:
    """The median step, the losses, and the peak of the GPU's memory."""
    gc.collect()
    on_gpu = asked.device != "cpu"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    options = mh.Options(progress="none", autocast=True, recompute=True, compile=compiled)
    begun = time.perf_counter()
    task = make_task(shape, asked)
    run = mh.fit(task, strategy, workers=1, steps=asked.steps, device=asked.device, options=options)
    seconds = [row["seconds"] for row in run.history.steps]
    found = {
        "strategy": strategy,
        "layers": shape.layers,
        "compiled": compiled,
        "step_s": statistics.median(seconds[WARM_UP:]),
        "slowest_s": max(seconds[WARM_UP:]),
        "whole_run_s": time.perf_counter() - begun,
        "loss": [row["loss"] for row in run.history.steps],
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "peak_of_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(
        f"{shape.layers:3} layers, {strategy:34} {found['step_s']:8.3f} s a step (slowest {found['slowest_s']:.3f}), "
        f"{found['whole_run_s']:.0f} s in all, GPU {found['peak_allocated_bytes'] / GIB:.2f} GiB (reserved "
        f"{found['peak_reserved_bytes'] / GIB:.2f}), process {found['peak_of_process_bytes'] / GIB:.2f} GiB",
        flush=True,
    )
    return found


def of_few_layers(shape: Shape, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Both ways at the smaller depth, and in memory at the larger."""
    small, deeper = (Shape(**{**vars(shape), "layers": layers}) for layers in asked.few)
    # As few layers fit as of the whole model: then the limit is that of the whole model, less what is the same.
    rows = [
        measure(small, strategy, asked)
        for strategy in ("single", f"single device_memory={show_size(asked.limit)}")
    ]
    for compiled in (False, True) if asked.compiled else (False,):
        if compiled:
            rows.append(measure(small, "single", asked, compiled))
        rows.append(measure(deeper, "single", asked, compiled))
    return rows


def in_memory_s(rows: list[dict[str, Any]], layers: int, *, compiled: bool) -> float:
    """A step of `layers` layers, from those of two depths."""
    first, second = (row for row in rows if row["strategy"] == "single" and row["compiled"] == compiled)
    each = (second["step_s"] - first["step_s"]) / (second["layers"] - first["layers"])
    return float(first["step_s"] + each * (layers - first["layers"]))


def main() -> None:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=parse_size, default=40 * GIB)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--few", type=int, nargs=2, default=(2, 6), help="depths that fit in memory")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--clip", type=float, help="clip the gradient to this norm, which takes a second pass"
    )
    parser.add_argument("--compiled", action="store_true", help="in memory compiled as well")
    asked = parser.parse_args()
    shape = Shape(asked.layers, asked.width, asked.heads, asked.context, asked.vocabulary)
    parameters = shape.parameters
    print(f"{parameters / 1e6:,.0f} M parameters, states {parameters * BYTES_OF_STATES / GIB:.1f} GiB")
    whole = measure(shape, f"single device_memory={show_size(asked.limit)}", asked)
    rows = of_few_layers(shape, asked)
    apart = max(abs(one / other - 1) for one, other in zip(rows[0]["loss"], rows[1]["loss"], strict=True))
    kinds = (False, True) if asked.compiled else (False,)
    expected = {
        "compiled" if kind else "eager": in_memory_s(rows, asked.layers, compiled=kind) for kind in kinds
    }
    result = {
        "device": torch.cuda.get_device_name() if asked.device != "cpu" else "CPU",
        "torch": torch.__version__,
        **vars(shape),
        "batch": asked.batch,
        "steps": asked.steps,
        "clip": asked.clip,
        "parameters": parameters,
        "states_bytes": parameters * BYTES_OF_STATES,
        "device_memory_bytes": asked.limit,
        "limited": whole,
        "few": rows,
        "in_memory_s": expected,
        "speed": {name: seconds / whole["step_s"] for name, seconds in expected.items()},
        "tokens_per_s": asked.batch * asked.context / whole["step_s"],
        "largest_relative_difference": apart,
    }
    for name, seconds in expected.items():
        print(
            f"in memory, {name}: {seconds:.3f} s a step of {asked.layers} layers; so {result['speed'][name]:.0%} of "
            f"its speed, {result['tokens_per_s']:,.0f} tokens/s; losses of {asked.few[0]} layers differ by {apart:.1e}"
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
