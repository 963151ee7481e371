"""What each strategy says beforehand that its workers need at their peak, against what live workers allocate.

`sharded` is in test_sharded_memory.py. Not foretold, since a matter of time: an output that a stage of a pipeline has
sent and still holds, because its sending thread has not come to drop it. It is allowed for here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import manyhands as mh
from live_memory import Watch
from manyhands.data.randomness import preserved
from manyhands.facts import Machines, ModelFootprint
from manyhands.foresight.estimate import Estimate, estimate
from manyhands.foresight.plan.task_profile import TaskProfiles
from manyhands.strategies.pipeline.strategy import Pipeline
from manyhands.strategy import Strategy
from manyhands.wire.names import RAW
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.next_token import next_byte_loss
from manyhands.workloads.tasks import build


def layers() -> mh.Task:
    return mh.Task(
        model=lambda: nn.Sequential(*(one for _ in range(12) for one in (nn.Linear(64, 64), nn.ReLU()))),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        data=(torch.randn(128, 64),),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=32,
    )


def transformer() -> mh.Task:
    return mh.Task(
        model=lambda: GPT(context=32, layers=4, width=64, heads=4, vocabulary=64),
        loss=next_byte_loss,
        data=torch.randint(0, 64, (640, 33)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=16,
    )


TASKS: dict[str, Callable[[], mh.Task]] = {
    "layers": layers,
    "digits": lambda: replace(build("digits"), evaluation=None, metrics={}),
    "gpt": transformer,
}
STEPS, UNTIL = 60, 400  # modules that a worker calls, of which the second half counts
WHOLE = ("mirrored", "allreduce algorithm=ring", "central", "ps", "local", "hogwild")
CASES = [
    ("layers", 1, "single"),
    ("layers", 3, "mirrored"),
    ("layers", 2, "pipeline cuts=12"),
    ("digits", 2, "pipeline cuts=4 microbatches=1"),
    ("gpt", 2, "pipeline"),  # whose cuts a plan finds
    ("gpt", 2, "ps"),
    ("gpt", 2, "allreduce link=tcp codec=powersgd:2"),
    ("layers", 2, "ps link=tcp codec=topk:0.01"),
]
LONG = [
    *((name, workers, text) for name in TASKS for text in WHOLE for workers in (2, 4)),
    *((name, 1, "single") for name in ("digits", "gpt")),
    ("gpt", 2, "pipeline cuts=3"),
    *((name, workers, "tensor") for name in TASKS for workers in (2, 4)),
    ("layers", 4, "tensor slices=2"),
    ("layers", 4, "pipeline stages=2 cuts=12"),
    ("gpt", 4, "pipeline stages=2 cuts=3"),
    ("layers", 8, "mirrored"),
    ("layers", 8, "central"),
    # Of small models the peak is a bucket that is decoded, which this cannot see: see test_coded_costs.py.
    ("gpt", 4, "allreduce link=tcp codec=topk:0.01"),
    ("gpt", 4, "allreduce link=tcp codec=powersgd:2"),
    ("gpt", 2, "allreduce link=tcp codec=int8"),
    ("digits", 2, "allreduce link=tcp codec=topk:0.01"),
    ("layers", 2, "local link=tcp codec=int8"),
    ("gpt", 2, "ps link=tcp codec=int8"),
    *((name, workers, "pipeline") for name in ("layers", "digits") for workers in (2, 4)),
]


def live(task: mh.Task, strategy: Strategy, workers: int, folder: Path) -> float:
    """Bytes of all workers together at their peaks, without samples, and what they share once."""
    data = [one for one in tree_leaves(task.data) if isinstance(one, Tensor)]
    watch, make = Watch(folder, UNTIL, data), task.model
    if workers == 1:
        watch.in_caller()
    watched = replace(task, model=lambda: watch.hooked(make()))
    options = mh.Options(progress="none", check_every=0, allow_overload=True)
    steps = STEPS if strategy.facts.splits_batches else workers * STEPS
    mh.fit(watched, strategy, workers=workers, steps=steps, options=options)
    found = [json.loads(file.read_text()) for file in folder.iterdir()]
    assert len(found) == workers
    samples = sum(one.nbytes for one in data)
    batch = samples * task.batch_size / len(data[0]) / strategy.shares(workers)
    shared = {place: size for one in found for place, size in one["shared"].items()}
    own = sum(one["own"] - (samples if workers > 1 else 0) - batch for one in found)
    if getattr(strategy, "codec", RAW) != RAW:
        own += sum(one["elsewhere"] for one in found)
    return own + sum(shared.values())


def planned(task: mh.Task, strategy: Strategy, workers: int, found: Estimate) -> Strategy:
    """With the settings that a plan finds, and `train --plan` keeps: else each run measures them anew."""
    if not isinstance(strategy, Pipeline) or strategy.cuts:
        return strategy
    profile = TaskProfiles(task, found, seconds=0.3).of(workers, workers)
    step = strategy.predict(profile, Machines(per_host=workers))
    assert step is not None
    settled: Strategy = step.with_settings
    return settled


def still_sent(strategy: Strategy, footprint: ModelFootprint) -> int:
    """Bytes that stages of a pipeline may still hold: at each cut, the output sent on and its gradient sent back.

    Each is as large as a micro-batch's largest output of one layer, at the most.
    """
    if not isinstance(strategy, Pipeline):
        return 0
    sizes, traced = list[int](), footprint.traced
    assert traced is not None
    model = traced.copy()
    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(lambda _module, _given, output: sizes.append(output.nbytes))
    with preserved(), traced.tracing():
        traced.task.loss(model, traced.batch(footprint.batch_size // strategy.microbatches))
    return 2 * (strategy.table().parts - 1) * max(sizes)


@pytest.mark.filterwarnings("ignore:hogwild on a dense model")
@pytest.mark.parametrize(
    ("name", "workers", "text"), [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in LONG)]
)
def test_a_peak_is_foretold_within_a_twentieth(name: str, workers: int, text: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = TASKS[name]()
    found = estimate(task)
    footprint, strategy = found.footprint, planned(task, Strategy.parse(text), workers, found)
    said = sum(row.count * row.total for row in strategy.needs(footprint, workers) if row.who != "server")
    seen, held = live(task, strategy, workers, tmp_path), still_sent(strategy, footprint)
    print(f"{name} {workers} {strategy}: {said} said, {seen:.0f} seen, {100 * (said / seen - 1):+.1f} %")
    # Which of them are there at the peak depends on which stage is ahead.
    assert 0.95 * seen - held <= said <= 1.05 * seen + held / 2


@pytest.mark.parametrize(
    ("name", "workers", "text"),
    [
        ("layers", 1, "ps"),
        ("gpt", 3, "ps"),
        ("digits", 2, "ps servers=2"),
        ("layers", 2, "ps servers=2 consistency=async"),
        ("layers", 2, "ps link=tcp"),
    ],
)
def test_servers_keep_what_was_foretold(name: str, workers: int, text: str) -> None:
    """Values, the optimizer's state and the sum of a step, as the servers count them at the end of a run."""
    task = TASKS[name]()
    rows = Strategy.parse(text).needs(estimate(task).footprint, workers)
    said = sum(row.count * row.total for row in rows if row.who == "server")
    run = mh.fit(
        task, text, workers=workers, steps=8, options=mh.Options(progress="none", allow_overload=True)
    )
    assert said == pytest.approx(sum(one["bytes"] for one in run.summary["servers"]), rel=0.01)
