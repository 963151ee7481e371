"""`manyhands memory TASK`: what every worker would hold, before anything is trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from manyhands.cli.command_options import add_task_command, check_writable, write_json
from manyhands.cli.leaving import status_line
from manyhands.errors import UserError, format_bytes
from manyhands.strategy import check_count
from manyhands.workloads.registry import offered
from manyhands.workloads.tasks.builtin import BuiltinTask

if TYPE_CHECKING:
    from manyhands.engine.kernel_task import AnyTask
    from manyhands.facts import WorkerMemory
    from manyhands.foresight.estimate import Estimate
    from manyhands.strategy import Strategy

__all__ = ["memory_app"]

memory_app = typer.Typer(
    help="Say what training needs in memory on each worker, before anything is trained.",
    no_args_is_help=True,
)


@dataclass(frozen=True, kw_only=True)
class _Common:
    """The options of every estimate."""

    strategy: Annotated[
        str | None, typer.Option(help="How, as for train; several, with ';' between.", show_default="all")
    ] = None
    workers: Annotated[int, typer.Option(help="Processes on this host.")] = 2
    json_file: Annotated[Path | None, typer.Option("--json", help="Write it to this file.")] = None


def _tell(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _Common) -> None:
    # Imported here so that help texts do not wait for torch.
    from manyhands.foresight.estimate import estimate

    check_writable(common.json_file)
    workers = common.workers
    check_count("workers", workers)
    asked = _asked(common.strategy, workers)
    with status_line() as say:
        say("reading the data")
        task = entry.build(**task_options)
        found = estimate(task, say)
        say("dividing it as each strategy does")
        rows = []
        for text, strategy in asked or _all():
            try:
                needs = _needs(task, strategy, workers, found)
            except UserError:
                if asked:
                    raise
                continue  # not for this network, or not with so many workers
            rows += [(text, one) for one in needs]
    model = found.footprint
    out = Console()
    if not out.is_terminal:
        out.width = 120
    out.print(
        f"{entry.name}: parameters {format_bytes(model.parameters)}, gradients {format_bytes(model.gradients)}, "
        f"optimizer state {format_bytes(model.state)}; batches of {model.batch_size}, {workers} workers",
        highlight=False,
    )
    out.print(_table(rows))
    for text, one in rows:
        if one.what:
            out.print(f"{text}, besides: {one.what}", highlight=False)
    out.print(
        f"Activations were {found.how}. What torch, the data and the processes themselves take is not counted.",
        highlight=False,
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


def _asked(text: str | None, workers: int) -> list[tuple[str, Strategy]]:
    """By their texts; none where none was named. What no task could be trained by is refused before one is built."""
    from manyhands.strategy import Strategy

    asked = [Strategy.parse(one) for one in text.split(";")] if text is not None else []
    for strategy in asked:
        strategy.check(_of(strategy, workers), "cpu")
    return [(str(strategy), strategy) for strategy in asked]


def _all() -> list[tuple[str, Strategy]]:
    from manyhands.strategies.registry import STRATEGIES
    from manyhands.strategy import Strategy

    return [(word, Strategy.parse(word)) for word in STRATEGIES]


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
    """As many workers as it may have."""
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


for _entry in offered("task"):
    add_task_command(memory_app, _entry, _Common, _tell, f"What training {_entry.help} needs.")
