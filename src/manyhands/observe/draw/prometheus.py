"""A run's numbers for Prometheus: the text format 0.0.4, which a scrape of `/metrics` gets.

One family is a HELP and a TYPE line, then a sample for each set of labels; see
https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from manyhands.observe.analyse.view import Phase, Presence, RunView, ServerView, WorkerView

_Samples = Iterable[tuple[Mapping[str, str], float]]
Family = tuple[str, str, _Samples]  # name, what it is, and a sample for each set of labels

_OF_WORKER: Mapping[str, tuple[str, Callable[[WorkerView], float]]] = {
    "worker_up": ("Whether the worker takes part.", lambda one: one.presence is Presence.PRESENT),
    "worker_steps_total": ("Steps of a worker.", lambda one: one.steps),
    "worker_samples_total": ("Samples of a worker.", lambda one: one.samples),
    "worker_steps_per_second": ("Steps of a worker, recently.", lambda one: one.steps_per_s),
    "worker_compute_seconds": ("Compute time of a recent step.", lambda one: one.compute_ms / 1000),
    "worker_sent_bytes_total": ("Bytes sent.", lambda one: one.bytes_sent),
    "worker_sent_messages_total": ("Messages sent.", lambda one: one.messages_sent),
}
_OF_SERVER: Mapping[str, tuple[str, Callable[[ServerView], float]]] = {
    "server_up": ("Whether the server takes part.", lambda one: one.presence is Presence.PRESENT),
    "server_updates_total": ("Updates applied.", lambda one: one.updates),
    "server_updates_per_second": ("Updates, lately.", lambda one: one.updates_per_s),
    "server_apply_seconds": ("Time to apply a recent update.", lambda one: one.apply_ms / 1000),
    "server_apply_ratio": ("Share of all servers' applying.", lambda one: one.share),
    "server_parameter_bytes": ("Bytes it is the primary of.", lambda one: one.num_bytes),
    "server_shards": ("Shards it is the primary of.", lambda one: len(one.primary_of)),
}


def metrics_text(view: RunView) -> str:
    return "".join(line for family in (*_of_run(view), *_of_members(view)) for line in family_lines(*family))


def _of_run(view: RunView) -> Iterator[Family]:
    yield (
        "run_info",
        "The task and strategy; always 1.",
        [({"task": view.task, "strategy": view.strategy}, 1.0)],
    )
    phases = [({"phase": phase.value}, float(phase is view.phase)) for phase in Phase]
    yield "phase", "Phase of the run: 1 for the current phase, 0 for the others.", phases
    for name, about, value in (
        ("steps_total", "Global batches done.", view.step),
        ("steps_asked", "Global batches to do.", view.steps_asked),
        ("run_seconds", "Seconds since the first event.", view.seconds),
        ("samples_per_second", "Samples of all workers, recently.", view.samples_per_s),
        ("steps_per_second", "Global batches, recently.", view.steps_per_s),
        ("membership_epoch", "Changes of the membership; 0 if there were none.", view.epoch),
        ("warnings", "Number of current warnings.", len(view.warnings)),
        ("staleness_mean", "Mean number of updates of others that an update missed.", view.staleness.mean),
        ("staleness_max", "Largest number of updates of others that an update missed.", view.staleness.max),
        ("loss", "Loss of the last step.", view.loss),
    ):
        if value is not None:
            yield name, about, [({}, value)]
    if view.final:
        measured = [({"metric": name}, value) for name, value in view.final.items()]
        yield "metric", "Metrics of the newest evaluation.", measured


def _of_members(view: RunView) -> Iterator[Family]:
    for name, (about, of_worker) in _OF_WORKER.items():
        yield name, about, [({"worker": str(one.role)}, of_worker(one)) for one in view.workers]
    shares = [
        ({"worker": str(worker.role), "part": part}, getattr(worker.recent, part))
        for worker in view.workers
        for part in ("compute", "input", "exchange", "wait")
    ]
    yield "worker_time_ratio", "Shares of a worker's time, recently.", shares
    for name, (about, of_server) in _OF_SERVER.items() if view.servers else ():
        labels = ({"server": one.name.removeprefix("server ")} for one in view.servers)
        yield name, about, zip(labels, map(of_server, view.servers), strict=True)
    for word, amount in (("Bytes", "num_bytes"), ("Messages", "messages")) if view.traffic else ():
        carried = [({"wire": one.wire, "codec": one.codec}, getattr(one, amount)) for one in view.traffic]
        yield f"wire_{word.lower()}_total", f"{word} by link and codec.", carried


def family_lines(name: str, about: str, samples: _Samples) -> Iterator[str]:
    yield f"# HELP manyhands_{name} {_escaped(about)}\n"
    yield f"# TYPE manyhands_{name} {'counter' if name.endswith('_total') else 'gauge'}\n"
    for labels, value in samples:
        inside = ",".join(f'{label}="{_escaped(text, quoted=True)}"' for label, text in labels.items())
        yield f"manyhands_{name}{f'{{{inside}}}' if inside else ''} {_number(value)}\n"


def _escaped(text: str, *, quoted: bool = False) -> str:
    """Escape backslashes and line feeds, and double quotes within quotes."""
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
