"""How long the kernels of a training step take on a processor of which three numbers are known; pure.

A kernel takes as long as its arithmetic at the peak rate, or its bytes at the bandwidth, whichever is longer (Williams,
Waterman and Patterson, Roofline, 2009). The host launches kernels one after another and runs ahead, so that a step is
limited by launching where kernels are small.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.errors import UserError

_PEAK = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)flop(?:s|/s)?", re.IGNORECASE)
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_LOSS_KERNELS = 5  # square and mean, and backward of both


@dataclass(frozen=True, slots=True)
class Kernel:
    """What one kernel computes and moves."""

    flops: float
    num_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorSpeed:
    """A GPU as its data sheet tells it."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float  # until the host can launch the next kernel

    def seconds(self, kernel: Kernel) -> float:
        return max(kernel.flops / self.flops_per_s, kernel.num_bytes / self.bytes_per_s)


def parse_flops(text: str) -> float:
    """`100TFLOPS` in operations per second; UserError where that is no positive rate."""
    match = _PEAK.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise UserError(f"{text!r} is not a rate of arithmetic above 0; write it as 100TFLOPS or 500GFLOPS")
    return float(match[1]) * _PREFIXES[match[2].lower()]


def step_kernels(width: int, batch: int, layers: int, item_bytes: int) -> list[Kernel]:
    """Of a training step of so many square layers without bias, with a loss of squares and plain SGD."""
    product = Kernel(2.0 * batch * width**2, item_bytes * (width**2 + 2.0 * batch * width))
    loss = Kernel(batch * width, item_bytes * 2.0 * batch * width)
    update = Kernel(2.0 * layers * width**2, item_bytes * 3.0 * layers * width**2)
    # Forward, then for each layer the gradients of its weight and of its input, which the first one does not need.
    return [product] * layers + [loss] * _LOSS_KERNELS + [product] * (2 * layers - 1) + [update]


def step_flops(width: int, batch: int, layers: int) -> float:
    """The arithmetic of all products of matrices in such a step."""
    return 2.0 * batch * width**2 * (3 * layers - 1)


def queued_seconds(kernels: Sequence[Kernel], processor: ProcessorSpeed) -> float:
    """From the first launch to the end of the last kernel: each begins when it is launched and the one before ended."""
    launched = ended = 0.0
    for kernel in kernels:
        launched += processor.launch_s
        ended = max(launched, ended) + processor.seconds(kernel)
    return ended


def crossover(sizes: Sequence[int], slow_s: Sequence[float], fast_s: Sequence[float]) -> float | None:
    """The size from which on `fast_s` is below `slow_s`, interpolated between sizes on logarithmic scales.

    The first size where that holds for all, None where it does not hold for the last.
    """
    gains = [math.log(slow / fast) for slow, fast in zip(slow_s, fast_s, strict=True)]
    if gains[-1] <= 0:
        return None
    last = max((place for place, gain in enumerate(gains) if gain <= 0), default=None)
    if last is None:
        return float(sizes[0])
    share = gains[last] / (gains[last] - gains[last + 1])
    return math.exp(math.log(sizes[last]) + share * math.log(sizes[last + 1] / sizes[last]))
