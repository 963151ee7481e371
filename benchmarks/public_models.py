"""Predictions of clusters that somebody else measured, by what `manyhands plan` predicts with: `Strategy.predict`.

A cluster is described (devices of a host, links by the vendor's data sheet), a model by its layers. Few constants are
calibrated on some rows; the others are predicted. All constants are costs (seconds of an operation, of a byte, of a
step), in which a prediction is nearly linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import numpy as np
from scipy.optimize import nnls

from manyhands.facts import (
    ComputeTime,
    LayerTimes,
    LinkRate,
    Machines,
    ModelFootprint,
    StepCosts,
    TaskProfile,
)
from manyhands.foresight.plan.described_model import DescribedTransformer, DescribedWorker
from manyhands.strategies.pipeline.predicted_parts import predicted_cuts, predicted_parts
from manyhands.strategies.pipeline.schedules import interleaved
from manyhands.strategy import Strategy
from public_rows import Fsdp, Gpt, Grid, Served

__all__ = [
    "A100",
    "H100",
    "V100",
    "Constants",
    "Host",
    "amoebanet_s",
    "bloom_flops",
    "bloom_s",
    "calibrated",
    "data_parallel_s",
    "fsdp_s",
    "gpt_s",
    "nanotron_gib",
    "nanotron_s",
    "served_s",
    "summed_s",
    "titan_s",
    "transformer_of",
]

Constants = tuple[float, ...]
Row = TypeVar("Row")


def calibrated(
    predict: Callable[[Row, Constants], float],
    rows: Sequence[Row],
    seen: Sequence[float],
    start: Constants,
    rounds: int = 2,
) -> Constants:
    """The costs, none below 0, with the least squares of relative errors over the rows."""
    now, truth = np.array(start, dtype=float), np.array(seen, dtype=float)
    for _ in range(rounds):
        base = np.array([predict(row, tuple(now)) for row in rows])
        slopes = np.empty((len(rows), len(start)))
        for at, unit in enumerate(start):
            step = 1e-2 * unit
            moved = now.copy()
            moved[at] += step
            slopes[:, at] = [predict(row, tuple(moved)) for row in rows]
            slopes[:, at] = (slopes[:, at] - base) / step
        # In units of the start: the constants differ by many orders of magnitude.
        scaled, target = slopes * np.array(start), truth - (base - slopes @ now)
        found, _ = nnls(scaled / truth[:, None], target / truth)
        now = found * np.array(start)
    return tuple(now.tolist())


@dataclass(frozen=True, slots=True)
class Host:
    """A host by data sheets: what a device reaches at most, its link to its neighbours, and the host's to others."""

    devices: int
    flops: float
    inside: float  # bytes per second of a device, one way
    between: float  # of the host, one way
    memory: float  # bytes per second of a device's own

    @property
    def link(self) -> LinkRate:
        return LinkRate(bytes_per_s=self.inside)

    def machines(self, devices: int, slices: int = 1) -> Machines:
        """So many devices, as workers of `slices` each."""
        per_host = min(devices, self.devices) // slices
        return Machines(
            hosts=max(1, devices // self.devices),
            per_host=per_host,
            memory=self.link,
            inside=self.link,
            between=LinkRate(latency_s=_LATENCY_S, bytes_per_s=self.between),
        )


_LATENCY_S = 2e-6  # of InfiniBand
V100 = Host(16, 125e12, 150e9, 125e9, 0.9e12)  # DGX-2H: NVSwitch, 10 adapters of 100 Gbit/s
A100 = Host(8, 312e12, 300e9, 200e9, 2.0e12)  # DGX A100: NVSwitch, 8 of 200 Gbit/s
H100 = Host(8, 989e12, 450e9, 400e9, 3.35e12)  # 8 of 400 Gbit/s


def _per_byte(cost: float, latency_s: float = 0.0) -> LinkRate:
    return LinkRate(latency_s=latency_s, bytes_per_s=1 / cost if cost else math.inf)


def _equal_layers(
    layers: int,
    sample_s: float,
    gradient_bytes: float,
    batch: int,
    *,
    fixed_s: float = 0.0,
    step_s: float = 0.0,
) -> TaskProfile:
    """Layers that are all alike, two thirds of whose time is backward."""
    each = LayerTimes(
        name="layer",
        forward=ComputeTime(fixed_s=fixed_s / layers / 3, per_sample_s=sample_s / layers / 3),
        backward=ComputeTime(fixed_s=2 * fixed_s / layers / 3, per_sample_s=2 * sample_s / layers / 3),
        gradient_bytes=round(gradient_bytes / layers),
    )
    whole = round(gradient_bytes)
    model = ModelFootprint(parameters=whole, gradients=whole, batch_size=batch)
    return TaskProfile(layers=(each,) * layers, model=model, optimizer_s=step_s)


def _predicted(text: str, profile: TaskProfile, machines: Machines) -> float:
    step = Strategy.parse(text).predict(profile, machines)
    assert step is not None, f"{text} is not modelled"
    return step.seconds


def data_parallel_s(
    devices: int, constants: Constants, *, host: Host, batch: int, gradient_bytes: float
) -> float:
    """A step of a fixed global batch whose gradients are summed once, after it; seconds of a sample, and of a step."""
    sample_s, step_s = constants
    profile = _equal_layers(1, sample_s, gradient_bytes, batch, step_s=step_s)
    return _predicted("allreduce algorithm=hierarchical buckets=8GiB", profile, host.machines(devices))


def summed_s(row: Served, devices: int, constants: Constants) -> float:
    """A step within one host, from that of one device; seconds of a byte between two devices."""
    profile = _equal_layers(
        10, 1 / row.seen[1], _GRADIENT_BYTES[row.name.partition(",")[0]], devices * row.batch
    )
    machines = Machines(per_host=devices, inside=_per_byte(*constants))
    return _predicted("allreduce algorithm=ring buckets=25MiB", profile, machines)


_GRADIENT_BYTES = {
    "Inception": 4 * 23.8e6,
    "Inception v3": 4 * 23.8e6,
    "ResNet-50": 4 * 25.6e6,
    "ResNet-152": 4 * 60.2e6,
    "AlexNet": 4 * 61.1e6,
    "VGG16": 4 * 138.4e6,
}
"""Of the papers' models."""


def served_s(row: Served, devices: int, constants: Constants) -> float:
    """A step with parameter servers, from that of one host, which is a worker; seconds of a byte between hosts."""
    hosts, each = devices // 8, 8 * row.batch
    profile = _equal_layers(1, 1 / row.seen[8], _GRADIENT_BYTES[row.name.partition(",")[0]], hosts * each)
    if hosts == 1:
        return profile.compute_s()
    machines = Machines(hosts=hosts, between=_per_byte(*constants))
    return _predicted(f"ps servers={min(row.servers, hosts)}", profile, machines)


# Of llm-foundry's configurations and of Llama 3.1: layers.
_LAYERS = {"70b": 80, "30b": 48, "13b": 40, "7b": 32, "3b": 32, "1b": 24, "125m": 12}


def fsdp_s(row: Fsdp, devices: int, constants: Constants, *, host: Host, tokens: int) -> float:
    """A step of a micro-batch for each device; the compute is what is left of the smallest row without the exchange.

    Constants: seconds of a byte on a host's link, of a message.
    """
    fewest = min(row.seen)
    # Within one host the link to others does not matter, and one answer does for all.
    here = constants if fewest > host.devices else (0.0, 0.0)
    return _sharded_s(row, devices, _sample_s(row, here, host, tokens), constants, host)


def _sharded_s(row: Fsdp, devices: int, sample_s: float, constants: Constants, host: Host) -> float:
    cost, latency_s = constants
    profile = _equal_layers(_LAYERS.get(row.name, 32), sample_s, 2 * row.parameters, devices * row.micro)
    return _predicted("sharded", profile, replace(host.machines(devices), between=_per_byte(cost, latency_s)))


@cache
def _sample_s(row: Fsdp, constants: Constants, host: Host, tokens: int) -> float:
    """What a sample computes, so that the smallest row is met."""
    fewest = min(row.seen)
    seen_s = row.micro * tokens / row.seen[fewest]
    sample_s = seen_s / row.micro
    for _ in range(3):
        exposed_s = _sharded_s(row, fewest, sample_s, constants, host) - row.micro * sample_s
        sample_s = max(0.1 * seen_s, seen_s - exposed_s) / row.micro
    return sample_s


def transformer_of(row: Gpt) -> DescribedTransformer:
    return DescribedTransformer(
        layers=row.layers,
        hidden=row.hidden,
        sequence=row.sequence,
        vocabulary=row.vocabulary,
        batch_size=row.batch,
        recompute=row.recompute,
    )


@cache
def gpt_s(row: Gpt, constants: Constants, host: Host) -> float:
    """Seconds of an operation; how often a layer moves what it keeps."""
    flop_s, moves = constants
    worker = DescribedWorker(
        flops=1 / flop_s, slices=row.slices, link=host.link, memory=host.memory, moves=moves
    )
    profile, machines = transformer_of(row).profile(worker), host.machines(row.gpus, row.slices)
    if row.stages == 1:
        return _predicted("allreduce algorithm=ring buckets=64GiB", profile, machines)
    pieces = row.batch // (row.replicas * row.micro)
    if row.chunks > 1:  # more than the two that `schedule=interleaved` has
        table = interleaved(row.stages, pieces, row.chunks)
        cuts = predicted_cuts(table, profile, row.replicas)
        assert cuts is not None, "there are more layers than parts"
        return predicted_parts(table, profile, machines, replicas=row.replicas, cuts=cuts).seconds
    return _predicted(f"pipeline stages={row.stages} microbatches={pieces}", profile, machines)


_BLOOM = DescribedTransformer(
    layers=70, hidden=14336, sequence=2048, vocabulary=250880, batch_size=1, recompute=True
)


@cache
def bloom_s(row: tuple[int, int], constants: Constants) -> float:
    """A step of (global batch, micro-batch) on 384 A100, 4 slices × 12 stages × 8; of an operation, of a step."""
    (batch, micro), (flop_s, step_s) = row, constants
    worker = DescribedWorker(flops=1 / flop_s, slices=4, link=A100.link)
    profile = replace(_BLOOM, batch_size=batch).profile(worker)
    text = f"pipeline stages=12 microbatches={max(1, batch // (8 * micro))}"
    return _predicted(text, profile, A100.machines(384, 4)) + step_s


def bloom_flops(batch: int) -> float:
    return replace(_BLOOM, batch_size=batch).step_flops


_LLAMA_405B = DescribedTransformer(
    layers=126, hidden=16384, sequence=8192, vocabulary=128256, batch_size=256, feedforward=53248, matrices=3,
    recompute=True,
)  # fmt: skip


@cache
def titan_s(schedule: str, constants: Constants) -> float:
    """A step of 405B on 512 H100, 8 × 8 stages × 8 slices; seconds of an operation."""
    worker = DescribedWorker(flops=1 / constants[0], slices=8, link=H100.link)
    text = f"pipeline stages=8 microbatches=32 schedule={schedule}"
    return _predicted(text, _LLAMA_405B.profile(worker), H100.machines(512, 8))


_NANOTRON = DescribedTransformer(
    layers=24, hidden=2048, sequence=4096, vocabulary=50257, batch_size=1024, feedforward=4096, matrices=3
)


@cache
def nanotron_s(row: Grid, constants: Constants) -> float:
    """Seconds of an operation, of a layer beside that, of a byte between slices, of a message between stages.

    What a message costs is measured by `manyhands plan` too (`StepCosts`), and added to what a strategy predicts.
    """
    flop_s, layer_s, byte_s, message_s = constants
    worker = DescribedWorker(
        flops=1 / max(flop_s, 1e-18), slices=row.slices, link=_per_byte(byte_s), layer_s=layer_s
    )
    pieces = _NANOTRON.batch_size // (row.data * row.micro)
    text = f"pipeline stages={row.stages} microbatches={pieces}"
    messages = 2 * pieces if row.stages > 1 else 0
    step_s = _predicted(text, _NANOTRON.profile(worker), H100.machines(row.gpus, row.slices))
    return step_s + StepCosts(message_s=message_s).seconds(messages, 0.0)


def nanotron_gib(row: Grid, constants: Constants) -> float:
    """Of the fullest device, by `Pipeline.needs` with ZeRO-1's share of the optimizer's state.

    Constants: activations over what the formula says; GiB that are always there.
    """
    pieces = _NANOTRON.batch_size // (row.data * row.micro)
    model = _NANOTRON.profile(DescribedWorker(flops=1.0, slices=row.slices)).model
    # Gradients are kept in 32 bits; each replica has a share of the state.
    model = replace(model, gradients=2 * model.gradients, state=model.state // row.data)
    # The loss computes in 32 bits on the logits, which the last stage holds.
    logits = (
        4 * _NANOTRON.sequence * _NANOTRON.vocabulary / row.slices * row.micro if row.stages == 1 else 0.0
    )
    strategy = Strategy.parse(f"pipeline stages={row.stages} microbatches={pieces}")
    (need,) = strategy.needs(model, row.data * row.stages)
    kept = need.activations + logits
    return (need.total - need.activations + constants[0] * kept) / 2**30 + constants[1]


_AMOEBANET_LAYERS, _AMOEBANET_BATCH = 24, 128


@cache
def amoebanet_s(row: tuple[int, int], constants: Constants) -> float:
    """A sample of (stages, micro-batches); seconds of a sample, and of a micro-batch beside that."""
    stages, pieces = row
    sample_s, fixed_s = constants
    profile = _equal_layers(_AMOEBANET_LAYERS, sample_s, 0.0, _AMOEBANET_BATCH, fixed_s=fixed_s)
    text = f"pipeline stages={stages} microbatches={pieces} schedule=gpipe recompute=yes"
    return _predicted(text, profile, Machines(per_host=stages)) / _AMOEBANET_BATCH
