"""Where a chain of layers is cut, by the measured costs of its layers.

The cost of the slowest part is minimised by dynamic programming. A cut is the place in the chain, from 0, of the layer
that begins a part. The first part begins at 0, so a chain in p parts has p − 1 cuts. In a pipeline all stages wait for
the slowest. So the best cut is the one whose most expensive part is cheapest, among those that fit into the memory of a
worker.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from manyhands.errors import UserError, format_bytes
from manyhands.strategy import enough

Cuts: TypeAlias = tuple[int, ...]
PartBytes: TypeAlias = Callable[[int, int, int], int]
"""(number of the part, its first layer, the layer after its last) -> bytes that its worker needs for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """The cost of one layer of a chain for one micro-batch."""

    seconds: float  # seconds of forward and backward together
    held_bytes: int = 0
    """Bytes held all the time: parameters, their gradients, the optimizer's state and buffers."""
    activation_bytes: int = 0  # bytes that its forward saves for its backward
    input_bytes: int = 0  # bytes of its input
    gives_tensor: bool = True
    """Whether its output is a tensor, which can be sent to another stage, so that a part may end with it."""


def parts_of(cuts: Sequence[int], layers: int) -> list[range]:
    ends = [*cuts, layers]
    return [range(begin, end) for begin, end in zip([0, *cuts], ends, strict=True)]


def check_cuts(cuts: Sequence[int], layers: int, parts: int) -> None:
    shown = ",".join(map(str, cuts))
    if len(cuts) != parts - 1:
        raise UserError(f"cuts={shown}: {parts} parts need {parts - 1} cuts, not {len(cuts)}")
    if any(later <= before for before, later in zip([0, *cuts], [*cuts, layers], strict=True)):
        raise UserError(
            f"cuts={shown}: must ascend between 1 and {layers - 1}; each is the first layer of a part, and the "
            f"model is a chain of {layers} layers"
        )


def balanced(
    costs: Sequence[float], parts: int, fits: Callable[[int, int, int], bool] = lambda *_: True
) -> Cuts | None:
    """The cuts whose most expensive part is cheapest, of parts (number, first, end) that fit; None: there are none."""
    layers = len(costs)
    upto = [0.0]
    for cost in costs:
        upto.append(upto[-1] + cost)
    # best[end]: the lowest possible cost of the most expensive part so far, where the parts cover the layers before
    # `end`.
    best = [0.0] + [math.inf] * layers
    chosen: list[list[int]] = []
    for part in range(parts):
        later = [math.inf] * (layers + 1)
        came = [0] * (layers + 1)
        for end in range(part + 1, layers - (parts - part - 1) + 1):
            for begin in range(part, end):
                cost = max(best[begin], upto[end] - upto[begin])
                if cost < later[end] and fits(part, begin, end):
                    later[end], came[end] = cost, begin
        best = later
        chosen.append(came)
    if not math.isfinite(best[layers]):
        return None
    cuts: list[int] = []
    end = layers
    for part in reversed(range(1, parts)):
        end = chosen[part][end]
        cuts.append(end)
    return tuple(reversed(cuts))


def part_bytes(layers: Sequence[LayerCost], held: Sequence[int], *, recompute: bool) -> PartBytes:
    """Return the function that gives a part's memory need.

    `held` says of how many micro-batches each part keeps activations at once. With `recompute` a part keeps the input
    of each of them, and the activations of one.
    """

    def need(part: int, begin: int, end: int) -> int:
        inside = layers[begin:end]
        always = sum(layer.held_bytes for layer in inside)
        activations = sum(layer.activation_bytes for layer in inside)
        if recompute:
            return always + activations + held[part] * layers[begin].input_bytes
        return always + held[part] * activations

    return need


def planned(layers: Sequence[LayerCost], stages: int, chunks: int, need: PartBytes, limit: int) -> Cuts:
    """The best cuts into `stages` × `chunks` parts such that no worker needs more than `limit` bytes (0: no limit).

    A worker with several parts has an equal share of the limit for each. Where nothing fits, the UserError says how
    much would be needed.
    """
    parts, seconds = stages * chunks, [layer.seconds for layer in layers]
    whole = len(layers)

    def cut(costs: Sequence[float], most: float) -> Cuts | None:
        def fits(part: int, begin: int, end: int) -> bool:
            return ends[end] and (most == math.inf or need(part, begin, end) <= most)

        return balanced(costs, parts, fits)

    # By layer: whether a part may end before it. Its output must be a tensor, unless it goes to the loss.
    ends = [False, *(layer.gives_tensor for layer in layers[:-1]), True]
    if cut(seconds, math.inf) is None:
        raise UserError(
            f"stages={stages}: stages exchange one tensor, but {whole - sum(ends)} of {whole} layers "
            f"return something else, so no cut makes {parts} parts; use at most {sum(ends) // chunks} stages"
        )
    found = cut(seconds, limit // chunks if limit else math.inf)
    if found is not None:
        return found
    spans = [(begin, end) for begin in range(whole) for end in range(begin + 1, whole + 1)]
    sizes = sorted({need(part, *span) for part in range(parts) for span in spans})
    enough_at = bisect_left(sizes, True, key=lambda size: cut([0.0] * whole, size) is not None)
    least = sizes[enough_at] * chunks
    largest = max(range(whole), key=lambda layer: layers[layer].held_bytes + layers[layer].activation_bytes)
    raise UserError(
        f"memory={format_bytes(limit)}: no cut of {whole} layers into {parts} parts fits; the best needs "
        f"{format_bytes(least)} on a worker (the largest layer is number {largest}); give "
        f"memory={enough(least)}, more stages, a schedule that keeps fewer micro-batches (1f1b) or "
        "recompute=yes"
    )
