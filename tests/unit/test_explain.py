"""Explanations of runs whose cause of slowness was put in: it is the one that is named, in the right numbers."""

import io
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from manyhands.cli.main import app
from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import UserError
from manyhands.observe.analyse.explain import Explanation, Parts, WorkerPath, explain, paragraph
from manyhands.observe.analyse.remarks import layers_sent
from manyhands.observe.draw.time_table import layers_table, workers_table
from manyhands.observe.record.event_files import EventFileWriter
from manyhands.observe.record.events import NOBODY, RECORD, EventKind
from manyhands.observe.record.recorded import RoleEvents

MS = 1_000_000
Row = tuple[EventKind, float, float, int, int]


def role_of(role: int, rows: Sequence[Row], resumes: tuple[int, ...] = ()) -> RoleEvents:
    """Records of (kind, start, duration, step, peer), in milliseconds."""
    records = np.zeros(len(rows), RECORD)
    for name, column in zip(
        ("kind", "start_ns", "duration_ns", "step", "peer"), zip(*rows, strict=True), strict=False
    ):
        records[name] = [round(one * MS) for one in column] if name.endswith("_ns") else column
    records["role"], records["id"] = role, np.arange(len(rows))
    return RoleEvents(role=role, name=f"worker-{role}", records=records, resumes=resumes)


def barrier_run(
    compute: Callable[[int, int], float],
    workers: int,
    steps: int,
    *,
    exchange_ms: float = 1.0,
    input_ms: Callable[[int, int], float] = lambda worker, step: 0.0,
) -> list[RoleEvents]:
    """A synchronous run: `compute(worker, step)` ms, the wait for the last, an exchange; all steps end together."""
    rows: list[list[Row]] = [[] for _ in range(workers)]
    now = 0.0
    for step in range(steps):
        own = [compute(worker, step) for worker in range(workers)]
        busy = [own[worker] + input_ms(worker, step) for worker in range(workers)]
        last = busy.index(max(busy))
        whole = max(busy) + exchange_ms
        for worker in range(workers):
            begin = now + busy[worker] - own[worker]
            if begin > now:
                rows[worker].append((EventKind.INPUT, now, begin - now, step, NOBODY))
            rows[worker].append((EventKind.COMPUTE, begin, own[worker], step, NOBODY))
            if worker != last:
                wait = max(busy) - busy[worker]
                rows[worker].append((EventKind.WAIT, now + busy[worker], wait, step, last))
            rows[worker].append((EventKind.EXCHANGE, now + max(busy), exchange_ms, step, NOBODY))
            rows[worker].append((EventKind.STEP, now, whole, step, NOBODY))
        now += whole
    return [role_of(worker, rows[worker]) for worker in range(workers)]


def parts_of(found: Explanation) -> tuple[float, ...]:
    parts = found.parts
    return tuple(
        round(part, 6) for part in (parts.compute_ms, parts.wait_ms, parts.exchange_ms, parts.other_ms)
    )


# ---- synchronous runs ----


