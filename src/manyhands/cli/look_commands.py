"""Look at a run: `manyhands timeline`, `explain`, `watch`, `report` and `tensorboard`, each with its directory."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from manyhands.cli.command_options import argument, from_options, json_option, option, write_json
from manyhands.errors import UserError, format_bytes

if TYPE_CHECKING:
    from manyhands.observe.analyse.view import RunView

__all__ = [
    "explain_command",
    "report_command",
    "serving",
    "tensorboard_command",
    "timeline_command",
    "watch_command",
]


class _Format(StrEnum):
    TRACE = "trace"
    SVG = "svg"


@dataclass(frozen=True)
class _LookedAt:
    """The run that a command is about."""

    run: Path = argument(..., "The run's directory.")


@dataclass(frozen=True)
class _TimelineOptions(_LookedAt):
    """The options of `timeline`."""

    out: Path | None = option(None, "Write to this file; RUN/timeline.json or .svg otherwise.", writes=True)
    form: _Format | None = option(
        None, "What to write; svg for a file of that name, trace otherwise.", "--format"
    )
    steps: str | None = option(None, "Only global batches A to B - 1, as A:B; either may be left out.")


@from_options
def timeline_command(asked: _TimelineOptions) -> None:
    from manyhands.data.store.atomic import write_atomically
    from manyhands.data.store.rundir import RunDirectory
    from manyhands.observe.analyse.timeline import build_timeline
    from manyhands.observe.draw.timeline_svg import MAX_SVG_SLICES, MAX_SVG_STEPS, timeline_svg
    from manyhands.observe.draw.trace_json import MAX_TRACE_SLICES, trace_json
    from manyhands.observe.record.checked_values import text
    from manyhands.observe.record.recorded import read_run_events

    named_svg = asked.out is not None and asked.out.suffix == ".svg"
    is_svg = asked.form is _Format.SVG or (asked.form is None and named_svg)
    path = asked.out or asked.run / f"timeline.{'svg' if is_svg else 'json'}"
    steps = None if asked.steps is None else _parse_steps(asked.steps)
    directory = RunDirectory.open(asked.run, lock=False)
    events = read_run_events(directory.events_path)
    about = {key: text(str(directory.config.get(key))) for key in ("task", "strategy", "workers")}
    if is_svg:
        limits, hint = {"max_slices": MAX_SVG_SLICES, "max_steps": MAX_SVG_STEPS}, "open it in a browser"
        timeline = build_timeline(events.roles, **limits, steps=steps)
        title = f"{about['task']} · {about['strategy']} · {about['workers']} workers"
        write_atomically(path, [timeline_svg(timeline, title).encode()])
    else:
        timeline = build_timeline(events.roles, max_slices=MAX_TRACE_SLICES, steps=steps)
        hint = "open it in ui.perfetto.dev or chrome://tracing"
        write_atomically(path, trace_json(timeline, about))
    for note in (*events.notes, *timeline.left_out):
        print(f"manyhands: {note}", file=sys.stderr)
    print(f"{path} · {len(timeline.rows)} roles · {format_bytes(path.stat().st_size)} · {hint}")


def _parse_steps(text: str) -> range:
    match = re.fullmatch(r"(\d*):(\d*)", text)
    first, end = (int(match[1] or 0), int(match[2] or sys.maxsize)) if match else (0, 0)
    if first >= end:
        raise UserError(f"--steps {text} is not allowed; A:B means steps A to B - 1, as in 100:120")
    return range(first, end)


@dataclass(frozen=True)
class _ExplainOptions(_LookedAt):
    """The options of `explain`."""

    json: Path | None = json_option("Write the figures to this file as JSON, too.")


@from_options
def explain_command(asked: _ExplainOptions) -> None:
    from manyhands.data.store.rundir import RunDirectory
    from manyhands.observe.analyse.explain import explain, paragraph
    from manyhands.observe.analyse.summary_facts import codec_words, layers_sent, privacy_words
    from manyhands.observe.draw.time_table import layers_table, parts_table, workers_table
    from manyhands.observe.record.checked_values import text
    from manyhands.observe.record.recorded import read_run_events
    from manyhands.strategy import Strategy

    directory = RunDirectory.open(asked.run, lock=False)
    strategy = Strategy.parse(str(directory.config.get("strategy")))
    events = read_run_events(directory.events_path)
    found = explain(events.roles, synchronous=strategy.facts.stepwise)
    for note in events.notes:
        print(f"manyhands: {note}", file=sys.stderr)
    summary = directory.read_summary() or {}
    words = " ".join([paragraph(found, str(strategy)), *codec_words(summary), *privacy_words(summary)])
    layers = layers_sent(summary)
    title = f"{text(str(directory.config.get('task')))} · {strategy}"
    out = Console(highlight=False)
    out.print(f"{title} · {len(found.workers)} workers · {found.steps} steps", soft_wrap=True)
    out.print(parts_table(found), "", workers_table(found, out), "", sep="\n")
    if layers:
        out.print(layers_table(layers), "", sep="\n")
    out.print(words)
    sent = {"layers": [asdict(layer) for layer in layers]} if layers else {}
    write_json(asked.json, {"strategy": str(strategy), **found.to_dict(), **sent, "paragraph": words})


@dataclass(frozen=True)
class _WatchOptions(_LookedAt):
    """The options of `watch`."""

    host: str = option(
        "127.0.0.1", "Address to listen on; 0.0.0.0 lets other machines in, who need the token, too."
    )
    port: int = option(0, "Port to listen on; 0 takes a free one.")
    open_browser: bool = option(False, "Open the page in this machine's browser.", "--open/--no-open")


@from_options
def watch_command(asked: _WatchOptions) -> None:
    from manyhands.observe.analyse.follow import existing_run
    from manyhands.places.local.signals import ending

    source = existing_run(asked.run).poll
    source()  # what cannot be read is said now, and not in the browser
    farewell = f"manyhands watch has ended; manyhands watch {asked.run} opens this page again"
    try:
        with ending(), serving(source, asked.host, asked.port, farewell) as url:
            if asked.open_browser:
                import webbrowser

                webbrowser.open(url)
            print("Ctrl-C ends it", file=sys.stderr, flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        print("manyhands: the page is closed", file=sys.stderr)


@contextmanager
def serving(source: Callable[[], RunView], host: str, port: int, farewell: str) -> Iterator[str]:
    """The page of a run for as long as this lasts; its address is printed once, and given."""
    from manyhands.observe.draw.prometheus import metrics_text
    from manyhands.serving.hosting import Dashboard
    from manyhands.transport.security import is_loopback

    with Dashboard(source, metrics_text, host=host, port=port, farewell=farewell) as dashboard:
        print(f"page  {dashboard.url}", file=sys.stderr, flush=True)
        if not is_loopback(host):
            print(
                f"manyhands: {host} can be reached from other machines; whoever has the token can read the page, "
                "and what is sent is not encrypted",
                file=sys.stderr,
            )
        yield dashboard.url


@dataclass(frozen=True)
class _ReportOptions(_LookedAt):
    """The options of `report`."""

    out: Path | None = option(None, "Write to this file; RUN/report.html otherwise.", writes=True)


@from_options
def report_command(asked: _ReportOptions) -> None:
    from manyhands.observe.draw.page import write_report

    print(f"report  {write_report(asked.run, asked.out)}")


def tensorboard_command(
    run: Annotated[Path, typer.Argument(help="The run's directory.")],
    out: Annotated[
        Path | None, typer.Option(help="Write to this directory; RUN/tensorboard otherwise.")
    ] = None,
) -> None:
    from manyhands.observe.draw.tensorboard import write_run

    directory = out or run / "tensorboard"
    steps = write_run(run, directory)
    print(f"{directory} · {steps} steps · tensorboard --logdir {directory}")
