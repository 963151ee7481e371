"""Put the committed results into the documents: `python benchmarks/render.py` rewrites what stands between the marks.

A mark is a pair of HTML comments, `<!-- name -->` and `<!-- /name -->`. A test fails when a document says something
else than the results it quotes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from manyhands.errors import format_bytes
from render_choosing import choosing
from render_exploring import density_speed, scaling_speed
from render_federated import (
    federated_flower,
    federated_gpu,
    federated_mnist,
    federated_noniid,
    federated_privacy,
    federated_roles,
)
from render_filters import filters
from render_generating import generating_rates
from render_gpu_nccl import nccl_steps
from render_inference import inference_speed
from render_links import (
    geo,
    helpers_live,
    hosts_speed,
    links_speed,
    many_ranks,
    ray_actor,
    sending_orders,
    tls_cost,
)
from render_loading import loading_rates
from render_models import (
    codecs_speed,
    language_speed,
    offload,
    pipeline_speed,
    two_workers,
    wavefronts,
)
from render_plan import auto_speed, link_errors, plan_errors
from render_public import public_tables
from render_rl import rl_inference, rl_kills, rl_lags, rl_learning, rl_returns, rl_simulation
from render_scorecard import measures, promises
from render_startup import startup_times
from render_text import bert_settings, curves, tokenizing_speed, tuning_scores
from render_wire import local_steps, wire_time
from results_read import RENAMED, RESULTS, ROOT, load, markdown, show_percent, show_ratio, show_time


def allreduce_ratios() -> str:
    """The README's sentence: the least and the most that a bucket gains over Gloo, over all sizes and workers."""
    names = ["allreduce-2", "allreduce-4", *(f"allreduce-16core-{workers}" for workers in (2, 4, 8, 16))]
    results = [load(name) for name in names]
    ratios = [row["contenders"]["bucket"]["times_gloo"] for result in results for row in result["results"]]
    sizes = [row["size_bytes"] for row in results[0]["results"]]
    return (
        f"All-reduce on one host is {show_ratio(min(ratios))} to **{show_ratio(max(ratios))}** as fast as torch's Gloo "
        f"({format_bytes(min(sizes))} to {format_bytes(max(sizes))}, 2 to 16 workers, on 2 and 16 cores)."
    )


def backend_speed() -> str:
    """`dist.all_reduce` on the drop-in backend at each size and number of ranks."""
    names = ["backend-2", "backend-4", *(f"backend-16core-{ranks}" for ranks in (2, 4, 8, 16))]
    results = [load(name) for name in names]
    sizes = [1 << 10, 64 << 10, 1 << 20, 25 << 20, 64 << 20]
    rows = [["ranks on cores", *map(format_bytes, sizes)]]
    for result in results:
        ours = [row["contenders"]["manyhands"] for row in result["results"] if row["size_bytes"] in sizes]
        cells = [f"{show_time(cell['median_us'])}, {show_ratio(cell['times_gloo'])}" for cell in ours]
        rows.append([f"{result['workers']} on {result['cores']}", *cells])
    return markdown(rows)


def allreduce_schedules() -> str:
    """At each size and number of workers: the bucket and the fastest schedule over links, with their ratios to Gloo."""
    names = ["allreduce-2", "allreduce-4", *(f"allreduce-16core-{workers}" for workers in (2, 4, 8, 16))]
    results = [load(name) for name in names]
    sizes = [row["size_bytes"] for row in results[0]["results"]]
    rows = [["workers on cores", "", *(format_bytes(size) for size in sizes)]]
    for result in results:
        cells = [row["contenders"] for row in result["results"]]
        schedules = [
            min(cell.keys() - {"bucket", "gloo"}, key=lambda name: float(cell[name]["median_us"]))
            for cell in cells
        ]
        shown = {"bucket": ["bucket"] * len(cells), "fastest schedule": schedules}
        for title, chosen in shown.items():
            row = [f"{result['workers']} on {result['cores']}" if title == "bucket" else "", title]
            for cell, name in zip(cells, chosen, strict=True):
                which = f"{name} " if title == "fastest schedule" else ""
                row.append(
                    f"{which}{show_time(cell[name]['median_us'])} ({show_ratio(cell[name]['times_gloo'])})"
                )
            rows.append(row)
    return markdown(rows)


