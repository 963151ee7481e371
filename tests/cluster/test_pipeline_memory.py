"""Activations that each stage of a pipeline keeps, measured: the bytes that autograd saved and has not let go of."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.strategies.pipeline.schedules import MOST_HELD, SCHEDULES
from pipelines import adamw, gradients_of

MICROBATCHES = 8


class Kept:
    """What autograd saves in the thread that enters `watching`, a storage that is saved several times once."""

    def __init__(self, own: set[int]) -> None:
        self._own = own
        self._count: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self.now = self.peak = 0

    def watching(self) -> AbstractContextManager[object]:
        return torch.autograd.graph.saved_tensors_hooks(partial(_Saved, self), lambda saved: saved.tensor)

    def add(self, storage: Any) -> int:
        place = storage.data_ptr()
        if place not in self._own:
            self._count[place] = self._count.get(place, 0) + 1
            if self._count[place] == 1:
                self._bytes[place] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return place

    def remove(self, place: int) -> None:
        if place not in self._own:
            self._count[place] -= 1
            if not self._count[place]:
                self.now -= self._bytes[place]


class _Saved:
    """Stands for a saved tensor for as long as autograd holds it."""

    def __init__(self, kept: Kept, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # with its graph, an output that is saved would keep itself
        self._kept = kept
        self._place = kept.add(tensor.untyped_storage())

    def __del__(self) -> None:
        self._kept.remove(self._place)


def squared(model: nn.Module, batch: Any) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


@cache
def peaks(schedule: str, stages: int, recompute: bool = False) -> tuple[int, ...]:
    """The most bytes that each stage kept at once, of a chain of equal layers."""
    torch.manual_seed(0)
    layers = [one for _ in range(8) for one in (nn.Linear(12, 12), nn.Tanh())]
    model = nn.Sequential(*layers).double()
    samples = torch.randn(4 * MICROBATCHES, 12, dtype=torch.float64)
    task = mh.Task(
        model=lambda: model, loss=squared, data=(samples, samples), optimizer=adamw, batch_size=len(samples)
    )
    own = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept = [Kept(own) for _ in range(stages)]
    table = SCHEDULES[schedule](stages, MICROBATCHES)
    gradients_of(task, table, recompute=recompute, worker_context=lambda stage: kept[stage].watching())
    assert [one.now for one in kept] == [0] * stages, "after a step nothing is kept"
    return tuple(one.peak for one in kept)


@pytest.mark.parametrize("stages", [2, 4])
def test_1f1b_keeps_stages_of_microbatches_where_gpipe_keeps_all(stages: int) -> None:
    every, few = peaks("gpipe", stages), peaks("1f1b", stages)
    assert max(few) <= stages / MICROBATCHES * max(every)
    layer = 4 * 12 * 8  # the output of a layer for a micro-batch
    assert every[0] == MICROBATCHES * (8 // stages + 1) * layer, "its input, and what each tanh gave"
    for stage in range(stages):
        assert few[stage] <= (stages - stage) / MICROBATCHES * every[stage], stage


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "zb-h1"])
def test_bytes_kept_are_those_of_as_many_microbatches_as_the_schedule_says(schedule: str) -> None:
    table = SCHEDULES[schedule](4, MICROBATCHES)
    one = peaks("naive", 4)  # which keeps one micro-batch at a time
    for stage, peak in enumerate(peaks(schedule, 4)):
        assert peak == MOST_HELD[schedule](table, stage) * one[stage]


def test_recomputing_keeps_the_activations_of_one_microbatch() -> None:
    assert peaks("gpipe", 4, recompute=True) == peaks("naive", 4)
