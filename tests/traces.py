"""What every trace must be, whoever recorded it."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any


def assert_flows_bound(trace: dict[str, Any]) -> None:
    """Each flow begins and ends once, not backwards in time, inside a slice of its own track."""
    events = trace["traceEvents"]
    slices = defaultdict(list)
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid"} <= event.keys()
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert Counter(event["ph"] for event in events)["s"] == len(starts)
    assert Counter(event["ph"] for event in events)["f"] == len(ends)
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert end["bp"] == "e"
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        for event in (start, end):
            track = slices[event["pid"], event["tid"]]
            assert any(begin - 1e-6 <= event["ts"] <= stop + 1e-6 for begin, stop in track)