def test_equal_steps_hide_nobody() -> None:
    """The trap: every step of every worker takes 31 ms, and one of them computes three times as long."""
    roles = barrier_run(lambda worker, step: 30.0 if worker == 2 else 10.0, 4, 40)
    times = {int(time) for events in roles for time in events.of(EventKind.STEP)["duration_ns"]}
    assert times == {31 * MS}

    found = explain(roles, synchronous=True)
    assert parts_of(found) == (10.0, 20.0, 1.0, 0.0)
    assert found.parts.step_ms == pytest.approx(31.0)
    assert found.ideal_ms == pytest.approx(10.0)
    assert found.speedup == pytest.approx(3.1)
    assert [path.last_share for path in found.workers] == [0.0, 0.0, 1.0, 0.0]
    (slow,) = found.slow
    assert (slow.worker, slow.since_step, slow.until_step, slow.from_the_start) == (2, 0, None, True)
    assert slow.ratio == pytest.approx(3.0)
    words = paragraph(found)
    assert "Worker 2 computes 3.0 times the median of the others from the start" in words
    assert "20.0 ms (65 %) waiting for stragglers" in words
    assert "Look at worker 2 first" in words
    assert "worker 0" not in words


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("since", [13, 100, 137, 180])
def test_the_step_at_which_a_worker_became_slow_is_found(workers: int, since: int) -> None:
    random = np.random.default_rng(since)
    noise = random.lognormal(0.0, 0.1, (workers, 200))

    def compute(worker: int, step: int) -> float:
        return float(10.0 * noise[worker, step] * (2.5 if worker == 1 and step >= since else 1.0))

    found = explain(barrier_run(compute, workers, 200), synchronous=True)
    (slow,) = found.slow
    assert slow.worker == 1
    assert abs(slow.since_step - since) <= 1
    assert slow.until_step is None
    assert slow.ratio == pytest.approx(2.5, rel=0.15)
    assert slow.step_before_ms == pytest.approx(11.0, rel=0.2)
    assert slow.step_since_ms == pytest.approx(26.0, rel=0.1)
    assert f"since step {slow.since_step}" in paragraph(found)


def test_a_delay_that_passed_is_reported_with_its_end() -> None:
    roles = barrier_run(lambda worker, step: 20.0 if worker == 0 and 60 <= step < 100 else 10.0, 3, 300)
    found = explain(roles, synchronous=True)
    (slow,) = found.slow
    assert (slow.worker, slow.since_step, slow.until_step) == (0, 60, 99)
    assert parts_of(found) == (10.0, 0.0, 1.0, 0.0), "the median step lies outside of it"
    assert "from step 60 to step 99" in paragraph(found)


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_named_where_all_are_alike(seed: int) -> None:
    noise = np.random.default_rng(seed).lognormal(0.0, 0.3, (4, 300))
    found = explain(
        barrier_run(lambda worker, step: float(10 * noise[worker, step]), 4, 300), synchronous=True
    )
    assert found.slow == ()
    words = paragraph(found)
    assert "No worker is slower than the others for long." in words
    assert "different workers are late at times" in words


def test_getting_the_samples_is_told_apart_from_computing() -> None:
    roles = barrier_run(lambda worker, step: 10.0, 3, 30, input_ms=lambda worker, step: 15.0 * (worker == 1))
    found = explain(roles, synchronous=True)
    assert parts_of(found) == (10.0, 0.0, 1.0, 0.0)
    assert found.parts.input_ms == pytest.approx(15.0)
    assert found.ideal_ms == pytest.approx(25.0), "the ideal is about speed and exchange, not about input"
    assert found.workers[1].last_share == 1.0
    assert found.slow == ()
    assert "Getting the samples is the largest loss" in paragraph(found)


def test_time_in_a_step_and_in_none_of_its_parts_is_other() -> None:
    rows: list[Row] = []
    for step in range(10):
        rows.append((EventKind.COMPUTE, 10.0 * step + 3, 7.0, step, NOBODY))
        rows.append((EventKind.STEP, 10.0 * step, 10.0, step, NOBODY))
    found = explain([role_of(0, rows)], synchronous=True)
    assert parts_of(found) == (7.0, 0.0, 0.0, 3.0)


