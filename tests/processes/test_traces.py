"""The trace of every strategy, from real runs: a row for each role, both ends of every message, nothing overlapping."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.observe.analyse.timeline import build_timeline
from manyhands.observe.draw.trace_json import MAX_TRACE_SLICES, trace_json
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import RunEvents, read_run_events
from manyhands.workloads.tasks import TASKS
from traces import assert_flows_bound

STEPS, WORKERS = 12, 2


def roles_of(strategy: str) -> list[str]:
    if strategy == "single":
        return ["worker 0"]
    servers = mh.Strategy.parse(strategy).num_server_processes if strategy.startswith("ps") else 0
    return [f"worker {rank}" for rank in range(WORKERS)] + [f"server {place}" for place in range(servers)]


def ends(events: RunEvents, kind: EventKind) -> Counter[tuple[int, int, int]]:
    found: Counter[tuple[int, int, int]] = Counter()
    for role in events.roles:
        for record in role.of(kind):
            peer, number = int(record["peer"]), int(record["message"])
            found[(role.role, peer, number) if kind is EventKind.SEND else (peer, role.role, number)] += 1
    return found


@pytest.mark.parametrize(
    ("strategy", "messages"),
    [
        ("ps servers=2 consistency=bounded:2", 2 * (2 * STEPS + WORKERS)),
        pytest.param("allreduce algorithm=ring", 2 * STEPS, marks=pytest.mark.soak),
        pytest.param("single", 0, marks=pytest.mark.soak),
        pytest.param("mirrored", 0, marks=pytest.mark.soak),
        pytest.param("central", 0, marks=pytest.mark.soak),
        pytest.param("hogwild order=turns", 0, marks=pytest.mark.soak),
        pytest.param("ps replicas=1 link=tcp", 2 * WORKERS * STEPS + WORKERS, marks=pytest.mark.soak),
        pytest.param("ps consistency=async", 2 * STEPS + WORKERS, marks=pytest.mark.soak),
    ],
)
@pytest.mark.filterwarnings("ignore:hogwild on a dense model")
def test_every_role_has_a_row_and_every_message_an_arrow(
    tmp_path: Path, strategy: str, messages: int
) -> None:
    workers = 1 if strategy == "single" else WORKERS
    mh.fit(TASKS["digits"].build(), strategy, workers=workers, steps=STEPS, out=tmp_path / "run")
    events = read_run_events(tmp_path / "run" / "events")
    assert ends(events, EventKind.SEND) == ends(events, EventKind.RECEIVE)
    assert ends(events, EventKind.SEND).total() == messages
    timeline = build_timeline(events.roles, max_slices=MAX_TRACE_SLICES)
    trace = json.loads(b"".join(trace_json(timeline, {"strategy": strategy})))
    assert_flows_bound(trace)
    rows = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert rows == roles_of(strategy)
    arrows = [event for event in trace["traceEvents"] if event["ph"] == "s" and event["cat"] == "message"]
    # The first pull comes before the first step and the last answer after the last: neither is in a step.
    outside = 2 * len(roles_of(strategy)[WORKERS:]) * WORKERS
    assert messages - outside <= len(arrows) <= messages
