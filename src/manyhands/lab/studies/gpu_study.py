"""The study `gpu`: from which batch and width on a GPU is faster than this processor, and by how much."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from manyhands.errors import UserError, format_seconds, num_of
from manyhands.foresight.plan.described_cluster import parse_duration, parse_rate
from manyhands.lab.studies.roofline import (
    ProcessorSpeed,
    crossover,
    parse_flops,
    queued_seconds,
    step_flops,
    step_kernels,
)
from manyhands.lab.studies.study import Study, StudyAnswer, StudyChart, StudyTable
from manyhands.lab.studies.study_values import counts_of, read_as
from manyhands.observe.draw.axes import short_number
from manyhands.observe.draw.charts import Series, line_chart
from manyhands.workloads.task_options import check_options, option

_DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """What is measured, and the GPU that is extrapolated to."""

    widths: str = option("64,256,1024", "widths of the layers", metavar="LIST")
    batches: str = option("1,8,64,512", "samples in a batch", metavar="LIST")
    layers: int = option(4, "linear layers, one after another", at_least=1)
    dtype: str = option("float32", "numbers that are computed with", choices=_DTYPES)
    seconds: float = option(0.2, "of measuring each size on each device", above=0)
    device: str = option("cuda", "GPU that is measured, if there is one")
    peak: str | None = option(None, "arithmetic of a GPU that is not here, such as 100TFLOPS", metavar="RATE")
    bandwidth: str | None = option(None, "bandwidth of its memory, such as 1TB/s", metavar="RATE")
    launch: str | None = option(
        None, "time that the host needs to launch a kernel, torch included, such as 10us", metavar="TIME"
    )

    def __post_init__(self) -> None:
        check_options(self)
        counts_of("widths", self.widths)
        counts_of("batches", self.batches)
        _ = self.extrapolated  # refuses what is no GPU
        if not self.device.startswith("cuda"):
            raise UserError(
                f"--device {self.device!r} is not a GPU; give cuda, or cuda:1; the processor is always measured"
            )

    @property
    def extrapolated(self) -> ProcessorSpeed | None:
        """The GPU of the last three, which are given together; None where they are not given."""
        given = {"peak": self.peak, "bandwidth": self.bandwidth, "launch": self.launch}
        missing = [f"--{name}" for name, text in given.items() if text is None]
        if len(missing) == len(given):
            return None
        if missing:
            raise UserError(
                f"{missing[0]} is missing; a GPU is described by --peak, --bandwidth and --launch"
            )
        return ProcessorSpeed(
            flops_per_s=read_as("peak", self.peak or "", parse_flops),
            bytes_per_s=read_as("bandwidth", self.bandwidth or "", parse_rate),
            launch_s=read_as("launch", self.launch or "", parse_duration),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """One step at one size: seconds on each processor, None where it is not known."""

    width: int
    batch: int
    flops: float  # of its products of matrices
    kernels: int  # that a GPU is given for it
    cpu_s: float
    gpu_s: float | None = None  # measured
    modelled_s: float | None = None  # by the roofline

    @property
    def other_s(self) -> float | None:
        return self.gpu_s if self.gpu_s is not None else self.modelled_s


def gpu_answer(rows: Sequence[StepTimes], about: str, gpu: str, modelled: str) -> StudyAnswer:
    """From all sizes; `about` says what was computed, `gpu` and `modelled` call the GPUs, empty where there is none."""
    widths = sorted({row.width for row in rows})
    by_width = {width: [row for row in rows if row.width == width] for width in widths}
    points = {width: _crossover(of_width) for width, of_width in by_width.items()} if gpu or modelled else {}
    sentences = []
    if points:
        where = _where_faster(points, [row.batch for row in by_width[widths[0]]])
        is_faster = f"{gpu} is" if gpu else f"A GPU of {modelled} would be"
        how = "measured" if gpu else "extrapolated by a roofline, not measured"
        sentences.append(f"{is_faster} faster than this processor {where} ({how}).")
        best = max(rows, key=_gain)
        sentences.append(
            f"The GPU gains most at width {best.width:,} and batch {best.batch:,}: {short_number(_gain(best))} times "
            "as fast."
        )
    if not gpu:
        sentences.append(
            "This machine has no GPU that torch can use, so only the processor's half is measured"
            + ("." if modelled else "; --peak, --bandwidth and --launch extrapolate a GPU's.")
        )
    shortest = min((row for row in rows if row.gpu_s), key=lambda row: row.gpu_s or 0.0, default=None)
    if shortest is not None and shortest.gpu_s:
        sentences.append(
            f"Its shortest step takes {format_seconds(shortest.gpu_s)}, "
            f"{format_seconds(shortest.gpu_s / shortest.kernels)} for each of {shortest.kernels} kernels, which is "
            "mostly their launch by torch."
        )
    errors = [row.modelled_s / row.gpu_s - 1 for row in rows if row.gpu_s and row.modelled_s]
    if errors:
        middle = statistics.median(map(abs, errors))
        sentences.append(
            f"The roofline of {modelled} is off by {middle:.0%} in the median, from {min(errors):+.0%} to "
            f"{max(errors):+.0%}."
        )
    sentences.append(
        f"{about} Batches are in the processor's memory already: moving them there takes no time here."
    )
    return StudyAnswer(
        sentences=tuple(sentences),
        tables=(_table(rows, bool(gpu), bool(modelled)),),
        charts=tuple(_charts(by_width, bool(gpu))),
        figures={
            "rows": [asdict(row) for row in rows],
            "gpu": gpu,
            "extrapolated": modelled,
            "crossover_batch": {str(width): batch for width, batch in points.items()},
        },
    )


def _crossover(rows: Sequence[StepTimes]) -> float | None:
    other = [row.other_s for row in rows if row.other_s is not None]
    return crossover([row.batch for row in rows], [row.cpu_s for row in rows], other)


def _where_faster(points: Mapping[int, float | None], batches: Sequence[int]) -> str:
    said = []
    for width, batch in points.items():
        if batch is None:
            said.append(f"not at width {width:,} up to batch {batches[-1]:,}")
        elif batch <= batches[0]:
            said.append(f"at width {width:,} from batch {batches[0]:,} on, the smallest")
        else:
            said.append(f"at width {width:,} from a batch of about {short_number(batch)} on")
    return "; ".join(said)


def _gain(row: StepTimes) -> float:
    return row.cpu_s / row.other_s if row.other_s else 0.0


def _table(rows: Sequence[StepTimes], measured: bool, modelled: bool) -> StudyTable:
    head = ["width", "batch", "CPU", "CPU, GFLOP/s"]
    head += ["GPU", "GPU, GFLOP/s"] * measured + ["GPU, extrapolated"] * modelled
    head += ["times as fast"] * (measured or modelled)
    cells = []
    for row in rows:
        times = [row.cpu_s, *([row.gpu_s] if measured else [])]
        shown = [f"{row.width:,}", f"{row.batch:,}"]
        for seconds in times:
            shown += [format_seconds(seconds or 0.0), f"{row.flops / (seconds or 1.0) / 1e9:,.3g}"]
        shown += [format_seconds(row.modelled_s or 0.0)] * modelled
        cells.append((*shown, *([short_number(_gain(row))] * (measured or modelled))))
    return StudyTable(title="A training step", head=tuple(head), rows=tuple(cells))


def _charts(by_width: Mapping[int, Sequence[StepTimes]], measured: bool) -> list[StudyChart]:
    times, gains, how = [], [], "GPU" if measured else "GPU, extrapolated"
    for width, rows in by_width.items():
        xs = [float(row.batch) for row in rows]
        times.append(Series(name=f"CPU, width {width:,}", xs=xs, ys=[row.cpu_s * 1e3 for row in rows]))
        known = [row.other_s * 1e3 for row in rows if row.other_s is not None]
        if known:
            times.append(Series(name=f"{how}, width {width:,}", xs=xs, ys=known))
            gains.append(Series(name=f"width {width:,}", xs=xs, ys=[_gain(row) for row in rows]))
    picture = partial(line_chart, x_label="samples in a batch", log_x=True, log_y=True)
    title = "Time of a training step"
    charts = [StudyChart(title=title, picture=picture(times, title=title, y_label="ms"))]
    if gains:
        title = f"What the {how} gains"
        drawn = picture(gains, title=title, y_label="times as fast as the CPU")
        charts.append(StudyChart(title=title, picture=drawn, explained="Below 1 the processor is faster."))
    return charts


def _run(options: GpuOptions, report: Callable[[str], None]) -> StudyAnswer:
    import torch

    from manyhands.engine.device import check_device, num_gpus
    from manyhands.lab.studies.measured_steps import measure_steps

    described, layers = options.extrapolated, options.layers
    device = check_device(options.device) if num_gpus() else ""
    dtype: torch.dtype = getattr(torch, options.dtype)
    sizes = [
        (width, batch)
        for width in counts_of("widths", options.widths)
        for batch in counts_of("batches", options.batches)
    ]
    devices = ["cpu", device] if device else ["cpu"]
    took = measure_steps(sizes, layers, dtype, devices, options.seconds, report)
    rows = []
    for width, batch in sizes:
        kernels = step_kernels(width, batch, layers, dtype.itemsize)
        rows.append(
            StepTimes(
                width=width,
                batch=batch,
                flops=step_flops(width, batch, layers),
                kernels=len(kernels),
                cpu_s=took[width, batch, "cpu"],
                gpu_s=took[width, batch, device] if device else None,
                modelled_s=queued_seconds(kernels, described) if described else None,
            )
        )
    about = (
        f"A step is forward, backward and SGD of {num_of(layers, 'linear layer')} without bias in "
        f"{options.dtype}; the processor computes with {num_of(torch.get_num_threads(), 'thread')}."
    )
    modelled = f"{options.peak}, {options.bandwidth} and {options.launch} a launch" if described else ""
    return gpu_answer(rows, about, torch.cuda.get_device_name(device) if device else "", modelled)


GPU = Study(
    name="gpu",
    question="From which batch and width on is a GPU faster than this processor?",
    options_type=GpuOptions,
    run=_run,
)
