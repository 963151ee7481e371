"""The study `parallelism`: how much of a task's step can be done at the same time, whoever does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from manyhands.errors import UserError, num_of
from manyhands.foresight.work_depth import Op, WorkDepth, work_depth
from manyhands.lab.studies.study import Study, StudyAnswer, StudyChart, StudyTable
from manyhands.observe.draw.axes import short_number
from manyhands.observe.draw.charts import Series, line_chart
from manyhands.workloads.task_options import CheckedOptions, option

_PROCESSORS = (1, 2, 4, 8, 16, 32, 64)
_HALVES = {"forward": False, "backward": True, "forward and backward": None}
_WHOLE, _SINGLE = "whole operators", "single operations"


@dataclass(frozen=True, kw_only=True)
class ParallelismOptions(CheckedOptions):
    """What is analysed."""

    task: str = option("digits", "built-in task, or MODULE:NAME of your own")
    batch_size: int | None = option(None, "samples in the batch", at_least=1, shown="the task's")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPart:
    """A half of a step, or all of it, on so many samples, at one size of the smallest piece."""

    part: str  # forward, backward or both
    samples: int
    pieces: str  # what is not divided further
    bounds: WorkDepth


def parts_of_step(ops: Sequence[Op], samples: int) -> list[StepPart]:
    costs: dict[str, Callable[[Op], float]] = {_WHOLE: lambda op: op.flops, _SINGLE: lambda op: op.span}
    return [
        StepPart(
            part=part, samples=samples, pieces=pieces, bounds=work_depth(ops, cost, backward=is_backward)
        )
        for pieces, cost in costs.items()
        for part, is_backward in _HALVES.items()
    ]


def answer_of_ops(traces: dict[int, Sequence[Op]], name: str) -> StudyAnswer:
    """The answer from the operators of a step, by the number of its samples."""
    parts = [part for samples, ops in sorted(traces.items()) for part in parts_of_step(ops, samples)]
    steps = {(one.pieces, one.samples): one.bounds for one in parts if _HALVES[one.part] is None}
    few, many = min(traces), max(traces)
    inside = steps[_SINGLE, many]
    forward, backward = (
        next(one.bounds for one in parts if (one.pieces, one.part, one.samples) == (_WHOLE, part, many))
        for part in ("forward", "backward")
    )
    sentences = [
        f"A step of {name} on {num_of(many, 'sample')} has parallelism {short_number(steps[_WHOLE, many].parallelism)} "
        f"where an operator of torch is not divided ({short_number(forward.parallelism)} in forward, "
        f"{short_number(backward.parallelism)} in backward): operators that do not need each other, on any number of "
        "processors, make it no faster than that.",
        f"Inside the operators it is {short_number(inside.parallelism)}: the longest chain of single operations has "
        f"{short_number(inside.depth)} of {short_number(inside.work)}. Splitting batches and matrices has much "
        "to gain.",
    ]
    if few < many:
        alone = steps[_SINGLE, few]
        sentences.append(
            f"A batch of {many:,} instead of {few:,} does {short_number(inside.work / alone.work)} times the work in "
            f"{short_number(inside.depth / alone.depth)} times the depth, so parallelism grows "
            f"{short_number(inside.parallelism / alone.parallelism)} times: samples wait for each other only in sums."
        )
    sentences.append(
        "Counted from shapes, not measured: memory, communication and the optimizer take no time here, so these are "
        "limits and no forecast."
    )
    return StudyAnswer(
        sentences=tuple(sentences),
        tables=(_parts_table(parts), _bounds_table(steps)),
        charts=(_bounds_chart(steps, many),),
        figures={
            "task": name,
            "parts": [{**asdict(one), "parallelism": one.bounds.parallelism} for one in parts],
            "bounds": [
                {
                    "pieces": pieces,
                    "samples": samples,
                    "processors": processors,
                    "at_most": bounds.at_most(processors),
                    "at_least": bounds.at_least(processors),
                }
                for (pieces, samples), bounds in steps.items()
                for processors in _PROCESSORS
            ],
        },
    )


def _parts_table(parts: Sequence[StepPart]) -> StudyTable:
    return StudyTable(
        title="Work and depth, in operations",
        head=("smallest piece", "samples", "part", "work", "depth", "parallelism"),
        rows=tuple(
            (
                one.pieces,
                f"{one.samples:,}",
                one.part,
                short_number(one.bounds.work),
                short_number(one.bounds.depth),
                short_number(one.bounds.parallelism),
            )
            for one in parts
        ),
    )


def _bounds_table(steps: dict[tuple[str, int], WorkDepth]) -> StudyTable:
    def shown(bounds: WorkDepth, processors: int) -> str:
        return f"{short_number(bounds.at_least(processors))} to {short_number(bounds.at_most(processors))}"

    return StudyTable(
        title="Speed-up of a step: at least, by Brent's bound, and at most",
        head=("processors", *(f"{pieces}, {num_of(samples, 'sample')}" for pieces, samples in steps)),
        rows=tuple(
            (str(processors), *(shown(bounds, processors) for bounds in steps.values()))
            for processors in _PROCESSORS
        ),
    )


def _bounds_chart(steps: dict[tuple[str, int], WorkDepth], samples: int) -> StudyChart:
    series = [
        Series(name=f"{pieces}, {word}", xs=_PROCESSORS, ys=[bound(p) for p in _PROCESSORS])
        for pieces in (_WHOLE, _SINGLE)
        for word, bound in (
            ("at most", steps[pieces, samples].at_most),
            ("at least", steps[pieces, samples].at_least),
        )
    ]
    title = f"Speed-up that the graph allows, {num_of(samples, 'sample')}"
    picture = line_chart(
        series, title=title, x_label="processors", y_label="times as fast", log_x=True, log_y=True
    )
    return StudyChart(
        title=title,
        picture=picture,
        explained="At most: the lesser of p and work / depth. At least: Brent's T(p) ≤ depth + (work - depth) / p.",
    )


def _run(options: ParallelismOptions, report: Callable[[str], None]) -> StudyAnswer:
    from manyhands.data.batches import BatchSource
    from manyhands.foresight.estimate import estimate
    from manyhands.foresight.op_graph import trace_ops
    from manyhands.workloads.own_task import own_task
    from manyhands.workloads.tasks import build

    task = own_task(options.task) if ":" in options.task else build(options.task)
    batch_size = options.batch_size or task.batch_size
    traced = estimate(task, report).footprint.traced
    assert traced is not None, "estimate() always traces"
    if batch_size > (most := len(BatchSource(task.data, task.collate))):
        raise UserError(
            f"--batch-size {batch_size}: task {task.name!r} has {num_of(most, 'sample')}; give at most that"
        )
    traces: dict[int, Sequence[Op]] = {}
    for samples in dict.fromkeys((1, batch_size)):
        report(f"tracing forward and backward of {num_of(samples, 'sample')}")
        traces[samples] = trace_ops(traced, samples)
    return answer_of_ops(traces, task.name)


PARALLELISM = Study(
    name="parallelism",
    question="How much of a training step can be done at the same time, on any number of processors?",
    options_type=ParallelismOptions,
    run=_run,
)
