"""On a GPU: a model whose states are four times `device_memory`, beside the same model that is there as a whole.

    python benchmarks/offload.py [--json benchmarks/results/offload.json]

A transformer of a thousand million parameters in float32, its layers computed again in backward, trained by AdamW with
all of the GPU's memory and with a quarter of what parameters, gradients and optimizer state take. Steps per second are
of the median step; peaks are torch's own, of one whole run each; the weights are compared at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from manyhands.strategy import show_size
from manyhands.workloads.language.gpt import GPTBlock

VOCABULARY = 256
WARM_UP = 3
GIB = 1 << 30


class Deep(nn.Module):
    """Blocks of which only the inputs are kept for backward."""

    def __init__(self, *, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GPTBlock(width=width, heads=width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) tokens to scores of the next."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        scores: Tensor = self.head(self.norm(x))
        return scores


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross entropy of the next token."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def make_task(shape: dict[str, int], batch: int) -> mh.Task:
    """The task; its samples are random, which costs what text costs."""
    tokens = torch.randint(
        0, VOCABULARY, (8 * batch, shape["context"] + 1), generator=torch.Generator().manual_seed(0)
    )
    return mh.Task(
        model=lambda: Deep(**shape),
        loss=loss,
        data=tokens,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch_size=batch,
    )


def measure(task: mh.Task, strategy: str, steps: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The median step, the peak of the GPU's memory, and the weights at the end."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run = mh.fit(task, strategy, workers=1, steps=steps, device="cuda", options=mh.Options(progress="none"))
    seconds = [row["seconds"] for row in run.history.steps[WARM_UP:]]
    found = {
        "strategy": strategy,
        "step_s": statistics.median(seconds),
        "slowest_s": max(seconds),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    return found, run.model.state_dict()


def main() -> None:
    """Measure both, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/offload.json"))
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=11)
    asked = parser.parse_args()
    shape = {"layers": asked.layers, "width": asked.width, "context": asked.context}
    task = make_task(shape, asked.batch)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Deep(**shape).parameters())
    states = 4 * 4 * parameters  # values, gradients and two numbers of AdamW, in float32
    limit = states // 4 // (1 << 20) * (1 << 20)
    limited, ours = measure(task, f"single device_memory={show_size(limit)}", asked.steps)
    whole, reference = measure(task, "single", asked.steps)
    difference = max(
        float((ours[name] - value).norm() / value.norm().clamp(min=1e-30))
        for name, value in reference.items()
    )
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **shape,
        "batch": asked.batch,
        "steps": asked.steps,
        "parameters": parameters,
        "states_bytes": states,
        "device_memory_bytes": limit,
        "whole": whole,
        "limited": limited,
        "speed": whole["step_s"] / limited["step_s"],
        "largest_relative_difference": difference,
    }
    for row in (whole, limited):
        print(
            f"{row['strategy']:32} {row['step_s'] * 1e3:8.1f} ms a step (slowest {row['slowest_s'] * 1e3:.1f}), peak "
            f"{row['peak_allocated_bytes'] / GIB:.2f} GiB, reserved {row['peak_reserved_bytes'] / GIB:.2f} GiB"
        )
    print(
        f"{parameters / 1e6:.0f} M parameters, states {states / GIB:.1f} GiB, limit {limit / GIB:.2f} GiB: "
        f"{result['speed']:.0%} of the speed, weights differ by {difference:.1e}"
    )
    asked.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
