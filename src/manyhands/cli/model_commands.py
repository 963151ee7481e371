"""The model of a built-in task before anything is trained: `manyhands graph TASK` draws it with its placement and its
cut, and `manyhands memory TASK` says what every worker would hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from manyhands.cli.command_options import json_option, option, task_commands, write_json
from manyhands.cli.lazy_commands import usual_workers
from manyhands.cli.runs import status_line
from manyhands.errors import UserError, format_bytes, num_of
from manyhands.strategy import Strategy, check_count
from manyhands.workloads.builtin_task import BuiltinTask

if TYPE_CHECKING:
    from torch import nn

    from manyhands.engine.placement.tracing import Graph
    from manyhands.foresight.estimate import Estimate
    from manyhands.strategy import (
        WorkerMemory,
        WorkerTraffic,
    )
    from manyhands.task import Task


@dataclass(frozen=True, kw_only=True)
class _GraphOptions:
    strategy: str = option("mirrored", "Strategy, as for `train`.")
    workers: int | None = option(
        None, "Processes that share the work.", shown="2, or what the strategy needs"
    )
    place: list[str] | None = option(
        None,
        "Instead of --strategy: modules on a device, such as 'blocks.*=cuda:0'; repeatable. The device need not exist.",
        metavar="PATTERN=DEVICE",
        shown=False,
    )
    svg: Path | None = option(None, "Also write the picture to this file.", writes=True)


def _graph(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _GraphOptions) -> None:
    from manyhands.data.store.atomic import write_atomically
    from manyhands.foresight.graph_drawing import graph_svg, graph_text

    strategy = Strategy.parse(common.strategy)
    workers = usual_workers(strategy) if common.workers is None else common.workers
    check_count("workers", workers)
    strategy.check(workers, "cpu")
    where = {}
    for text in common.place or ():
        pattern, sign, device = text.rpartition("=")
        if not (pattern and sign and device):
            raise UserError(f"--place {text!r}: it must be PATTERN=DEVICE, such as 'blocks.*=cuda:0'")
        where[pattern] = device
    task = entry.build(**task_options)
    if where:
        graph, model = _traced(task, task.batch_size)
        places, about = _placed(graph, model, where), "placed by name"
    else:
        graph, model = _traced(task, math.ceil(task.batch_size / strategy.shares(workers)))
        places = _split(graph, strategy, workers)
        children = f"{workers} workers · split by {strategy.split.value}" if workers > 1 else "1 worker"
        about = f"{strategy} · {children}"
    title = f"{entry.name} · {about} · {graph.samples} samples"
    print(title, end="\n\n")
    print(graph_text(graph, places), end="")
    print(f"\n{graph.parameters:,} parameters, {format_bytes(graph.parameter_bytes)}")
    if common.svg is not None:
        write_atomically(common.svg, [graph_svg(graph, places, title).encode()])
        print(f"picture in {common.svg}")


def _traced(task: Task, samples: int) -> tuple[Graph, nn.Module]:
    from manyhands.data.batches import BatchSource
    from manyhands.data.randomness import seed_all
    from manyhands.engine.placement.tracing import trace

    seed_all(0)
    model = task.model()
    source = BatchSource(task.data, task.collate)
    batch = source.fetch(range(min(samples, len(source))))
    return trace(model, lambda model: task.loss(model, batch), min(samples, len(source))), model


def _placed(graph: Graph, model: nn.Module, where: dict[str, str]) -> tuple[str, ...]:
    from manyhands.engine.placement.placed import AUTO, known_device
    from manyhands.engine.placement.tracing import places_by_name

    for pattern, device in where.items():
        if device != AUTO:
            known_device(device, repr(pattern))
    names = [name for name, _ in model.named_modules() if name]
    return places_by_name(graph, names, where, otherwise="cpu")


def _split(graph: Graph, strategy: Strategy, workers: int) -> tuple[str, ...]:
    """Where a strategy has each module: in a stage, sliced over some workers, or on every worker."""
    from manyhands.facts import Split

    stages = strategy.stages_of([node.seconds for node in graph.nodes], workers)
    if stages is not None:
        return tuple(f"stage {stage}" for stage in stages)
    if strategy.split is Split.DIMENSIONS:
        workers //= strategy.shares(workers)
        return (f"sliced over {workers} workers",) * len(graph.nodes)
    return ("the only worker" if workers == 1 else f"each of {workers} workers",) * len(graph.nodes)


graph_app = task_commands(_graph, "Draw the model of {name}: {help}.")


@dataclass(frozen=True, kw_only=True)
class _MemoryOptions:
    strategy: str | None = option(None, "Strategies, as for `train`, separated by semicolons.", shown="all")
    workers: int = option(2, "Processes on this host.")
    json_file: Path | None = json_option("Write the estimate to this file.")


def _estimate(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _MemoryOptions) -> None:
    from manyhands.foresight.estimate import estimate, require_trainable
    from manyhands.lab.compare.comparison import workers_of
    from manyhands.strategies.registry import STRATEGIES

    workers = common.workers
    check_count("workers", workers)
    named = common.strategy is not None
    texts = common.strategy.split(";") if common.strategy is not None else list(STRATEGIES)
    strategies = [Strategy.parse(text) for text in texts]
    for strategy in strategies if named else ():  # before the task is built, which may take long
        strategy.check(workers_of(strategy, workers), "cpu")
    with status_line() as say:
        say("reading the data")
        task = entry.build(**task_options)
        found = estimate(task, say)
        say("dividing it as each strategy does")
        rows: list[tuple[str, WorkerMemory]] = []
        sent: dict[str, list[WorkerTraffic] | None] = {}
        for text, strategy in zip(texts, strategies, strict=True):
            shown = str(strategy) if named else text
            try:
                count = workers_of(strategy, workers)
                require_trainable(task, strategy, count, found)
                needs = strategy.needs(found.footprint, count)
                sent[shown] = strategy.sends(found.footprint, count)
            except UserError:
                if named:
                    raise
                continue  # not for this network, or not with so many workers
            rows += [(shown, one) for one in needs]
    model = found.footprint
    out = Console(highlight=False)
    if not out.is_terminal:
        out.width = 120
    out.print(
        f"{entry.name}: parameters {format_bytes(model.parameters)}, gradients {format_bytes(model.gradients)}, "
        f"optimizer state {format_bytes(model.state)}; batches of {model.batch_size}, {num_of(workers, 'worker')}"
    )
    out.print(_table(rows, sent), highlight=True)
    for text, one in rows:
        if one.what:
            out.print(f"{text}, besides: {one.what}")
    if None in sent.values():
        out.print("?: what is sent is not modelled with these settings.")
    out.print(
        f"Activations were {found.how}. Memory of torch, the data and the processes themselves is not counted."
    )
    write_json(common.json_file, _written(entry.name, workers, found, rows, sent))


def _written(
    task: str,
    workers: int,
    found: Estimate,
    rows: Sequence[tuple[str, WorkerMemory]],
    sent: Mapping[str, Sequence[WorkerTraffic] | None],
) -> dict[str, Any]:
    figures = asdict(replace(found.footprint, traced=None))
    del figures["traced"]
    return {
        "task": task,
        "workers": workers,
        "model": figures,
        "activations": found.how,
        "memory": [{"strategy": text, **asdict(one), "total": one.total} for text, one in rows],
        "sent_per_step": {
            text: None if traffic is None else [asdict(one) for one in traffic]
            for text, traffic in sent.items()
        },
    }


def _table(
    rows: Sequence[tuple[str, WorkerMemory]], sent: Mapping[str, Sequence[WorkerTraffic] | None]
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("strategy")
    table.add_column("who", no_wrap=True)
    for name in (
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "besides",
        "each",
        "sent/step",
        "messages",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for text, of_one in groupby(rows, key=itemgetter(0)):
        traffic, name = {one.who: one for one in sent[text] or ()}, text
        for _, one in of_one:
            amounts = (one.weights, one.gradients, one.state, one.activations, one.besides)
            shown = [format_bytes(amount) if amount else "–" for amount in amounts]
            own = _sent(traffic.pop(one.who, None), modelled=sent[text] is not None)
            table.add_row(name, _who(one), *shown, format_bytes(one.total), *own)
            name = ""
        for other in traffic.values():  # they hold nothing of their own here, as clients of a simulation
            table.add_row(name, _who(other), *["–"] * 6, *_sent(other, modelled=True))
    return table


def _who(one: WorkerMemory | WorkerTraffic) -> str:
    return one.who if one.count == 1 else f"{one.count} × {one.who}"


def _sent(one: WorkerTraffic | None, *, modelled: bool) -> tuple[str, str]:
    """Bytes and messages; a dash where nothing is sent, a question mark where that is not modelled."""
    if not modelled:
        return "?", "?"
    if one is None or not one.messages:
        return "–", "–"
    return format_bytes(one.num_bytes), f"{one.messages:,.4g}"


memory_app = task_commands(_estimate, "Estimate the memory for training {help}.")