def step_scaling() -> str:
    """The step of every strategy at several numbers of workers: time, ratio to DDP, efficiency."""
    large = [load(path.stem) for path in RESULTS.glob("step-16core-*.json")]
    results = [load("step-2"), *sorted(large, key=lambda result: result["workers"])]
    rows = [["workload", "workers on cores", "ddp", "mirrored", "central"]]
    for index, workload in enumerate(row["workload"] for row in results[0]["results"]):
        for result in results:
            cells = result["results"][index]["contenders"]
            shown = [
                f"{cells[name]['median_ms']:.1f} ms, {cells[name]['times_ddp']:.2f}×, "
                f"{show_percent(cells[name]['efficiency'])}"
                for name in rows[0][2:]
            ]
            rows.append(
                [RENAMED.get(workload, workload), f"{result['workers']} on {result['cores']}", *shown]
            )
    return markdown(rows)


def server_table(name: str) -> Callable[[], str]:
    """All contenders of one result of a parameter server's push and pull, and the memory of its servers."""

    def render() -> str:
        result = load(name)
        rows = [["", "round trip", "to the Ray actor"]]
        for row in result["results"]:
            about = f"**{row['exchange']}**, {format_bytes(row['gradient_bytes'])} each way, {row['about']}"
            rows.append([about, "", ""])
            for contender, cell in row["contenders"].items():
                rows.append([contender, show_time(cell["median_us"]), show_ratio(cell["times_ray"])])
        versions = f"torch {result['torch']}, ray {result['ray']}"
        title = f"**One worker and one server on {result['cores']} cores** ({versions})"
        return f"{title}\n\n{markdown(rows)}"

    return render


def glove_training() -> str:
    """Records per CPU-second of training beside C, and what a second core adds."""
    result = load("glove")["train"]
    rows = [["dimensions", "one thread", "C, double precision", "ratio", "two threads ÷ one"]]
    for row in result["rows"]:
        found = row["records_per_s"]
        rows.append(
            [
                str(row["dim"]),
                f"{found['one thread, per CPU-second'] / 1e6:.1f} M/CPU-s",
                f"{found['C, per CPU-second'] / 1e6:.2f} M/CPU-s",
                show_ratio(row["times_c"]),
                f"{row['two_over_one']:.2f}",
            ]
        )
    return f"**{result['records']:,} records, {result['cores']} cores**\n\n{markdown(rows)}"


def glove_counting() -> str:
    """Tokens per second of counting co-occurrence beside C."""
    result = load("glove")["count"]
    row = result["rows"]
    found = {name: f"{speed / 1e6:.2f} M tokens/s" for name, speed in row["tokens_per_s"].items()}
    about = f"**{row['tokens']:,} tokens, window {row['window']}, {row['records']:,} records, {result['cores']} cores**"
    table = [["", *found, "two workers ÷ C"], [row["corpus"], *found.values(), show_ratio(row["times_c"])]]
    return f"{about}\n\n{markdown(table)}"


