"""Timelines of runs whose course is known: nothing overlaps, nothing is lost unsaid, arrows end where waits do."""

import itertools
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from manyhands.cli.main import app
from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import DataError, UserError
from manyhands.observe.analyse.timeline import Row, Timeline, build_timeline
from manyhands.observe.draw.page import sections
from manyhands.observe.draw.paper import STYLE
from manyhands.observe.draw.timeline_svg import MAX_SVG_SLICES, MAX_SVG_STEPS, timeline_svg
from manyhands.observe.draw.trace_json import MAX_TRACE_SLICES, trace_json
from manyhands.observe.record.event_files import EventFileWriter
from manyhands.observe.record.events import NO_STEP, NOBODY, RECORD, EventKind, Records
from manyhands.observe.record.recorded import RoleEvents, read_run_events
from traces import assert_flows_bound
from views import run_view

MS = 1_000_000
ZERO = 5_000 * MS
SVG = "{http://www.w3.org/2000/svg}"


def records_of(role: int, rows: Sequence[tuple[EventKind, int, int, int, int]]) -> Records:
    """Records of (kind, start, duration, step, peer), in nanoseconds."""
    out = np.zeros(len(rows), RECORD)
    for name, column in zip(
        ("kind", "start_ns", "duration_ns", "step", "peer"), zip(*rows, strict=True), strict=True
    ):
        out[name] = column
    out["role"], out["id"] = role, np.arange(len(rows))
    return out


def barrier_run(compute_ms: Sequence[float], steps: int, exchange_ms: float = 1.0) -> list[RoleEvents]:
    """Steps that end together: each role computes, waits for the slowest, exchanges."""
    slowest = int(np.argmax(compute_ms))
    whole = round((max(compute_ms) + exchange_ms) * MS)
    roles = []
    for role, own in enumerate(compute_ms):
        rows = [(EventKind.JOIN, ZERO - 9 * MS, 4 * MS, NO_STEP, NOBODY)]
        for step in range(steps):
            begin, busy = ZERO + step * whole, round(own * MS)
            rows.append((EventKind.COMPUTE, begin, busy, step, NOBODY))
            waited = round(max(compute_ms) * MS) - busy
            if waited:
                rows.append((EventKind.WAIT, begin + busy, waited, step, slowest))
            rows.append((EventKind.EXCHANGE, begin + busy + waited, round(exchange_ms * MS), step, NOBODY))
            rows.append((EventKind.STEP, begin, whole, step, NOBODY))
        rows.append((EventKind.LEAVE, ZERO + steps * whole, 0, NO_STEP, NOBODY))
        roles.append(RoleEvents(role=role, name=f"worker-{role}", records=records_of(role, rows)))
    return roles


def trace_of(timeline: Timeline) -> tuple[dict[str, Any], int]:
    data = b"".join(trace_json(timeline, {"strategy": "mirrored"}))
    trace: dict[str, Any] = json.loads(data)
    return trace, len(data)


def assert_in_order(row: Row) -> None:
    pieces = sorted((piece.start_ns, piece.end_ns) for piece in (*row.slices, *row.gaps))
    assert all(begin < end for begin, end in pieces)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(pieces))


def times(row: Row) -> list[tuple[str, int, int]]:
    return [(part.kind.name, part.start_ns, part.end_ns) for part in row.slices]


# ---- laying out ----


def test_what_does_not_overlap_stays_where_it_was_recorded() -> None:
    timeline = build_timeline(barrier_run([2, 5], 2), max_slices=1000)
    zero = 9 * MS  # the run's first event is the join
    assert times(timeline.rows[0]) == [
        ("COMPUTE", zero, zero + 2 * MS),
        ("WAIT", zero + 2 * MS, zero + 5 * MS),
        ("EXCHANGE", zero + 5 * MS, zero + 6 * MS),
        ("COMPUTE", zero + 6 * MS, zero + 8 * MS),
        ("WAIT", zero + 8 * MS, zero + 11 * MS),
        ("EXCHANGE", zero + 11 * MS, zero + 12 * MS),
    ]
    assert [step.end_ns for step in timeline.rows[1].steps] == [zero + 6 * MS, zero + 12 * MS]
    assert [mark.kind for mark in timeline.rows[0].marks] == [EventKind.JOIN, EventKind.LEAVE]
    assert timeline.left_out == ()


