"""Each microsecond in which a GPU computes nothing has one cause."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from manyhands.errors import UserError
from manyhands.observe.analyse.gpu_idle import GpuTime, gpu_time, gpu_words
from manyhands.observe.record.torch_traces import EXCHANGE, INPUT, read_traces

CAUSES = {"exchange", "copies", "input", "launches", "queue"}


def event(
    kind: str, begin: float, end: float, number: int | None = None, name: str = "gemm"
) -> dict[str, Any]:
    about = {"args": {"correlation": number}} if number is not None else {}
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin, **about}


def kernel(
    begin: float, end: float, launched: float, number: int, name: str = "gemm"
) -> list[dict[str, Any]]:
    launch = event("cuda_runtime", launched, launched + 1, number, "cudaLaunchKernel")
    return [event("kernel", begin, end, number, name), launch]


def waits(*parts: list[dict[str, Any]] | dict[str, Any]) -> dict[str, float]:
    """In microseconds, between two kernels of 100; the second begins at 200."""
    events = [*kernel(0, 100, -5, 1), *kernel(200, 300, 190, 2)]
    for part in parts:
        events += part if isinstance(part, list) else [part]
    found = gpu_time(events)
    assert found is not None
    assert set(found.waits) == CAUSES
    return {cause: share * found.span_us for cause, share in found.waits.items() if share}


def test_a_late_launch_is_the_hosts_and_a_short_pause_the_gpus() -> None:
    assert waits() == pytest.approx({"launches": 90, "queue": 10})


def test_a_kernel_that_was_launched_in_time_waits_for_the_gpu_alone() -> None:
    found = gpu_time(
        [*kernel(0, 100, -5, 1), *kernel(200, 300, 50, 2), event("user_annotation", 0, 300, name=INPUT)]
    )
    assert found is not None
    assert found.waits["queue"] == pytest.approx(1 / 3)
    assert found.idle == pytest.approx(1 / 3)


def test_getting_samples_is_input_until_the_launch() -> None:
    assert waits(event("user_annotation", 80, 195, name=INPUT)) == pytest.approx({"input": 90, "queue": 10})
    assert waits(event("user_annotation", 120, 150, name=INPUT)) == pytest.approx(
        {"input": 30, "launches": 60, "queue": 10}
    )


def test_copies_and_exchanges_have_names_of_their_own() -> None:
    copied = event("gpu_memcpy", 110, 130), event("gpu_memset", 125, 140)
    assert waits(*copied) == pytest.approx({"copies": 30, "launches": 60, "queue": 10})
    summed = event("kernel", 100, 160, 7, "ncclDevKernel_AllReduce_Sum_f32")
    assert waits(summed) == pytest.approx({"exchange": 60, "launches": 30, "queue": 10})
    assert waits(*copied, event("user_annotation", 105, 150, name=EXCHANGE)) == pytest.approx(
        {"exchange": 45, "launches": 45, "queue": 10}
    )


def test_what_runs_beside_a_kernel_costs_nothing() -> None:
    assert waits(kernel(90, 210, 60, 3), event("gpu_memcpy", 0, 90)) == {}


def test_the_causes_add_up_to_the_time_without_a_kernel() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        events: list[dict[str, Any]] = []
        busy = set[int]()
        for number in range(30):
            begin = draw.randrange(2000)
            length = draw.randrange(1, 40)
            busy |= set(range(begin, begin + length))
            events += kernel(begin, begin + length, begin - draw.randrange(60), number)
        for kind, name in (("gpu_memcpy", "copy"), ("user_annotation", INPUT), ("user_annotation", EXCHANGE)):
            for _ in range(15):
                begin = draw.randrange(min(busy), max(busy))
                events.append(event(kind, begin, min(max(busy) + 1, begin + draw.randrange(60)), name=name))
        found = gpu_time(draw.sample(events, len(events)))
        assert found is not None
        span = max(busy) + 1 - min(busy)
        assert found.span_us == span
        assert found.idle == pytest.approx(1 - len(busy) / span)


def test_a_trace_without_a_gpu_or_with_broken_events_is_none() -> None:
    broken = [
        {"cat": "kernel", "ts": "x"},
        {"cat": "kernel", "ts": 1.0, "dur": float("nan")},
        {"ts": 1, "dur": 1},
    ]
    assert gpu_time([event("cpu_op", 0, 5), *broken]) is None


def test_the_largest_cause_gives_the_advice() -> None:
    told = gpu_words(3, GpuTime(span_us=5e3, waits={"launches": 0.3, "copies": 0.1, "input": 0.0}))
    assert told.startswith(
        "The GPU of worker 3 waits 40.0% of 5.0 ms in the trace: launches 30.0%, copies 10.0%; "
    )
    assert told.endswith("compile, or take larger micro-batches.")
    assert gpu_words(0, GpuTime(span_us=5e3, waits={"queue": 0.008})).endswith("trace: queue 0.8%.")


def test_traces_are_read_by_worker_and_what_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"has no trace worker-0.json; give the folder of `manyhands train --profile`"
    ):
        read_traces(tmp_path)
    for worker in (10, 2):
        (tmp_path / f"worker-{worker}.json").write_text(json.dumps({"traceEvents": [{"ts": worker}, 3]}))
    assert read_traces(tmp_path) == {2: [{"ts": 2}], 10: [{"ts": 10}]}
    for content, why in (("{", "it is no JSON"), ("[]", "it has no traceEvents"), ("[" * 100_000, "no JSON")):
        (tmp_path / "worker-2.json").write_text(content)
        with pytest.raises(UserError, match=why):
            read_traces(tmp_path)
