"""A run as a view, from events, rows and members that were made up: every number can be worked out by hand."""

from collections.abc import Sequence

import numpy as np
import pytest

from manyhands.observe.analyse.curves import spread
from manyhands.observe.analyse.run_view import Gather
from manyhands.observe.analyse.view import Phase, Presence, RunView, Shares
from manyhands.observe.draw.page import sections
from manyhands.observe.record.events import NOBODY, RECORD, EventKind, Records, Wire

MS = 1_000_000
S = 1_000_000_000
BEGIN = 100 * S


def event(kind: EventKind, role: int, at_s: float, took_s: float, **fields: float) -> Records:
    record = np.zeros(1, RECORD)
    record["kind"], record["role"], record["peer"], record["step"] = kind, role, NOBODY, -1
    record["start_ns"], record["duration_ns"] = BEGIN + round(at_s * S), round(took_s * S)
    for name, value in fields.items():
        record[name] = value
    return record


def joined(records: Sequence[Records]) -> Records:
    """In the order in which they ended, numbered by role as a ring does."""
    whole = np.concatenate(records)
    whole = whole[np.argsort(whole["start_ns"] + whole["duration_ns"], kind="stable")]
    for role in np.unique(whole["role"]):
        chosen = whole["role"] == role
        whole["id"][chosen] = np.arange(chosen.sum())
    return whole


def training(seconds: float, compute_ms: Sequence[float], *, slow_since_s: float = 1e9) -> list[Records]:
    """Workers that all wait for the last; worker 1 computes three times as long from `slow_since_s` on."""
    records, now, step = [], 0.0, 0
    while now < seconds:
        own = [
            ms / 1000 * (3 if rank == 1 and now >= slow_since_s else 1) for rank, ms in enumerate(compute_ms)
        ]
        last = own.index(max(own))
        for rank, took in enumerate(own):
            records += [
                event(EventKind.INPUT, rank, now, 0.001, step=step),
                event(EventKind.COMPUTE, rank, now + 0.001, took, step=step),
                event(EventKind.WAIT, rank, now + 0.001 + took, max(own) - took, step=step, peer=last),
                event(
                    EventKind.EXCHANGE,
                    rank,
                    now + 0.001 + max(own),
                    0.001,
                    step=step,
                    num_bytes=100,
                    count=2,
                    wire=Wire.MEMORY,
                ),
                event(EventKind.STEP, rank, now, max(own) + 0.002, step=step, count=8, value=1 / (step + 1)),
            ]
        now += max(own) + 0.002
        step += 1
    return records


def gathered(records: Records, workers: int, **about: object) -> Gather:
    values = {"task": "digits", "strategy": "mirrored", "steps_asked": 2000, "workers": workers} | about
    gather = Gather(**values)  # type: ignore[arg-type]
    for role in range(workers):
        gather.meet(role, f"worker-{role}")
    gather.add_events(records)
    return gather


def at(gather: Gather, seconds: float, **how: bool) -> RunView:
    return gather.view(BEGIN + round(seconds * S), **how)


def test_a_run_that_evaluates_says_so_and_no_time_that_is_left() -> None:
    begun = [event(EventKind.EVALUATE, rank, 10.01, 0.0, step=454) for rank in range(2)]
    view = at(gathered(joined([*training(10, [20, 5]), *begun]), 2), 12)
    assert (view.phase, view.evaluating, view.seconds_left) == (Phase.RUNNING, True, None)
    assert view.steps_per_s == pytest.approx(1 / 0.022, rel=0.02)
    assert "<dt>state</dt><dd>evaluating</dd>" in sections(view)["now"]


def test_a_running_run_is_shown_with_the_numbers_worked_out_by_hand() -> None:
    view = at(gathered(joined(training(10, [20, 5])), 2), 10)
    assert (view.task, view.strategy, view.phase) == ("digits", "mirrored", Phase.RUNNING)
    assert view.step == 455  # of 22 ms each, the last ends after 10 s
    assert view.steps_per_s == pytest.approx(1 / 0.022, rel=0.02)
    assert view.samples_per_s == pytest.approx(16 / 0.022, rel=0.02)
    assert view.seconds_left == pytest.approx((2000 - 455) * 0.022, rel=0.02)
    assert view.loss == pytest.approx(1 / 455)
    first, second = view.workers
    assert (first.name, first.steps, first.samples) == ("worker 0", 455, 455 * 8)
    assert first.presence is Presence.PRESENT
    assert first.compute_ms == pytest.approx(20)
    assert first.steps_per_s == pytest.approx(1 / 0.022, rel=0.05)
    expected = Shares(compute=5 / 22, input=1 / 22, exchange=1 / 22, wait=15 / 22)
    for shares in (second.shares, second.recent):
        assert (shares.compute, shares.input, shares.exchange, shares.wait) == pytest.approx(
            (expected.compute, expected.input, expected.exchange, expected.wait), rel=0.02
        )
    assert (first.waits_for, second.waits_for) == ("", "worker 0")
    assert view.waits[1][0] == pytest.approx(455 * 0.015)
    assert view.waits[0] == (0.0, 0.0)
    (traffic,) = view.traffic
    assert (traffic.wire, traffic.codec, traffic.num_bytes, traffic.messages) == (
        "memory",
        "raw",
        91000,
        1820,
    )