def test_what_the_busiest_server_applies_is_taken_off_exchange_and_wait() -> None:
    """Push at 10, answer at 20 of every 20 ms; one server applies from 13 to 17, the other from 12 to 13."""
    rows: list[Row] = []
    for step in range(10):
        begin = 20.0 * step
        rows.append((EventKind.COMPUTE, begin, 10.0, step, NOBODY))
        rows.append((EventKind.STEP, begin, 10.0, step, NOBODY))
        kind = EventKind.EXCHANGE if step % 2 else EventKind.WAIT
        rows.append((kind, begin + 10, 10.0, step, NOBODY if step % 2 else 1))
    servers = [
        role_of(role, [(EventKind.APPLY, 20.0 * step + begin, end - begin, step, 0) for step in range(10)])
        for role, (begin, end) in ((1, (13, 17)), (2, (12, 13)))
    ]
    found = explain([role_of(0, rows), *servers], synchronous=False)
    assert found.parts.apply_ms == pytest.approx(4.0)
    assert found.parts.exchange_ms + found.parts.wait_ms == pytest.approx(6.0)
    assert [path.worker for path in found.workers] == [0], "servers have no steps to explain"


def test_exchange_is_named_where_it_is_the_loss() -> None:
    found = explain(barrier_run(lambda worker, step: 10.0, 2, 30, exchange_ms=30.0), synchronous=True)
    assert parts_of(found) == (10.0, 0.0, 30.0, 0.0)
    assert found.speedup == pytest.approx(4.0)
    assert "Exchange is the largest loss" in paragraph(found)


def test_the_median_step_is_not_moved_by_a_few_long_ones_and_its_parts_add_up() -> None:
    roles = barrier_run(lambda worker, step: 500.0 if step % 10 == 0 else 10.0 + step / 100, 2, 100)
    found = explain(roles, synchronous=True)
    wholes = sorted(500.0 if step % 10 == 0 else 10.0 + step / 100 for step in range(100))
    assert found.parts.step_ms - 1.0 == pytest.approx(np.median(wholes), abs=0.01)
    assert found.steps == 100


def test_evaluation_and_checkpoints_are_beside_the_step() -> None:
    roles = barrier_run(lambda worker, step: 10.0, 2, 20)
    end = 20 * 11.0
    extra = [(EventKind.EVALUATE, end, 40.0, 19, NOBODY), (EventKind.CHECKPOINT, end + 40, 100.0, 19, NOBODY)]
    roles[0] = RoleEvents(
        role=0, name="worker-0", records=np.concatenate([roles[0].records, role_of(0, extra).records])
    )
    found = explain(roles, synchronous=True)
    assert (found.evaluate_ms, found.checkpoint_ms) == pytest.approx((2.0, 5.0))
    assert parts_of(found) == (10.0, 0.0, 1.0, 0.0)
    assert "Evaluate and save less often." in paragraph(found)


def test_one_worker_has_nobody_to_wait_for() -> None:
    found = explain(barrier_run(lambda worker, step: 10.0, 1, 12, exchange_ms=0.0), synchronous=True)
    assert parts_of(found) == (10.0, 0.0, 0.0, 0.0)
    assert (found.slow, found.workers[0].last_share, found.speedup) == ((), 0.0, 1.0)
    assert paragraph(found) == (
        "The median step takes 10.0 ms: 10.0 ms (100 %) compute. "
        "Nearly all of it is compute: only faster computing or more workers will help."
    )


def test_steps_done_again_after_a_resume_are_steps_of_their_own() -> None:
    once = barrier_run(lambda worker, step: 10.0, 2, 10)
    again = [
        RoleEvents(
            role=events.role,
            name=events.name,
            records=np.concatenate([events.records, events.records]),
            resumes=(len(events.records),),
        )
        for events in once
    ]
    for events in again:
        events.records["start_ns"][events.resumes[0] :] += np.uint64(1000 * MS)
    found = explain(again, synchronous=True)
    assert found.steps == 20
    assert parts_of(found) == (10.0, 0.0, 1.0, 0.0)


def test_nothing_to_explain_is_said() -> None:
    with pytest.raises(UserError, match="no step"):
        explain([role_of(0, [(EventKind.JOIN, 0, 1, -1, NOBODY)])], synchronous=True)


# ---- runs without a barrier ----


