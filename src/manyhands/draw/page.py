"""What a page says of a run: a view as sections of HTML, the same on the live page and in a report.

Every section is there from the beginning and keeps its place, with a quiet line where it has nothing to say
yet, so that nothing jumps while a run goes on.
"""

from __future__ import annotations

import math
from html import escape

from manyhands.analyse.recent import WINDOW_NS
from manyhands.analyse.view import Curve, Phase, Presence, RunView, Shares
from manyhands.draw.charts import (
    Series,
    bar_chart,
    data_table,
    histogram,
    line_chart,
    matrix,
    quiet,
    section,
    share_bars,
    short_number,
)
from manyhands.draw.paper import STYLE, document
from manyhands.errors import format_bytes

__all__ = ["PAGE_STYLE", "report", "sections", "title_of"]

PAGE_STYLE = (
    STYLE
    + """
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(7rem, 1fr)); gap: .3rem .7rem; margin: 0; }
.tiles div { min-width: 0; } .tiles dt { color: var(--faint); font-size: .82rem; }
.tiles dd { margin: 0; font-size: 1.2rem; font-weight: 600; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }
progress { width: 100%; height: .55rem; margin-top: .5rem; accent-color: var(--c0); display: block; }
.wrong li { color: var(--bad); font-weight: 600; } .wrong ul { list-style: "! "; }
section.alarm { border-color: var(--bad) !important; background: var(--bad-paper) !important; }
.fill { flex: 1; min-height: 0; overflow: auto; } .live svg.chart { max-height: 13.2rem; }
.live svg.rows { max-height: none; }
#members td:last-child { min-width: 13rem; } #members td { white-space: nowrap; }
#members td:last-child { white-space: normal; }
.pair { display: grid; gap: 0 1.5rem; grid-template-columns: minmax(0, 1fr); }
@media (min-width: 70rem) { .pair { grid-template-columns: minmax(0, 28rem) minmax(0, 1fr); } }
.live main > section { height: 19rem; } .live main > section.short { height: auto; }
.live #wrong { height: 7rem; } .live #traffic, .live #notes { height: 11rem; }
.live #workers { height: 15rem; } .live main > section.small { height: 6rem; }
@media (max-width: 46rem) { .live #wrong { height: 10rem; } .live #workers { height: 22rem; }
  .live #waits { height: 14rem; } .live #notes { height: 8rem; } }
"""
)

_PARTS = ("compute", "input", "exchange", "waiting")
_PART_COLOURS = (2, 3, 0, 1)


def title_of(view: RunView) -> str:
    """What the page of a run is called."""
    return f"{view.task} · {view.strategy}"


def report(view: RunView) -> str:
    """The whole page as one file that needs nothing else and connects to nothing."""
    return document(f"{title_of(view)} · report", sections(view).values(), style=PAGE_STYLE)


def sections(view: RunView) -> dict[str, str]:
    """Each section's HTML by its key, in the order of the page; equal views give equal text.

    What only servers have comes last where a strategy has none.
    """
    of_servers = (_servers(view), _staleness(view))
    on_servers = _on_servers(view)
    ordered = (
        _now(view),
        _wrong(view),
        _loss(view),
        _metrics(view),
        _throughput(view),
        _workers(view),
        _waits(view),
        *(of_servers if on_servers else ()),
        _members(view),
        _traffic(view),
        _notes(view),
        *(() if on_servers else of_servers),
    )
    return dict(ordered)


def _now(view: RunView) -> tuple[str, str]:
    asked = f" of {view.steps_asked:,}" if view.steps_asked else ""
    left = view.seconds_left
    values = {
        "state": view.phase.value,
        "step": f"{view.step:,}{asked}",
        "loss": "–" if view.loss is None else f"{view.loss:.4g}",
        "samples/s": f"{view.samples_per_s:,.0f}",
        "elapsed": _duration(view.seconds),
        "time left": _duration(left) if left is not None and view.phase is Phase.RUNNING else "–",
    }
    tiles = "".join(f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in values.items())
    done = min(view.step, view.steps_asked)
    bar = f'<progress value="{done}" max="{max(1, view.steps_asked)}" aria-label="steps done"></progress>'
    heading = "The whole run" if view.phase is Phase.ENDED else "Now"
    return "now", section("now", heading, f'<dl class="tiles">{tiles}</dl>{bar}', "wide short")


