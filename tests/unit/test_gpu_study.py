"""The roofline of a step against closed forms, the crossover of known lines, and the study on this machine."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from manyhands.errors import UserError
from manyhands.lab.studies.gpu_study import GPU, GpuOptions, StepTimes, gpu_answer
from manyhands.lab.studies.measured_steps import median_seconds, training_step
from manyhands.lab.studies.roofline import (
    Kernel,
    ProcessorSpeed,
    crossover,
    parse_flops,
    queued_seconds,
    step_flops,
    step_kernels,
)

H200 = ProcessorSpeed(flops_per_s=67e12, bytes_per_s=4.8e12, launch_s=5e-6)


def test_a_kernel_takes_its_arithmetic_or_its_bytes() -> None:
    ridge = H200.flops_per_s / H200.bytes_per_s  # operations per byte at which both take as long
    assert H200.seconds(Kernel(67e12, 0)) == 1
    assert H200.seconds(Kernel(0, 4.8e12)) == 1
    assert H200.seconds(Kernel(ridge * 1e9, 1e9)) == pytest.approx(1e9 / 4.8e12)


@pytest.mark.parametrize("count", [1, 7, 40])
@pytest.mark.parametrize("kernel_s", [1e-7, 5e-6, 1e-3])
def test_equal_kernels_wait_for_the_slower_of_launching_and_computing(count: int, kernel_s: float) -> None:
    kernels = [Kernel(kernel_s * H200.flops_per_s, 0)] * count
    launch_s = H200.launch_s
    expected = count * launch_s + kernel_s if kernel_s <= launch_s else launch_s + count * kernel_s
    assert queued_seconds(kernels, H200) == pytest.approx(expected)


def test_the_products_of_a_step_are_what_torch_counts() -> None:
    with FlopCounterMode(display=False) as counter:
        training_step(32, 8, 3, torch.float32, "cpu")()
    assert counter.get_total_flops() == step_flops(32, 8, 3)
    products = [one for one in step_kernels(32, 8, 3, 4) if one.num_bytes == 4 * (32**2 + 2 * 8 * 32)]
    assert sum(one.flops for one in products) == step_flops(32, 8, 3)


def test_a_constant_and_a_line_cross_where_they_are_equal() -> None:
    sizes = [1, 4, 16, 64]
    line, constant = [1e-3 * size for size in sizes], [2e-2] * 4
    assert crossover(sizes, line, constant) == pytest.approx(20)
    assert crossover(sizes, constant, line) is None, "the line is slower in the end"
    assert crossover(sizes, line, [1e-9] * 4) == 1
    assert crossover(sizes, line, [2 * one for one in line]) is None
    assert crossover([8], [2.0], [1.0]) == 8


@pytest.mark.parametrize(
    ("text", "rate"), [("100TFLOPS", 1e14), ("67.5 tflop/s", 6.75e13), ("2GFLOP", 2e9), ("3PFLOPS", 3e15)]
)
def test_rates_of_arithmetic_are_read(text: str, rate: float) -> None:
    assert parse_flops(text) == rate


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (
            {"peak": "100", "bandwidth": "1TB/s", "launch": "10us"},
            "--peak: '100' is not a rate of arithmetic",
        ),
        ({"peak": "0TFLOPS", "bandwidth": "1TB/s", "launch": "10us"}, "--peak: '0TFLOPS'"),
        ({"peak": "1TFLOPS", "bandwidth": "1", "launch": "10us"}, "--bandwidth: '1' is not a rate"),
        ({"peak": "1TFLOPS", "bandwidth": "1TB/s", "launch": "10"}, "--launch: '10' is not a time"),
        ({"peak": "1TFLOPS", "launch": "10us"}, "--bandwidth is missing"),
        ({"widths": "64,wide"}, "--widths 'wide' is not an integer of at least 1"),
        ({"device": "cpu"}, "--device 'cpu' is not a GPU"),
        ({"batches": ","}, "--batches: ',' lists no value"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(given: dict[str, str], part: str) -> None:
    with pytest.raises(UserError) as caught:
        GPU.run(GpuOptions(**given), lambda _: None)
    assert str(caught.value).startswith(part)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_it_says_so_and_marks_what_it_extrapolates() -> None:
    small = {"widths": "16", "batches": "1,32", "seconds": 0.01}
    answer = GPU.run(GpuOptions(**small), lambda _: None)
    assert any("no GPU" in sentence and "--peak" in sentence for sentence in answer.sentences)
    assert answer.figures["crossover_batch"] == {}
    assert not any("GPU" in head for head in answer.tables[0].head)
    described = {"peak": "67TFLOPS", "bandwidth": "4.8TB/s", "launch": "5us"}
    answer = GPU.run(GpuOptions(**small, **described), lambda _: None)
    assert "not measured" in answer.sentences[0]
    assert "GPU, extrapolated" in answer.tables[0].head
    modelled = [row["modelled_s"] for row in answer.figures["rows"]]
    ours = [queued_seconds(step_kernels(16, batch, 4, 4), H200) for batch in (1, 32)]
    assert modelled == pytest.approx(ours)
    assert len(answer.charts) == 2


def test_a_gpu_that_was_measured_is_named_and_the_roofline_gets_its_error() -> None:
    rows = [
        StepTimes(
            width=64, batch=batch, flops=1e6, kernels=20, cpu_s=1e-5 * batch, gpu_s=1e-4, modelled_s=0.9e-4
        )
        for batch in (1, 100)
    ]
    answer = gpu_answer(rows, "", "NVIDIA H200", "67TFLOPS")
    assert math.isclose(answer.figures["crossover_batch"]["64"], 10)
    assert answer.sentences[0].startswith(
        "NVIDIA H200 is faster than this processor at width 64 from a batch of about 10"
    )
    assert any("5 µs for each of 20 kernels" in sentence for sentence in answer.sentences)
    assert any("off by 10%" in sentence for sentence in answer.sentences)
    assert not any("no GPU" in sentence for sentence in answer.sentences)


def test_the_time_of_a_call_is_that_of_one_call() -> None:
    calls = [0]

    def call() -> None:
        calls[0] += 1
        sum(range(1000))

    seconds = median_seconds(call, "cpu", 0.02)
    assert calls[0] > 100, "a short call is timed in groups"
    assert 0 < seconds < 0.02