def test_an_exchange_hidden_under_backward_keeps_its_length_inside_the_step() -> None:
    # 10 ms of backward hid 3 ms of exchange: 7 ms of compute, then a wait, then 1 + 3 ms of exchange in one piece.
    rows = [
        (EventKind.COMPUTE, 0, 7, 0, NOBODY),
        (EventKind.WAIT, 10, 5, 0, 1),
        (EventKind.EXCHANGE, 15, 4, 0, NOBODY),
        (EventKind.COMPUTE, 16, 2, 0, NOBODY),
        (EventKind.STEP, 0, 18, 0, NOBODY),
        (EventKind.COMPUTE, 18, 7, 1, NOBODY),
    ]
    role = RoleEvents(role=0, name="worker-0", records=records_of(0, rows))
    row = build_timeline([role], max_slices=100).rows[0]
    assert times(row) == [
        ("COMPUTE", 0, 7),
        ("WAIT", 7, 12),
        ("EXCHANGE", 12, 16),
        ("COMPUTE", 16, 18),
        ("COMPUTE", 18, 25),
    ]


def test_parts_recorded_from_one_moment_are_laid_end_to_end() -> None:
    rows = [
        (EventKind.COMPUTE, 0, 10, 0, NOBODY),
        (EventKind.WAIT, 10, 3, 0, 1),
        (EventKind.WAIT, 10, 4, 0, 2),
        (EventKind.EXCHANGE, 10, 5, 0, NOBODY),
        (EventKind.STEP, 0, 22, 0, NOBODY),
    ]
    role = RoleEvents(role=0, name="worker-0", records=records_of(0, rows))
    row = build_timeline([role], max_slices=100).rows[0]
    assert [begin for _, begin, _ in times(row)] == [0, 10, 13, 17]
    assert times(row)[-1] == ("EXCHANGE", 17, 22)


@pytest.mark.parametrize("seed", range(20))
def test_slices_never_overlap_whatever_was_recorded(seed: int) -> None:
    random = np.random.default_rng(seed)
    kinds = [EventKind.COMPUTE, EventKind.WAIT, EventKind.EXCHANGE, EventKind.STEP, EventKind.EVALUATE]
    rows = [
        (kinds[random.integers(5)], *random.integers(0, 300, 2).tolist(), int(random.integers(12)), 1)
        for _ in range(80)
    ]
    roles = [
        RoleEvents(role=role, name=f"worker-{role}", records=records_of(role, rows[role::2]))
        for role in (0, 1)
    ]
    for most in (1000, 12):
        timeline = build_timeline(roles, max_slices=most)
        for row in timeline.rows:
            assert_in_order(row)
        assert_flows_bound(trace_of(timeline)[0])


# ---- arrows ----


def test_an_arrow_leads_from_the_one_waited_for_to_the_end_of_the_wait() -> None:
    timeline = build_timeline(barrier_run([2, 5, 3], 1), max_slices=1000)
    end = 9 * MS + 5 * MS
    found = [(arrow.source, arrow.target, arrow.source_ns, arrow.target_ns) for arrow in timeline.arrows]
    assert found == [(1, 0, end - 1, end - 1), (1, 2, end - 1, end - 1)]


def test_no_arrow_without_a_peer_or_from_a_row_that_is_not_there() -> None:
    rows = [
        (EventKind.COMPUTE, 0, 10, 0, NOBODY),
        (EventKind.WAIT, 10, 3, 0, NOBODY),
        (EventKind.WAIT, 13, 3, 0, 7),
        (EventKind.STEP, 0, 16, 0, NOBODY),
    ]
    role = RoleEvents(role=0, name="worker-0", records=records_of(0, rows))
    assert build_timeline([role], max_slices=100).arrows == ()


# ---- the trace ----