def _wrong(view: RunView) -> tuple[str, str]:
    if view.warnings:
        body = _list(view.warnings)
    elif view.phase is Phase.STARTING:
        body = quiet("Nothing so far; no step has ended yet.")
    else:
        body = '<p class="good">Nothing that the events tell of.</p>'
    spoken = f'<div class="wrong" role="status" aria-live="polite">{body}</div>'
    kind = "wide alarm" if view.warnings else "wide"
    return "wrong", section("wrong", "What is wrong", _fill("What is wrong", spoken), kind)


def _loss(view: RunView) -> tuple[str, str]:
    curves = [curve for curve in view.curves if "loss" in curve.name]
    return "loss", section("loss", "Loss", _curves(curves, "loss", "Loss of training and evaluation"))


def _metrics(view: RunView) -> tuple[str, str]:
    curves = [one for one in view.curves if "loss" not in one.name and one.name != "samples_per_s"]
    if not curves:
        return "metrics", section("metrics", "Metrics", quiet("Nothing was evaluated yet."))
    newest = ", ".join(
        f"{curve.name} {view.final[curve.name]:.4g}" for curve in curves if curve.name in view.final
    )
    caption = f"Newest: {newest}" if newest else "On the evaluation data"
    return "metrics", section("metrics", "Metrics", _curves(curves, "metric", caption))


def _throughput(view: RunView) -> tuple[str, str]:
    curves = [curve for curve in view.curves if curve.name == "samples_per_s" and curve.values]
    if not curves:
        return "throughput", section("throughput", "Throughput", quiet("No step has ended yet."))
    series = [Series(name="samples/s", xs=one.seconds, ys=one.values) for one in curves]
    chart = line_chart(
        series,
        title="All workers together, over the run's seconds",
        x_label="seconds",
        y_label="samples/s",
        from_zero=True,
    )
    return "throughput", section("throughput", "Throughput", chart)


def _workers(view: RunView) -> tuple[str, str]:
    heading = "Workers and their time"
    if not view.workers:
        return "workers", section("workers", heading, quiet("No worker has begun yet."), "wide")
    is_over = view.phase is Phase.ENDED
    shares = [_shares(worker.shares if is_over else worker.recent) for worker in view.workers]
    bars = share_bars(
        [(worker.name, share) for worker, share in zip(view.workers, shares, strict=True)],
        _PARTS,
        title="Time over the whole run" if is_over else f"Time in the last {WINDOW_NS // 10**9} seconds",
        colours=_PART_COLOURS,
    )
    rows = [
        (
            _named(worker.name, worker.presence, view.phase),
            f"{worker.steps:,}",
            short_number(worker.steps_per_s),
            f"{worker.compute_ms:.2f}",
            f"{100 * worker.shares.wait:.0f} %",
            worker.waits_for or "–",
            format_bytes(worker.bytes_sent),
            f"{worker.messages_sent:,}",
        )
        for worker in view.workers
    ]
    columns = ("worker", "steps", "steps/s", "compute, ms", "waited", "waits for", "sent", "messages")
    table = data_table(columns, rows, title="Each worker since the beginning", words=(0, 5), scrolls=False)
    both = f'<div class="pair">{bars}<div>{table}</div></div>'
    return "workers", section("workers", heading, _fill(heading, both), "wide")


def _waits(view: RunView) -> tuple[str, str]:
    heading = "Who waits for whom"
    if not any(seconds for row in view.waits for seconds in row):
        return "waits", section("waits", heading, quiet("No worker has waited for another."))
    names = [worker.name for worker in view.workers][: len(view.waits)]
    names += [f"worker {index}" for index in range(len(names), len(view.waits))]
    table = matrix(
        view.waits,
        names,
        [f"for {_number(name)}" for name in names],
        title="Seconds that a row's worker waited for a column's",
        corner="waited",
        show=lambda seconds: f"{seconds:.2f}",
        scrolls=False,
    )
    return "waits", section("waits", heading, _fill(heading, table))


def _servers(view: RunView) -> tuple[str, str]:
    heading = "Servers and their shards"
    if not view.servers:
        has_none = not _on_servers(view)
        said = "This strategy has no servers." if has_none else "No server has begun yet."
        return "servers", section("servers", heading, quiet(said), "broad small" if has_none else "broad")
    even = 1 / len(view.servers)
    bars = bar_chart(
        [(server.name, server.share) for server in view.servers],
        title=f"Share of all applying, recently (even: {100 * even:.0f} % each)",
        show=lambda share: f"{100 * share:.0f} %",
    )
    rows = [
        (
            _named(server.name, server.presence, view.phase),
            _shards(server.primary_of),
            _shards(server.backup_of),
            format_bytes(server.num_bytes) if server.num_bytes else "–",
            f"{server.updates:,}",
            short_number(server.updates_per_s),
            f"{server.apply_ms:.3f}",
        )
        for server in view.servers
    ]
    columns = ("server", "primary of", "backup of", "parameters", "updates", "updates/s", "apply, ms")
    table = data_table(columns, rows, title="Each server", words=(0, 1, 2), scrolls=False)
    return "servers", section("servers", heading, _fill(heading, bars + table), "broad")


