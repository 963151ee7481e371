"""A run's numbers for Prometheus: the text format 0.0.4, which a scrape of `/metrics` gets.

One family is one kind of number: a HELP and a TYPE line, then a sample for each set of labels. Counters only grow
while a run goes on, and end in `_total`. Names carry their unit. See
https://prometheus.io/docs/instrumenting/exposition_formats/ for the format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from manyhands.observe.analyse.view import Phase, Presence, RunView, ServerView, WorkerView

__all__ = ["CONTENT_TYPE", "metrics_text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of the answer to a scrape

_PREFIX = "manyhands_"
_Samples = Iterable[tuple[Mapping[str, str], float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """All samples of one metric name."""

    name: str
    kind: str  # gauge or counter
    about: str
    samples: _Samples


def metrics_text(view: RunView) -> str:
    """Return the view in Prometheus' text format; every line ends in a line feed."""
    families = [*_of_run(view), *_of_workers(view.workers), *_of_servers(view.servers), *_of_traffic(view)]
    return "".join(line for family in families for line in _lines(family))


def _of_run(view: RunView) -> list[_Family]:
    about = {"task": view.task, "strategy": view.strategy}
    families = [
        _gauge("run_info", "What runs; always 1.", [(about, 1.0)]),
        _gauge(
            "phase",
            "Where the run is: 1 for the phase it is in, 0 for the others.",
            [({"phase": phase.value}, float(phase is view.phase)) for phase in Phase],
        ),
        _counter("steps_total", "Global batches done.", [({}, view.step)]),
        _gauge("steps_asked", "Global batches to do.", [({}, view.steps_asked)]),
        _gauge("run_seconds", "Seconds since the first event.", [({}, view.seconds)]),
        _gauge("samples_per_second", "Samples of all workers, lately.", [({}, view.samples_per_s)]),
        _gauge("steps_per_second", "Global batches, lately.", [({}, view.steps_per_s)]),
        _gauge("membership_epoch", "Changes of the membership; 0 where a run has none.", [({}, view.epoch)]),
        _gauge("warnings", "Sentences on what is wrong now.", [({}, len(view.warnings))]),
        _gauge("staleness_mean", "Updates of others that an update had missed.", [({}, view.staleness.mean)]),
        _gauge("staleness_max", "The most of them.", [({}, view.staleness.max)]),
    ]
    if view.loss is not None:
        families.append(_gauge("loss", "Of the last step.", [({}, view.loss)]))
    if view.final:
        metrics = [({"metric": name}, value) for name, value in view.final.items()]
        families.append(_gauge("metric", "Of the newest evaluation.", metrics))
    return families


def _of_workers(workers: Iterable[WorkerView]) -> list[_Family]:
    workers = list(workers)

    def each(value: Callable[[WorkerView], float]) -> _Samples:
        return [({"worker": str(worker.role)}, value(worker)) for worker in workers]

    shares: _Samples = [
        ({"worker": str(worker.role), "part": part}, getattr(worker.recent, part))
        for worker in workers
        for part in ("compute", "input", "exchange", "wait")
    ]
    return [
        _gauge(
            "worker_up",
            "Whether the worker takes part.",
            each(lambda worker: worker.presence is Presence.PRESENT),
        ),
        _counter("worker_steps_total", "Steps of a worker.", each(lambda worker: worker.steps)),
        _counter("worker_samples_total", "Samples of a worker.", each(lambda worker: worker.samples)),
        _gauge(
            "worker_steps_per_second", "Steps of a worker, lately.", each(lambda worker: worker.steps_per_s)
        ),
        _gauge(
            "worker_compute_seconds",
            "What computing takes in a recent step.",
            each(lambda worker: worker.compute_ms / 1000),
        ),
        _gauge("worker_time_ratio", "Where a worker's time goes, lately.", shares),
        _counter("worker_sent_bytes_total", "Bytes sent.", each(lambda worker: worker.bytes_sent)),
        _counter("worker_sent_messages_total", "Messages sent.", each(lambda worker: worker.messages_sent)),
    ]


def _of_servers(servers: Iterable[ServerView]) -> list[_Family]:
    servers = list(servers)

    def each(value: Callable[[ServerView], float]) -> _Samples:
        return [({"server": server.name.removeprefix("server ")}, value(server)) for server in servers]

    if not servers:
        return []
    return [
        _gauge(
            "server_up",
            "Whether the server takes part.",
            each(lambda server: server.presence is Presence.PRESENT),
        ),
        _counter("server_updates_total", "Updates applied.", each(lambda server: server.updates)),
        _gauge("server_updates_per_second", "Updates, lately.", each(lambda server: server.updates_per_s)),
        _gauge(
            "server_apply_seconds",
            "What applying a recent update takes.",
            each(lambda server: server.apply_ms / 1000),
        ),
        _gauge("server_apply_ratio", "Its part of all servers' applying.", each(lambda server: server.share)),
        _gauge("server_parameter_bytes", "Whose primary it is.", each(lambda server: server.num_bytes)),
        _gauge("server_shards", "Whose primary it is.", each(lambda server: len(server.primary_of))),
    ]


def _of_traffic(view: RunView) -> list[_Family]:
    labels = [{"wire": one.wire, "codec": one.codec} for one in view.traffic]
    if not labels:
        return []
    num_bytes = zip(labels, (one.num_bytes for one in view.traffic), strict=True)
    messages = zip(labels, (one.messages for one in view.traffic), strict=True)
    return [
        _counter("wire_bytes_total", "Bytes by what carried them, and in which codec.", num_bytes),
        _counter("wire_messages_total", "Messages by what carried them, and in which codec.", messages),
    ]


def _gauge(name: str, about: str, samples: _Samples) -> _Family:
    return _Family(name=_PREFIX + name, kind="gauge", about=about, samples=samples)


def _counter(name: str, about: str, samples: _Samples) -> _Family:
    assert name.endswith("_total"), f"{name} counts, and its name does not say so"
    return _Family(name=_PREFIX + name, kind="counter", about=about, samples=samples)


def _lines(family: _Family) -> Iterable[str]:
    yield f"# HELP {family.name} {_escaped(family.about)}\n"
    yield f"# TYPE {family.name} {family.kind}\n"
    for labels, value in family.samples:
        inside = ",".join(f'{name}="{_escaped(text, quoted=True)}"' for name, text in labels.items())
        yield (
            f"{family.name}{{{inside}}} {_number(value)}\n" if inside else f"{family.name} {_number(value)}\n"
        )


def _escaped(text: str, *, quoted: bool = False) -> str:
    """Escape backslashes and line feeds, and double quotes within quotes."""
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


def _number(value: float) -> str:
    """Format a number for Go's ParseFloat."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
