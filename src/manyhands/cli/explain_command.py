"""`manyhands explain RUN`: where the time of the median step goes, who is slow since when, and the ideal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from manyhands.cli.command_options import check_writable, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from manyhands.observe.analyse.explain import Explanation
    from manyhands.observe.analyse.summary_facts import LayerSent

__all__ = ["explain_command"]


def explain_command(
    run: Annotated[Path, typer.Argument(help="The run's directory.")],
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file as JSON, too.")] = None,
) -> None:
    """Say why a run is as fast as it is, from its events."""
    # Imported here so that help texts do not wait for torch.
    from manyhands.data.store.rundir import RunDirectory
    from manyhands.observe.analyse.explain import explain, paragraph
    from manyhands.observe.analyse.summary_facts import codec_words, layers_sent, privacy_words
    from manyhands.observe.record.checked_values import text
    from manyhands.observe.record.recorded import read_run_events
    from manyhands.strategy import Strategy

    check_writable(json)
    directory = RunDirectory.open(run, lock=False)
    strategy = Strategy.parse(str(directory.config.get("strategy")))
    events = read_run_events(directory.events_path)
    found = explain(events.roles, synchronous=strategy.facts.stepwise)
    for note in events.notes:
        print(f"manyhands: {note}", file=sys.stderr)
    words = paragraph(found, str(strategy))
    summary = directory.read_summary() or {}
    words = " ".join([words, *codec_words(summary), *privacy_words(summary)])
    layers = layers_sent(summary)
    _print(found, f"{text(str(directory.config.get('task')))} · {strategy}", words, layers)
    by_layer = {"layers": [layer.to_dict() for layer in layers]} if layers else {}
    write_json(json, {"strategy": str(strategy), **found.to_dict(), **by_layer, "paragraph": words})


def _print(found: Explanation, title: str, words: str, layers: Sequence[LayerSent]) -> None:
    from manyhands.observe.draw.time_table import layers_table, parts_table, workers_table

    out = Console(highlight=False)
    out.print(f"{title} · {len(found.workers)} workers · {found.steps} steps", soft_wrap=True)
    out.print(parts_table(found))
    out.print()
    out.print(workers_table(found, out))
    out.print()
    if layers:
        out.print(layers_table(layers))
        out.print()
    out.print(words)