def glove_workers() -> str:
    """Records per second and final cost over the number of workers: serial, locked, in turns, HOGWILD!."""
    result = load("glove-16core")["workers"]
    rows = result["rows"]
    orders = list(dict.fromkeys(row["order"] for row in rows[1:]))
    table = [["workers", *orders]]
    for workers in dict.fromkeys(row["workers"] for row in rows):
        found = [
            row for order in orders for row in rows if (row["order"], row["workers"]) == (order, workers)
        ]
        cells = [
            f"{row['records_per_s'] / 1e6:.1f} M/s, cost × {row['cost_over_serial']:.4f}" for row in found
        ]
        table.append([str(workers), *cells])
    serial = f"serial: {rows[0]['records_per_s'] / 1e6:.1f} M records/s, cost {rows[0]['cost']:.5f}"
    about = f"**{result['records']:,} records of {result['words']:,} words, 50 dimensions, {result['cores']} cores**"
    return f"{about}; {serial}\n\n{markdown(table)}"


def glove_corpus() -> str:
    """A whole corpus, seed by seed."""
    result = load("glove-corpus")
    rows = [
        ["seed", "vocabulary", "counting", "shuffling", "training", "cost after 1, 5, 10, 15", "analogies"]
    ]
    for row in result["rows"]:
        phases = [
            f"{row['seconds'][name]:.1f} s" for name in ("vocabulary", "counting", "shuffling", "training")
        ]
        costs = ", ".join(f"{row['costs'][number - 1]:.4f}" for number in (1, 5, 10, 15))
        split = f"(semantic {row['semantic']:.1f}, syntactic {row['syntactic']:.1f})"
        rows.append([str(row["seed"]), *phases, costs, f"{row['analogies']:.2f} % {split}"])
    known = result["published"]
    rows.append(
        [
            "C tools, as published",
            "",
            f"{known['counting_s']:.0f} s",
            f"{known['shuffling_s']:.0f} s",
            f"{known['training_cpu_s']:.0f} CPU-s",
            ", ".join(f"{cost:.4f}" for cost in known["costs"].values()),
            f"{known['analogies']:.2f} % (semantic {known['semantic']:.1f}, syntactic {known['syntactic']:.1f})",
        ]
    )
    first = result["rows"][0]
    about = (
        f"**{result['corpus']}: {first['tokens']:,} tokens, {first['vocabulary']:,} words, "
        f"{first['records']:,} records; {result['workers']} workers on {result['cores']} cores**"
    )
    return f"{about}\n\n{markdown(rows)}"


def regression_speed() -> str:
    """Examples per second and log loss beside scikit-learn and Vowpal Wabbit."""
    result = load("regression")
    rows = [["", "examples per CPU-second", "log loss", "AUC"]]
    titles = {"learn": "learning from memory", "file": "from a file to a model"}
    works = dict.fromkeys((row["work"], row["part"]) for row in result["rows"] if row["part"] in titles)
    for work, part in works:
        rows.append([f"**{work}, {titles[part]}**", *[""] * 3])
        for row in result["rows"]:
            if (row["work"], row["part"]) == (work, part):
                scores = [f"{row[name]:.4f}" for name in ("log_loss", "auc")]
                rows.append([row["case"], f"{row['examples_per_cpu_s'] / 1e6:.2f} M", *scores])
    return f"**{result['passes']} passes, {result['cores']} cores**\n\n{markdown(rows)}"


def gbdt_speed() -> str:
    """Seconds from a matrix to a model beside scikit-learn and LightGBM, on one and two threads or workers."""
    if not (RESULTS / "gbdt.json").exists():
        return "Not measured yet: `python benchmarks/gbdt.py`."
    result = load("gbdt")
    rows = [["", "threads or workers", "seconds", "trees alone", "to scikit-learn", "AUC or R²"]]
    for work in dict.fromkeys((row["work"], row["objective"]) for row in result["rows"]):
        rows.append([f"**{', '.join(work)}**", *[""] * 5])
        for row in result["rows"]:
            if (row["work"], row["objective"]) == work:
                alone = f"{row['trees_s']:.2f}" if row["trees_s"] is not None else ""
                ratio = show_ratio(row["times_scikit_learn"])
                cells = [
                    str(row["hands"]),
                    f"{row['whole_s']:.2f}",
                    alone,
                    ratio,
                    f"{row['quality']:.4f}",
                ]
                rows.append([row["case"], *cells])
    return f"**{result['trees']} trees, {result['cores']} cores**\n\n{markdown(rows)}"