def test_the_trace_has_a_named_process_per_role_and_matched_flows() -> None:
    roles = barrier_run([2, 5, 3], 4)
    roles[2] = RoleEvents(
        role=2,
        name="worker-2",
        records=np.concatenate(
            [roles[2].records, records_of(2, [(EventKind.FAULT, ZERO + 7 * MS, 0, 3, 1)])]
        ),
    )
    trace, _ = trace_of(build_timeline(roles, max_slices=1000))
    assert_flows_bound(trace)
    events = trace["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {1: "worker 0", 2: "worker 1", 3: "worker 2"}
    kinds = Counter(event["name"] for event in events if event["ph"] == "X" and event["cat"] != "step")
    assert kinds == {"compute": 12, "exchange": 12, "wait for worker 1": 8}
    assert Counter(event["ph"] for event in events)["s"] == 8
    instants = Counter(event["name"] for event in events if event["ph"] == "i")
    assert instants == {"join": 3, "leave": 3, "fault of worker 1": 1}
    assert trace["otherData"] == {"strategy": "mirrored", "left out": "nothing"}
    first = next(event for event in events if event["name"] == "wait for worker 1")
    assert (first["ts"], first["dur"], first["args"]) == (11_000, 3_000, {"step": 0, "peer": 1})


def test_ten_thousand_steps_are_bounded_and_the_file_says_what_is_left_out() -> None:
    steps = 10_000
    roles = barrier_run([2, 5], steps)
    slow = roles[1].records
    slow["duration_ns"][(slow["kind"] == EventKind.STEP) & (slow["step"] == 6_000)] += MS // 2
    timeline = build_timeline(roles, max_slices=MAX_TRACE_SLICES)
    trace, size = trace_of(timeline)
    assert size < 20_000_000
    assert [window.label for window in timeline.windows] == ["first", "slowest", "last"]
    first, slowest, last = timeline.windows
    assert first.first_step == 0
    assert last.last_step == steps - 1
    assert slowest.first_step <= 6_000 <= slowest.last_step
    shown = {event["args"]["step"] for event in trace["traceEvents"] if event.get("cat") == "step"}
    gone = steps - len(shown)
    assert gone > 0
    assert f"{gone:,} of 10,000 steps are left out" in trace["otherData"]["left out"]
    for row in timeline.rows:
        assert_in_order(row)
        assert row.gaps
    # Nothing is lost from the sums: what is drawn and what is left out make the whole run.
    row = timeline.rows[0]
    drawn = sum(part.end_ns - part.start_ns for part in row.slices if part.kind is EventKind.WAIT)
    assert drawn + sum(gap.wait_ns for gap in row.gaps) == steps * 3 * MS


def test_faults_without_end_are_bounded_too() -> None:
    rows = [(EventKind.FAULT, moment, 0, 0, NOBODY) for moment in range(5_000)]
    rows.append((EventKind.STEP, 0, 10, 0, NOBODY))
    role = RoleEvents(role=0, name="worker-0", records=records_of(0, rows))
    timeline = build_timeline([role], max_slices=100)
    moments = [mark.end_ns for mark in timeline.rows[0].marks]
    assert (len(moments), moments[0], moments[-1]) == (1_000, 0, 4_999)
    assert timeline.left_out == ("4,000 joins, leaves and faults in the middle of worker 0 are left out",)


# ---- servers and messages ----


def served_run(steps: int, workers: int = 2) -> list[RoleEvents]:
    """Workers that push to one server and wait for its answer; the server applies every update alone."""
    server, step_ns = workers, 10 * MS
    events: dict[int, list[tuple[EventKind, int, int, int, int, int, float]]] = defaultdict(list)
    for step in range(steps):
        worker, clock = step % workers, step // workers
        begin = ZERO + clock * step_ns + worker * 3 * MS
        pushed, arrived, number = begin + 4 * MS, begin + 4 * MS + 50_000, clock + 1
        applied, answered = arrived + 20_000, arrived + 220_000
        mine, its = events[worker], events[server]
        mine.append((EventKind.COMPUTE, begin, 4 * MS, step, NOBODY, 0, 0))
        mine.append((EventKind.STEP, begin, 4 * MS, step, NOBODY, 0, 0))
        mine.append((EventKind.SEND, pushed + 1, 0, step, server, number, 0))
        its.append((EventKind.RECEIVE, arrived, 20_000, step, worker, number, 0))
        its.append((EventKind.APPLY, applied, 200_000, step, worker, 0, clock % 3))
        its.append((EventKind.HOLD, arrived, 230_000, step, worker, 0, 1 - worker))
        its.append((EventKind.SEND, answered, 10_000, step, worker, number, 0))
        mine.append((EventKind.RECEIVE, answered + 60_000, 0, step, server, number, 0))
        mine.append((EventKind.EXCHANGE, pushed, 6 * MS, step, NOBODY, 0, 0))
    roles = []
    for role in range(workers + 1):
        rows = events[role]
        records = records_of(role, [row[:5] for row in rows])
        records["message"], records["value"] = [row[5] for row in rows], [row[6] for row in rows]
        name = f"worker-{role}" if role < workers else "server-0"
        roles.append(RoleEvents(role=role, name=name, records=records))
    return roles


def test_a_server_has_a_row_of_what_it_did_and_every_message_an_arrow() -> None:
    steps = 12
    timeline = build_timeline(served_run(steps), max_slices=1000)
    assert [row.name for row in timeline.rows] == ["worker 0", "worker 1", "server 0"]
    server = timeline.rows[2]
    assert Counter(part.kind.name for part in server.slices) == {"RECEIVE": 12, "APPLY": 12, "SEND": 12}
    assert_in_order(server)
    assert len(server.holds) == steps
    arrows = Counter((arrow.source, arrow.target) for arrow in timeline.arrows if arrow.is_message)
    assert arrows == {(0, 2): 6, (2, 0): 6, (1, 2): 6, (2, 1): 6}
    trace, _ = trace_of(timeline)
    assert_flows_bound(trace)
    applied = [event for event in trace["traceEvents"] if event["name"].startswith("apply update of")]
    assert [event["args"]["staleness"] for event in applied] == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]
    phases = Counter(event["ph"] for event in trace["traceEvents"] if event.get("cat") == "hold")
    assert phases == {"b": steps, "e": steps}


