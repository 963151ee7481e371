"""The text of a scrape against the grammar of the text format 0.0.4, written down here from its specification.

Lines end in a line feed. A line that begins with `#` is a comment, HELP (name, text with \\\\ and \\n escaped) or TYPE
(name, kind): one of each for a name, before its samples. A sample is a name, labels in braces or none (values in
double quotes with \\\\, \\" and \\n escaped), a number as Go's ParseFloat takes it and, perhaps, a timestamp. All
samples of a name stand together, and no two have the same labels.
"""

import math
import re
from dataclasses import dataclass, field, replace

import pytest

from manyhands.observe.analyse.run_view import Gather
from manyhands.observe.analyse.view import (
    Phase,
    Presence,
    RunView,
    ServerView,
    Shares,
    Staleness,
    TrafficView,
    WorkerView,
)  # fmt: skip
from manyhands.observe.draw.prometheus import metrics_text

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r"([a-zA-Z_][a-zA-Z0-9_]*)=\"((?:[^\\\"\n]|\\\\|\\\"|\\n)*)\""
NUMBER = r"[+-]?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+|Inf)|NaN"
HELP = re.compile(rf"# HELP ({NAME}) ((?:[^\\\n]|\\\\|\\n)*)")
TYPE = re.compile(rf"# TYPE ({NAME}) (counter|gauge|histogram|summary|untyped)")
SAMPLE = re.compile(rf"({NAME})(?:\{{((?:{LABEL},?)*)\}})? ({NUMBER})( \d+)?")


@dataclass
class Family:
    kind: str = ""
    help: str | None = None
    samples: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)


def unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], text)


def parse(text: str) -> dict[str, Family]:
    """Strictly: whatever the specification does not have fails."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    closed: set[str] = set()
    current = ""
    for line in text.removesuffix("\n").split("\n"):
        match = HELP.fullmatch(line) or TYPE.fullmatch(line) or SAMPLE.fullmatch(line)
        assert match, f"no line of the format: {line!r}"
        name = match[1]
        if name != current:
            closed.add(current)
            assert name not in closed, f"the lines of {name} do not stand together"
            current = name
        family = families.setdefault(name, Family())
        if line.startswith("# HELP"):
            assert family.help is None
            family.help = unescape(match[2])
        elif line.startswith("# TYPE"):
            assert not family.kind
            assert not family.samples
            family.kind = match[2]
        else:
            labels = tuple((key, unescape(value)) for key, value in re.findall(LABEL, match[2] or ""))
            assert labels not in family.samples
            assert len({key for key, _ in labels}) == len(labels)
            family.samples[labels] = float(match[5])
    return families


def worker(role: int) -> WorkerView:
    shares = Shares(compute=0.5, input=0.125, exchange=0.125, wait=0.25)
    return WorkerView(
        role=role, name=f"worker {role}", presence=Presence.PRESENT if role == 0 else Presence.STARTING,
        steps=10 + role, samples=640, steps_per_s=2.5, compute_ms=12.5, shares=shares, recent=shares, waits_for="",
        bytes_sent=10**17, messages_sent=7,
    )  # fmt: skip


def full_view() -> RunView:
    server = ServerView(
        role=2, name="server 0", presence=Presence.PRESENT, primary_of=(0, 1), backup_of=(), num_bytes=4096, updates=99,
        updates_per_s=9.5, apply_ms=0.5, share=1.0,
    )  # fmt: skip
    return replace(
        Gather(task="digits", strategy="ps consistency=async", steps_asked=100).view(0),
        phase=Phase.RUNNING,
        step=11,
        loss=0.25,
        final={"accuracy": 0.5, 'odd "name" \\ of\na metric': float("inf")},
        workers=(worker(0), worker(1)),
        servers=(server,),
        staleness=Staleness(histogram={0: 1, 4: 1}, mean=2.0, max=4),
        traffic=(TrafficView(wire="tcp", codec="raw", num_bytes=5, messages=2),),
    )


def test_every_line_is_of_the_format_and_counters_say_so() -> None:
    families = parse(metrics_text(full_view()))
    assert len(families) > 25
    for name, family in families.items():
        assert name.startswith("manyhands_")
        assert family.help
        assert (family.kind == "counter") == name.endswith("_total")
        assert family.samples


def test_values_are_those_of_the_view() -> None:
    found = {name: family.samples for name, family in parse(metrics_text(full_view())).items()}
    assert found["manyhands_steps_total"] == {(): 11}
    assert found["manyhands_loss"] == {(): 0.25}
    assert found["manyhands_run_info"] == {(("task", "digits"), ("strategy", "ps consistency=async")): 1}
    assert found["manyhands_phase"][(("phase", "running"),)] == 1
    assert sum(found["manyhands_phase"].values()) == 1
    assert found["manyhands_worker_up"] == {(("worker", "0"),): 1, (("worker", "1"),): 0}
    assert found["manyhands_worker_compute_seconds"][(("worker", "1"),)] == 0.0125
    assert found["manyhands_worker_time_ratio"][(("worker", "0"), ("part", "wait"))] == 0.25
    assert found["manyhands_worker_sent_bytes_total"][(("worker", "0"),)] == 10**17
    assert found["manyhands_server_shards"] == {(("server", "0"),): 2}
    assert found["manyhands_wire_bytes_total"] == {(("wire", "tcp"), ("codec", "raw")): 5}
    assert found["manyhands_staleness_max"] == {(): 4}


def test_labels_with_quotes_backslashes_and_line_feeds_come_back_whole() -> None:
    metrics = parse(metrics_text(full_view()))["manyhands_metric"].samples
    assert metrics == {(("metric", "accuracy"),): 0.5, (("metric", 'odd "name" \\ of\na metric'),): math.inf}


@pytest.mark.parametrize("loss", [float("nan"), float("-inf"), 1e-9, 1e300, -0.0])
def test_numbers_of_all_kinds_are_read_back(loss: float) -> None:
    (found,) = parse(metrics_text(replace(full_view(), loss=loss)))["manyhands_loss"].samples.values()
    assert found == loss or (math.isnan(found) and math.isnan(loss))


def test_a_run_that_has_not_begun_has_text_too() -> None:
    families = parse(metrics_text(Gather().view(0)))
    assert families["manyhands_steps_total"].samples == {(): 0}
    assert "manyhands_loss" not in families
    assert "manyhands_server_up" not in families