def class_figures() -> str:
    """Accuracy and log loss of several classes beside LightGBM and scikit-learn."""
    found = load("classes")["rows"]
    cells = {
        (row["work"], row["kind"], row["case"]): f"{row['accuracy']:.4f}, {row['log_loss']:.4f}"
        for row in found
    }
    cases = ("manyhands", "LightGBM", "scikit-learn")
    rows = [["accuracy, log loss", "", *cases]]
    for work, kind in dict.fromkeys((row["work"], row["kind"]) for row in found):
        rows.append([work, kind, *(cells.get((work, kind, case), "") for case in cases)])
    return markdown(rows)


def svd_speed() -> str:
    """CPU-seconds to the same error beside scikit-learn and scipy."""
    result = load("svd")
    rows = [["", "peer", "its error", "CPU-seconds", "ours", "our error", "passes", "peer ÷ ours"]]
    for row in result["rows"]:
        ratio = row["peer_cpu_s"] / row["ours_cpu_s"]
        times = [f"{row[name]:.3g}" for name in ("peer_cpu_s", "ours_cpu_s")]
        errors = [f"{row[name]:.0e}" for name in ("peer_error", "ours_error")]
        line = [
            "" if row["work"] in (one[0] for one in rows) else row["work"],
            f"`{row['peer']}`",
            errors[0],
            *times,
            errors[1],
            str(row["passes"]),
            f"{ratio:.2f}×",
        ]
        rows.append(line)
    about = (
        f"**Rank {result['rank']}, {result['threads']} thread of linear algebra for everyone, {result['cores']} cores "
        f"({result['machine']}), median of {result['rounds']}**; the largest file took {result['memory_mib']:.0f} MiB "
        "more at its peak than digits"
    )
    return f"{about}\n\n{markdown(rows)}"


def stragglers(scenario: str) -> Callable[[], str]:
    """Updates per second and the share of time waiting, live and simulated, for one kind of straggler."""

    def render() -> str:
        rows = [["consistency", "live: updates/s", "waiting", "simulated: updates/s", "waiting"]]
        for row in load("stragglers")["scenarios"][scenario]:
            if row["consistency"] in ("bounded:1", "bounded:16"):
                continue
            cells = [
                text
                for one in (row["live"], row["simulated"])
                for text in (f"{one['updates_per_s']:.1f}", show_percent(one["waiting"]))
            ]
            rows.append([f"`{row['consistency']}`", *cells])
        return markdown(rows)

    return render


def events_overhead() -> str:
    """What recording events is of a training step, under each strategy."""
    result = load("events").get("overhead")
    if result is None:
        return "Not measured yet: `python benchmarks/events.py`."
    rows = [["strategy", "events per step, all roles", "median step", "share of the step"]]
    for strategy, row in result["strategies"].items():
        rows.append(
            [
                f"`{strategy}`",
                f"{row['events_per_step']:.1f}",
                f"{row['step_ms']:.2f} ms",
                f"{row['percent']:.2f} %",
            ]
        )
    steps = f"{result['workers']} workers, {result['steps']} steps of the digits"
    return f"**{steps}, {result['ns_per_event']:.0f} ns per event**\n\n{markdown(rows)}"


def events_cost() -> str:
    """What one event costs its worker and the parent."""
    cases = {name: f"{case['median_ns']:.0f}" for name, case in load("events")["cases"].items()}
    parent = sum(
        load("events")["cases"][name]["median_ns"] for name in ("drain", "add to totals", "append to file")
    )
    return (
        f"`record` takes {cases['record, with a reader in another process']} ns, beside "
        f"{cases['struct.pack_into, for comparison']} ns of a plain `struct.pack_into` of the same bytes and "
        f"{cases['time.monotonic_ns, for comparison']} ns of one `time.monotonic_ns()`. The parent takes {parent:.0f} "
        "ns per event."
    )