def own_pace(worker: int, cycle: Sequence[tuple[EventKind, float]], steps: int) -> RoleEvents:
    """One worker by itself, whose pull comes before the step, as with a parameter server."""
    rows: list[Row] = []
    now = 0.0
    for step in range(steps):
        begin = 0.0
        for kind, duration in cycle:
            if kind is EventKind.COMPUTE:
                begin = now
            rows.append((kind, now, duration, step * 3 + worker, 1 if kind is EventKind.WAIT else NOBODY))
            now += duration
        rows.append((EventKind.STEP, begin, now - begin, step * 3 + worker, NOBODY))
    return role_of(worker, rows)


def test_without_a_barrier_every_worker_has_its_own_path() -> None:
    pull, wait, work = EventKind.EXCHANGE, EventKind.WAIT, EventKind.COMPUTE
    found = explain(
        [
            own_pace(0, [(pull, 2.0), (work, 10.0)], 100),
            own_pace(1, [(pull, 2.0), (work, 40.0)], 29),
            own_pace(2, [(wait, 5.0), (work, 10.0)], 80),
        ],
        synchronous=False,
    )
    steps = [path.parts.step_ms for path in found.workers]
    assert steps == pytest.approx([12.0, 42.0, 15.0])
    assert found.workers[2].parts.wait_ms == pytest.approx(5.0)
    assert all(path.last_share == 0 for path in found.workers)
    assert parts_of(found) == (20.0, round(5 / 3, 6), round(4 / 3, 6), 0.0)
    assert found.ideal_ms == pytest.approx(10.0)
    assert found.speedup == pytest.approx((3 / 10) / (1 / 12 + 1 / 42 + 1 / 15))
    (slow,) = found.slow
    assert (slow.worker, slow.from_the_start, slow.until_step) == (1, True, None)
    assert slow.ratio == pytest.approx(4.0)
    assert slow.step_before_ms is None
    assert "Every worker runs at its own pace" in paragraph(found)


def test_the_waiting_of_a_schedule_is_told_from_that_for_a_straggler() -> None:
    found = explain(barrier_run(lambda worker, step: 10.0, 4, 40), synchronous=True)
    words = paragraph(found, "pipeline stages=4 microbatches=8")
    assert "with 4 equal stages and 8 micro-batches, 1f1b leaves each stage idle for 27 % of a step." in words
    for other in ("pipeline stages=1", "mirrored", "of another release"):
        assert "idle" not in paragraph(found, other)


# ---- in a terminal ----


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_at_eighty_columns_no_heading_and_no_number_is_cut(synchronous: bool, scale: float) -> None:
    fields = ("compute_ms", "exchange_ms", "wait_ms", "apply_ms", "input_ms", "other_ms")
    long = Parts(
        **dict(zip(fields, (scale * n for n in (1024.1, 211.15, 925.65, 111.3, 10.15, 10.06)), strict=True))
    )
    short = Parts(**dict.fromkeys(fields, 0.0))
    beside = {"evaluate_ms": 0.0, "checkpoint_ms": 0.0, "steps": 100_000}
    workers = tuple(
        WorkerPath(worker=10 + n, name=f"worker {10 + n}", parts=part, last_share=1.0 - n, **beside)
        for n, part in enumerate((long, short))
    )
    found = Explanation(
        synchronous=synchronous, parts=long, ideal_ms=1.0, speedup=2.0, workers=workers, slow=(), **beside
    )
    said = printed(found, 80)
    headings = [
        "worker",
        "steps",
        "step, ms",
        "compute",
        "exchange",
        "waiting",
        "applying",
        "input",
        "other",
        "last",
    ]
    for heading in headings[: 10 if synchronous else 9]:
        assert re.search(rf"\b{heading}\b", said), heading
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= 80
    lines = [line for line in said.splitlines() if line.strip().startswith("10 ")]
    assert len(lines) == 1, "one line for each worker"
    assert len(lines[0].split()) == (11 if synchronous else 9)
    assert ("came" in said) is synchronous


