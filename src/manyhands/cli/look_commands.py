"""Look at a run: `manyhands show RUN` as a page, a file, a trace or for TensorBoard, and `manyhands explain RUN`;
and what the records of parameter servers prove: `manyhands audit RUN` and `manyhands replay RUN`.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from manyhands.cli.command_options import argument, from_options, json_option, option, write_json
from manyhands.cli.program import spare_the_compiler
from manyhands.errors import UserError, format_bytes, num_of

if TYPE_CHECKING:
    from manyhands.observe.analyse.gpu_idle import GpuTime
    from manyhands.observe.analyse.view import RunView
    from manyhands.strategies.ps.audit import AuditedRun
    from manyhands.workloads.rl.run_tickets import AuditedTickets


class Form(StrEnum):
    """What `show` makes of a run."""

    PAGE = "page"
    FILE = "file"
    TRACE = "trace"
    SVG = "svg"
    TENSORBOARD = "tensorboard"


_BY_SUFFIX = {".html": Form.FILE, ".json": Form.TRACE, ".svg": Form.SVG}


@dataclass(frozen=True)
class _LookedAt:
    run: Path = argument(..., "The run's directory.")


@dataclass(frozen=True)
class _ShowOptions(_LookedAt):
    form: Form | None = option(
        None,
        "page: live; file: the page as one file; trace: for ui.perfetto.dev; svg: a picture of which worker waited; "
        "tensorboard: event files. By default page, or by the ending of --out (.html, .json, .svg).",
        "--as",
    )
    out: Path | None = option(None, "Write to this file or folder instead of one in RUN.", writes=True)
    steps: str | None = option(None, "For a trace or picture: only steps A to B - 1, as A:B, A: or :B.")
    host: str = option("127.0.0.1", "Address of the page; 0.0.0.0 admits other machines, with the token.")
    port: int = option(0, "Port of the page; 0: any free port.")
    open_browser: bool = option(False, "Open the page in this machine's browser.", "--open/--no-open")


@from_options
def show_command(asked: _ShowOptions) -> None:
    """`manyhands show RUN` alone opens the live page."""
    suffix = asked.out.suffix if asked.out is not None else ""
    form = asked.form or _BY_SUFFIX.get(suffix, Form.PAGE)
    if asked.steps is not None and form not in (Form.TRACE, Form.SVG):
        raise UserError(f"--steps is for --as trace and --as svg; a {form} shows all steps")
    if asked.out is not None and form is Form.PAGE:
        raise UserError(f"--out {asked.out}: give the format: --as file, trace, svg or tensorboard")
    if form is Form.PAGE:
        _serve_page(asked)
    elif form is Form.FILE:
        from manyhands.observe.draw.page import write_report

        print(f"report  {write_report(asked.run, asked.out)}")
    elif form is Form.TENSORBOARD:
        from manyhands.observe.draw.tensorboard import write_run

        directory = asked.out or asked.run / "tensorboard"
        steps = write_run(asked.run, directory)
        print(f"{directory} · {steps} steps · tensorboard --logdir {directory}")
    else:
        _write_timeline(asked, is_svg=form is Form.SVG)


def _write_timeline(asked: _ShowOptions, *, is_svg: bool) -> None:
    from manyhands.data.store.atomic import write_atomically
    from manyhands.data.store.rundir import RunDirectory
    from manyhands.observe.analyse.timeline import build_timeline
    from manyhands.observe.draw.timeline_svg import MAX_SVG_SLICES, MAX_SVG_STEPS, timeline_svg
    from manyhands.observe.draw.trace_json import MAX_TRACE_SLICES, trace_json
    from manyhands.observe.record.checked_values import text
    from manyhands.observe.record.recorded import read_run_events

    path = asked.out or asked.run / f"timeline.{'svg' if is_svg else 'json'}"
    steps = None if asked.steps is None else _parse_steps(asked.steps)
    directory = RunDirectory.open(asked.run, lock=False)
    events = read_run_events(directory.events_path)
    about = {key: text(str(directory.config.get(key))) for key in ("task", "strategy", "workers")}
    if is_svg:
        limits, hint = {"max_slices": MAX_SVG_SLICES, "max_steps": MAX_SVG_STEPS}, "open it in a browser"
        timeline = build_timeline(events.roles, **limits, steps=steps)
        workers = about["workers"]
        title = f"{about['task']} · {about['strategy']} · {workers} worker{'' if workers == '1' else 's'}"
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


def _serve_page(asked: _ShowOptions) -> None:
    from manyhands.observe.analyse.follow import existing_run
    from manyhands.places.local.signals import ending

    source = existing_run(asked.run).poll
    source()  # what cannot be read is said now, and not in the browser
    farewell = f"manyhands show has ended; manyhands show {asked.run} opens this page again"
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
                f"manyhands: {host} can be reached from other machines; anyone with the token can read the page, "
                "and the traffic is not encrypted",
                file=sys.stderr,
            )
        yield dashboard.url


@dataclass(frozen=True)
class _ExplainOptions(_LookedAt):
    traces: Path | None = option(
        None, "Traces of --profile: also say what keeps the GPU of each worker waiting.", metavar="DIR"
    )
    json: Path | None = json_option("Also write the figures to this file as JSON.")


@from_options
def explain_command(asked: _ExplainOptions) -> None:
    from manyhands.data.store.rundir import RunDirectory
    from manyhands.observe.analyse.explain import explain, paragraph
    from manyhands.observe.analyse.gpu_idle import gpu_words
    from manyhands.observe.analyse.remarks import codec_words, layers_sent, privacy_words, speed_words
    from manyhands.observe.draw.time_table import layers_table, parts_table, workers_table
    from manyhands.observe.record.checked_values import text
    from manyhands.observe.record.recorded import read_run_events
    from manyhands.strategy import Strategy

    directory = RunDirectory.open(asked.run, lock=False)
    gpus = _traced_gpus(asked.traces) if asked.traces is not None else {}
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
    out.print(
        f"{title} · {num_of(len(found.workers), 'worker')} · {num_of(found.steps, 'step')}", soft_wrap=True
    )
    out.print(parts_table(found), "", workers_table(found, out), "", sep="\n")
    if layers:
        out.print(layers_table(layers), "", sep="\n")
    out.print(words)
    if speed := speed_words(summary):
        out.print(speed)
    for worker, gpu in gpus.items():
        out.print(gpu_words(worker, gpu))
    more: dict[str, Any] = {"layers": layers} if layers else {}
    more |= {"gpus": {str(worker): asdict(gpu) for worker, gpu in gpus.items()}} if gpus else {}
    write_json(asked.json, {"strategy": str(strategy), **found.to_dict(), **more, "paragraph": words})


def _traced_gpus(folder: Path) -> dict[int, GpuTime]:
    """Where the time of each worker's GPU goes; UserError where no GPU computed in the traces."""
    from manyhands.observe.analyse.gpu_idle import gpu_time
    from manyhands.observe.record.torch_traces import read_traces

    times = {worker: gpu_time(events) for worker, events in read_traces(folder).items()}
    found = {worker: one for worker, one in times.items() if one is not None}
    if not found:
        raise UserError(
            f"{folder}: no GPU computes in these traces; leave --traces out, or train with --device cuda"
        )
    return found


