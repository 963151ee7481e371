"""A transformer that is described and not built: its layers' times and bytes, for a plan of machines that are not here.

Nothing is measured: a layer takes its floating-point operations over a share of a device's peak, and the bytes that it
moves over the bandwidth of its memory; the optimizer's step takes its bytes. A worker is one device, or several that
slice every layer between them (tensor parallelism), with the all-reduces of Megatron (Shoeybi et al. 2019): two of a
layer's outputs in forward, two in backward. Activations are those of Korthikanti et al. 2022 with sequence parallelism
and without stored attention scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from manyhands.errors import UserError
from manyhands.facts import (
    ComputeTime,
    LayerFootprint,
    LayerTimes,
    LinkRate,
    Machines,
    ModelFootprint,
    TaskProfile,
)
from manyhands.strategies.common.step_times import all_reduce_s

__all__ = ["DescribedTransformer", "DescribedWorker"]

_HALF = 2  # bytes of a value in 16 bits: parameters, gradients, activations
_STATE = 12  # bytes of Adam for each parameter: a copy in 32 bits, and two moments
_STEPPED = 2 * _STATE + 2 * _HALF
"""Bytes that its step moves for each: state is read and written, a gradient read, a value written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribedWorker:
    """What computes a replica of the model, or a stage of it."""

    flops: float  # operations of one device in a second that layers reach: its peak times an efficiency
    slices: int = 1  # devices that slice every layer between them
    link: LinkRate = field(default_factory=LinkRate)  # between these devices
    layer_s: float = 0.0  # of each layer, in forward and again in backward, whatever the samples
    memory: float = math.inf  # bytes that one device reads or writes in its memory in a second
    moves: float = 1.0
    """How often a layer's forward writes and reads what it keeps for backward; kernels that are not fused move more."""

    def __post_init__(self) -> None:
        for name in ("flops", "memory"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name}={getattr(self, name)} must be above 0; give what a device reaches")
        if self.slices < 1:
            raise UserError(f"slices={self.slices} must be at least 1")

    def reduced(self, num_bytes: float) -> ComputeTime:
        """Of an all-reduce of so many bytes for each sample among the slices."""
        machines = Machines(per_host=self.slices, inside=self.link)
        latency_s, unit = all_reduce_s("ring", machines, 0), 1 << 30
        slope = (all_reduce_s("ring", machines, unit) - latency_s) / unit
        return ComputeTime(fixed_s=latency_s, per_sample_s=slope * num_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribedTransformer:
    """A decoder or encoder of equal layers, as papers describe it; a sample is one sequence."""

    layers: int
    hidden: int
    sequence: int  # tokens of a sample
    vocabulary: int
    batch_size: int  # samples of a global batch
    feedforward: int = 0  # width within a layer; 0: four times hidden
    matrices: int = 2  # in the feed-forward part of a layer; 3 where one is a gate
    recompute: bool = False  # whether backward computes each layer's forward again, to keep only its input

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value < (one.name in ("layers", "hidden", "sequence", "vocabulary", "batch_size", "matrices")):
                raise UserError(f"{one.name}={value} must be an integer of at least 1")

    @property
    def layer_parameters(self) -> int:
        width = self.feedforward or 4 * self.hidden
        return self.hidden * (4 * self.hidden + self.matrices * width)

    @property
    def table_parameters(self) -> int:
        """Of the embedding, which the head shares."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.table_parameters

    @property
    def layer_flops(self) -> float:
        """Of one sample in the forward of a layer; attention is not halved for a causal mask."""
        return 2.0 * self.sequence * self.layer_parameters + 4.0 * self.sequence**2 * self.hidden

    @property
    def head_flops(self) -> float:
        return 2.0 * self.sequence * self.table_parameters

    @property
    def step_flops(self) -> float:
        """Of a global batch, forward and backward; with `recompute`, what is computed twice counts twice."""
        passes = 4 if self.recompute else 3
        return self.batch_size * (passes * self.layers * self.layer_flops + 3 * self.head_flops)

    def profile(self, worker: DescribedWorker) -> TaskProfile:
        """How long each part of a step takes on such a worker, by arithmetic; bytes are those of one of its devices."""
        output = float(_HALF * self.sequence * self.hidden)
        rate, sums = worker.flops * worker.slices, worker.reduced(output)
        # Slices share all of it but the inputs of the halves of a layer.
        kept = (10 + 24 / worker.slices) * self.sequence * self.hidden
        moved_s = 2 * worker.moves * kept / worker.memory

        def passes(many: int) -> ComputeTime:
            """Of so many times a layer's forward; the gradient of a pass is computed in the time of two."""
            reduces = 2 * (many - many // 2)
            return ComputeTime(
                fixed_s=worker.layer_s + reduces * sums.fixed_s,
                per_sample_s=many * (self.layer_flops / rate + moved_s) + reduces * sums.per_sample_s,
            )

        layer = LayerTimes(
            name="layer",
            forward=passes(1),
            backward=passes(3 if self.recompute else 2),
            gradient_bytes=_HALF * self.layer_parameters // worker.slices,
            output_bytes=output,
        )
        # The embedding computes next to nothing; its table's gradient is counted with the head, which shares it.
        head = LayerTimes(
            name="head",
            forward=ComputeTime(per_sample_s=self.head_flops / rate),
            backward=ComputeTime(per_sample_s=2 * self.head_flops / rate),
            gradient_bytes=_HALF * self.table_parameters // worker.slices,
        )
        return TaskProfile(
            layers=(layer,) * self.layers + (head,),
            model=self._footprint(worker.slices),
            optimizer_s=_STEPPED * self.parameters / worker.slices / worker.memory,
        )

    def _footprint(self, slices: int) -> ModelFootprint:
        held = self.parameters // slices
        kept = 2 if self.recompute else 34 / slices
        each = LayerFootprint(
            name="layer",
            parameters=_HALF * self.layer_parameters // slices,
            activations=kept * self.sequence * self.hidden,
        )
        head = LayerFootprint(name="head", parameters=_HALF * self.table_parameters // slices)
        return ModelFootprint(
            parameters=_HALF * held,
            gradients=_HALF * held,
            state=_STATE * held,
            per_sample=self.layers * each.activations,
            batch_size=self.batch_size,
            layers=(each,) * self.layers + (head,),
        )