def test_what_no_worker_spent_time_on_has_no_column() -> None:
    found = explain(barrier_run(lambda worker, step: 10.0, 2, 20), synchronous=True)
    said = printed(found, 80)
    assert "compute" in said
    assert "applying" not in said
    assert "input" not in said


def printed(found: Explanation, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(workers_table(found, console))
    return console.file.getvalue()  # type: ignore[attr-defined]


# ---- through the command ----


@pytest.mark.parametrize(
    ("strategy", "synchronous"),
    [("mirrored", True), ("ps", True), ("ps consistency=bounded:2", False), ("hogwild", False)],
)
def test_the_command_names_the_slow_worker(tmp_path: Path, strategy: str, synchronous: bool) -> None:
    config = {"task": "digits", "seed": 0, "batch_size": 8, "samples": 64, "parameters": {"w": "float32 2"}}
    with RunDirectory.create(tmp_path / "run", {**config, "strategy": strategy, "workers": 3}) as run:
        for events in barrier_run(lambda worker, step: 30.0 if worker == 1 and step >= 20 else 10.0, 3, 60):
            writer = EventFileWriter.create(
                run.events_path, name=events.name, role=events.role, max_bytes=10**6
            )
            writer.append(events.records)
            writer.close(0)
    out = tmp_path / "found.json"
    kernels = [{"cat": "kernel", "name": "gemm", "ts": at, "dur": 10} for at in (0, 40)]
    (tmp_path / "worker-2.json").write_text(json.dumps({"traceEvents": kernels}))
    words = ["explain", str(tmp_path / "run"), "--json", str(out)]
    done = CliRunner().invoke(app, [*words, "--traces", str(tmp_path)])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "Worker 1 computes 3.0 times the median of the others since step 20" in said
    found = json.loads(out.read_text())
    assert found["synchronous"] is synchronous
    assert found["slow"][0]["since_step"] == 20
    assert math.isclose(found["parts"]["step_ms"], 31.0)
    assert found["paragraph"] in said
    assert "The GPU of worker 2 waits 60.0% of 0.1 ms in the trace: launches 60.0%; the host" in said
    assert math.isclose(found["gpus"]["2"]["waits"]["launches"], 0.6)
    (tmp_path / "worker-2.json").write_text(json.dumps({"traceEvents": []}))
    assert "no GPU computes" in str(CliRunner().invoke(app, [*words, "--traces", str(tmp_path)]).exception)


@pytest.mark.parametrize("usual_ms", [5.0, 50.0, 300.0])
def test_a_worker_that_slowed_five_seconds_ago_is_named(usual_ms: float) -> None:
    """However long the run was before: 60 s, and five more with one of four three times as slow."""
    since = round(60_000 / usual_ms)
    steps = since + int(5000 / (3 * usual_ms + 1))
    roles = barrier_run(lambda worker, step: usual_ms * (3 if worker == 2 and step >= since else 1), 4, steps)
    (slow,) = explain(roles, synchronous=True).slow
    assert (slow.worker, slow.since_step, slow.until_step) == (2, since, None)


def test_layers_of_a_summary_that_make_no_sense_are_left_out() -> None:
    good = {"layer": "head", "how": "row", "forward_bytes": 4.0, "backward_bytes": 0, "messages": 2}
    bad = [{**good, "messages": value} for value in (None, "2", float("nan"), True)]
    (found,) = layers_sent({"layers": [3, None, [], {}, *bad, good]})
    assert found == {
        "layer": "head",
        "how": "row",
        "forward_bytes": 4.0,
        "backward_bytes": 0.0,
        "messages": 2.0,
    }
    assert layers_sent({}) == layers_sent({"layers": 7}) == []
    out = Console(file=io.StringIO(), width=80)
    out.print(layers_table([found, *layers_sent({"layers": [{**good, "layer": "[red]\x1b"}]})]))
    assert "head" in out.file.getvalue()
    assert "[red]" in out.file.getvalue(), "names are no markup"
