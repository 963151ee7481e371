"""How fast trained models answer: over precision, batch and workers, without a network in between.

Every worker is a process with the whole model, as `manyhands serve` has them; they begin at the same moment and compute
batches of inputs for a while. Reported are the inputs of all workers a second, how long one batch takes (p50, p95), and
how many of the model's choices are those of single precision.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.data.batches import BatchSource
from manyhands.data.store.tensorfile import check_precision
from manyhands.engine.fitting import fit
from manyhands.errors import ManyhandsError, UserError, nearest
from manyhands.lab.bench.harness import host_facts
from manyhands.observe.analyse.serving_view import percentile
from manyhands.observe.draw.bars import Bars
from manyhands.places.local.control import RoleContext
from manyhands.places.local.host import threads_per_role
from manyhands.places.local.supervisor import Ended, Role, Said, Supervisor
from manyhands.serving.own_predictor import inputs_of_loss
from manyhands.task import Task
from manyhands.workloads.own_task import own_task
from manyhands.workloads.predictor import in_precision
from manyhands.workloads.tasks import build

_WAIT_S = 120.0  # for all to be ready, and again for what is under way when the time is over
_BEFORE_S = 0.3  # from the last that is ready to the moment when all begin
_LEAST_BATCHES = 2
_COMPARED = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedModel:
    """What is measured of each model."""

    options: Mapping[str, Any]
    steps: int  # of training, so that its choices mean something


MODELS: dict[str, AskedModel] = {
    "digits": AskedModel(options={"width": 32}, steps=40),
    "gpt": AskedModel(options={}, steps=20),
    "recurrent": AskedModel(options={}, steps=20),
}
"""By the name of its task; a name with a colon is a Task of the user's own."""
_OWN_STEPS = 20


def run_bench(
    models: Sequence[str],
    precisions: Sequence[str],
    batches: Sequence[int],
    workers: Sequence[int],
    seconds: float,
) -> dict[str, Any]:
    """Train each model for a moment, then measure every combination; the figures as JSON."""
    for name in models:
        if name not in MODELS and ":" not in name:
            raise UserError(f"there is no model {name!r} to measure; {nearest(name, MODELS)}")
    for precision in precisions:
        check_precision(precision)
    if min((*batches, *workers), default=0) < 1 or not seconds > 0:
        raise UserError("batch sizes and workers must be at least 1, and the seconds above 0")
    rows: list[dict[str, Any]] = []
    facts = host_facts()
    combinations = list(itertools.product(workers, batches, precisions))
    for name in models:
        measured = MODELS.get(name)
        task = own_task(name) if measured is None else build(name, **measured.options)
        model = fit(task, "single", steps=measured.steps if measured else _OWN_STEPS).model.eval()
        inputs = _inputs(model, task)
        with torch.inference_mode():  # the share of the model's choices that are those of single precision
            usual = _choices(model(inputs), task)
            chosen = {one: _choices(_computing(model, one)(inputs), task) for one in precisions}
        agrees = {one: float((choice == usual).double().mean()) for one, choice in chosen.items()}
        with Bars() as bars, bars.phase(name, len(combinations), "combinations") as phase:
            for count, batch, precision in combinations:
                job = partial(
                    _work, model=model, inputs=inputs, precision=precision, batch=batch, seconds=seconds
                )
                about = {"model": name, "precision": precision, "batch": batch, "workers": count}
                about |= {"threads": threads_per_role(count), "agreement": agrees[precision]}
                rows.append({**about, **_measured(count, job, seconds)})
                phase.advance(1)
    return {**facts, "seconds": seconds, "rows": rows}


def _inputs(model: nn.Module, task: Task) -> Tensor:
    """Real ones: what the task's loss gives the model for its evaluation data, or for its data."""
    source = BatchSource(task.data if task.evaluation is None else task.evaluation, task.collate)
    given = inputs_of_loss(model, task, source.fetch(range(min(_COMPARED, len(source)))))
    if list(given) != [0]:
        raise UserError(
            f"task {task.name!r}: its model takes several or named tensors; models of one can be measured"
        )
    return given[0]