def test_a_worker_that_slows_in_mid_run_is_in_the_warnings_within_five_seconds() -> None:
    records = joined(training(18, [20, 20, 20], slow_since_s=12))
    ended = records["start_ns"] + records["duration_ns"]
    before = gathered(records[ended <= BEGIN + 12 * S], 3)
    assert at(before, 12).warnings == ()
    for at_s in (12.5, 13, 13.5, 14):  # and nothing else is said of it before
        for sentence in at(gathered(records[ended <= BEGIN + at_s * S], 3), at_s).warnings:
            assert sentence.startswith("worker 1 is")
    (sentence,) = at(gathered(records[ended <= BEGIN + 17 * S], 3), 17).warnings
    step = int(
        records["step"][(records["kind"] == EventKind.COMPUTE) & (records["duration_ns"] > 50 * MS)].min()
    )
    assert sentence == (
        f"worker 1 is 3.0 times slower than the median of the others since step {step}: the others wait 65 % of their "
        "time; a bound on staleness would not help with a permanent straggler; ps consistency=async would"
    )


def test_portions_do_not_matter() -> None:
    records = joined(training(6, [20, 5, 7]))
    parts = gathered(records[:0], 3)
    for part in np.array_split(records, 31):
        parts.add_events(part)
    assert at(gathered(records, 3), 6) == at(parts, 6)


def test_nothing_yet_is_a_view_too() -> None:
    view = Gather().view(0)
    assert (view.phase, view.step, view.workers[0].steps, view.warnings) == (Phase.STARTING, 0, 0, ())
    assert [curve.name for curve in view.curves] == ["loss", "samples_per_s"]


def test_curves_are_bounded_in_order_and_keep_the_newest_point() -> None:
    gather = gathered(joined(training(3, [5])), 1)
    rows = [{"step": step + 1, "loss": 1 / (step + 1), "at_s": step / 100} for step in range(5000)]
    gather.add_rows(rows)
    gather.add_rows([{"step": 5000, "metrics": {"accuracy": 0.9, "odd": None}, "at_s": 50.0}])
    view = at(gather, 3)
    loss, speed, accuracy = view.curves
    assert (loss.name, speed.name, accuracy.name) == ("loss", "samples_per_s", "accuracy")
    for curve in view.curves:
        assert len(curve.steps) == len(curve.seconds) == len(curve.values) <= 401
        assert list(curve.steps) == sorted(curve.steps)
        assert list(curve.seconds) == sorted(curve.seconds)
    assert (loss.steps[0], loss.steps[-1], loss.values[-1]) == (1, 5000, 1 / 5000)
    spacing = np.diff(loss.steps)[:-1]
    assert spacing.min() == spacing.max(), "thinned evenly"
    assert np.mean(speed.values) == pytest.approx(8 / 0.007, rel=0.02)
    assert view.final == {"accuracy": 0.9}
    assert view.step == 5000


def test_speed_of_a_long_run_is_kept_in_bins_that_grow() -> None:
    gather = gathered(np.zeros(0, RECORD), 1)
    for minute in range(30):
        steps = [
            event(EventKind.STEP, 0, minute * 60 + at_s, 1.0, step=minute * 60 + at_s, count=4)
            for at_s in range(60)
        ]
        gather.add_events(joined(steps))
    speed = at(gather, 1800).curves[1]
    assert 150 <= len(speed.values) <= 400
    assert speed.values[10:] == pytest.approx([4.0] * len(speed.values[10:]))