def test_a_message_with_one_end_has_no_arrow() -> None:
    roles = served_run(6)
    lost = roles[2].records
    lost["message"][(lost["kind"] == EventKind.RECEIVE) & (lost["step"] == 3)] = 99
    arrows = [arrow for arrow in build_timeline(roles, max_slices=1000).arrows if arrow.is_message]
    assert len(arrows) == 2 * 6 - 1


def test_a_message_that_arrives_before_the_call_that_sends_it_returns_has_its_arrow() -> None:
    roles = served_run(6)
    records = roles[2].records
    sends = (records["kind"] == EventKind.SEND) & (records["step"] == 3)
    records["duration_ns"][sends] = 5 * MS  # its answer is read long before that
    timeline = build_timeline(roles, max_slices=1000)
    arrows = [arrow for arrow in timeline.arrows if arrow.is_message]
    assert len(arrows) == 2 * 6
    assert all(arrow.source_ns <= arrow.target_ns for arrow in arrows)
    trace, _ = trace_of(timeline)
    assert_flows_bound(trace)


def test_a_long_run_with_a_server_is_bounded_and_its_gaps_keep_the_sums() -> None:
    timeline = build_timeline(served_run(20_000), max_slices=MAX_TRACE_SLICES)
    _, size = trace_of(timeline)
    assert size < 25_000_000
    server = timeline.rows[2]
    assert_in_order(server)
    drawn = sum(part.end_ns - part.start_ns for part in server.slices if part.kind is EventKind.APPLY)
    left_out = sum(gap.apply_ns for gap in server.gaps)
    assert left_out > 0
    # What lies across the edge of a window is in neither: at most one update at each edge.
    assert abs(drawn + left_out - 20_000 * 200_000) <= 4 * 2 * 200_000