def _staleness(view: RunView) -> tuple[str, str]:
    stale = view.staleness
    if not stale.histogram:
        said = "No server has applied an update."
        return "staleness", section(
            "staleness", "Staleness", quiet(said), "" if _on_servers(view) else "small"
        )
    chart = histogram(
        stale.histogram,
        title=f"Steps of others that an update had missed: mean {stale.mean:.2f}, most {stale.max}",
        x_label="steps missed",
        y_label="updates",
    )
    return "staleness", section("staleness", "Staleness", chart)


def _traffic(view: RunView) -> tuple[str, str]:
    heading = "Traffic by link and codec"
    if not view.traffic:
        return "traffic", section("traffic", heading, quiet("Nothing was sent."))
    rows = [(one.wire, one.codec, format_bytes(one.num_bytes), f"{one.messages:,}") for one in view.traffic]
    steps = max(1, view.step)
    each = format_bytes(sum(one.num_bytes for one in view.traffic) / steps)
    columns = ("link", "codec", "sent", "messages")
    table = data_table(columns, rows, title=f"All roles together; {each} a step", words=(0, 1), scrolls=False)
    return "traffic", section("traffic", heading, _fill(heading, table))


def _members(view: RunView) -> tuple[str, str]:
    heading = "Members, faults and recoveries"
    if not view.happenings:
        return "members", section("members", heading, quiet("Nobody has come or gone."), "broad")
    rows = [
        (
            f"{one.at_s:.1f} s",
            str(one.epoch) if one.epoch else "–",
            one.who,
            one.sentence or one.what,
        )
        for one in reversed(view.happenings)
    ]
    epoch = f"; the membership is in epoch {view.epoch}" if view.epoch else ""
    columns = ("at", "epoch", "who", "what happened")
    table = data_table(columns, rows, title=f"The newest first{epoch}", words=(2, 3), scrolls=False)
    return "members", section("members", heading, _fill(heading, table), "broad")


def _notes(view: RunView) -> tuple[str, str]:
    heading = "What is missing here"
    body = _list(view.notes) if view.notes else quiet("Nothing: every event was read.")
    return "notes", section("notes", heading, _fill(heading, body), "broad")


def _on_servers(view: RunView) -> bool:
    return view.strategy.split(maxsplit=1)[:1] == ["ps"]


def _curves(curves: list[Curve], y_label: str, caption: str) -> str:
    if not any(curve.values for curve in curves):
        return quiet("No step has ended yet.")
    series = [_by_step(curve) for curve in curves]
    return line_chart(series, title=caption, x_label="step", y_label=y_label)


def _by_step(curve: Curve) -> Series:
    """In the order of steps: workers that do not wait for each other end them in another one."""
    points = sorted(zip(curve.steps, curve.values, strict=True), key=lambda point: point[0])
    return Series(name=_words(curve.name), xs=[x for x, _ in points], ys=[y for _, y in points])


def _fill(label: str, body: str) -> str:
    """The part of a section that scrolls where there is more than its place holds; the keyboard reaches it."""
    return f'<div class="fill" tabindex="0" role="region" aria-label="{escape(label)}">{body}</div>'


def _list(sentences: tuple[str, ...]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _shares(shares: Shares) -> tuple[float, float, float, float]:
    return shares.compute, shares.input, shares.exchange, shares.wait


def _named(name: str, presence: Presence, phase: Phase) -> str:
    """A member's name, and what keeps it from taking part; at the end of a run all have left."""
    takes_part = presence is Presence.PRESENT or phase is Phase.ENDED
    return name if takes_part else f"{name} ({presence.value})"


def _shards(numbers: tuple[int, ...]) -> str:
    """`0, 1, 2, 5` as `0–2, 5`."""
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans) or "–"


def _number(name: str) -> str:
    """`worker 3` as `3`, for narrow columns."""
    return name.removeprefix("worker ")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