@pytest.mark.parametrize("step_s", [0.007, 0.2, 0.8, 60.0])
def test_speed_is_steady_where_steps_are_of_any_length(step_s: float) -> None:
    steps = [
        event(EventKind.STEP, role, step_s * k, step_s, step=k, count=3) for k in range(30) for role in (0, 1)
    ]
    gather = gathered(joined(steps), 2)
    speed = at(gather, 30 * step_s).curves[1]
    assert speed.values == pytest.approx([6 / step_s] * len(speed.values), rel=1e-3)
    assert speed.seconds[-1] == pytest.approx(30 * step_s, abs=max(0.25, step_s / 4))


def test_speed_is_shown_as_far_as_every_worker_has_reported() -> None:
    """Worker 1 is in the middle of a step: what it does there is not known, and no dip."""
    steps = [event(EventKind.STEP, 0, 1.0 * k, 1.0, step=k, count=4) for k in range(10)]
    steps += [event(EventKind.STEP, 1, 4.0 * k, 4.0, step=k, count=8) for k in range(2)]
    speed = at(gathered(joined(steps), 2), 10).curves[1]
    assert speed.values == pytest.approx([6.0] * len(speed.values))
    assert speed.seconds[-1] == pytest.approx(8.0)


def test_samples_are_spread_over_the_time_they_took_and_none_is_lost() -> None:
    random = np.random.default_rng(1)
    starts = random.integers(0, 10**10, 200)
    ends, counts = starts + random.integers(1, 10**10, 200), random.integers(0, 1000, 200)
    fine, coarse = (spread(starts, ends, counts, bin_ns) for bin_ns in (10**6, 2 * 10**6))
    assert fine[1].sum() == counts.sum() * 10**6
    added = np.bincount(fine[0] // 2, fine[1].astype(float), coarse[0].max() + 1)
    np.testing.assert_array_equal(added, np.bincount(coarse[0], coarse[1].astype(float)))
    places, parts = spread(np.array([5]), np.array([25]), np.array([4]), 10)
    assert (places.tolist(), parts.tolist()) == ([0, 1, 2], [1_000_000, 2_000_000, 1_000_000])


def test_a_resumed_history_goes_on_where_it_was() -> None:
    gather = Gather()
    gather.add_rows({"step": step, "loss": 1.0, "at_s": float(step)} for step in range(1, 6))
    gather.add_rows({"step": step, "loss": 1.0, "at_s": float(step - 5)} for step in range(6, 9))
    assert gather.view(0).curves[0].seconds == (1, 2, 3, 4, 5, 6, 7, 8)
    gather.forget_rows()
    assert gather.view(0).curves[0].seconds == ()


def test_who_was_last_seen_doing_what_when_nothing_happens() -> None:
    gather = gathered(
        joined([*training(2, [20, 20]), event(EventKind.WAIT, 0, 2.1, 0.1, step=90, peer=1)]), 2
    )
    assert at(gather, 11).phase is Phase.RUNNING
    view = at(gather, 13.2)
    assert view.phase is Phase.QUIET
    (sentence,) = view.warnings
    assert sentence == (
        "nothing has happened for 11 s, and the run has not ended: "
        "worker 1 was last seen at the end of step 90, 11 s ago; worker 0 was last seen waiting in step 90, 11 s ago"
    )


def test_steps_that_take_long_are_not_quiet() -> None:
    gather = gathered(joined([event(EventKind.STEP, 0, 60.0 * k, 60, step=k, count=1) for k in range(3)]), 1)
    assert at(gather, 200).phase is Phase.RUNNING


def test_a_run_that_nobody_holds_was_stopped() -> None:
    view = at(gathered(joined(training(2, [20])), 1), 2.5, held=False)
    assert view.phase is Phase.QUIET
    assert "it was stopped; --resume continues it" in view.warnings[0]


def test_the_end_shows_who_was_slow_and_no_silence() -> None:
    gather = gathered(joined(training(10, [20, 60])), 2)
    gather.summary = {"samples_per_s": 123.0}
    view = at(gather, 5000)
    assert (view.phase, view.samples_per_s, view.seconds_left) == (Phase.ENDED, 123.0, None)
    assert view.seconds == pytest.approx(10, abs=0.1)
    (sentence,) = view.warnings
    assert sentence.startswith("worker 1 is 3.0 times slower than the median of the others from the start")
    assert view.workers[1].recent.compute > 0.9


def test_the_end_has_the_rates_of_the_whole_run_however_long_the_last_save_took() -> None:
    records = [*training(10, [20, 60]), event(EventKind.CHECKPOINT, 0, 10.1, 30.0, step=161)]
    gather = gathered(joined(records), 2)
    gather.summary = {}
    first, second = at(gather, 40.1).workers
    assert (first.waits_for, second.waits_for) == ("worker 1", "")
    for worker, compute_ms in ((first, 20), (second, 60)):
        assert worker.steps_per_s == pytest.approx(1 / 0.062, rel=0.01)
        assert worker.compute_ms == pytest.approx(compute_ms)
        assert worker.recent == worker.shares


def test_the_end_has_the_rates_of_servers_over_the_whole_run() -> None:
    gather = server_run()
    gather.add_events(event(EventKind.CHECKPOINT, 2, 6.1, 30.0))
    gather.summary = {}
    first, second = at(gather, 36.1).servers
    assert first.updates_per_s == second.updates_per_s == pytest.approx(300 / 6, rel=0.01)
    assert (first.apply_ms, second.apply_ms) == pytest.approx((18, 1))
    assert first.share == pytest.approx(18 / 19)


def test_lost_events_are_counted_from_the_gaps() -> None:
    records = joined(training(1, [20]))
    records["id"][50:] += 7
    gather = gathered(records, 1)
    again = joined(training(1, [20]))  # resumed: numbered from 0
    again["start_ns"] += np.uint64(5 * S)
    gather.add_events(again)
    assert at(gather, 6).warnings == (
        "worker 0 recorded faster than it was read: 7 events are missing from all figures",
    )


# --- servers and members


def server_run() -> Gather:
    records = training(6, [20, 20])
    for k in range(300):
        for server, took in ((2, 0.018), (3, 0.001)):
            records.append(
                event(
                    EventKind.APPLY, server, 0.02 * k, took, step=k, peer=k % 2, count=server - 2, value=k % 3
                )
            )
            records.append(
                event(
                    EventKind.SEND,
                    server,
                    0.02 * k,
                    0,
                    step=k,
                    peer=k % 2,
                    count=1,
                    num_bytes=50,
                    wire=Wire.TCP,
                )
            )
    gather = gathered(np.zeros(0, RECORD), 2, strategy="ps servers=2 consistency=async")
    gather.meet(2, "server-0")
    gather.meet(3, "server-1")
    gather.add_events(joined(records))
    return gather


def members(gather: Gather) -> None:
    gather.add_members(
        [
            {"event": "layout", "shards": [{"shard": 0, "bytes": 1000}, {"shard": 1, "bytes": 24}]},
            {"event": "started", "at_s": 0.0, "member": 5, "name": "server 1"},
            {"event": "joined", "at_s": 0.0, "member": 5},
            {
                "event": "view",
                "at_s": 0.1,
                "epoch": 3,
                "shards": [
                    {"shard": 0, "epoch": 1, "primary": 4, "backup": 5},
                    {"shard": 1, "epoch": 1, "primary": 5, "backup": None},
                ],
                "slots": [{"slot": 0, "member": 0}],
                "names": {"0": "worker 0", "4": "server 0", "5": "server 1"},
            },
            {"event": "died", "at_s": 2.0, "member": 5, "sentence": "server 1 was killed by SIGKILL"},
        ]
    )


def test_servers_show_what_they_apply_and_who_does_most_of_it() -> None:
    view = at(server_run(), 6)
    first, second = view.servers
    assert (first.name, first.role, first.updates) == ("server 0", 2, 300)
    assert first.presence is Presence.PRESENT
    assert first.updates_per_s == pytest.approx(50, rel=0.05)
    assert first.apply_ms == pytest.approx(18)
    assert first.share == pytest.approx(18 / 19, rel=0.01)
    assert second.share == pytest.approx(1 / 19, rel=0.01)
    assert view.staleness.histogram == {0: 200, 1: 200, 2: 200}
    assert (view.staleness.mean, view.staleness.max) == (1.0, 2)
    assert view.warnings == (
        "server 0 does 95 % of the applying instead of 50 %: the parameters are spread unevenly over the servers; "
        "use more servers (servers=)",
    )
    assert {one.wire: (one.num_bytes, one.messages) for one in view.traffic}["tcp"] == (600 * 50, 600)
    assert len(view.workers) == 2, "servers are no workers"


def test_members_say_who_keeps_what_and_what_happened() -> None:
    gather = server_run()
    members(gather)
    view = at(gather, 6)
    first, second = view.servers
    assert (first.primary_of, first.backup_of, first.num_bytes) == ((0,), (), 1000)
    assert (second.primary_of, second.backup_of, second.num_bytes) == ((1,), (0,), 24)
    assert (first.presence, second.presence) == (Presence.PRESENT, Presence.GONE)
    assert [worker.presence for worker in view.workers] == [Presence.PRESENT, Presence.GONE]
    assert view.epoch == 3
    started, joined_, died = view.happenings
    assert joined_.who == "server 1"
    assert (started.what, started.who, started.epoch) == ("started", "server 1", 0)
    assert (died.what, died.who, died.epoch, died.at_s) == ("died", "server 1", 3, 2.0)
    assert died.sentence == "server 1 was killed by SIGKILL"


def test_without_members_the_events_tell_who_came_and_went() -> None:
    records = [event(EventKind.JOIN, 0, 0, 1.5), event(EventKind.LEAVE, 0, 3, 0)]
    view = at(gathered(joined(records), 2), 4)
    assert [(one.what, one.who, one.at_s) for one in view.happenings] == [
        ("joined", "worker 0", 1.5),
        ("left", "worker 0", 3.0),
    ]
    assert [worker.presence for worker in view.workers] == [Presence.GONE, Presence.STARTING]


def test_who_was_asked_for_is_shown_from_the_beginning_as_starting() -> None:
    gather = Gather(strategy="ps servers=2", workers=2)
    gather.add_members(
        [
            {"event": "started", "at_s": 0.0, "member": 4, "name": "server 0"},
            {"event": "started", "at_s": 0.0, "member": 5, "name": "server 1"},
            {"event": "joined", "at_s": 0.0, "member": 4, "name": "server 0"},
        ]
    )
    gather.meet(2, "server-0")
    gather.add_events(event(EventKind.JOIN, 2, 0.0, 1.0))
    view = at(gather, 2)
    assert view.phase is Phase.STARTING
    assert [(one.name, one.presence) for one in (*view.workers, *view.servers)] == [
        ("worker 0", Presence.STARTING),
        ("worker 1", Presence.STARTING),
        ("server 0", Presence.PRESENT),
        ("server 1", Presence.STARTING),
    ]
    assert Gather(strategy="of another release", workers=1).view(0).servers == ()


def test_a_successor_is_starting_until_it_joins() -> None:
    gather = server_run()
    members(gather)
    gather.add_members([{"event": "started", "at_s": 2.5, "member": 9, "name": "server 1"}])
    assert [server.presence for server in at(gather, 6).servers] == [Presence.PRESENT, Presence.STARTING]
    gather.add_members([{"event": "joined", "at_s": 3.0, "member": 9, "name": "server 1"}])
    assert [server.presence for server in at(gather, 6).servers] == [Presence.PRESENT, Presence.PRESENT]


def test_what_happened_to_members_has_its_place_among_the_events_however_long_the_start_took() -> None:
    first_s = 1_700_000_000.0  # the time of day of the first event
    rows = [
        {"event": "started", "at_s": 0.0, "unix_s": first_s - 0.1, "member": 5, "name": "server 1"},
        {"event": "joined", "at_s": 0.0, "unix_s": first_s + 48.0, "member": 5},
        {"event": "note", "at_s": 2.0, "unix_s": first_s + 50.0, "member": 5, "sentence": "told"},
        {"event": "note", "at_s": 2.5, "member": 5, "sentence": "of a release that told no time of day"},
    ]
    gather = server_run()
    gather.add_members(rows)
    assert [one.at_s for one in at(gather, 6).happenings] == [0.0, 0.0, 2.0, 2.5]
    gather.offset_ns = round(first_s * S) - BEGIN
    assert [one.at_s for one in at(gather, 6).happenings] == pytest.approx([0.0, 48.0, 50.0, 2.5])


def test_a_worker_that_comes_later_gets_a_place() -> None:
    gather = gathered(joined(training(2, [20, 20])), 2)
    gather.meet(5, "worker-5")
    assert [worker.role for worker in at(gather, 2).workers] == [0, 1]
    gather.add_events(event(EventKind.JOIN, 5, 2.0, 0.1))
    view = at(gather, 2.2)
    assert [worker.role for worker in view.workers] == [0, 1, 5]
    assert (len(view.waits), {len(row) for row in view.waits}) == (3, {3})
    assert view.workers[2].name == "worker 5"


def test_words_of_strangers_in_a_file_can_be_shown() -> None:
    """Escape sequences, marks of direction and half a character, as an older or a foreign run may have them."""
    gather = server_run()
    words = "\x1b[2J\ud800\u202e" + "x" * 10**6
    gather.add_members([{"event": "note", "at_s": 1.0, "member": 1, "sentence": words}])
    (happening,) = at(gather, 6).happenings
    assert happening.sentence.startswith(r"\x1b[2J\ud800\u202exxx")
    assert len(happening.sentence) < 3000