def test_the_picture_shows_servers_and_thin_arrows_for_messages() -> None:
    timeline = build_timeline(served_run(12), max_slices=MAX_SVG_SLICES, max_steps=MAX_SVG_STEPS)
    root = ET.fromstring(timeline_svg(timeline, "served"))
    assert "server 0" in texts(root, "text")
    assert any("server 0, step 3: apply an update of worker 1" in text for text in texts(root, "title"))
    kinds = Counter(line.get("class") for line in root.iter(f"{SVG}line"))
    assert kinds["message"] == 24


# ---- the picture ----


def texts(root: ET.Element, tag: str) -> list[str]:
    return [element.text or "" for element in root.iter(SVG + tag)]


def test_the_picture_has_a_row_per_worker_and_a_tooltip_per_bar() -> None:
    timeline = build_timeline(barrier_run([2, 5], 3), max_slices=MAX_SVG_SLICES, max_steps=MAX_SVG_STEPS)
    svg = timeline_svg(timeline, 'a < b & "c"')
    root = ET.fromstring(svg)
    said = texts(root, "text")
    assert {'a < b & "c"', "worker 0", "worker 1", "compute", "exchange", "waiting", "ms"} <= set(said)
    assert said.count("2") >= 2  # the number of the last step, above both rows
    classes = Counter(
        element.get("class") for element in root.iter() if element.find(SVG + "title") is not None
    )
    assert classes == {"step": 6, "compute": 6, "exchange": 6, "waiting": 3, "arrow": 3, "mark": 2}
    assert "worker 0, step 1: waiting for worker 1 3.000 ms" in texts(root, "title")
    assert "prefers-color-scheme: dark" in svg
    assert not re.search(r"(href|src|@import|url\((?!#))", svg), "it must need nothing from elsewhere"


def test_bars_are_to_scale_and_inside_the_picture() -> None:
    timeline = build_timeline(barrier_run([2, 5], 3), max_slices=MAX_SVG_SLICES)
    root = ET.fromstring(timeline_svg(timeline, "x"))
    bars = {
        title.text: (float(bar.get("x", "")), float(bar.get("width", "")))
        for bar in root.iter(SVG + "rect")
        if (title := bar.find(SVG + "title")) is not None
    }
    fast, slow = (bars[f"worker {role}, step 0: compute {ms}.000 ms"] for role, ms in ((0, 2), (1, 5)))
    assert fast[0] == slow[0]
    assert fast[1] / slow[1] == pytest.approx(2 / 5, abs=1e-3)
    width = float(root.get("width", ""))
    assert all(x >= 0 and x + wide <= width for x, wide in bars.values())


def boxes(root: ET.Element, kind: str) -> list[tuple[float, float]]:
    """From where to where the bars of a kind reach, those of the legend left out."""
    bars = [
        one
        for one in root.iter(SVG + "rect")
        if one.get("class") == kind and one.find(SVG + "title") is not None
    ]
    return [(float(one.get("x", "")), float(one.get("x", "")) + float(one.get("width", ""))) for one in bars]


def test_the_steps_fill_their_panel_whatever_comes_before_and_after_them() -> None:
    """A wait for others to start belongs to the first step and a save to the last; both took far longer."""
    roles = barrier_run([2, 5], 20)
    whole = roles[0].records["duration_ns"][roles[0].records["kind"] == EventKind.STEP].sum()
    begin, end = ZERO, ZERO + int(whole)
    extra = [
        (EventKind.EXCHANGE, begin - 3_000 * MS, 2_999 * MS, 0, NOBODY),
        (EventKind.CHECKPOINT, end, 9_000 * MS, 19, NOBODY),
    ]
    roles[0] = replace(roles[0], records=np.concatenate([roles[0].records, records_of(0, extra)]))
    root = ET.fromstring(timeline_svg(build_timeline(roles, max_slices=MAX_SVG_SLICES), "x"))
    steps = boxes(root, "step")
    assert max(end for _, end in steps) - min(begin for begin, _ in steps) > 990 / 1.51
    width = float(root.get("width", ""))
    for kind in ("exchange", "checkpoint"):
        assert all(110 <= left < right <= width - 20 + 1e-6 for left, right in boxes(root, kind))
    assert any("checkpoint 9,000.000 ms" in said for said in texts(root, "title")), (
        "a cut bar says its whole length"
    )