def _choices(output: Any, task: Task) -> Tensor:
    if not isinstance(output, Tensor) or not output.ndim:
        raise UserError(
            f"task {task.name!r}: its model gives a {type(output).__name__}; models of one tensor can be measured"
        )
    return output.float().argmax(-1)


def _computing(model: nn.Module, precision: str) -> Callable[[Tensor], Tensor]:
    made = in_precision(model, precision)
    kept = torch.bfloat16 if precision == "bf16" else None
    return lambda inputs: made(inputs.to(kept) if kept and inputs.is_floating_point() else inputs)


def _measured(
    count: int, job: Callable[[RoleContext], Mapping[str, Any]], seconds: float
) -> dict[str, float]:
    """Have `count` workers compute at the same time; their inputs a second together, and how long batches took."""
    ended: list[Mapping[str, Any]] = []
    ready = 0
    deadline = time.monotonic() + _WAIT_S
    with Supervisor(num_members=count) as supervisor:
        members = [supervisor.start(Role(name=f"worker {number}", target=job)) for number in range(count)]
        while len(ended) < count:
            if time.monotonic() > deadline:
                late = "answer within" if ready == count else "start within"
                missing = count - len(ended)
                raise ManyhandsError(f"{missing} worker{'s' * (missing > 1)} did not {late} {_WAIT_S:g} s")
            for event in supervisor.poll(0.1):
                match event:
                    case Said():
                        ready += 1
                        if ready == count:
                            begin = time.monotonic() + _BEFORE_S
                            deadline = begin + seconds + _WAIT_S
                            for member in members:
                                supervisor.tell(member, {"begin": begin})
                    case Ended(payload=payload, failure=failure):
                        if payload is None:
                            raise ManyhandsError(
                                failure.sentence if failure is not None else "a worker failed"
                            )
                        ended.append(payload)
    return measured_together(ended)


def measured_together(workers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Their inputs a second in all, and the percentiles of the batches of all, as who asks any of them sees them."""
    counted: Counter[int] = Counter()
    for worker in workers:
        counted.update(dict(worker["took_us"]))
    took = sorted(counted.elements())
    return {
        "inputs_per_s": sum(worker["inputs_per_s"] for worker in workers),
        "p50_ms": percentile(took, 50) / 1e3,
        "p95_ms": percentile(took, 95) / 1e3,
    }


def _work(
    context: RoleContext, *, model: nn.Module, inputs: Tensor, precision: str, batch: int, seconds: float
) -> Mapping[str, Any]:
    computing = _computing(model, precision)
    rows = torch.arange(batch) % len(inputs)
    mine = inputs[rows]
    with torch.inference_mode():
        computing(mine)  # what is done once is not measured
        context.send({"ready": True})
        deadline = time.monotonic() + _WAIT_S
        while not (received := list(context.received())):
            if time.monotonic() > deadline:
                raise ManyhandsError("no process sent the start signal")
            time.sleep(0.002)
        time.sleep(max(0.0, float(received[0]["begin"]) - time.monotonic()))
        took: list[float] = []
        started = time.perf_counter()
        while len(took) < _LEAST_BATCHES or time.perf_counter() - started < seconds:
            before = time.perf_counter()
            computing(mine)
            took.append(time.perf_counter() - before)
        elapsed = time.perf_counter() - started
    # Whole microseconds, counted: of a million batches each would be too much for one message.
    counted = Counter(round(one * 1e6) for one in took)
    return {"inputs_per_s": batch * len(took) / elapsed, "took_us": sorted(counted.items())}


def format_table(result: Mapping[str, Any]) -> str:
    lines = [
        f"{result['cores']} cores ({result['machine']}), torch {result['torch']}, {result['seconds']:g} s each"
    ]
    heading = ("model", "workers", "batch", "precision", "inputs/s", "p50, ms", "p95, ms", "same choices")
    lines.append("{:<10} {:>7} {:>6} {:>10} {:>11} {:>9} {:>9} {:>13}".format(*heading))
    for row in result["rows"]:
        lines.append(
            f"{row['model']:<10} {row['workers']:>7} {row['batch']:>6} {row['precision']:>10} "
            f"{row['inputs_per_s']:>11,.0f} {row['p50_ms']:>9.2f} {row['p95_ms']:>9.2f} {row['agreement']:>12.1%}"
        )
    return "\n".join(lines)
