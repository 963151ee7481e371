"""The study `truck`: a fast car or a truck; small batches with short latency, or large ones with high throughput."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manyhands.errors import UserError
from manyhands.lab.studies.study import Study, StudyAnswer
from manyhands.lab.studies.study_values import counts_of
from manyhands.workloads.task_options import check_options, option


@dataclass(frozen=True, kw_only=True)
class TruckOptions:
    """What is measured."""

    task: str = option("digits", "built-in task, or MODULE:NAME of your own")
    batches: str = option("1,2,4,8,16,32,64,128,256", "samples in a batch", metavar="LIST")
    seconds: float = option(0.5, "of measuring each size", above=0)
    device: str = option("cpu", "where it is computed: cpu, or cuda")

    def __post_init__(self) -> None:
        check_options(self)
        counts_of("batches", self.batches)


def _run(options: TruckOptions, report: Callable[[str], None]) -> StudyAnswer:
    from manyhands.engine.device import check_device
    from manyhands.lab.studies.latency_throughput import truck_answer
    from manyhands.lab.studies.measured_batches import measure_batches
    from manyhands.workloads.own_task import own_task
    from manyhands.workloads.tasks import build

    device = check_device(options.device)
    task = own_task(options.task) if ":" in options.task else build(options.task)
    if task.streams:
        raise UserError(
            f"--task {options.task}: its data is {task.stream_name}; this study needs samples that it can choose"
        )
    batches = sorted({1, *counts_of("batches", options.batches)})  # all are compared with one
    rows = measure_batches(task, batches, device, options.seconds, report)
    return truck_answer(rows, task.name, device)


TRUCK = Study(
    name="truck",
    question="Are small batches, which are answered soon, or large ones, which do more a second, the better choice?",
    options_type=TruckOptions,
    run=_run,
)