def test_what_a_server_numbers_does_not_widen_a_panel() -> None:
    """A server's last answers bear the number 0, as those of the first step do."""
    roles = served_run(200)
    records = roles[2].records
    records["step"][np.flatnonzero(records["kind"] == EventKind.SEND)[-4:]] = 0
    timeline = build_timeline(roles, max_slices=MAX_SVG_SLICES, max_steps=MAX_SVG_STEPS)
    root = ET.fromstring(timeline_svg(timeline, "x"))
    first = boxes(root, "step")[:8]
    assert max(end for _, end in first) - min(begin for begin, _ in first) > 990 / 1.51


def every_kind() -> list[RoleEvents]:
    """A run whose picture has everything that a legend explains."""
    roles = served_run(6)
    more = [
        (kind, ZERO + 200 * MS + n * MS, MS, 5, 1)
        for n, kind in enumerate((EventKind.INPUT, EventKind.WAIT, EventKind.EVALUATE, EventKind.CHECKPOINT))
    ]
    roles[0] = replace(roles[0], records=np.concatenate([roles[0].records, records_of(0, more)]))
    barrier = barrier_run([2, 5], 6)[1]
    return [
        roles[0],
        replace(roles[1], records=np.concatenate([roles[1].records, barrier.records])),
        roles[2],
    ]


def test_the_whole_legend_is_inside_the_picture_and_nothing_lies_on_it() -> None:
    root = ET.fromstring(timeline_svg(build_timeline(every_kind(), max_slices=MAX_SVG_SLICES), "x"))
    named = [
        (one.text or "", float(one.get("x", "")), float(one.get("y", ""))) for one in root.iter(SVG + "text")
    ]
    first_panel = next(y for text, _, y in named if text.startswith("steps "))
    legend = [(text, x, y) for text, x, y in named if 30 < y < first_panel - 10]
    assert [text for text, _, _ in legend] == [
        "input", "compute", "exchange", "waiting", "evaluate", "checkpoint", "apply", "receive", "send",
        "in the step, none of these", "arrived, and ended a wait", "a message",
    ]  # fmt: skip
    for text, x, _ in legend:
        assert x + 6.6 * len(text) <= float(root.get("width", "")), text
    for (text, x, y), (_, next_x, next_y) in itertools.pairwise(legend):
        assert next_y > y or next_x - 12 >= x + 6.6 * len(text), "nothing lies on another"


@pytest.mark.parametrize("scheme", [0, 1])
def test_no_two_kinds_share_a_colour(scheme: int) -> None:
    svg = timeline_svg(build_timeline(every_kind(), max_slices=MAX_SVG_SLICES), "x")
    rules = dict(re.findall(r"\.(\w+) { fill: var\(--(\w+)\)", svg))
    colours = dict(re.findall(r"--(\w+): #(\w{6})", svg.split("prefers-color-scheme")[scheme]))
    kinds = (
        "input",
        "compute",
        "exchange",
        "waiting",
        "evaluate",
        "checkpoint",
        "apply",
        "receive",
        "send",
        "step",
    )
    seen = [np.array(list(bytes.fromhex(colours[rules[kind]])), int) for kind in kinds]
    nearest = min(int(abs(one - other).sum()) for one, other in itertools.combinations(seen, 2))
    assert nearest >= 60, "told apart at a glance"


def test_a_long_run_is_three_panels_and_a_sentence() -> None:
    timeline = build_timeline(barrier_run([2, 5], 500), max_slices=MAX_SVG_SLICES, max_steps=24)
    svg = timeline_svg(timeline, "x")
    said = texts(ET.fromstring(svg), "text")
    assert [text for text in said if re.fullmatch(r"steps \d+ to \d+ \(\w+\)", text)] == [
        "steps 0 to 7 (first)",
        "steps 8 to 15 (slowest)",
        "steps 492 to 499 (last)",
    ]
    assert any(text.startswith("476 of 500 steps are left out (steps 16 to 491)") for text in said)
    assert len(svg) < 200_000


