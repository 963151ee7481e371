"""The page of a model server: rates, latencies, workers, and how to send requests."""

from __future__ import annotations

import math
from html import escape

from manyhands.errors import num_of
from manyhands.observe.analyse.serving_view import ServingView
from manyhands.observe.draw import paper
from manyhands.observe.draw.charts import Series, histogram, line_chart
from manyhands.observe.draw.page import PAGE_STYLE
from manyhands.observe.draw.prometheus import Family, family_lines


def serving_title(view: ServingView) -> str:
    return f"{view.task} · served by {num_of(view.wanted, 'worker')}"


def serving_report(view: ServingView) -> str:
    title = f"{serving_title(view)} · report"
    return paper.document(title, serving_sections(view).values(), style=PAGE_STYLE)


def serving_sections(view: ServingView) -> dict[str, str]:
    made = (_now, _wrong, _latency, _throughput, _workers, _how, _notes)
    return {key: paper.section(key, *make(view)) for make in made if (key := make.__name__[1:])}


def _now(view: ServingView) -> paper.PageSection:
    values = {
        "requests/s": f"{view.requests_per_s:,.1f}",
        "inputs/s": f"{view.inputs_per_s:,.1f}",
        "latency p50": _ms(view.p50_ms),
        "p95": _ms(view.p95_ms),
        "p99": _ms(view.p99_ms),
        "requests": f"{view.requests:,}",
        "inputs in a batch": f"{view.batch_mean:.1f}",
        "waiting": f"{view.waiting:,}",
    }
    tiles = "".join(paper.tile(name, text) for name, text in values.items())
    return paper.PageSection("Now", f'<dl class="tiles">{tiles}</dl>', "wide")


def _wrong(view: ServingView) -> paper.PageSection:
    present = [one for one in view.workers if one.state != "starting"]
    found = []
    if len(present) < view.wanted:
        found.append(f"{len(present)} of {view.wanted} workers answer; the others are being started.")
    for status, why in (
        (5, "the model failed, or no worker could answer in time."),
        (4, "the request was invalid."),
    ):
        count = sum(many for one, many in view.lately if one // 100 == status)
        requests = "1 request was" if count == 1 else f"{count:,} requests were"
        if count:
            found.append(f"{requests} answered with {status}xx in the last minute: {why}")
    body = '<p class="good">Every request of the last minute was answered, and all workers are there.</p>'
    if found:
        body = paper.sentence_list(found)
    spoken = f'<div class="wrong" role="status" aria-live="polite">{body}</div>'
    return paper.PageSection("What is wrong", spoken, "wide alarm" if found else "wide")


def _latency(view: ServingView) -> paper.PageSection:
    chart = histogram(
        dict(view.latencies_ms),
        title="The newest answers, by milliseconds",
        x_label="milliseconds from request to answer",
        y_label="answers",
        empty="Nothing was answered yet.",
    )
    return paper.PageSection("Latency", chart)


def _throughput(view: ServingView) -> paper.PageSection:
    series = [Series(name="requests/s", xs=[x for x, _ in view.curve], ys=[y for _, y in view.curve])]
    chart = line_chart(
        series if view.curve else [],
        title="Requests answered in each of the last seconds",
        x_label="seconds since the start",
        y_label="requests/s",
        from_zero=True,
        empty="Nothing was answered yet.",
    )
    return paper.PageSection("Throughput", chart)


def _workers(view: ServingView) -> paper.PageSection:
    if not view.workers:
        return paper.PageSection("Workers", paper.quiet("No worker has started yet."), "beside")
    rows = [
        (f"worker {one.number}", str(one.pid), one.state, f"{one.batches:,}", f"{one.inputs:,}")
        for one in view.workers
    ]
    table = paper.data_table(
        ("worker", "process", "state", "batches", "inputs"), rows, title="Replicas of one model", words=(0, 2)
    )
    return paper.PageSection("Workers", table, "beside")


def _how(view: ServingView) -> paper.PageSection:
    shown = view.example if len(view.example) <= 160 else view.example[:160] + " …"
    body = (
        f"<p>POST to <code>/predict</code> with the token that the command printed, as "
        f"<code>Authorization: Bearer TOKEN</code>, and a body of JSON: an array of inputs, each "
        f"{escape(view.takes)}.</p>"
        f'<p><code>{{"inputs": [{escape(shown)}]}}</code></p>'
    )
    return paper.PageSection("How to ask", body, "wide")


def _notes(view: ServingView) -> paper.PageSection:
    counted = ", ".join(f"{count:,} × {status}" for status, count in view.by_status) or "none yet"
    lines = [
        f"Answers by HTTP status: {counted}. Workers that died and were replaced: {view.deaths}.",
        *view.notes,
    ]
    return paper.PageSection("What happened", paper.sentence_list(lines), "wide")


def _ms(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:,.1f} ms"


def serving_metrics(view: ServingView) -> str:
    quantiles = (("0.5", view.p50_ms), ("0.95", view.p95_ms), ("0.99", view.p99_ms))
    workers = sum(one.state != "starting" for one in view.workers)
    families: tuple[Family, ...] = (
        ("requests_total", "Requests answered.", [({"status": str(s)}, n) for s, n in view.by_status]),
        (
            "latency_seconds",
            "Newest answers.",
            [({"quantile": q}, ms / 1e3) for q, ms in quantiles],
        ),
        ("workers", "Workers that answer.", [({}, workers)]),
        ("worker_deaths_total", "Workers that died and were replaced.", [({}, view.deaths)]),
        ("waiting_inputs", "Inputs that wait for a worker.", [({}, view.waiting)]),
        ("inputs_total", "Inputs answered.", [({}, view.inputs)]),
    )
    return "".join(
        line for name, about, samples in families for line in family_lines(f"serve_{name}", about, samples)
    )
