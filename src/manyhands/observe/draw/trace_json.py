"""A timeline as trace JSON, Google's "Trace Event Format", which ui.perfetto.dev and chrome://tracing open.

Every role is a process with two tracks, its steps and their parts (a server has the second only); parts are complete
events ("X"), joins, leaves and faults instants ("i"), what a server keeps back an asynchronous slice ("b" to "e"), and
the end of a wait and every message is a flow ("s" to "f"), bound to the slices that enclose its two ends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from manyhands.observe.analyse.timeline import Gap, Row, Slice, Timeline
from manyhands.observe.record.events import NO_STEP, NOBODY, EventKind

MAX_TRACE_SLICES = 60_000  # steps and parts in a trace: with its arrows that is at most some 18 MB

_STEPS, _PARTS = 1, 2  # the two tracks of a role
_WITH_PEER = {
    EventKind.APPLY: "apply update of",
    EventKind.RECEIVE: "receive from",
    EventKind.SEND: "send to",
}
_COUNTS = {
    EventKind.EXCHANGE: "messages",
    EventKind.SEND: "messages",
    EventKind.INPUT: "samples",
    EventKind.EVALUATE: "samples",
    EventKind.APPLY: "shard",
}


def trace_json(timeline: Timeline, about: Mapping[str, str]) -> Iterator[bytes]:
    """Yield the file in pieces, one event per line; `about` is shown among the trace's details."""
    names = {row.role: row.name for row in timeline.rows}
    details = dict(about) | {"left out": "; ".join(timeline.left_out) or "nothing"}
    head = json.dumps({"displayTimeUnit": "ms", "otherData": details})
    yield head.removesuffix("}").encode() + b', "traceEvents": [\n'
    separator = b""
    encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)  # json.dumps makes one per event
    for event in _events(timeline, names):
        yield separator + encoder.encode(event).encode()
        separator = b",\n"
    yield b"\n]}\n"


def _events(timeline: Timeline, names: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    args: dict[str, Any]
    shared: dict[str, Any]
    for row in timeline.rows:
        yield _event("process_name", "M", row.role, 0, args={"name": row.name})
        yield _event("process_sort_index", "M", row.role, 0, args={"sort_index": row.role})
        tracks = ((_STEPS, "steps"), (_PARTS, "parts")) if row.steps else ((_PARTS, "work"),)
        for track, name in tracks:
            yield _event("thread_name", "M", row.role, 0, track=track, args={"name": name})
            yield _event("thread_sort_index", "M", row.role, 0, track=track, args={"sort_index": track})
        for step in row.steps:
            args = {"step": step.step, "samples": step.count}
            args |= {"loss": step.value} if math.isfinite(step.value) else {}
            yield _span(f"step {step.step}", row.role, step, "step", args, track=_STEPS)
        yield from (_part(row, part, names) for part in row.slices)
        for gap in row.gaps:
            args = {"first step": gap.first_step, "last step": gap.last_step}
            for part in ("compute", "exchange", "wait", "apply"):
                args[f"{part} ms"] = getattr(gap, f"{part}_ns") / 1e6
            name = f"steps {gap.first_step} to {gap.last_step}, left out"
            yield _span(name, row.role, gap, "left out", args)
        for mark in row.marks:
            kind = mark.kind.name.lower()
            args = {} if mark.step == NO_STEP else {"step": mark.step}
            blamed = mark.kind is EventKind.FAULT and mark.peer != NOBODY
            name = f"{kind} of {_name(mark.peer, names)}" if blamed else kind
            yield _event(name, "i", row.role, mark.end_ns, s="p", cat=kind, args=args)
        for number, hold in enumerate(row.holds, start=1):
            name = f"hold {_name(hold.peer, names)}"
            if hold.value >= 0:
                name += f" for {_name(int(hold.value), names)}"
            shared = {"cat": "hold", "id": f"{row.role}.{number}", "args": {"shard": hold.count}}
            yield _event(name, "b", row.role, hold.start_ns, **shared)
            yield _event(name, "e", row.role, hold.end_ns, **shared)
    for number, arrow in enumerate(timeline.arrows, start=1):
        name, shared = f"{_name(arrow.source, names)} arrived", {"cat": "arrival", "id": number}
        if arrow.is_message:
            name = f"{_name(arrow.source, names)} to {_name(arrow.target, names)}"
            shared = {"cat": "message", "id": number, "args": {"bytes": arrow.num_bytes}}
        yield _event(name, "s", arrow.source, arrow.source_ns, **shared)
        # "bp": "e" binds the end to the enclosing slice; otherwise a viewer takes the next slice.
        yield _event(name, "f", arrow.target, arrow.target_ns, bp="e", **shared)


def _event(name: str, phase: str, role: int, at_ns: int, **more: Any) -> dict[str, Any]:
    track = more.pop("track", _PARTS)
    # Viewers take process 0 for the system's idle task, so roles count from 1.
    return {"name": name, "ph": phase, "ts": at_ns / 1000, "pid": role + 1, "tid": track, **more}


def _span(
    name: str, role: int, span: Slice | Gap, kind: str, args: dict[str, Any], track: int = _PARTS
) -> dict[str, Any]:
    took = (span.end_ns - span.start_ns) / 1000
    return _event(name, "X", role, span.start_ns, track=track, cat=kind, dur=took, args=args)


def _part(row: Row, part: Slice, names: Mapping[int, str]) -> dict[str, Any]:
    name = kind = part.kind.name.lower()
    args: dict[str, Any] = {} if part.step == NO_STEP else {"step": part.step}
    if part.kind is EventKind.WAIT and part.peer != NOBODY:
        name = f"wait for {_name(part.peer, names)}"
    elif part.kind in _WITH_PEER:
        name = f"{_WITH_PEER[part.kind]} {_name(part.peer, names)}"
    if name != kind:
        args["peer"] = part.peer
    if part.kind in (EventKind.COMPUTE, EventKind.WAIT) and part.count:  # a work item of a pipeline
        args["micro-batch"] = part.count - 1
        name += f", micro-batch {part.count - 1}"
    if part.num_bytes:
        args |= {"bytes": part.num_bytes}
    if part.kind in _COUNTS and (part.count or part.kind is EventKind.APPLY):
        args |= {_COUNTS[part.kind]: part.count}
    if part.kind is EventKind.APPLY:
        args |= {"staleness": part.value}
    return _span(name, row.role, part, kind, args)


def _name(role: int, names: Mapping[int, str]) -> str:
    return names.get(role, f"role {role}")