def test_steps_can_be_chosen() -> None:
    roles = barrier_run([2, 5], 50)
    timeline = build_timeline(roles, max_slices=1000, steps=range(10, 13))
    assert {part.step for row in timeline.rows for part in row.slices} == {10, 11, 12}
    with pytest.raises(UserError, match="the run has steps 0 to 49"):
        build_timeline(roles, max_slices=1000, steps=range(60, 70))
    with pytest.raises(UserError, match="no step"):
        build_timeline([], max_slices=1000)


# ---- from files, and through the command ----


def write_run(path: Path, roles: Sequence[RoleEvents]) -> Path:
    config = {"task": "digits", "seed": 0, "batch_size": 8, "samples": 64, "parameters": {"w": "float32 2"}}
    with RunDirectory.create(path, {**config, "strategy": "mirrored", "workers": len(roles)}) as run:
        for events in roles:
            add_file(run.events_path, events)
    return path


def add_file(directory: Path, events: RoleEvents, dropped: int = 0) -> Path:
    writer = EventFileWriter.create(directory, name=events.name, role=events.role, max_bytes=10**7)
    writer.append(events.records)
    writer.close(dropped)
    return writer.path


def test_the_files_of_a_resumed_run_are_one_run(tmp_path: Path) -> None:
    roles = barrier_run([2, 5], 3)
    for part in range(2):
        for events in roles:
            path = add_file(tmp_path, events, dropped=part * 4)
            if part:  # as if the machine had been started anew: its monotonic clock began again
                data = bytearray(path.read_bytes())
                data[16:24] = (int.from_bytes(data[16:24], "little", signed=True) + 10**12).to_bytes(
                    8, "little"
                )
                path.write_bytes(data)
    run = read_run_events(tmp_path)
    assert [(events.name, len(events.records)) for events in run.roles] == [
        ("worker-0", 28),
        ("worker-1", 22),
    ]
    assert [events.resumes for events in run.roles] == [(14,), (11,)]
    assert run.notes == tuple(
        f"worker-{role}.2.bin lacks 4 events that were recorded but not kept" for role in (0, 1)
    )
    starts = [events.records["start_ns"].astype(np.int64) for events in run.roles]
    shifts = {int(start[count] - start[0]) for start, count in zip(starts, (14, 11), strict=True)}
    assert len(shifts) == 1, "all roles are moved alike"
    assert abs(shifts.pop() - 10**12) < 10**11


def test_a_folder_without_events_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no event files"):
        read_run_events(tmp_path)
    (tmp_path / "worker-0.bin").write_bytes(b"no events")
    with pytest.raises(DataError, match=r"worker-0\.bin"):
        read_run_events(tmp_path)


def test_the_command_writes_a_trace_and_a_picture(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", barrier_run([2, 5], 40))
    done = CliRunner().invoke(app, ["show", str(run), "--as", "trace"])
    assert done.exit_code == 0, done.output
    assert_flows_bound(json.loads((run / "timeline.json").read_text()))

    out = tmp_path / "picture.svg"
    done = CliRunner().invoke(app, ["show", str(run), "--out", str(out), "--steps", "4:8"])
    assert done.exit_code == 0, done.output
    assert "steps 4 to 7" in texts(ET.parse(out).getroot(), "text")

    done = CliRunner().invoke(app, ["show", str(run), "--out", str(out)])
    assert "16 of 40 steps are left out" in done.output
    for wrong in ("8:4", "x", "3"):
        with pytest.raises(UserError, match="--steps"):
            CliRunner().invoke(
                app, ["show", str(run), "--as", "trace", "--steps", wrong], catch_exceptions=False
            )


@pytest.mark.parametrize("part", ["compute", "input", "exchange", "waiting"])
def test_a_part_of_the_time_has_the_colour_that_it_has_on_the_page_of_a_run(part: str) -> None:
    page = "".join(sections(run_view()).values())
    drawn = re.search(rf'class="f(\d)"[^>]*><title>worker 0: {part}', page)
    assert drawn is not None
    svg = timeline_svg(build_timeline(every_kind(), max_slices=MAX_SVG_SLICES), "x")
    assert re.findall(rf"--{part}: (#\w+)", svg) == re.findall(rf"--c{drawn[1]}: (#\w+)", STYLE)