_EXIT = {"complete": 0, "restored": 0, "broken": 1, "incomplete": 3}
"""By verdict; 2 says that there is nothing to audit."""
_SAME_GRADIENTS = "every gradient is the recorded one"
_TICKET_COLUMNS = ("environments", "starts", "batches", "tickets", "lag, mean", "max", "dropped")
_COLUMNS = (
    *("shard", "batches", "steps", "updates", "stale, mean"),
    *("max", "late", "skipped", "lost", "restored"),
)


def audit_command(run: Annotated[Path, typer.Argument(help="The run's directory.")]) -> None:
    """The last word is the verdict: complete, restored (and how much that lost), incomplete, or broken.

    Exit status: 0 for the first two, 3 for incomplete, 1 for broken.
    """
    from manyhands.strategies.ps.audit import audit_run, is_of_servers
    from manyhands.workloads.rl.run_tickets import audit_run_tickets

    statuses, sentences = list[int](), list[str]()
    tickets = audit_run_tickets(run)
    if tickets is not None:
        _print_tickets(tickets)
        statuses.append(_EXIT[tickets.verdict])
        sentences += tickets.broken or tickets.missing
    if tickets is None or is_of_servers(run):
        audited = audit_run(run)
        found = audited.found
        for note in audited.notes:
            print(f"manyhands: {note}", file=sys.stderr)
        _print(audited)
        statuses.append(_EXIT[found.verdict.value])
        sentences += [violation.sentence for violation in found.violations] or list(found.missing)
    if sentences:
        more = f" (and {len(sentences) - 1} more)" if len(sentences) > 1 else ""
        print(f"manyhands: {sentences[0]}{more}", file=sys.stderr)
    if any(statuses):
        raise typer.Exit(1 if 1 in statuses else max(statuses))


