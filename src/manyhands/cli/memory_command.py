"""`manyhands memory TASK`: what every worker would hold, before anything is trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from manyhands.cli.command_options import json_option, option, task_commands, write_json
from manyhands.cli.runs import status_line
from manyhands.errors import UserError, format_bytes, num_of
from manyhands.strategy import check_count
from manyhands.workloads.tasks.builtin import BuiltinTask

if TYPE_CHECKING:
    from manyhands.engine.kernel_task import AnyTask
    from manyhands.facts import WorkerMemory
    from manyhands.foresight.estimate import Estimate
    from manyhands.strategy import Strategy

__all__ = ["memory_app"]


@dataclass(frozen=True, kw_only=True)
class _MemoryOptions:
    strategy: str | None = option(None, "How, as for train; several, with ';' between.", show_default="all")
    workers: int = option(2, "Processes on this host.")
    json_file: Path | None = json_option("Write it to this file.")


def _estimate(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _MemoryOptions) -> None:
    from manyhands.foresight.estimate import estimate
    from manyhands.strategies.registry import STRATEGIES
    from manyhands.strategy import Strategy

    workers = common.workers
    check_count("workers", workers)
    named = common.strategy is not None
    texts = common.strategy.split(";") if common.strategy is not None else list(STRATEGIES)
    strategies = [Strategy.parse(text) for text in texts]
    for strategy in strategies if named else ():  # before the task is built, which may take long
        strategy.check(_of(strategy, workers), "cpu")
    with status_line() as say:
        say("reading the data")
        task = entry.build(**task_options)
        found = estimate(task, say)
        say("dividing it as each strategy does")
        rows = []
        for text, strategy in zip(texts, strategies, strict=True):
            try:
                needs = _needs(task, strategy, workers, found)
            except UserError:
                if named:
                    raise
                continue  # not for this network, or not with so many workers
            rows += [(str(strategy) if named else text, one) for one in needs]
    model = found.footprint
    out = Console(highlight=False)
    if not out.is_terminal:
        out.width = 120
    out.print(
        f"{entry.name}: parameters {format_bytes(model.parameters)}, gradients {format_bytes(model.gradients)}, "
        f"optimizer state {format_bytes(model.state)}; batches of {model.batch_size}, {num_of(workers, 'worker')}"
    )
    out.print(_table(rows), highlight=True)
    for text, one in rows:
        if one.what:
            out.print(f"{text}, besides: {one.what}")
    out.print(
        f"Activations were {found.how}. What torch, the data and the processes themselves take is not counted."
    )
    write_json(
        common.json_file,
        {
            "task": entry.name,
            "workers": workers,
            "model": asdict(model),
            "activations": found.how,
            "memory": [{"strategy": text, **asdict(one), "total": one.total} for text, one in rows],
        },
    )


def _needs(task: AnyTask, strategy: Strategy, workers: int, found: Estimate) -> list[WorkerMemory]:
    """What each worker holds; whatever `train` would refuse before it begins is refused with its sentence."""
    from manyhands.engine.options import Options
    from manyhands.engine.request import Length, Request
    from manyhands.engine.training import training_class

    count = _of(strategy, workers)
    shortest = Length(rounds=1) if strategy.facts.counts_rounds else Length(steps=1)
    request = Request.make(task, strategy, count, shortest, 0, Options(), "cpu")
    training_class(strategy, compiled=request.plan.task.compiled)(request, found.model)
    return strategy.needs(found.footprint, count)


def _of(strategy: Strategy, workers: int) -> int:
    return workers if strategy.most_workers is None else min(workers, strategy.most_workers)


def _table(rows: list[tuple[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("strategy")
    table.add_column("who", no_wrap=True)
    for name in ("weights", "gradients", "optimizer", "activations", "besides", "each"):
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    for text, one in rows:
        amounts = (one.weights, one.gradients, one.state, one.activations, one.besides)
        who = one.who if one.count == 1 else f"{one.count} × {one.who}"
        shown = [format_bytes(amount) if amount else "–" for amount in amounts]
        table.add_row(text if text != before else "", who, *shown, format_bytes(one.total))
        before = text
    return table


memory_app = task_commands(_estimate, "What training {help} needs.")