def desync_cost() -> str:
    """What comparing parameters costs."""
    result = load("desync")
    rows = [["parameters", "step", "one check", f"share of a step, every {result['every']}"]]
    rows += [
        [
            f"{row['MiB']:.2f} MiB",
            f"{row['step']:.1f} ms",
            f"{row['check']:.1f} ms",
            f"{row['percent']:.2f} %",
        ]
        for row in result["rows"]
    ]
    return f"**{result['workers']} workers on {result['cores']} cores**\n\n{markdown(rows)}"


def first_minute() -> str:
    """What a new user waits for; the rows of this tree."""
    result = load("first_minute")
    rows = [["command", "whole", "to the first step", "counted as work"]]
    for row in result["rows"]:
        if row["tree"] == "now":
            times = [
                f"{row[name]:.1f} s" if name in row else ""
                for name in ("seconds", "first_step_s", "counted_s")
            ]
            rows.append([row["what"], *times])
    return f"**{result['cores']} cores**\n\n{markdown(rows)}"


BLOCKS: dict[str, Callable[[], str]] = {
    "allreduce ratios": allreduce_ratios,
    "backend speed": backend_speed,
    "choosing": choosing,
    "promises": promises,
    "scorecard": measures,
    "codecs": codecs_speed,
    "density": density_speed,
    "scaling": scaling_speed,
    "links": links_speed,
    "tls": tls_cost,
    "geo": geo,
    "hosts": hosts_speed,
    "sending orders": sending_orders,
    "language gpu": language_speed,
    "many ranks": many_ranks,
    "helpers live": helpers_live,
    "nccl": nccl_steps,
    "auto speed": auto_speed,
    "link errors": link_errors,
    "plan errors": plan_errors,
    "public tables": public_tables,
    "generating": generating_rates,
    "rl-simulation": rl_simulation,
    "rl-learning": rl_learning,
    "rl-kills": rl_kills,
    "rl-inference": rl_inference,
    "rl-returns": rl_returns,
    "rl-lags": rl_lags,
    "inference": inference_speed,
    "local steps": local_steps,
    "ray actor": ray_actor,
    "events overhead": events_overhead,
    "events cost": events_cost,
    "bert settings": bert_settings,
    "curves": curves,
    "desync cost": desync_cost,
    "steps": step_scaling,
    "server": server_table("server"),
    "glove training": glove_training,
    "glove counting": glove_counting,
    "glove workers": glove_workers,
    "glove corpus": glove_corpus,
    "first minute": first_minute,
    "loading": loading_rates,
    "offload": offload,
    "pipeline speed": pipeline_speed,
    "federated flower": federated_flower,
    "federated gpu": federated_gpu,
    "federated mnist": federated_mnist,
    "federated noniid": federated_noniid,
    "federated privacy": federated_privacy,
    "federated roles": federated_roles,
    "filters": filters,
    "regression": regression_speed,
    "gbdt": gbdt_speed,
    "classes": class_figures,
    "startup": startup_times,
    "svd": svd_speed,
    "stragglers permanent": stragglers("permanent"),
    "stragglers passing": stragglers("passing"),
    "tokenizing": tokenizing_speed,
    "tuning": tuning_scores,
    "two workers": two_workers,
    "wavefronts": wavefronts,
    "wire time": wire_time,
    "allreduce schedules": allreduce_schedules,
}


def render(text: str) -> str:
    """`text` with every marked block as the results have it."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{BLOCKS[match[1]]()}\n<!-- /{match[1]} -->"

    return re.sub(r"<!-- ([^/].*?) -->\n.*?<!-- /\1 -->", fill, text, flags=re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


if __name__ == "__main__":
    for page in pages():
        page.write_text(render(page.read_text()))