def _print_tickets(audited: AuditedTickets) -> None:
    from manyhands.observe.draw.time_table import plain_table

    rows = []
    for log in audited.logs:
        acted = log.lags.total()
        mean = f"{sum(lag * count for lag, count in log.lags.items()) / acted if acted else 0:.2f}"
        names = f"{log.environments.start} to {log.environments.stop - 1}"
        row = (names, log.starts, log.batches, acted, mean, max(log.lags, default=0), log.dropped)
        rows.append([str(cell) for cell in row])
    out = Console(highlight=False)
    out.print(plain_table(_TICKET_COLUMNS, rows, words=0))
    out.print(f"tickets of actors · {audited.verdict}", soft_wrap=True)


def _print(audited: AuditedRun) -> None:
    from manyhands.observe.draw.time_table import plain_table

    rows = []
    for shard in audited.found.shards:
        total = sum(value * count for value, count in shard.staleness.items())
        mean = f"{total / shard.applied if shard.applied else 0:.2f}"
        most = max(shard.staleness, default=0)
        counts = (shard.late, shard.skipped, shard.lost, shard.restores)
        row = (shard.shard, shard.batches, shard.versions, shard.applied, mean, most, *counts)
        rows.append([str(cell) for cell in row])
    out = Console(highlight=False)
    out.print(plain_table(_COLUMNS, rows, words=0))
    lag = audited.strategy.consistency.lag
    bound = "no bound on reads" if lag is None else f"reads lag by at most {lag} clocks"
    out.print(f"{audited.strategy} · {bound} · {audited.found.words}", soft_wrap=True)


@dataclass(frozen=True)
class _ReplayOptions:
    run: Path = argument(..., "The run's directory.")
    until: int | None = option(None, "Stop after every shard has applied this many global batches.")
    save: Path | None = option(None, "Write the weights to this safetensors file.", writes=True)
    script: Path | None = option(None, "Of a loop of your own under ps: the script, which is started again.")


@from_options
def replay_command(asked: _ReplayOptions) -> None:
    from manyhands.data.store.atomic import write_atomically
    from manyhands.data.store.tensorfile import encode_tensors
    from manyhands.strategies.ps.audit import is_of_servers
    from manyhands.strategies.ps.replay import replay

    began = time.monotonic()
    if asked.script is not None:
        _replay_script(asked, began)
        return
    spare_the_compiler()
    done = replay(asked.run, until=asked.until)
    for note in done.notes:
        print(f"manyhands: {note}", file=sys.stderr)
    took, same = f"replayed in {time.monotonic() - began:.1f} s", "every batch is the recorded one"
    if is_of_servers(asked.run):
        copies, same = format_bytes(done.extra_bytes), _SAME_GRADIENTS
        steps = num_of(done.steps, "step")
        print(f"{num_of(done.updates, 'update')} {took}: {steps} at every shard, {copies} of copies")
    else:
        print(f"{num_of(done.steps, 'step')} {took}")
    values = ({} if done.loss is None else {"loss": done.loss}) | (done.metrics or {})
    own = ({} if done.run_loss is None else {"loss": done.run_loss}) | done.run_metrics
    beside = {name: f" (in the run {value:.4f})" for name, value in own.items()}
    print("  ".join(f"{name} {value:.4f}{beside.get(name, '')}" for name, value in values.items()))
    if asked.save is not None:
        write_atomically(asked.save, encode_tensors(done.model.state_dict()))
        print(f"weights in {asked.save}")
    _compare(
        done.first_difference.sentence if done.first_difference is not None else "", done.same_bytes, same
    )


def _replay_script(asked: _ReplayOptions, began: float) -> None:
    from manyhands.interop.own_loop.replay_script import replay_script
    from manyhands.places.place import ignore_environment

    if asked.until is not None or asked.save is not None:
        raise UserError(
            "--script: a script is replayed to its end, and writes its weights itself; leave --until and --save out"
        )
    ignore_environment()
    assert asked.script is not None, "or nothing leads here"
    found = replay_script(asked.run, asked.script)
    took = f"{num_of(found.updates, 'update')} replayed in {time.monotonic() - began:.1f} s"
    print(f"{took}: {num_of(found.steps, 'step')} at every shard")
    _compare(found.difference, found.same_bytes)


def _compare(wrong: str, same_bytes: bool | None, same: str = _SAME_GRADIENTS) -> None:
    """Say how a replay compares with the run; exits with 1 where something differs."""
    if not wrong and same_bytes is False:
        wrong = f"{same}, but the final weights differ from those of the run"
    if wrong:
        print(f"manyhands: {wrong}", file=sys.stderr)
        raise typer.Exit(1)
    nothing_to_compare = "; the run has no final weights to compare with"
    print(same + (", and the weights are the same bytes" if same_bytes else nothing_to_compare))
