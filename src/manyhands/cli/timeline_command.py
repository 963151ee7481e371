"""`manyhands timeline RUN`: what every worker did when, for the trace viewers people have, or as a picture."""

from __future__ import annotations

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli.command_options import check_writable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from manyhands.observe.analyse.picture import Timeline
    from manyhands.observe.record.recorded import RunEvents

__all__ = ["timeline_command"]


class _Format(StrEnum):
    TRACE = "trace"
    SVG = "svg"


def timeline_command(
    run: Annotated[Path, typer.Argument(help="The run's directory.")],
    out: Annotated[
        Path | None, typer.Option(help="Write to this file; RUN/timeline.json or .svg otherwise.")
    ] = None,
    form: Annotated[
        _Format | None,
        typer.Option("--format", help="What to write; svg for a file of that name, trace otherwise."),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Only global batches A to B - 1, as A:B; either may be left out.")
    ] = None,
) -> None:
    """Draw who computed, exchanged and waited for whom: a trace for ui.perfetto.dev, or one SVG."""
    # Imported here so that help texts do not wait for torch.
    from manyhands.data.store.atomic import write_atomically
    from manyhands.data.store.rundir import RunDirectory
    from manyhands.errors import format_bytes
    from manyhands.observe.record.checked_values import text
    from manyhands.observe.record.recorded import read_run_events

    check_writable(out, "--out")
    form = form or (_Format.SVG if out is not None and out.suffix == ".svg" else _Format.TRACE)
    path = out or run / ("timeline.svg" if form is _Format.SVG else "timeline.json")
    wanted = _parse_steps(steps)
    directory = RunDirectory.open(run, lock=False)
    events = read_run_events(directory.events_path)
    about = {key: text(str(directory.config.get(key))) for key in ("task", "strategy", "workers")}
    timeline, content = _render(events, form, wanted, about)
    write_atomically(path, content)
    for note in (*events.notes, *timeline.left_out):
        print(f"manyhands: {note}", file=sys.stderr)
    hint = "open it in a browser" if form is _Format.SVG else "open it in ui.perfetto.dev or chrome://tracing"
    print(f"{path} · {len(timeline.rows)} roles · {format_bytes(path.stat().st_size)} · {hint}")


def _render(
    events: RunEvents, form: _Format, steps: range | None, about: Mapping[str, str]
) -> tuple[Timeline, Iterable[bytes]]:
    from manyhands.observe.analyse.timeline import build_timeline
    from manyhands.observe.draw.timeline_svg import MAX_SVG_SLICES, MAX_SVG_STEPS, timeline_svg
    from manyhands.observe.draw.trace_json import MAX_TRACE_SLICES, trace_json

    if form is _Format.TRACE:
        timeline = build_timeline(events.roles, max_slices=MAX_TRACE_SLICES, steps=steps)
        return timeline, trace_json(timeline, about)
    timeline = build_timeline(events.roles, max_slices=MAX_SVG_SLICES, max_steps=MAX_SVG_STEPS, steps=steps)
    title = f"{about['task']} · {about['strategy']} · {about['workers']} workers"
    return timeline, [timeline_svg(timeline, title).encode()]


def _parse_steps(text: str | None) -> range | None:
    from manyhands.errors import UserError

    if text is None:
        return None
    match = re.fullmatch(r"(\d*):(\d*)", text)
    first, end = (int(match[1] or 0), int(match[2] or sys.maxsize)) if match else (0, 0)
    if first >= end:
        raise UserError(f"--steps {text} is not allowed; A:B means steps A to B - 1, as in 100:120")
    return range(first, end)
