"""How long calls take on a device: the median over groups, each of which is long enough for a clock."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from manyhands.lab.bench.harness import interleaved

ROUNDS = 3  # in which all sizes are measured in turn: a machine may be slower for a while

_WARM_UP, _FEWEST, _GROUP_S = 3, 3, 0.005


def median_seconds(call: Callable[[], object], device: str, seconds: float) -> float:
    """Of one call among several in a row: a GPU is waited for at the end of a group, as training would."""
    for _ in range(_WARM_UP):
        call()
    took = _group(call, device, 1)
    count = max(1, math.ceil(_GROUP_S / took))
    groups = [took] if count == 1 else []
    while len(groups) < _FEWEST or sum(groups) * count < seconds:
        groups.append(_group(call, device, count) / count)
    return statistics.median(groups)


def _group(call: Callable[[], object], device: str, count: int) -> float:
    synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def training_step(width: int, batch: int, layers: int, dtype: torch.dtype, device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    made = [nn.Linear(width, width, bias=False, dtype=dtype, device=device) for _ in range(layers)]
    model, inputs = nn.Sequential(*made), torch.randn(batch, width, device=device).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def measure_steps(
    sizes: Sequence[tuple[int, int]],
    layers: int,
    dtype: torch.dtype,
    devices: Sequence[str],
    seconds: float,
    report: Callable[[str], None],
) -> Mapping[tuple[int, int, str], float]:
    """The median time of a step of each width and batch on each device."""
    took: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for done, (width, batch) in enumerate(interleaved(sizes, ROUNDS)):
        report(f"width {width:,}, batch {batch:,}, round {done // len(sizes) + 1} of {ROUNDS}")
        for device in devices:
            step = training_step(width, batch, layers, dtype, device)
            took[width, batch, device].append(median_seconds(step, device, seconds / ROUNDS))
    return {size: statistics.median(of_rounds) for size, of_rounds in took.items()}
