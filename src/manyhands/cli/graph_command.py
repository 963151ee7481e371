"""`manyhands graph TASK`: the model of a built-in task as a graph, with its placement and its cut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.cli.command_options import option, task_commands
from manyhands.cli.lazy_commands import usual_workers
from manyhands.errors import UserError, format_bytes
from manyhands.strategy import check_count
from manyhands.workloads.tasks.builtin import BuiltinTask

if TYPE_CHECKING:
    from torch import nn

    from manyhands.engine.placement.tracing import Graph
    from manyhands.strategy import Strategy
    from manyhands.task import Task

__all__ = ["graph_app"]


@dataclass(frozen=True, kw_only=True)
class _GraphOptions:
    strategy: str = option("mirrored", "How it is to be trained, as for `train`.")
    workers: int | None = option(
        None, "Processes that share the work.", show_default="2, or what the strategy takes"
    )
    place: list[str] | None = option(
        None,
        "Instead of --strategy: modules on a device, as 'blocks.*=cuda:0'; may be given several times, "
        "and nothing has to be there.",
        metavar="PATTERN=DEVICE",
        show_default=False,
    )
    svg: Path | None = option(None, "Write the picture to this file, too.", writes=True)


def _graph(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _GraphOptions) -> None:
    from manyhands.data.store.atomic import write_atomically
    from manyhands.foresight.graph_drawing import graph_svg, graph_text
    from manyhands.strategy import Strategy

    strategy = Strategy.parse(common.strategy)
    workers = usual_workers(strategy) if common.workers is None else common.workers
    check_count("workers", workers)
    strategy.check(workers, "cpu")
    where = {}
    for text in common.place or ():
        pattern, sign, device = text.rpartition("=")
        if not (pattern and sign and device):
            raise UserError(f"--place {text!r}: it must be PATTERN=DEVICE, as in 'blocks.*=cuda:0'")
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
    """The graph of the task's model for its first samples, and the model."""
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
