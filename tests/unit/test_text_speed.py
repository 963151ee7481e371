"""Tokens a second and MFU of a run of text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

import manyhands as mh
from manyhands.data.batches import BatchSource
from manyhands.engine.text_speed import largest_use, text_speed
from manyhands.observe.analyse.remarks import speed_words
from manyhands.task import TextWork
from manyhands.workloads.tasks import build

WORK = TextWork(tokens=1024, flops=2e12, formula="a count")
SIZES = {"layers": 2, "width": 64, "heads": 2, "context": 32, "evaluation_bytes": 200}


def test_tokens_and_mfu_are_those_of_the_median_step() -> None:
    """Of 8 rows in half a second, where one step took long."""
    used = {"device_name": "NVIDIA H200", "gpus": 2, "peak_memory_bytes": 1 << 30}
    found = text_speed(WORK, batch=8, ends=[0.0, 0.5, 1.0, 9.0, 9.5], used=used, half=True)
    assert found["tokens_per_s"] == 8 * 1024 / 0.5
    assert found["mfu"]["share"] == pytest.approx(8 * 2e12 / 0.5 / (2 * 989e12))
    assert speed_words({**used, **found}) == (
        "16,384 tokens/s in the median step · MFU 1.6% of 989 TFLOP/s, by a count · "
        "peak memory of a worker's GPU 1.0 GiB"
    )


@pytest.mark.parametrize(("name", "half"), [("NVIDIA H200", False), ("Unknown", True)])
def test_no_share_of_a_peak_that_is_not_that_of_the_products(name: str, half: bool) -> None:
    found = text_speed(
        WORK, batch=8, ends=[0.0, 1.0, 2.0, 3.0], used={"device_name": name, "gpus": 1}, half=half
    )
    assert set(found) == {"tokens_per_step", "tokens_per_s"}


def test_memory_is_that_of_the_largest_worker_and_a_shared_gpu_counts_once() -> None:
    reports: list[dict[str, Any]] = [
        {"peak_memory_bytes": memory, "device_name": "G", "gpu": gpu}
        for memory, gpu in ((5, "a"), (9, "a"), (7, "b"))
    ]
    assert largest_use([*reports, {}]) == {"peak_memory_bytes": 9, "device_name": "G", "gpus": 2}
    assert largest_use([{}]) == {}


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_the_count_is_that_of_torch(name: str) -> None:
    """But for attention and vectors, which torch does not count here, and BERT's scores, computed for targets alone."""
    task = build(name, **SIZES)
    work = task.text_work() if task.text_work is not None else None
    assert work is not None
    model, source = task.model(), BatchSource(task.data)
    with FlopCounterMode(display=False) as counter:
        task.loss(model, source.fetch([0, 1, 2, 3])).backward()
    counted, length = counter.get_total_flops() / 4, 32
    assert work.tokens == length
    left_out = sum(one.numel() for one in model.parameters() if one.ndim == 1)
    if name == "bert":
        left_out += sum(one.numel() for one in model.parameters() if one.shape[0] >= 256)
    attention = 12 * 2 * 64 * length * length
    assert work.flops - attention - 6 * length * left_out <= counted <= work.flops


def test_a_run_tells_its_tokens_and_memory() -> None:
    task = replace(build("gpt", **SIZES), batch_size=4)
    for strategy, workers in (("single", 1), ("mirrored", 2)):
        summary = mh.fit(task, strategy, workers=workers, steps=6).summary
        assert summary["tokens_per_step"] == 4 * 32
        assert summary["tokens_per_s"] > 0
        assert summary["peak_memory_bytes"] > 1 << 20
        assert "mfu" not in summary  # of a CPU
